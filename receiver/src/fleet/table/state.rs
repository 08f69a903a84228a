//! State under the runtime table's lock.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use tidewatch_shared::{
    heartbeat::Heartbeat,
    identity::RuntimeId,
    plan::{Plan, Work},
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    PlacementError, Settings, job::ReconcileStart, kymas::Kymas, modules::ModuleReports,
    signature_clock::SignatureClock, silence::Incomplete, stamps::Stamps, traces::PendingTraces, trust::TrustAnnouncer,
};
use crate::{
    base::{error_class::ErrorClass, key::KymaKey},
    fleet::{
        Contract, EventBatch, EventsRecord, HeartbeatRecord, HeartbeatStatus, PathState, PathThresholds, PlanIndex,
        Runtime, Snapshot, Unproven, Verified,
        forward::{self, Outbox},
        queue::{DelayReason, Drift, Lanes, Priority, Queue, QueuedWork, ReconcileOutcome, WorkSet},
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
    pub(super) id: Option<RuntimeId>,
    /// Distinguishes successive Kymas of one name: a reconcile of an earlier one settles nothing.
    pub(super) generation: u64,
    pub(super) runtime: Runtime,
    /// Path state at the last [`RuntimeTable::changed_paths`](super::RuntimeTable::changed_paths).
    pub(super) reported_path: Option<PathState>,
    /// Acceptance time of the oldest event that no reconcile has started with.
    accepted: Option<Instant>,
    /// Cancelled when the Kyma is removed.
    cancellation: CancellationToken,
}

pub(super) struct State {
    pub(super) synced: bool,
    pub(super) settings: Settings,
    pub(super) kymas: Kymas,
    /// Index by runtime id; almost always one Kyma each.
    pub(super) runtimes: HashMap<RuntimeId, Vec<KymaKey>>,
    /// Runtime ids that lost their last Kyma in the current step.
    pub(super) departed: Vec<RuntimeId>,
    pub(super) queue: Queue<KymaKey>,
    pub(super) outbox: Outbox<Snapshot>,
    /// Changes of module objects.
    pub(super) reports: ModuleReports,
    pub(super) stamps: Stamps,
    pub(super) traces: PendingTraces,
    pub(super) trust: TrustAnnouncer,
    /// Time of the last arrival over a lost connection; bounded by the number of Kymas.
    pub(super) lost_connections: HashMap<KymaKey, Instant>,
    /// Agents with missing objects, by their last heartbeats; bounded by the number of Kymas.
    pub(super) incomplete: HashMap<KymaKey, Incomplete>,
    /// Indexes of the plans in use, by revision; most runtimes share a few plans.
    planned: HashMap<String, Weak<PlanIndex>>,
    signature_clock: SignatureClock,
    generations: u64,
}

impl State {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            synced: false,
            settings,
            kymas: Kymas::default(),
            runtimes: HashMap::new(),
            departed: Vec::new(),
            queue: Queue::new(Lanes::new(settings.slots), settings.seed),
            outbox: Outbox::new(forward::Limits::default(), settings.seed),
            reports: ModuleReports::default(),
            stamps: Stamps::default(),
            traces: PendingTraces::default(),
            trust: TrustAnnouncer::default(),
            lost_connections: HashMap::new(),
            incomplete: HashMap::new(),
            planned: HashMap::new(),
            signature_clock: SignatureClock::default(),
            generations: 0,
        }
    }

    pub(super) fn place(&mut self, key: KymaKey, id: Option<RuntimeId>, plan: Arc<Plan>, now: Instant) {
        let planned = self.planned(plan);
        if let Some(entry) = self.kymas.get_mut(&key).filter(|entry| entry.id == id) {
            let missing = entry.runtime.replan(planned, now);
            if missing.contains(Work::Manifest) {
                // The objects of the unsettled events are no longer known.
                self.reports.add(&key, Drift::All);
            }
            self.queue.enqueue(&key, QueuedWork::new(missing.minus(WorkSet::MANIFEST), Priority::Catalog), now);
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
        self.traces.take(key);
        self.reports.remove(key);
        self.lost_connections.remove(key);
        self.incomplete.remove(key);
    }

    /// Heartbeat interval announced to agents now.
    pub(super) fn interval(&self) -> Duration {
        self.settings.heartbeat_interval(self.runtimes.len())
    }

    /// Thresholds for paths in a process that serves since `started`.
    pub(super) fn thresholds(&self, started: Instant) -> PathThresholds {
        PathThresholds { started, interval: self.interval(), away_after: self.settings.away_after }
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

    pub(super) fn events(
        &mut self,
        batch: Verified<EventBatch>,
        now_unix: i64,
        now: Instant,
    ) -> Result<EventsReply, PlacementError> {
        let Verified { runtime: id, signature, payload: EventBatch { events, traceparent }, leaf, .. } = batch;
        let epoch = signature.nonce.epoch;
        let created = self.signature_clock.convert(signature.created, now_unix, now);
        let (key, interval) = (self.key_of(&id)?, self.interval());
        let stamped = self.stamps.capture(events.iter().flatten());
        let entry = self.kymas.get_mut(&key).ok_or(PlacementError::Unknown)?;
        entry.runtime.request_received(Contract::V3, interval, now);
        let mut recorded = entry.runtime.events(epoch, created, events);
        let forwarded = super::forward::take(&mut self.outbox, entry, &id, epoch, &mut recorded, leaf.as_ref());
        let mut enqueued = None;
        if let Some(work) = recorded.queued.take().and_then(|work| self.reports.split(&key, work)) {
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
        now_unix: i64,
        now: Instant,
    ) -> Result<HeartbeatReply, PlacementError> {
        let Verified { runtime: id, signature, payload: heartbeat, authority, .. } = heartbeat;
        let created = self.signature_clock.convert(signature.created, now_unix, now);
        let (key, interval) = (self.key_of(id)?, self.interval());
        let entry = self.kymas.get_mut(&key).ok_or(PlacementError::Unknown)?;
        let was_away = entry.reported_path == Some(PathState::Unproven(Unproven::Away));
        entry.runtime.request_received(Contract::V3, interval, now);
        let mut record = entry.runtime.heartbeat(heartbeat, created, now);
        if was_away {
            // The agent is back: work that waits for the next probe is due now.
            entry.reported_path = None;
            let work = self.queue.queued(&key);
            self.queue.enqueue(&key, QueuedWork::new(work, Priority::User), now);
        }
        if let Some(work) = record.queued.take().and_then(|work| self.reports.split(&key, work)) {
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
        let start = ReconcileStart {
            generation: entry.generation,
            snapshot: entry.runtime.snapshot(),
            accepted: entry.accepted.take(),
            at: now,
            time_limit: self.queue.time_limit(&key),
            traces,
            cancellation: entry.cancellation.clone(),
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

    /// Those of these Kymas that have an unambiguous runtime id.
    pub(super) fn served<'a>(
        &'a self,
        keys: &'a [KymaKey],
    ) -> impl Iterator<Item = (&'a KymaKey, &'a RuntimeId, &'a Runtime)> {
        let served = keys.iter().filter_map(|key| Some((key, self.kymas.get(key)?)));
        let served = served.filter(|(_, entry)| !self.is_ambiguous(entry));
        served.filter_map(|(key, entry)| Some((key, entry.id.as_ref()?, &entry.runtime)))
    }

    pub(super) fn is_ambiguous(&self, entry: &Entry) -> bool {
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
                self.departed.push(id.clone());
                self.outbox.forget(id);
                self.runtimes.remove(id);
            }
        }
    }

    fn planned(&mut self, plan: Arc<Plan>) -> Arc<PlanIndex> {
        let known = self.planned.get(plan.revision()).and_then(Weak::upgrade);
        if let Some(planned) = known.filter(|it| Arc::ptr_eq(&it.plan, &plan) || it.plan == plan) {
            return planned;
        }
        self.planned.retain(|_, planned| planned.strong_count() > 0);
        let planned = Arc::new(PlanIndex::new(plan));
        self.planned.insert(planned.plan.revision().to_owned(), Arc::downgrade(&planned));
        planned
    }
}
