//! Index and outbox of all watches behind one lock. Watch tasks feed it, the link empties it; nothing is awaited inside, so
//! a heartbeat describes one instant.

mod watched;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use tidewatch_shared::{
    digest::{Digest, ObjectHasher},
    event::Change,
    exchange::{EventsAnswer, HeartbeatAnswer},
    heartbeat::{Canary, CertificateState, Heartbeat},
    identity::{Epoch, RuntimeId},
    plan::{Plan, PlannedWatch},
    signature::Nonce,
};
use tokio::{sync::Notify, time::Instant};

use crate::{
    index::{Applied, Index, Rule, Seen},
    outbox::{Batch, Facts, Outbox, What},
    random,
    telemetry::Metrics,
};
use watched::Watched;

/// What tells a watch of today from an earlier one of the same name: calls of a loop that has been stopped do nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WatchId(u64);

/// A watch whose loop must be started.
#[derive(Clone, Debug)]
pub(crate) struct Started {
    /// For calls of its loop.
    pub(crate) id: WatchId,
    /// What to watch.
    pub(crate) planned: Arc<PlannedWatch>,
}

/// What changed with a plan.
#[derive(Debug, Default)]
pub(crate) struct Turnover {
    /// Loops to stop, by name.
    pub(crate) stopped: Vec<Arc<str>>,
    /// Loops to start.
    pub(crate) started: Vec<Started>,
}

/// What a heartbeat says that the core does not know itself.
#[derive(Debug)]
pub(crate) struct Surroundings {
    /// The agent's certificate.
    pub(crate) certificate: CertificateState,
    /// Revision of the trust bundle.
    pub(crate) trust_revision: Option<String>,
    /// The canary, once it has come back.
    pub(crate) canary: Option<Canary>,
}

/// Figures for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Figures {
    pub(crate) waiting: usize,
    pub(crate) parked: usize,
    pub(crate) unsettled: usize,
    pub(crate) watches: usize,
    pub(crate) failing: usize,
    pub(crate) coarse: usize,
    pub(crate) objects: usize,
}

/// A handle; clones share the same core.
#[derive(Clone)]
pub(crate) struct Core(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    wake: Notify,
}

struct State {
    outbox: Outbox,
    watches: BTreeMap<Arc<str>, Watched>,
    hasher: Arc<ObjectHasher>,
    /// Objects of one watch, at most.
    cap: usize,
    ids: u64,
    plan_revision: Option<String>,
    plan_error: Option<String>,
}

impl Core {
    /// An empty core for one runtime; `cap` is the number of objects above which a watch goes coarse.
    pub(crate) fn new(runtime: RuntimeId, cap: usize, metrics: Metrics) -> Self {
        let hasher = Arc::new(ObjectHasher::new(&runtime));
        let outbox = Outbox::new(runtime, Box::new(random::bits), metrics);
        let watches = BTreeMap::new();
        let state = State { outbox, watches, hasher, cap, ids: 0, plan_revision: None, plan_error: None };
        Self(Arc::new(Shared { state: Mutex::new(state), wake: Notify::new() }))
    }

    fn with<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        // A panic elsewhere ends the process; until it does, the state is as good as it was.
        work(&mut self.0.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Like `with`, for what may leave something to send.
    fn stir<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        let result = self.with(work);
        self.0.wake.notify_one();
        result
    }

    /// Waits until something may have come up to be sent. A call that was made before the wait counts.
    pub(crate) async fn stirred(&self) {
        self.0.wake.notified().await;
    }

    /// Follows another plan: says which loops to stop and to start. A watch that changed is stopped and started.
    pub(crate) fn follow(&self, plan: &Plan) -> Turnover {
        self.stir(|state| state.follow(plan))
    }

    /// The newest plan was refused; the one before is still followed.
    pub(crate) fn plan_refused(&self, why: String) {
        self.with(|state| state.plan_error = Some(why));
    }

    /// The newest plan was taken, or taken back to the one that is followed.
    pub(crate) fn plan_taken(&self) {
        self.with(|state| state.plan_error = None);
    }

    /// Discovery has resolved what the plan names.
    pub(crate) fn described(&self, id: WatchId, version: &str, kind: &str, every_version: bool) {
        self.stir(|state| state.described(id, version, kind, every_version));
    }

    /// A list of a watch begins.
    pub(crate) fn list_begun(&self, id: WatchId) {
        self.with(|state| {
            if let Some(watched) = state.watched(id) {
                watched.index.begin_list();
            }
        });
    }

    /// One page of a list. False if no more pages are of use, because the watch is coarse.
    pub(crate) fn listed(&self, id: WatchId, objects: Vec<(Box<str>, Seen)>, now: Instant) -> bool {
        self.stir(|state| {
            state.alive(id, now);
            objects.into_iter().all(|(key, seen)| state.apply(id, &key, seen, true))
        })
    }

    /// The list of a watch is complete.
    pub(crate) fn list_complete(&self, id: WatchId, now: Instant) {
        self.stir(|state| state.list_complete(id, now));
    }

    /// The watch says that an object is there.
    pub(crate) fn present(&self, id: WatchId, key: &str, seen: Seen, now: Instant) {
        self.stir(|state| {
            state.alive(id, now);
            state.apply(id, key, seen, false);
        });
    }

    /// The watch says that an object left.
    pub(crate) fn gone(&self, id: WatchId, key: &str, seen: Seen, now: Instant) {
        self.stir(|state| {
            state.alive(id, now);
            state.delete(id, key, seen);
        });
    }

    /// A watch has said something, if only a bookmark.
    pub(crate) fn alive(&self, id: WatchId, now: Instant) {
        self.with(|state| state.alive(id, now));
    }

    /// What is wrong with a watch, in words; `None` when it is well again.
    pub(crate) fn troubled(&self, id: WatchId, why: Option<String>) {
        self.with(|state| {
            if let Some(watched) = state.watched(id) {
                watched.tried |= why.is_some();
                watched.error = why;
            }
        });
    }

    /// Watches that were neither listed nor refused yet, at most so many.
    pub(crate) fn untried(&self, most: usize) -> Vec<String> {
        self.with(|state| {
            let untried = state.watches.iter().filter(|(_, watched)| !watched.tried);
            untried.map(|(name, _)| name.to_string()).take(most).collect()
        })
    }

    /// When the next batch may be sent; `None` when there is nothing to send.
    pub(crate) fn due(&self, now: Instant) -> Option<Instant> {
        self.with(|state| state.outbox.due(now))
    }

    /// See [`Outbox::request`].
    pub(crate) fn batch(&self, now: Instant) -> Option<Batch> {
        self.with(|state| {
            let State { outbox, watches, .. } = state;
            outbox.request(now, &|watch| watches.get(watch)?.index.digest())
        })
    }

    /// See [`Outbox::answered`].
    pub(crate) fn answered(&self, now: Instant, epoch: Epoch, answer: &EventsAnswer) {
        self.with(|state| state.outbox.answered(now, epoch, answer));
    }

    /// See [`Outbox::refused_whole`].
    pub(crate) fn refused_whole(&self, epoch: Epoch) {
        self.with(|state| state.outbox.refused_whole(epoch));
    }

    /// See [`Outbox::start_over`].
    pub(crate) fn start_over(&self) {
        self.with(|state| state.outbox.start_over());
    }

    /// The next heartbeat, with the nonce of its request.
    pub(crate) fn heartbeat(&self, now: Instant, surroundings: Surroundings) -> (Heartbeat, Nonce) {
        self.with(|state| state.heartbeat(now, surroundings))
    }

    /// The answer to a heartbeat of an epoch.
    pub(crate) fn heartbeat_answered(&self, now: Instant, epoch: Epoch, answer: &HeartbeatAnswer) {
        self.with(|state| {
            if state.outbox.heartbeat_answered(now, epoch, answer.instance, &answer.settled) {
                answer.resend.iter().for_each(|watch| state.resend(watch));
            }
        });
    }

    /// Figures for metrics.
    pub(crate) fn figures(&self) -> Figures {
        self.with(|state| {
            let (outbox, watches) = (&state.outbox, state.watches.values());
            Figures {
                waiting: outbox.waiting(),
                parked: outbox.parked(),
                unsettled: outbox.unsettled(),
                watches: watches.len(),
                failing: watches.clone().filter(|watched| watched.error.is_some()).count(),
                coarse: watches.clone().filter(|watched| watched.index.is_coarse()).count(),
                objects: watches.map(|watched| watched.index.len()).sum(),
            }
        })
    }
}

impl State {
    fn watched(&mut self, id: WatchId) -> Option<&mut Watched> {
        self.watches.values_mut().find(|watched| watched.id == id)
    }

    fn named(&self, id: WatchId) -> Option<Arc<str>> {
        self.watches.iter().find(|(_, watched)| watched.id == id).map(|(name, _)| name.clone())
    }

    fn alive(&mut self, id: WatchId, now: Instant) {
        if let Some(watched) = self.watched(id) {
            watched.alive = Some(now);
        }
    }

    fn follow(&mut self, plan: &Plan) -> Turnover {
        let wanted: BTreeMap<&str, &PlannedWatch> =
            plan.watches().iter().map(|watch| (watch.name.as_str(), watch)).collect();
        let left = |(name, watched): (&Arc<str>, &Watched)| {
            (wanted.get(&**name) != Some(&&*watched.planned)).then(|| name.clone())
        };
        let stopped: Vec<Arc<str>> = self.watches.iter().filter_map(left).collect();
        for name in &stopped {
            self.watches.remove(name);
            self.outbox.close(name);
        }
        let new = wanted.into_iter().filter(|(name, _)| !self.watches.contains_key(*name)).collect::<Vec<_>>();
        let started = new.into_iter().map(|(name, planned)| self.open(name, planned)).collect();
        if self.plan_revision.as_deref() != Some(plan.revision()) {
            self.plan_revision = Some(plan.revision().to_owned());
            self.outbox.plan_changed();
        }
        self.plan_error = None;
        Turnover { stopped, started }
    }

    fn open(&mut self, name: &str, planned: &PlannedWatch) -> Started {
        let name: Arc<str> = name.into();
        self.ids += 1;
        let (id, planned) = (WatchId(self.ids), Arc::new(planned.clone()));
        let rule = Rule { field: planned.field, every_version: false };
        let index = Index::new(self.hasher.clone(), rule, self.cap);
        self.outbox.open(name.clone(), Facts::of(&planned));
        self.watches.insert(name, Watched::new(id, planned.clone(), index));
        Started { id, planned }
    }

    fn described(&mut self, id: WatchId, version: &str, kind: &str, every_version: bool) {
        let (hasher, cap) = (self.hasher.clone(), self.cap);
        let Some(name) = self.named(id) else { return };
        self.outbox.describe(&name, version, kind);
        let Some(watched) = self.watched(id) else { return };
        let rule = Rule { every_version, ..watched.index.rule() };
        if rule != watched.index.rule() {
            // Another rule is another digest: the watch begins anew, and its list will say so.
            let held = watched.index.len() > 0;
            watched.index = Index::new(hasher, rule, cap);
            if held {
                self.outbox.collapse(&name, random::unix_millis());
            }
        }
    }

    /// False if the watch is coarse or no longer there.
    fn apply(&mut self, id: WatchId, key: &str, seen: Seen, listing: bool) -> bool {
        let (Some(name), at) = (self.named(id), random::unix_millis()) else { return false };
        let Some(Watched { index, forward, .. }) = self.watches.get_mut(&name) else { return false };
        // The first list says all at once; only a forwarded watch needs each object of it.
        let told = index.is_complete() || *forward;
        match index.apply(key, seen.clone()) {
            Applied::Changed(moved) if told => {
                self.outbox.mark(&name, key, What::object(seen, moved.change, moved.after), moved.before, at);
                self.bound(&name, at);
            }
            Applied::Unchanged if listing && *forward => {
                let part = index.part(key, &seen);
                self.outbox.mark(&name, key, What::object(seen, Change::Status, part), part, at);
            }
            Applied::Changed(_) | Applied::Unchanged => {}
            Applied::Coarse => {
                self.outbox.collapse(&name, at);
                return false;
            }
        }
        true
    }

    fn delete(&mut self, id: WatchId, key: &str, seen: Seen) {
        let (Some(name), at) = (self.named(id), random::unix_millis()) else { return };
        let Some(watched) = self.watches.get_mut(&name) else { return };
        match watched.index.delete(key) {
            Applied::Changed(moved) => {
                self.outbox.mark(&name, key, What::object(seen, moved.change, moved.after), moved.before, at);
                self.bound(&name, at);
            }
            Applied::Unchanged => {}
            Applied::Coarse => self.outbox.collapse(&name, at),
        }
    }

    /// Objects that come and go under ever new names must not fill the outbox while nobody takes its events.
    fn bound(&mut self, name: &str, at: i64) {
        if self.outbox.dirty(name) > self.cap {
            self.outbox.collapse(name, at);
        }
    }

    fn list_complete(&mut self, id: WatchId, now: Instant) {
        let (Some(name), at) = (self.named(id), random::unix_millis()) else { return };
        let Some(watched) = self.watches.get_mut(&name) else { return };
        let told = watched.index.is_complete() || watched.forward;
        let gone = watched.index.finish_list();
        watched.listed = Some(now);
        watched.alive = Some(now);
        watched.tried = true;
        watched.error = None;
        for object in gone.into_iter().filter(|_| told) {
            let what = What::object(object.seen, Change::Deleted, Digest::ZERO);
            self.outbox.mark(&name, &object.key, what, object.before, at);
        }
        self.bound(&name, at);
        self.outbox.mark_whole(&name, at);
    }

    fn resend(&mut self, name: &str) {
        let at = random::unix_millis();
        let Some(watched) = self.watches.get(name) else { return };
        if watched.forward {
            for (key, seen, part) in watched.index.iter() {
                self.outbox.mark(name, key, What::object(seen.clone(), Change::Status, part), part, at);
            }
        }
        self.outbox.mark_whole(name, at);
    }

    fn heartbeat(&mut self, now: Instant, surroundings: Surroundings) -> (Heartbeat, Nonce) {
        let numbers = self.outbox.heartbeat();
        let Self { outbox, watches, .. } = self;
        let digest = |name: &str| outbox.sent_digest(name, &|watch| watches.get(watch)?.index.digest());
        let heartbeat = Heartbeat {
            epoch: numbers.epoch,
            sequence: numbers.sequence,
            counter: numbers.counter,
            waiting: outbox.waiting() as u64,
            parked: outbox.parked() as u64,
            plan_revision: self.plan_revision.clone(),
            plan_error: self.plan_error.clone(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            certificate: surroundings.certificate,
            trust_revision: surroundings.trust_revision,
            canary: surroundings.canary,
            watches: watches.iter().map(|(name, watched)| watched.state(name, digest(name), now)).collect(),
        };
        (heartbeat, numbers.nonce)
    }
}

#[cfg(test)]
mod tests;
