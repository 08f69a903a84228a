//! Index and outbox of all watches behind one lock. Watch loops write to it, the link drains it; nothing awaits while
//! the lock is held, so a heartbeat describes one instant.

mod bounds;
mod entry;
mod event_path;
mod group;
mod heartbeat;
mod not_served;
mod snapshot;

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use tidewatch_api::{
    identity::{Epoch, RuntimeId},
    plan::{Plan, PlannedWatch},
};
use tidewatch_contract::{
    digest::{Digest, ObjectHasher},
    event::Change,
    exchange::{EventsResponse, HeartbeatResponse},
    heartbeat::{Canary, CertificateState, Heartbeat},
    signature::Nonce,
};
use tokio::{sync::Notify, time::Instant};

use crate::{
    clock,
    index::{Applied, ChangeRule, Index},
    outbox::{AnnouncedLimits, EpochReason, Outbox, Update, WatchInfo},
    random,
    telemetry::Metrics,
};
pub use crate::{
    index::{ObjectState, Uid, Version},
    outbox::Batch,
    telemetry::Stats,
};
use entry::WatchEntry;
pub(crate) use heartbeat::Evidence;
use heartbeat::HeartbeatLog;

/// Objects of a watch that are reported one by one in its first list at most.
const ANNOUNCED: usize = 16;

/// Identifies one run of a watch loop. Calls with the ID of a stopped loop have no effect, even if a watch of the same
/// name runs again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WatchId(u64);

/// A watch with a loop to start.
#[derive(Clone, Debug)]
pub struct StartedWatch {
    /// ID for calls of the loop.
    pub id: WatchId,
    /// Name among all watches: that of the plan, followed by the resource if the watch of the plan is on a group.
    pub name: Arc<str>,
    /// The watch of the plan, or its part on one resource. A watch on a group has no objects; its loop looks up the
    /// resources of the group.
    pub planned: Arc<PlannedWatch>,
}

/// Difference between two plans, as loops to stop and to start.
#[derive(Debug, Default)]
pub struct PlanChanges {
    /// Loops to stop, by name.
    pub stopped: Vec<Arc<str>>,
    /// Loops to start.
    pub started: Vec<StartedWatch>,
}

/// Parts of a heartbeat that come from outside the core.
#[derive(Debug)]
pub struct HeartbeatContext {
    /// State of the agent's certificate.
    pub certificate: CertificateState,
    /// Revision of the trust bundle.
    pub trust_revision: Option<String>,
    /// The canary; `None` before its first round trip.
    pub canary: Option<Canary>,
    /// See [`Heartbeat::incomplete`].
    pub incomplete: bool,
}

/// A handle; clones share the same core.
#[derive(Clone)]
pub struct Core(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    wake: Notify,
}

/// How an object was observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Observed {
    /// In a page of a list.
    Listed,
    /// By the watch, as added or modified.
    Present,
    /// By the watch, as deleted.
    Deleted,
}

struct State {
    outbox: Outbox,
    watches: BTreeMap<Arc<str>, WatchEntry>,
    hasher: Arc<ObjectHasher>,
    /// Limit of objects per watch.
    cap: usize,
    /// Limit of objects of all watches, and of unsettled events of all watches.
    total: usize,
    /// Limit of the memory of all objects, and of that of all unsettled events, in bytes.
    bytes: usize,
    ids: u64,
    plan_revision: Option<String>,
    plan_error: Option<String>,
    heartbeats: HeartbeatLog,
}

impl Core {
    /// An empty core for one runtime; a watch with more than `cap` objects goes coarse.
    pub fn new(runtime: RuntimeId, cap: usize, metrics: Metrics) -> Self {
        let hasher = Arc::new(ObjectHasher::new(&runtime));
        let outbox = Outbox::new(runtime, Box::new(random::bits), metrics);
        let watches = BTreeMap::new();
        let total = usize::MAX;
        let bytes = usize::MAX;
        let plan_revision = None;
        let plan_error = None;
        let heartbeats = HeartbeatLog::default();
        let state = State { outbox, watches, hasher, cap, total, bytes, ids: 0, plan_revision, plan_error, heartbeats };
        Self(Arc::new(Shared { state: Mutex::new(state), wake: Notify::new() }))
    }

    /// Bounds the objects of all watches and the unsettled events: beyond the limit the largest watch goes coarse, the
    /// others stay exact.
    #[must_use]
    pub fn bounded(self, total: usize) -> Self {
        self.with(|state| state.total = total);
        self
    }

    /// Bounds the memory of the objects and the unsettled events of all watches, in bytes; each may take half of it.
    /// Beyond the limit the watch that needs the most goes coarse, or its events collapse.
    #[must_use]
    pub fn within(self, bytes: usize) -> Self {
        self.with(|state| state.bytes = bytes / 2);
        self
    }

    fn with<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        work(&mut self.0.state.lock())
    }

    /// Like [`Self::with`], and wakes the sender, because the work may have produced an event.
    fn with_wake<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        let result = self.with(work);
        self.0.wake.notify_one();
        result
    }

    /// Waits until an event may be ready to send. A wake-up before the call counts.
    pub(crate) async fn woken(&self) {
        self.0.wake.notified().await;
    }

    /// Follows a plan and returns the loops to stop and to start. A changed watch is both stopped and started.
    pub fn follow(&self, plan: &Plan) -> PlanChanges {
        self.with_wake(|state| state.follow(plan))
    }

    /// Sets the error of the newest plan or settings, while the last valid ones stay in force; `None` clears it.
    pub(crate) fn set_plan_error(&self, error: Option<String>) {
        self.with_wake(|state| state.plan_error = error);
    }

    /// The nonce of another request in this epoch.
    pub(crate) fn nonce(&self) -> Nonce {
        self.with(|state| state.outbox.nonce())
    }

    /// Discovery has resolved version and kind. `every_version` is set for kinds without a status subresource.
    pub fn described(&self, id: WatchId, version: &str, kind: &str, every_version: bool) {
        self.with_wake(|state| {
            let (Some(name), cap) = (state.name_of(id), state.cap) else { return };
            state.outbox.describe(&name, version, kind);
            let Some(watched) = state.watched(id) else { return };
            (watched.described, watched.not_served) = (true, false);
            let rule = ChangeRule { every_version, ..watched.index.rule() };
            if rule != watched.index.rule() {
                // Another rule changes the digest: pending contributions of the old one must not be sent beside it.
                watched.index.follow(rule);
                if watched.index.len() > 0 {
                    state.outbox.drop_objects(&name, cap, clock::unix_millis());
                }
            }
        });
    }

    /// A list begins.
    pub fn list_begun(&self, id: WatchId) {
        self.with(|state| {
            if let Some(watched) = state.watched(id) {
                watched.index.begin_list();
            }
        });
    }

    /// Applies one page of a list. Returns false if further pages are not needed, because the watch is coarse.
    pub fn listed(&self, id: WatchId, objects: Vec<(Box<str>, ObjectState)>, now: Instant) -> bool {
        self.with_wake(|state| {
            state.alive(id, now);
            objects.into_iter().all(|(key, seen)| state.apply(id, &key, seen, Observed::Listed))
        })
    }

    /// The list is complete.
    pub fn list_complete(&self, id: WatchId, now: Instant) {
        self.with_wake(|state| state.list_complete(id, now));
    }

    /// The watch reported an object as added or modified.
    pub fn present(&self, id: WatchId, key: &str, seen: ObjectState, now: Instant) {
        self.with_wake(|state| {
            state.alive(id, now);
            state.apply(id, key, seen, Observed::Present);
        });
    }

    /// The watch reported an object as deleted.
    pub fn gone(&self, id: WatchId, key: &str, seen: ObjectState, now: Instant) {
        self.with_wake(|state| {
            state.alive(id, now);
            state.apply(id, key, seen, Observed::Deleted);
        });
    }

    /// The watch is alive: it delivered an event or a bookmark.
    pub(crate) fn alive(&self, id: WatchId, now: Instant) {
        self.with(|state| state.alive(id, now));
    }

    /// True if the watch has too many objects to track each.
    pub(crate) fn is_coarse(&self, id: WatchId) -> bool {
        self.with(|state| state.watched(id).is_some_and(|watched| watched.index.is_coarse()))
    }

    /// Sets the error of a watch; `None` clears it.
    pub(crate) fn set_error(&self, id: WatchId, error: Option<String>) {
        self.with_wake(|state| {
            if let Some(watched) = state.watched(id) {
                watched.attempted |= error.is_some();
                watched.error = error;
            }
        });
    }

    /// Names of up to `limit` watches that have neither been listed nor failed yet.
    pub(crate) fn unattempted(&self, limit: usize) -> Vec<String> {
        self.with(|state| {
            let unattempted = state.watches.iter().filter(|(_, watched)| !watched.attempted && !watched.is_late);
            unattempted.map(|(name, _)| name.to_string()).take(limit).collect()
        })
    }

    /// Earliest time of the next batch; `None` if there is nothing to send. Continues the sweep after an
    /// overflow first.
    pub fn due(&self, now: Instant) -> Option<Instant> {
        self.with(|state| {
            // A watch in backoff must not delay the sweep of the others.
            if state.outbox.is_free() && state.outbox.due(now).is_none_or(|due| due > now) {
                state.sweep();
            }
            state.outbox.due(now)
        })
    }

    /// The next batch, or the unanswered one again; `None` if nothing is due.
    pub fn batch(&self, now: Instant) -> Option<Batch> {
        self.with(|state| {
            if state.outbox.is_free() {
                state.sweep();
            }
            let State { outbox, watches, .. } = state;
            outbox.request(now, &|watch| watches.get(watch)?.index.digest())
        })
    }

    /// Processes the response to a batch.
    pub fn apply_response(&self, now: Instant, epoch: Epoch, response: &EventsResponse) {
        self.with(|state| state.outbox.apply_response(now, epoch, response));
    }

    /// A batch was refused as a whole (400, 413): halves the next one, until the offending event is isolated. Returns
    /// true once it is.
    pub fn refused_whole(&self, now: Instant, epoch: Epoch) -> bool {
        self.with(|state| state.outbox.refused_whole(now, epoch))
    }

    /// Like [`Core::refused_whole`], for a batch that exceeded the receiver's limits.
    pub fn too_large(&self, now: Instant, epoch: Epoch, announced: AnnouncedLimits) -> bool {
        self.with(|state| state.outbox.too_large(now, epoch, announced))
    }

    /// The receiver refused signature or nonce: starts a new epoch with fresh counters.
    pub fn restart_epoch(&self) {
        self.with(|state| state.outbox.begin_epoch(EpochReason::Refused));
    }

    /// Epoch of the sequences of new events.
    pub fn epoch(&self) -> Epoch {
        self.with(|state| state.outbox.epoch_state.epoch)
    }

    /// The next heartbeat, and the nonce of its request.
    pub fn heartbeat(&self, now: Instant, surroundings: HeartbeatContext) -> (Heartbeat, Nonce) {
        self.with(|state| {
            let (epoch_state, nonce) = state.outbox.heartbeat();
            state.heartbeats.sent = true;
            let State { outbox, watches, .. } = &*state;
            let digest = |name: &str| outbox.sent_digest(name, &|watch| watches.get(watch)?.index.digest());
            let heartbeat = Heartbeat {
                epoch: epoch_state.epoch,
                sequence: epoch_state.sequence,
                counter: epoch_state.heartbeats,
                waiting: outbox.waiting() as u64,
                parked: outbox.parked() as u64,
                plan_revision: state.plan_revision.clone(),
                plan_error: state.plan_error.clone(),
                agent_version: env!("CARGO_PKG_VERSION").to_owned(),
                certificate: surroundings.certificate,
                trust_revision: surroundings.trust_revision,
                canary: surroundings.canary,
                incomplete: surroundings.incomplete,
                watches: state.watch_states(now, digest),
            };
            (heartbeat, nonce)
        })
    }

    /// Processes the response to a heartbeat.
    pub fn apply_heartbeat_response(&self, now: Instant, epoch: Epoch, response: &HeartbeatResponse) {
        self.with(|state| {
            state.heartbeats.apply_response(now, epoch, response);
            if state.outbox.apply_heartbeat_response(now, epoch, response.instance, response.since, &response.settled) {
                response.resend.iter().for_each(|watch| state.resend(watch));
            }
        });
    }

    /// Number of objects per watch of the plan.
    pub(crate) fn objects(&self) -> Vec<(Arc<str>, usize)> {
        self.with(|state| state.objects())
    }

    /// Counts for the metrics.
    pub fn figures(&self) -> Stats {
        self.with(|state| {
            let outbox = &state.outbox;
            let watches = state.watches.values();
            Stats {
                waiting: outbox.waiting(),
                parked: outbox.parked(),
                unsettled: outbox.unsettled(),
                watches: state.count_planned(|_| true),
                failing: state.count_planned(|watched| watched.error.is_some()),
                coarse: state.count_planned(|watched| watched.index.is_coarse()),
                objects: watches.clone().map(|watched| watched.index.len()).sum(),
                state_bytes: outbox.bytes() + watches.map(|watched| watched.index.bytes()).sum::<usize>(),
            }
        })
    }
}

impl State {
    fn watched(&mut self, id: WatchId) -> Option<&mut WatchEntry> {
        self.watches.values_mut().find(|watched| watched.id == id)
    }

    fn name_of(&self, id: WatchId) -> Option<Arc<str>> {
        self.watches.iter().find(|(_, watched)| watched.id == id).map(|(name, _)| name.clone())
    }

    fn alive(&mut self, id: WatchId, now: Instant) {
        if let Some(watched) = self.watched(id) {
            watched.alive = Some(now);
        }
    }

    fn follow(&mut self, plan: &Plan) -> PlanChanges {
        let planned_by_name: BTreeMap<&str, &PlannedWatch> =
            plan.watches().iter().map(|watch| (watch.name.as_str(), watch)).collect();
        let left = |(name, watched): (&Arc<str>, &WatchEntry)| {
            (planned_by_name.get(&*watched.source.name) != Some(&&*watched.source)).then(|| name.clone())
        };
        let stopped: Vec<Arc<str>> = self.watches.iter().filter_map(left).collect();
        let mut before = BTreeMap::new();
        for name in &stopped {
            before.extend(self.watches.remove(name).map(|watched| (name.clone(), watched)));
            self.outbox.close(name);
        }
        let new = planned_by_name.into_iter().filter(|(name, _)| !self.watches.contains_key(*name)).collect::<Vec<_>>();
        let mut started = Vec::new();
        for (name, planned) in new {
            let planned = Arc::new(planned.clone());
            started.push(self.open(name.into(), &planned, &planned, before.get(name)));
            started.extend(self.reopen_parts(name, &planned, &before));
        }
        if self.plan_revision.as_deref() != Some(plan.revision()) {
            self.plan_revision = Some(plan.revision().to_owned());
            self.outbox.plan_changed();
        }
        self.plan_error = None;
        PlanChanges { stopped, started }
    }

    fn open(
        &mut self,
        name: Arc<str>,
        planned: &Arc<PlannedWatch>,
        source: &Arc<PlannedWatch>,
        before: Option<&WatchEntry>,
    ) -> StartedWatch {
        self.ids += 1;
        let id = WatchId(self.ids);
        let rule = ChangeRule { field: planned.field, every_version: false };
        let index = Index::new(self.hasher.clone(), rule, self.cap);
        self.outbox.open(name.clone(), WatchInfo::of(planned));
        let mut watched = WatchEntry::new(id, planned.clone(), source.clone(), index);
        watched.is_added = self.plan_revision.is_some();
        // Deletions that the previous watch knew, or would have found in its next list, are unknown to this one. The parts
        // of a group know those of their resources.
        watched.lost = before.is_some_and(|before| {
            let knew = before.lost || !group::is_same(&before.planned, planned);
            watched.forward && before.planned.manager == planned.manager && knew
        });
        self.watches.insert(name.clone(), watched);
        StartedWatch { id, name, planned: planned.clone() }
    }

    /// Returns false if the watch is coarse or has left the plan.
    fn apply(&mut self, id: WatchId, key: &str, seen: ObjectState, observed: Observed) -> bool {
        let (Some(name), at) = (self.name_of(id), clock::unix_millis()) else { return false };
        let Some(watched) = self.watches.get_mut(&name) else { return false };
        // Before the first complete list, single changes are covered by the `watch.changed` of that list.
        let is_reported = watched.index.is_complete();
        let applied = match observed {
            Observed::Listed | Observed::Present => watched.index.apply(key, seen.clone()),
            Observed::Deleted => watched.index.delete(key),
        };
        match applied {
            Applied::Changed(moved) => {
                let is_new = moved.change == Change::Created && moved.before == Digest::ZERO;
                let update = Update::Object { seen, change: moved.change, part: moved.after };
                if is_reported {
                    if is_new && observed == Observed::Present {
                        self.outbox.mark_created(&name, key, update, at);
                    } else {
                        self.outbox.mark(&name, key, update, moved.before, at);
                    }
                    self.bound_events(&name, at);
                }
                self.bound_objects(&name, at)
            }
            Applied::Unchanged => true,
            Applied::Coarse => {
                watched.lost = true;
                self.outbox.go_coarse(&name, at);
                false
            }
        }
    }

    fn list_complete(&mut self, id: WatchId, now: Instant) {
        let (Some(name), at) = (self.name_of(id), clock::unix_millis()) else { return };
        let Some(watched) = self.watches.get_mut(&name) else { return };
        let forward = watched.forward;
        let lost = watched.lost;
        let is_first_of_new = watched.is_added && watched.listed.is_none() && !watched.is_part_of_group();
        let is_reported = watched.index.is_complete() || forward;
        let gone = watched.index.finish_list();
        let is_coarse = watched.index.is_coarse();
        watched.lost &= is_coarse;
        watched.listed = Some(now);
        watched.alive = Some(now);
        watched.attempted = true;
        watched.error = None;
        if !is_coarse {
            self.outbox.end_coarse(&name);
        }
        for object in gone.into_iter().filter(|_| is_reported) {
            let update = Update::Object { seen: object.seen, change: Change::Deleted, part: Digest::ZERO };
            self.outbox.mark(&name, &object.key, update, object.before, at);
            self.bound_events(&name, at);
        }
        if forward {
            self.outbox.resend_all(&name, at);
        } else if is_first_of_new && !is_coarse {
            self.announce(&name, at);
        }
        // A list does not reveal objects that were deleted while the index was lost.
        if lost { self.outbox.mark_unnamed(&name, at) } else { self.outbox.mark_watch(&name, at) }
    }

    /// Reports the objects of a watch that the plan has got since the start, if they are few: the receiver, which has probably
    /// created them itself, recognizes its own writes, and reads none of them again.
    fn announce(&mut self, name: &Arc<str>, at: i64) {
        let Some(watched) = self.watches.get(name).filter(|watched| watched.index.len() <= ANNOUNCED) else { return };
        for (key, seen, part) in watched.index.after("", None) {
            let update = Update::Object { seen: seen.clone(), change: Change::Spec, part };
            self.outbox.mark(name, key, update, Digest::ZERO, at);
        }
        self.bound_events(name, at);
    }

    /// Resends a watch of the plan.
    fn resend(&mut self, name: &str) {
        let at = clock::unix_millis();
        let mut is_planned = false;
        for (name, watched) in self.watches.iter().filter(|(_, watched)| watched.source.name == name) {
            is_planned = true;
            if watched.forward {
                self.outbox.resend_all(name, at);
            }
            if watched.lost { self.outbox.mark_unnamed(name, at) } else { self.outbox.mark_watch(name, at) }
        }
        self.heartbeats.resends += u64::from(is_planned);
    }
}

#[cfg(test)]
mod tests;
