//! Index and outbox of all watches behind one lock. Watch tasks feed it, the link empties it; nothing is awaited inside, so
//! a heartbeat describes one instant.

mod bounds;
mod heard;
mod single;
mod status;
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
    clock,
    index::{Applied, Index, Rule},
    outbox::{Announced, Facts, Outbox, What},
    random,
    telemetry::Metrics,
};
pub use crate::{
    index::{Seen, Uid, Version},
    outbox::Batch,
};
use heard::Heard;
pub(crate) use status::Account;
use watched::Watched;

/// What tells a watch of today from an earlier one of the same name: calls of a loop that has been stopped do nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WatchId(u64);

/// A watch whose loop must be started.
#[derive(Clone, Debug)]
pub struct Started {
    /// For calls of its loop.
    pub id: WatchId,
    /// What to watch.
    pub planned: Arc<PlannedWatch>,
}

/// What changed with a plan.
#[derive(Debug, Default)]
pub struct Turnover {
    /// Loops to stop, by name.
    pub stopped: Vec<Arc<str>>,
    /// Loops to start.
    pub started: Vec<Started>,
}

/// What a heartbeat says that the core does not know itself.
#[derive(Debug)]
pub struct Surroundings {
    /// The agent's certificate.
    pub certificate: CertificateState,
    /// Revision of the trust bundle.
    pub trust_revision: Option<String>,
    /// The canary, once it has come back.
    pub canary: Option<Canary>,
    /// See [`Heartbeat::incomplete`].
    pub incomplete: bool,
}

/// Figures for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Events that wait to be sent.
    pub waiting: usize,
    /// Events that cannot be sent.
    pub parked: usize,
    /// Events that were sent and are not settled.
    pub unsettled: usize,
    /// Watches of the plan.
    pub watches: usize,
    /// Watches that do not work.
    pub failing: usize,
    /// Watches that only know that something changed.
    pub coarse: usize,
    /// Objects held.
    pub objects: usize,
}

/// A handle; clones share the same core.
#[derive(Clone)]
pub struct Core(Arc<Shared>);

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
    /// Objects of all watches, at most, and events of all watches.
    total: usize,
    ids: u64,
    plan_revision: Option<String>,
    plan_error: Option<String>,
    heard: Heard,
}

impl Core {
    /// An empty core for one runtime; `cap` is the number of objects above which a watch goes coarse.
    pub fn new(runtime: RuntimeId, cap: usize, metrics: Metrics) -> Self {
        let hasher = Arc::new(ObjectHasher::new(&runtime));
        let outbox = Outbox::new(runtime, Box::new(random::bits), metrics);
        let watches = BTreeMap::new();
        let total = usize::MAX;
        let (plan_revision, plan_error, heard) = Default::default();
        let state = State { outbox, watches, hasher, cap, total, ids: 0, plan_revision, plan_error, heard };
        Self(Arc::new(Shared { state: Mutex::new(state), wake: Notify::new() }))
    }

    /// Bounds the objects of all watches together, and the events that are not settled: the largest watch goes coarse, the
    /// others stay exact.
    #[must_use]
    pub fn bounded(self, total: usize) -> Self {
        self.with(|state| state.total = total);
        self
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
    pub fn follow(&self, plan: &Plan) -> Turnover {
        self.stir(|state| state.follow(plan))
    }

    /// What is wrong with the newest plan or settings, in words, while those before are still followed; `None` when nothing is.
    pub(crate) fn plan_said(&self, error: Option<String>) {
        self.with(|state| state.plan_error = error);
    }

    /// For one more request of this epoch.
    pub(crate) fn nonce(&self) -> Nonce {
        self.with(|state| state.outbox.nonce())
    }

    /// A heartbeat of nobody in particular.
    #[cfg(test)]
    pub(crate) fn plain_heartbeat(&self) -> Heartbeat {
        let (not_after, fingerprint) = Default::default();
        let certificate = CertificateState { not_after, fingerprint, renewal_failed_since: None };
        self.heartbeat(
            Instant::now(),
            Surroundings { certificate, trust_revision: None, canary: None, incomplete: false },
        )
        .0
    }

    /// Discovery has resolved what the plan names.
    pub fn described(&self, id: WatchId, version: &str, kind: &str, every_version: bool) {
        self.stir(|state| state.described(id, version, kind, every_version));
    }

    /// A list of a watch begins.
    pub fn list_begun(&self, id: WatchId) {
        self.with(|state| {
            if let Some(watched) = state.watched(id) {
                watched.index.begin_list();
            }
        });
    }

    /// One page of a list. False if no more pages are of use, because the watch is coarse.
    pub fn listed(&self, id: WatchId, objects: Vec<(Box<str>, Seen)>, now: Instant) -> bool {
        self.stir(|state| {
            state.alive(id, now);
            objects.into_iter().all(|(key, seen)| state.apply(id, &key, seen, true))
        })
    }

    /// The list of a watch is complete.
    pub fn list_complete(&self, id: WatchId, now: Instant) {
        self.stir(|state| state.list_complete(id, now));
    }

    /// The watch says that an object is there.
    pub fn present(&self, id: WatchId, key: &str, seen: Seen, now: Instant) {
        self.stir(|state| {
            state.alive(id, now);
            state.apply(id, key, seen, false);
        });
    }

    /// The watch says that an object left.
    pub fn gone(&self, id: WatchId, key: &str, seen: Seen, now: Instant) {
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
    pub fn due(&self, now: Instant) -> Option<Instant> {
        self.with(|state| {
            // A watch that was refused and waits is no reason that the others do.
            if state.outbox.is_free() && state.outbox.due(now).is_none_or(|due| due > now) {
                state.sweep();
            }
            state.outbox.due(now)
        })
    }

    /// The next request, or the same once more if it has not been answered; `None` when nothing is due.
    pub fn batch(&self, now: Instant) -> Option<Batch> {
        self.with(|state| {
            if state.outbox.is_free() {
                state.sweep();
            }
            let State { outbox, watches, .. } = state;
            outbox.request(now, &|watch| watches.get(watch)?.index.digest())
        })
    }

    /// The answer to a batch of an epoch.
    pub fn answered(&self, now: Instant, epoch: Epoch, answer: &EventsAnswer) {
        self.with(|state| state.outbox.answered(now, epoch, answer));
    }

    /// A batch of an epoch was refused whole (400, 413): the next one has half of its events, until the one is found.
    /// True when it was found.
    pub fn refused_whole(&self, now: Instant, epoch: Epoch) -> bool {
        self.with(|state| state.outbox.refused_whole(now, epoch))
    }

    /// Like [`Core::refused_whole`], because the batch was too large.
    pub fn too_large(&self, now: Instant, epoch: Epoch, announced: Announced) -> bool {
        self.with(|state| state.outbox.too_large(now, epoch, announced))
    }

    /// The signature or nonce was refused: the counters of this epoch are of no use.
    pub fn start_over(&self) {
        self.with(|state| state.outbox.start_over());
    }

    /// The life of the sequences that new events get.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.with(|state| state.outbox.whereabouts().1)
    }

    /// The next heartbeat, with the nonce of its request.
    pub fn heartbeat(&self, now: Instant, surroundings: Surroundings) -> (Heartbeat, Nonce) {
        self.with(|state| state.heartbeat(now, surroundings))
    }

    /// The answer to a heartbeat of an epoch.
    pub fn heartbeat_answered(&self, now: Instant, epoch: Epoch, answer: &HeartbeatAnswer) {
        self.with(|state| {
            state.heard.answered(now, epoch, answer);
            if state.outbox.heartbeat_answered(now, epoch, answer.instance, answer.since, &answer.settled) {
                answer.resend.iter().for_each(|watch| state.resend(watch));
            }
        });
    }

    /// Objects held, by watch.
    pub(crate) fn objects(&self) -> Vec<(Arc<str>, usize)> {
        self.with(|state| state.watches.iter().map(|(name, watched)| (name.clone(), watched.index.len())).collect())
    }

    /// Figures for metrics.
    pub fn figures(&self) -> Figures {
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
        let mut before = BTreeMap::new();
        for name in &stopped {
            before.extend(self.watches.remove(name).map(|watched| (name.clone(), watched)));
            self.outbox.close(name);
        }
        let new = wanted.into_iter().filter(|(name, _)| !self.watches.contains_key(*name)).collect::<Vec<_>>();
        let started = new.into_iter().map(|(name, planned)| self.open(name, planned, before.get(name))).collect();
        if self.plan_revision.as_deref() != Some(plan.revision()) {
            self.plan_revision = Some(plan.revision().to_owned());
            self.outbox.plan_changed();
        }
        self.plan_error = None;
        Turnover { stopped, started }
    }

    fn open(&mut self, name: &str, planned: &PlannedWatch, before: Option<&Watched>) -> Started {
        let name: Arc<str> = name.into();
        self.ids += 1;
        let (id, planned) = (WatchId(self.ids), Arc::new(planned.clone()));
        let rule = Rule { field: planned.field, every_version: false };
        let index = Index::new(self.hasher.clone(), rule, self.cap);
        self.outbox.open(name.clone(), Facts::of(&planned));
        let mut watched = Watched::new(id, planned.clone(), index);
        // What the watch before knew to be gone, or would have known by its next list, this one never does.
        watched.lost = before.is_some_and(|before| watched.forward && before.planned.manager == planned.manager);
        self.watches.insert(name, watched);
        Started { id, planned }
    }

    fn described(&mut self, id: WatchId, version: &str, kind: &str, every_version: bool) {
        let (Some(name), cap) = (self.named(id), self.cap) else { return };
        self.outbox.describe(&name, version, kind);
        let Some(watched) = self.watched(id) else { return };
        let rule = Rule { every_version, ..watched.index.rule() };
        if rule != watched.index.rule() {
            // Another rule is another digest, and parts of the old one must not be told beside it.
            watched.index.follow(rule);
            if watched.index.len() > 0 {
                self.outbox.forget_objects(&name, cap, clock::unix_millis());
            }
        }
    }

    /// False if the watch is coarse or no longer there.
    fn apply(&mut self, id: WatchId, key: &str, seen: Seen, listing: bool) -> bool {
        let (Some(name), at) = (self.named(id), clock::unix_millis()) else { return false };
        let Some(watched) = self.watches.get_mut(&name) else { return false };
        // The first list says all at once.
        let told = watched.index.is_complete();
        match watched.index.apply(key, seen.clone()) {
            Applied::Changed(moved) => {
                let is_new = moved.change == Change::Created && moved.before == Digest::ZERO;
                let what = What::object(seen, moved.change, moved.after);
                if told {
                    if is_new && !listing {
                        self.outbox.mark_born(&name, key, what, at);
                    } else {
                        self.outbox.mark(&name, key, what, moved.before, at);
                    }
                    self.bound(&name, at);
                }
                return moved.change != Change::Created || self.thin(&name, at);
            }
            Applied::Unchanged => {}
            Applied::Coarse => {
                watched.lost = true;
                self.outbox.give_up(&name, at);
                return false;
            }
        }
        true
    }

    fn delete(&mut self, id: WatchId, key: &str, seen: Seen) {
        let (Some(name), at) = (self.named(id), clock::unix_millis()) else { return };
        let Some(watched) = self.watches.get_mut(&name) else { return };
        match watched.index.delete(key) {
            Applied::Changed(moved) => {
                self.outbox.mark(&name, key, What::object(seen, moved.change, moved.after), moved.before, at);
                self.bound(&name, at);
            }
            Applied::Unchanged => {}
            Applied::Coarse => {
                watched.lost = true;
                self.outbox.give_up(&name, at);
            }
        }
    }

    fn list_complete(&mut self, id: WatchId, now: Instant) {
        let (Some(name), at) = (self.named(id), clock::unix_millis()) else { return };
        let Some(watched) = self.watches.get_mut(&name) else { return };
        let (forward, lost) = (watched.forward, watched.lost);
        let told = watched.index.is_complete() || forward;
        let gone = watched.index.finish_list();
        watched.lost &= watched.index.is_coarse();
        watched.listed = Some(now);
        watched.alive = Some(now);
        watched.tried = true;
        watched.error = None;
        for object in gone.into_iter().filter(|_| told) {
            let what = What::object(object.seen, Change::Deleted, Digest::ZERO);
            self.outbox.mark(&name, &object.key, what, object.before, at);
        }
        self.bound(&name, at);
        if forward {
            self.outbox.tell_all(&name, at);
        }
        // What went while nobody knew the objects, no list tells.
        if lost { self.outbox.mark_unnamed(&name, at) } else { self.outbox.mark_whole(&name, at) }
    }

    fn resend(&mut self, name: &str) {
        let (Some(watched), at) = (self.watches.get(name), clock::unix_millis()) else { return };
        self.heard.resends += 1;
        if watched.forward {
            self.outbox.tell_all(name, at);
        }
        if watched.lost { self.outbox.mark_unnamed(name, at) } else { self.outbox.mark_whole(name, at) }
    }

    fn heartbeat(&mut self, now: Instant, surroundings: Surroundings) -> (Heartbeat, Nonce) {
        let numbers = self.outbox.heartbeat();
        self.heard.made = true;
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
            incomplete: surroundings.incomplete,
            watches: watches.iter().map(|(name, watched)| watched.state(name, digest(name), now)).collect(),
        };
        (heartbeat, numbers.nonce)
    }
}

#[cfg(test)]
mod tests;
