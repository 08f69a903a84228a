//! State of one shard, under its lock.

use std::{collections::HashMap, mem, sync::Arc, time::Duration};

use tidewatch_api::{
    identity::{Instance, RuntimeId},
    key::KymaKey,
    plan::{Plan, Work},
};
use tidewatch_contract::heartbeat::Heartbeat;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    Job, PlacementError, Settings,
    agenda::Enqueued,
    forwarded::{self, OutboxChanges},
    job::{ReconcileStart, Started},
    kymas::{Entry, Kymas},
    shared::Shared,
    stamps::Stamps,
    traces::TraceLinks,
};
use crate::{
    Contract, EventBatch, EventsRecord, HeartbeatRecord, HeartbeatStatus, PathState, PathThresholds, Runtime, Tenure,
    Unproven, Verified,
    queue::{DelayReason, Drift, Priority, QueuedWork, ReconcileOutcome, Verdict, WorkSet},
    verified::SignatureClock,
};

/// Probe interval of a runtime that is away, plus up to the same again of jitter; a request of its agent ends the wait.
const AWAY_PROBE: Duration = Duration::from_secs(15 * 60);

/// Result of a request of events.
pub(super) struct EventsReply {
    pub(super) recorded: EventsRecord,
    pub(super) enqueued: Option<Enqueued>,
    /// Changes of the outbox.
    pub(super) forwarded: OutboxChanges,
}

/// Result of a heartbeat.
pub(super) struct HeartbeatReply {
    pub(super) record: HeartbeatRecord,
    pub(super) plan_revision: String,
}

/// Effect of a reconcile that has ended.
pub(super) struct Ended {
    /// Time from acceptance of its oldest event, if all its work ended.
    pub(super) settled_after: Option<Duration>,
}

/// An agent with a missing object of its own.
#[derive(Default)]
pub(super) struct Incomplete {
    /// A heartbeat reported it since the last [`RuntimeTable::incomplete`](super::RuntimeTable::incomplete).
    pub(super) reported: bool,
    pub(super) taken: Option<Instant>,
}

pub(super) struct State {
    /// Instance that answers the agents, of this acquisition of the shard alone.
    pub(super) instance: Instance,
    /// Time of the acquisition.
    pub(super) started: Instant,
    pub(super) tenure: Tenure,
    /// Parent of the cancellations of all Kymas.
    pub(super) cancellation: CancellationToken,
    pub(super) shared: Arc<Shared>,
    pub(super) synced: bool,
    pub(super) settings: Settings,
    pub(super) kymas: Kymas,
    /// Index by runtime id; almost always one Kyma each.
    pub(super) runtimes: HashMap<RuntimeId, Vec<KymaKey>>,
    /// Runtime ids that lost their last Kyma in the current step.
    pub(super) departed: Vec<RuntimeId>,
    /// Time of the last arrival over a lost connection; bounded by the number of Kymas.
    pub(super) lost_connections: HashMap<KymaKey, Instant>,
    /// Agents with missing objects, by their last heartbeats; bounded by the number of Kymas.
    pub(super) incomplete: HashMap<KymaKey, Incomplete>,
    signature_clock: SignatureClock,
}

impl State {
    pub(super) fn new(
        instance: Instance,
        started: Instant,
        tenure: Tenure,
        settings: Settings,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            instance,
            started,
            tenure,
            cancellation: CancellationToken::new(),
            synced: false,
            settings,
            kymas: Kymas::default(),
            runtimes: HashMap::new(),
            departed: Vec::new(),
            lost_connections: HashMap::new(),
            incomplete: HashMap::new(),
            signature_clock: SignatureClock::default(),
            shared,
        }
    }

    pub(super) fn place(&mut self, key: KymaKey, id: Option<RuntimeId>, plan: Arc<Plan>, now: Instant) {
        let planned = self.shared.planned(plan);
        if let Some(entry) = self.kymas.get_mut(&key).filter(|entry| entry.id == id) {
            let missing = entry.runtime.replan(planned, now);
            let mut agenda = self.shared.agenda();
            if missing.modules != Drift::None {
                agenda.reports.add(&key, missing.modules);
            }
            agenda.queue.enqueue(&key, QueuedWork::new(missing.work, Priority::Catalog), now);
            return;
        }
        self.unindex(&key);
        if let Some(id) = &id {
            let keys = self.runtimes.entry(id.clone()).or_default();
            keys.reserve_exact(1);
            keys.push(key.clone());
        }
        self.shared.queue().insert(key.clone());
        let runtime = Runtime::new(planned, self.synced, now);
        let known = self.kymas.get(&key).map(|entry| entry.cancellation.clone());
        let cancellation = known.unwrap_or_else(|| self.cancellation.child_token());
        let entry = Entry {
            id,
            generation: self.shared.generation(),
            runtime,
            reported_path: None,
            safe: None,
            accepted: None,
            has_new_reports: false,
            traces: None,
            cancellation,
        };
        self.kymas.insert(key, entry);
    }

    /// Notes that another replica has served a Kyma until now: reconciles that begin before its last writes have landed are
    /// repeated.
    pub(super) fn taken_over(&mut self, key: &KymaKey, now: Instant) {
        let safe = now + self.settings.request_deadline;
        if let Some(entry) = self.kymas.get_mut(key) {
            entry.safe = Some(safe);
        }
    }

    pub(super) fn remove(&mut self, key: &KymaKey) {
        self.unindex(key);
        if let Some(entry) = self.kymas.remove(key) {
            entry.cancellation.cancel();
        }
        self.shared.agenda().remove(key);
        self.lost_connections.remove(key);
        self.incomplete.remove(key);
    }

    /// Heartbeat interval announced to agents now.
    pub(super) fn interval(&self) -> Duration {
        self.shared.interval.get()
    }

    /// Thresholds for paths in a process that serves since `started`.
    pub(super) fn thresholds(&self, started: Instant) -> PathThresholds {
        PathThresholds { started, interval: self.interval(), away_after: self.settings.away_after }
    }

    /// Records an event of contract v2 and enqueues all work of the runtime.
    pub(super) fn legacy_event(&mut self, id: &RuntimeId, now: Instant) -> Result<Option<Enqueued>, PlacementError> {
        let key = self.key_of(id)?;
        let interval = self.interval();
        let entry = self.kymas.get_mut(&key).ok_or(PlacementError::Unknown)?;
        entry.runtime.request_received(Contract::V2, interval, now);
        entry.accept(now);
        let work = WorkSet::of(&[Work::Kyma, Work::Catalog]);
        let queued = QueuedWork { work, priority: Priority::User, drift: Drift::All };
        Ok(self.shared.agenda().add(&key, queued, now))
    }

    /// Records the sequences of a batch, and looks the work of each watch up in the plan. Work on Manifests goes to the reports of
    /// the modules, and the rest is enqueued: of an event only its sequence, its work and its drift remain.
    pub(super) fn events(
        &mut self,
        batch: Verified<EventBatch>,
        now_unix: i64,
        now: Instant,
    ) -> Result<EventsReply, PlacementError> {
        let Verified { runtime: id, signature, payload: EventBatch { events, traceparent }, leaf, .. } = batch;
        let epoch = signature.nonce.epoch;
        let created = self.signature_clock.convert(signature.created, now_unix, now);
        let key = self.key_of(&id)?;
        let interval = self.interval();
        let stamps = self.shared.stamps.get_or_init(Stamps::default);
        let stamped = stamps.capture(events.iter().flatten());
        let entry = self.kymas.get_mut(&key).ok_or(PlacementError::Unknown)?;
        entry.runtime.request_received(Contract::V3, interval, now);
        let mut recorded = entry.runtime.events(epoch, created, events);
        let outbox = self.shared.outbox_for(!recorded.forwards.is_empty());
        let forwarded =
            outbox.map(|mut outbox| forwarded::take(&mut outbox, entry, &id, epoch, &mut recorded, leaf.as_ref()));
        let forwarded = forwarded.unwrap_or_default();
        let enqueued = recorded.queued.take().and_then(|queued| self.shared.agenda().add(&key, queued, now));
        if enqueued.is_some() {
            entry.accept(now);
            stamps.record(&id, stamped);
            if let Some(traceparent) = traceparent {
                entry.traces.get_or_insert_with(|| Box::new(TraceLinks::begin())).add(traceparent);
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
        let key = self.key_of(id)?;
        let interval = self.interval();
        let entry = self.kymas.get_mut(&key).ok_or(PlacementError::Unknown)?;
        let was_away = entry.reported_path == Some(PathState::Unproven(Unproven::Away));
        entry.runtime.request_received(Contract::V3, interval, now);
        let mut record = entry.runtime.heartbeat(heartbeat, created, now);
        if was_away {
            // The agent is back: work that waits for the next probe is due now.
            entry.reported_path = None;
            let mut queue = self.shared.queue();
            let work = queue.queued(&key);
            queue.enqueue(&key, QueuedWork::new(work, Priority::User), now);
        }
        let enqueued = record.queued.take().and_then(|queued| self.shared.agenda().add(&key, queued, now));
        entry.has_new_reports |= enqueued.is_some();
        let plan_revision = entry.runtime.plan_revision().to_owned();
        if record.status == HeartbeatStatus::Counted {
            entry.runtime.set_trust(heartbeat, authority.as_ref());
            if heartbeat.incomplete {
                self.incomplete.entry(key).or_default().reported = true;
            } else {
                self.incomplete.remove(&key);
            }
        }
        Ok(HeartbeatReply { record, plan_revision })
    }

    /// Takes a Kyma that is first in the queue, with a snapshot of its accepted sequences. `None` if it is not the first any more,
    /// or its shard is drained.
    pub(super) fn begin(&mut self, key: &KymaKey, now: Instant) -> Option<Started> {
        let entry = self.kymas.get_mut(key)?;
        let mut queue = self.shared.queue();
        let Some(in_progress) = self.tenure.begin() else {
            // The next holder of the shard reconciles it.
            queue.remove(key);
            return None;
        };
        let queued = queue.take_first(key, now)?;
        let time_limit = queue.time_limit(key);
        drop(queue);
        let start = ReconcileStart {
            generation: entry.generation,
            tenure: self.tenure.clone(),
            _in_progress: in_progress,
            snapshot: entry.runtime.snapshot(),
            accepted: entry.accepted.take(),
            has_new_reports: mem::take(&mut entry.has_new_reports),
            at: now,
            time_limit,
            traces: entry.traces.take(),
            cancellation: entry.cancellation.clone(),
        };
        Some((key.clone(), queued, start))
    }

    /// Ends a reconcile. One that started while a last write of the previous lease holder could land is repeated afterwards.
    /// `None` without any effect if its Kyma has left the shard, or the reconcile began in an earlier tenure.
    pub(super) fn finish(&mut self, job: &Job, outcome: &ReconcileOutcome, now: Instant) -> Option<Ended> {
        let Job { key, queued, start, .. } = job;
        if self.tenure.number != start.tenure.number {
            return None;
        }
        let mut safe = start.tenure.safe.unwrap_or(start.at);
        let thresholds = self.thresholds(safe);
        let ended = outcome.ended.both(queued.work).minus(outcome.failed);
        let mut settled = None;
        let mut is_away = false;
        let entry = self.kymas.get_mut(key)?;
        if entry.generation == start.generation {
            safe = entry.safe.map_or(safe, |entry| safe.max(entry));
            entry.runtime.ended(&start.snapshot, ended);
            match outcome.verdict() {
                Some(Verdict::Unreached) => entry.runtime.set_api_server_reached(false),
                Some(Verdict::Answered) => entry.runtime.set_api_server_reached(true),
                Some(Verdict::NoAccess) | None => {}
            }
            if queued.work.minus(ended).is_empty() {
                settled = start.accepted;
            } else if let Some(accepted) = start.accepted {
                entry.accepted = Some(entry.accepted.map_or(accepted, |since| since.min(accepted)));
            }
            is_away = entry.runtime.path(thresholds, now) == PathState::Unproven(Unproven::Away);
        }
        let mut queue = self.shared.queue();
        let probe = is_away.then(|| AWAY_PROBE + queue.jitter(AWAY_PROBE));
        let min_backoff = outcome.min_backoff.max(probe);
        queue.finish(key, queued, &ReconcileOutcome { min_backoff, ..outcome.clone() }, now);
        if start.at < safe {
            let again = QueuedWork { work: queued.work, priority: Priority::Catalog, drift: Drift::All };
            queue.enqueue_after(key, DelayReason::StartupGrace, safe, again, now);
        }
        Some(Ended { settled_after: settled.map(|accepted| now.saturating_duration_since(accepted)) })
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
                if let Some(mut outbox) = self.shared.outbox_for(false) {
                    outbox.forget(id);
                }
                self.runtimes.remove(id);
            }
        }
    }
}
