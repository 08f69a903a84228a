//! State under the runtime table's lock.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tidewatch_shared::{
    heartbeat::Heartbeat,
    identity::RuntimeId,
    plan::{Plan, Work},
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    PathReport, PathView, PlacementError, RuntimeTrust, RuntimeView, heartbeat_interval::HeartbeatPacing,
    job::ReconcileStart, metrics::FleetTotals, stamps::Stamps, traces::PendingTraces, trust::TrustAnnouncer,
};
use crate::{
    base::{error_class::ErrorClass, key::KymaKey},
    fleet::{
        Contract, EventBatch, EventsRecord, HeartbeatRecord, HeartbeatStatus, Inherited, PathState, PathThresholds,
        PlanIndex, Runtime, Snapshot, Unproven, Verified,
        forward::{self, Outbox},
        queue::{DelayReason, Drift, Priority, Queue, QueuedWork, ReconcileOutcome, WorkSet},
    },
};

/// Probe interval of a runtime that is away, plus up to the same again of jitter; a request of its agent ends the wait.
const AWAY_PROBE: Duration = Duration::from_secs(15 * 60);

/// Kyma with work enqueued by an event; true if none was queued before.
pub(super) type Enqueued = (KymaKey, bool);

/// Result of a request of events.
pub(super) struct EventsReply {
    pub(super) recorded: EventsRecord,
    pub(super) enqueued: Option<Enqueued>,
    /// Changes of the outbox.
    pub(super) forwarded: super::forward::OutboxChanges,
}

/// Result of a heartbeat.
pub(super) struct HeartbeatReply {
    pub(super) record: HeartbeatRecord,
    pub(super) plan_revision: String,
    pub(super) trust_revision: Option<String>,
    /// The response requests a renewal of the agent's certificate.
    pub(super) renew: bool,
}

/// A Kyma and the state of its runtime.
pub(super) struct Entry {
    id: Option<RuntimeId>,
    /// Distinguishes successive Kymas of one name: a reconcile of an earlier one settles nothing.
    generation: u64,
    pub(super) runtime: Runtime,
    /// Path state at the last [`State::changed_paths`].
    reported_path: Option<PathState>,
    /// Acceptance time of the oldest event that no reconcile has started with.
    accepted: Option<Instant>,
    /// Cancelled when the Kyma is removed.
    cancellation: CancellationToken,
}

/// An agent with a missing object of its own.
#[derive(Default)]
struct Incomplete {
    /// A heartbeat reported it since the last [`State::incomplete`].
    reported: bool,
    taken: Option<Instant>,
}

pub(super) struct State {
    pub(super) synced: bool,
    pub(super) pace: HeartbeatPacing,
    pub(super) kymas: HashMap<KymaKey, Entry>,
    /// Index by runtime id; almost always one Kyma each.
    runtimes: HashMap<RuntimeId, Vec<KymaKey>>,
    pub(super) queue: Queue<KymaKey>,
    pub(super) outbox: Outbox<Snapshot>,
    pub(super) stamps: Stamps,
    pub(super) traces: PendingTraces,
    pub(super) trust: TrustAnnouncer,
    /// Time of the last arrival over a lost connection; bounded by the number of Kymas.
    lost_connections: HashMap<KymaKey, Instant>,
    /// Agents with missing objects, by their last heartbeats; bounded by the number of Kymas.
    incomplete: HashMap<KymaKey, Incomplete>,
    /// Index of the last plan; most runtimes share one plan.
    planned: Option<Arc<PlanIndex>>,
    generations: u64,
    /// Time of the next Kyma of [`State::enqueue_paced`].
    paced: Option<Instant>,
}

impl State {
    pub(super) fn new(slots: usize, seed: u64) -> Self {
        Self {
            synced: false,
            pace: HeartbeatPacing::default(),
            kymas: HashMap::new(),
            runtimes: HashMap::new(),
            queue: Queue::new(slots, seed),
            outbox: Outbox::new(forward::Limits::default(), seed),
            stamps: Stamps::default(),
            traces: PendingTraces::default(),
            trust: TrustAnnouncer::default(),
            lost_connections: HashMap::new(),
            incomplete: HashMap::new(),
            planned: None,
            generations: 0,
            paced: None,
        }
    }

    pub(super) fn place(&mut self, key: KymaKey, id: Option<RuntimeId>, plan: Arc<Plan>, now: Instant) {
        let planned = self.planned(plan);
        if let Some(entry) = self.kymas.get_mut(&key).filter(|entry| entry.id == id) {
            let missing = entry.runtime.replan(planned, now);
            self.queue.enqueue(&key, QueuedWork::new(missing, Priority::Catalog), now);
            return;
        }
        self.unindex(&key);
        if let Some(id) = &id {
            let keys = self.runtimes.entry(id.clone()).or_default();
            keys.reserve_exact(1);
            keys.push(key.clone());
        }
        self.generations += 1;
        self.queue.insert(key.clone());
        let runtime = Runtime::new(planned, self.synced, now);
        let cancellation = self.kymas.get(&key).map(|entry| entry.cancellation.clone()).unwrap_or_default();
        let entry =
            Entry { id, generation: self.generations, runtime, reported_path: None, accepted: None, cancellation };
        self.kymas.insert(key, entry);
    }

    pub(super) fn remove(&mut self, key: &KymaKey) {
        self.unindex(key);
        if let Some(entry) = self.kymas.remove(key) {
            entry.cancellation.cancel();
        }
        self.queue.remove(key);
        self.traces.forget(key);
        self.lost_connections.remove(key);
        self.incomplete.remove(key);
    }

    pub(super) fn runtime(&self, key: &KymaKey) -> Option<&Runtime> {
        self.kymas.get(key).map(|entry| &entry.runtime)
    }

    /// Heartbeat interval announced to agents now.
    pub(super) fn interval(&self) -> Duration {
        self.pace.interval(self.runtimes.len())
    }

    /// Thresholds for paths in a process that serves since `started`.
    pub(super) fn thresholds(&self, started: Instant) -> PathThresholds {
        PathThresholds { started, interval: self.interval(), away_after: self.pace.away_after }
    }

    pub(super) fn inherit(&mut self, key: &KymaKey, inherited: Option<Inherited>, used_v3: bool) {
        if let Some(entry) = self.kymas.get_mut(key) {
            entry.runtime.inherit(inherited, used_v3);
        }
    }

    /// Notes a lost connection; nothing arrived over it after `since`.
    pub(super) fn connection_lost(&mut self, id: &RuntimeId, since: Instant) {
        if let Ok(key) = self.key_of(id) {
            // A connection used later may have been lost earlier.
            let last = self.lost_connections.entry(key).or_insert(since);
            *last = since.max(*last);
        }
    }

    /// Takes the Kymas with a connection lost for this long and no request since.
    pub(super) fn lost(&mut self, after: Duration, now: Instant) -> Vec<KymaKey> {
        let kymas = &self.kymas;
        let mut lost = Vec::new();
        self.lost_connections.retain(|key, at| {
            let is_silent = kymas.get(key).is_some_and(|entry| entry.runtime.last_request() <= *at);
            let waits = is_silent && now < *at + after;
            if is_silent && !waits {
                lost.push(key.clone());
            }
            waits
        });
        lost
    }

    /// Takes the Kymas with incomplete agents, each at most once per `again`.
    pub(super) fn incomplete(&mut self, again: Duration, now: Instant) -> Vec<KymaKey> {
        let mut taken = Vec::new();
        for (key, incomplete) in &mut self.incomplete {
            if incomplete.reported && incomplete.taken.is_none_or(|at| now >= at + again) {
                *incomplete = Incomplete { reported: false, taken: Some(now) };
                taken.push(key.clone());
            }
        }
        taken
    }

    /// Records an event of contract v2 and enqueues all work of the runtime.
    pub(super) fn legacy_event(&mut self, id: &RuntimeId, now: Instant) -> Result<Enqueued, PlacementError> {
        let (key, interval) = (self.key_of(id)?, self.interval());
        let entry = self.kymas.get_mut(&key).ok_or(PlacementError::Unknown)?;
        entry.runtime.request_received(Contract::V2, interval, now);
        entry.accepted.get_or_insert(now);
        let work = WorkSet::of(&[Work::Kyma, Work::Catalog]);
        let is_new = self.queue.queued(&key).is_empty();
        self.queue.enqueue(&key, QueuedWork { work, priority: Priority::User, drift: Drift::All }, now);
        Ok((key, is_new))
    }

    /// Returns true if a request in contract v3 of this runtime is known.
    pub(super) fn has_used_v3(&self, id: &RuntimeId) -> bool {
        let keys = self.runtimes.get(id).into_iter().flatten();
        keys.filter_map(|key| self.kymas.get(key)).any(|entry| entry.runtime.has_used_v3())
    }

    /// Kymas with a path that changed since the last call. Adds all runtimes to the totals.
    pub(super) fn changed_paths(
        &mut self,
        started: Instant,
        now: Instant,
        totals: &mut FleetTotals,
    ) -> Vec<(KymaKey, PathState)> {
        let thresholds = self.thresholds(started);
        let mut changed = Vec::new();
        for (key, entry) in &mut self.kymas {
            let path = entry.runtime.path(thresholds, now);
            totals.add(key, &path, entry.runtime.last_heartbeat(now).map(|(last_heartbeat, _)| last_heartbeat));
            if entry.reported_path.as_ref() != Some(&path) {
                entry.reported_path = Some(path.clone());
                changed.push((key.clone(), path));
            }
        }
        changed
    }

    pub(super) fn events(&mut self, batch: Verified<EventBatch>, now: Instant) -> Result<EventsReply, PlacementError> {
        let Verified { runtime: id, signature, payload: EventBatch { events, traceparent }, leaf, .. } = batch;
        let (epoch, created) = (signature.nonce.epoch, signature.created);
        let (key, interval) = (self.key_of(&id)?, self.interval());
        let stamped = self.stamps.capture(events.iter().flatten());
        let entry = self.kymas.get_mut(&key).ok_or(PlacementError::Unknown)?;
        entry.runtime.request_received(Contract::V3, interval, now);
        let mut recorded = entry.runtime.events(epoch, created, events);
        let forwarded = super::forward::take(&mut self.outbox, entry, &id, epoch, &mut recorded, leaf.as_ref());
        let mut enqueued = None;
        if let Some(work) = recorded.queued.take() {
            entry.accepted.get_or_insert(now);
            enqueued = Some((key.clone(), self.queue.queued(&key).is_empty()));
            self.queue.enqueue(&key, work, now);
            self.stamps.record(&id, stamped);
            if let Some(traceparent) = traceparent {
                self.traces.add(&key, traceparent);
            }
        }
        Ok(EventsReply { recorded, enqueued, forwarded })
    }

    pub(super) fn heartbeat(
        &mut self,
        heartbeat: &Verified<Heartbeat>,
        now: Instant,
    ) -> Result<HeartbeatReply, PlacementError> {
        let Verified { runtime: id, signature, payload: heartbeat, authority, .. } = heartbeat;
        let (key, interval) = (self.key_of(id)?, self.interval());
        let entry = self.kymas.get_mut(&key).ok_or(PlacementError::Unknown)?;
        let was_away = entry.reported_path == Some(PathState::Unproven(Unproven::Away));
        entry.runtime.request_received(Contract::V3, interval, now);
        let mut record = entry.runtime.heartbeat(heartbeat, signature.created, now);
        if was_away {
            // The agent is back: work that waits for the next probe is due now.
            entry.reported_path = None;
            let work = self.queue.queued(&key);
            self.queue.enqueue(&key, QueuedWork::new(work, Priority::User), now);
        }
        if let Some(work) = record.queued.take() {
            self.queue.enqueue(&key, work, now);
        }
        let plan_revision = entry.runtime.plan_revision().to_owned();
        let mut renew = false;
        if record.status == HeartbeatStatus::Counted {
            entry.runtime.set_trust(heartbeat, authority.as_ref());
            if heartbeat.incomplete {
                self.incomplete.entry(key).or_default().reported = true;
            } else {
                self.incomplete.remove(&key);
            }
            renew = self.trust.requests_renewal(authority.as_ref(), now);
        }
        Ok(HeartbeatReply { record, plan_revision, trust_revision: self.trust.revision(), renew })
    }

    /// Takes the next Kyma to reconcile, with a snapshot of its accepted sequences.
    pub(super) fn begin(&mut self, now: Instant) -> Option<(KymaKey, QueuedWork, ReconcileStart)> {
        let (key, queued) = self.queue.take(now)?;
        let traces = self.traces.take(&key);
        let entry = self.kymas.get_mut(&key)?;
        let (snapshot, accepted) = (entry.runtime.snapshot(), entry.accepted.take());
        let cancellation = entry.cancellation.clone();
        let time_limit = self.queue.time_limit(&key);
        let start = ReconcileStart {
            generation: entry.generation,
            snapshot,
            accepted,
            at: now,
            time_limit,
            traces,
            cancellation,
        };
        Some((key, queued, start))
    }

    /// Ends a reconcile. One that started before `safe` is repeated then, because until that time a last write of the
    /// previous lease holder may land. Returns the acceptance time of the oldest event that it settles.
    pub(super) fn finish(
        &mut self,
        key: &KymaKey,
        queued: &QueuedWork,
        start: &ReconcileStart,
        outcome: &ReconcileOutcome,
        safe: Instant,
        now: Instant,
    ) -> Option<Instant> {
        let thresholds = self.thresholds(safe);
        let ended = outcome.ended.both(queued.work).minus(outcome.failed);
        let (mut settled, mut probe) = (None, None);
        if let Some(entry) = self.kymas.get_mut(key).filter(|entry| entry.generation == start.generation) {
            entry.runtime.ended(&start.snapshot, ended);
            match outcome.class {
                Some(ErrorClass::Transport) => entry.runtime.set_api_server_reached(false),
                // Only this work certainly called the runtime's API server.
                _ if ended.contains(Work::Kyma) => entry.runtime.set_api_server_reached(true),
                _ => {}
            }
            if queued.work.minus(ended).is_empty() {
                settled = start.accepted;
            } else if let Some(accepted) = start.accepted {
                entry.accepted = Some(entry.accepted.map_or(accepted, |since| since.min(accepted)));
            }
            let away = entry.runtime.path(thresholds, now) == PathState::Unproven(Unproven::Away);
            probe = away.then(|| AWAY_PROBE + self.queue.jitter(AWAY_PROBE));
        }
        let requeue_after = outcome.requeue_after.max(probe.filter(|_| !outcome.failed.is_empty()));
        self.queue.finish(key, queued, &ReconcileOutcome { requeue_after, ..outcome.clone() }, now);
        if start.at < safe {
            let again = QueuedWork { work: queued.work, priority: Priority::Catalog, drift: Drift::All };
            self.queue.enqueue_after(key, DelayReason::StartupGrace, safe, again, now);
        }
        settled
    }

    pub(super) fn views(&self, started: Instant, now: Instant) -> Vec<RuntimeView> {
        let thresholds = self.thresholds(started);
        let view = |(key, entry): (&KymaKey, &Entry)| {
            let (heartbeat, last_seen) = entry.runtime.last_heartbeat(now).unzip();
            let plan_revision = heartbeat.and_then(|heartbeat| heartbeat.plan_revision.clone());
            let renewal_failed_since = heartbeat.and_then(|heartbeat| heartbeat.renewal_failed_since);
            let epochs = entry.runtime.epochs();
            let unsettled: WorkSet = epochs.iter().flat_map(|epoch| epoch.unsettled.iter().copied()).collect();
            RuntimeView {
                kyma: key.name.clone(),
                namespace: key.namespace.clone(),
                runtime_id: entry.id.as_ref().map(RuntimeId::to_string),
                ambiguous: self.is_ambiguous(entry),
                path: PathView::from(&entry.runtime.path(thresholds, now)),
                contract: entry.runtime.contract().as_str().to_owned(),
                last_seen_seconds: last_seen.map(|age| age.as_secs()),
                heartbeat_seconds: entry.runtime.interval(thresholds).as_secs(),
                canary_age_seconds: heartbeat.and_then(|heartbeat| heartbeat.canary_age(now)).map(|age| age.as_secs()),
                agent_version: heartbeat.map(|heartbeat| heartbeat.agent_version.clone()),
                plan_is_current: plan_revision.as_deref() == Some(entry.runtime.plan_revision()),
                plan_revision,
                certificate_not_after: heartbeat.map(|heartbeat| heartbeat.certificate_not_after.clone()),
                renewal_failed_since: renewal_failed_since.map(|since| super::rfc3339(since.into())),
                waiting: heartbeat.map_or(0, |heartbeat| heartbeat.waiting),
                parked: heartbeat.map_or(0, |heartbeat| heartbeat.parked),
                gaps: epochs.iter().map(|epoch| epoch.gaps).sum(),
                duplicates: epochs.iter().map(|epoch| epoch.duplicates).sum(),
                unsettled: unsettled.iter().collect(),
                queued: self.queue.queued(key).iter().collect(),
                paused: self.queue.parked(key).iter().collect(),
                in_progress: self.queue.in_progress(key),
                failures: self.queue.failures(key),
                epochs,
            }
        };
        self.kymas.iter().map(view).collect()
    }

    /// Trust state of each served runtime.
    pub(super) fn runtime_trust(&self, started: Instant, now: Instant) -> Vec<RuntimeTrust> {
        let thresholds = self.thresholds(started);
        let trust_of = |(key, id, runtime): (&KymaKey, &RuntimeId, &Runtime)| {
            let (trust_revision, authority) = runtime.trust();
            RuntimeTrust {
                kyma: key.clone(),
                runtime: id.clone(),
                path: runtime.path(thresholds, now),
                trust_revision,
                authority,
                silent: runtime.silence(now),
            }
        };
        self.served().map(trust_of).collect()
    }

    /// Path state of each served runtime.
    pub(super) fn path_reports(&self, started: Instant, now: Instant) -> Vec<PathReport> {
        let thresholds = self.thresholds(started);
        let report = |(key, id, runtime): (&KymaKey, &RuntimeId, &Runtime)| {
            let path = runtime.path(thresholds, now);
            let last_heartbeat = runtime.last_heartbeat(now).map(|(heartbeat, _)| heartbeat.at());
            PathReport { kyma: key.clone(), runtime: id.clone(), path, last_heartbeat }
        };
        self.served().map(report).collect()
    }

    /// Kymas with an unambiguous runtime id.
    fn served(&self) -> impl Iterator<Item = (&KymaKey, &RuntimeId, &Runtime)> {
        let served = self.kymas.iter().filter(|(_, entry)| !self.is_ambiguous(entry));
        served.filter_map(|(key, entry)| Some((key, entry.id.as_ref()?, &entry.runtime)))
    }

    /// Enqueues work of every Kyma at random times, on average this many per second.
    pub(super) fn enqueue_all(&mut self, work: WorkSet, priority: Priority, per_second: u32, now: Instant) {
        let count = u32::try_from(self.kymas.len()).unwrap_or(u32::MAX);
        // As many as one second takes need not wait.
        let spread = Duration::from_secs((count / per_second.max(1)).into());
        for key in self.kymas.keys() {
            let at = now + self.queue.jitter(spread);
            self.queue.enqueue_after(key, DelayReason::Spread, at, QueuedWork::new(work, priority), now);
        }
    }

    /// Enqueues work of these Kymas, this many per second, behind those that already wait and keep their turn.
    pub(super) fn enqueue_paced(&mut self, mut keys: Vec<KymaKey>, work: WorkSet, per_second: u32, now: Instant) {
        let step = Duration::from_secs(1) / per_second.max(1);
        // A random rotation, so that the same Kyma is not always first.
        let first = self.queue.jitter(Duration::from_millis(u64::try_from(keys.len()).unwrap_or(u64::MAX)));
        let first = usize::try_from(first.as_millis()).unwrap_or(0).min(keys.len());
        keys.rotate_left(first);
        let mut at = self.paced.filter(|at| *at > now).unwrap_or(now);
        for key in keys {
            let is_waiting = self.queue.is_delayed(&key, DelayReason::Paced);
            self.queue.enqueue_after(&key, DelayReason::Paced, at, QueuedWork::new(work, Priority::Catalog), now);
            if !is_waiting {
                at += step;
            }
        }
        self.paced = Some(at);
    }

    fn is_ambiguous(&self, entry: &Entry) -> bool {
        entry.id.as_ref().is_some_and(|id| self.runtimes.get(id).is_some_and(|keys| keys.len() > 1))
    }

    pub(super) fn key_of(&self, id: &RuntimeId) -> Result<KymaKey, PlacementError> {
        if !self.synced {
            return Err(PlacementError::NotSynced);
        }
        let keys = self.runtimes.get(id).ok_or(PlacementError::Unknown)?;
        match keys.first() {
            Some(key) if keys.len() == 1 => Ok(key.clone()),
            Some(_) => Err(PlacementError::Ambiguous),
            None => Err(PlacementError::Unknown),
        }
    }

    fn unindex(&mut self, key: &KymaKey) {
        let Some(id) = self.kymas.get(key).and_then(|entry| entry.id.as_ref()) else { return };
        if let Some(keys) = self.runtimes.get_mut(id) {
            keys.retain(|known| known != key);
            if keys.is_empty() {
                self.runtimes.remove(id);
                self.outbox.forget(id);
            }
        }
    }

    fn planned(&mut self, plan: Arc<Plan>) -> Arc<PlanIndex> {
        match &self.planned {
            Some(planned) if Arc::ptr_eq(planned.plan(), &plan) || *planned.plan() == plan => planned.clone(),
            _ => self.planned.insert(Arc::new(PlanIndex::new(plan))).clone(),
        }
    }
}
