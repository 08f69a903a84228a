//! State of one runtime: its epochs, plan and last heartbeat.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tidewatch_api::{identity::Epoch, plan::Work};
use tidewatch_contract::{
    admin::fleet::EpochView,
    certificate::KeyId,
    event::{Event, EventId, Object, Payload, Reason, Received, Subject},
    exchange::Settled,
    heartbeat::Heartbeat,
    v2,
};
use tidewatch_kit::variant::VariantName as _;
use tokio::time::Instant;

use super::{
    Contract, Inherited, LastHeartbeat, PathState, PathThresholds, PlanIndex, compare::Compare, ledger::Ledger,
    path::Evidence, sequences::SequenceStatus,
};
use crate::queue::{Drift, Priority, QueuedWork, WorkSet, merge_into};

/// Maximum number of epochs kept per runtime.
const MAX_EPOCHS: usize = 4;

/// What a request of events contained.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EventCounts {
    /// Number of events by the name of their [`SequenceStatus`].
    pub(crate) by_status: BTreeMap<&'static str, u64>,
    /// Watches with a digest mismatch.
    pub(crate) differing: u64,
    /// Forwarded events received earlier were accepted only now.
    pub(crate) forwards_unblocked: bool,
}

/// Maximum length of a trust bundle's revision, in bytes.
const MAX_REVISION_BYTES: usize = 64;

/// Effects of a request of events.
#[derive(Debug, Default)]
pub(crate) struct EventsRecord {
    pub(crate) accepted: u64,
    pub(crate) since: u64,
    pub(crate) settled: Settled,
    pub(crate) refused: Vec<(EventId, Reason)>,
    pub(crate) queued: Option<QueuedWork>,
    /// Sequences below this one were answered, see the ledger.
    pub(crate) answered_below: u64,
    /// Events for other managers.
    pub(crate) forwards: Vec<ForwardedEvent>,
    pub(crate) counts: EventCounts,
}

/// Event of a watch that belongs to another manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ForwardedEvent {
    pub(crate) id: EventId,
    pub(crate) watch: String,
    /// The object, without a name if it cannot be named; `None` for the watch as a whole, since its objects have events
    /// of their own.
    pub(crate) event: Option<v2::Event>,
}

/// Classification of a heartbeat. The name is its result in metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub(crate) enum HeartbeatStatus {
    Counted,
    /// Its counter is not higher than the last.
    Late,
    /// It is not of the newest epoch.
    OldEpoch,
}

/// Effects of a heartbeat.
#[derive(Debug)]
pub(crate) struct HeartbeatRecord {
    pub(crate) status: HeartbeatStatus,
    pub(crate) settled: Settled,
    /// Start of the run that `settled` refers to.
    pub(crate) since: u64,
    pub(crate) resend: Vec<String>,
    pub(crate) queued: Option<QueuedWork>,
    pub(crate) differing: u64,
}

/// State at the start of a reconcile, taken in the same step as its work and before it reads anything.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    accepted: Vec<(Epoch, u64)>,
    planned: Arc<PlanIndex>,
}

/// Unsettled work that watches have got with another plan.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct MissingWork {
    /// Work other than that of the Manifests.
    pub(crate) work: WorkSet,
    /// Objects that the Manifests are to read again.
    pub(crate) modules: Drift,
}

/// State of one runtime. Bounded: at most [`MAX_EPOCHS`] ledgers, each by the watches of the plan.
#[derive(Debug)]
pub(crate) struct Runtime {
    planned: Arc<PlanIndex>,
    /// Placed while events were already received: the agent may have sent events that an earlier entry accepted.
    placed_late: bool,
    /// Time of the placement or of the last change of the plan.
    since: Instant,
    epochs: Vec<(Epoch, Ledger)>,
    order: u64,
    /// The last counted heartbeat.
    pub(super) last_heartbeat: Option<LastHeartbeat>,
    /// Start of a new epoch, until the agent has reported once that nothing is missing.
    restarting_since: Option<Instant>,
    /// Time of the last request, initially of the placement.
    pub(super) last_request: Instant,
    /// Contract of the last request.
    pub(super) contract: Contract,
    /// A request in contract v3 is known, to this process, or to an earlier one according to the condition in KCP.
    pub(super) used_v3: bool,
    /// The last two heartbeat intervals announced to the agent; the later response may have been lost.
    announced_intervals: [Duration; 2],
    /// The last reconcile could not reach the runtime's API server.
    unreachable: bool,
    inherited: Option<Inherited>,
    /// Revision of the agent's trust bundle, by its last counted heartbeat.
    pub(super) trust_revision: Option<String>,
    /// Key that issued the certificate of that heartbeat.
    pub(super) authority: Option<KeyId>,
}

impl Runtime {
    pub(crate) fn new(planned: Arc<PlanIndex>, placed_late: bool, now: Instant) -> Self {
        Self {
            planned,
            placed_late,
            since: now,
            epochs: Vec::new(),
            order: 0,
            last_heartbeat: None,
            restarting_since: None,
            last_request: now,
            contract: Contract::Unknown,
            used_v3: false,
            announced_intervals: [Duration::ZERO; 2],
            unreachable: false,
            inherited: None,
            trust_revision: None,
            authority: None,
        }
    }

    /// Stores the trust bundle that a counted heartbeat reports and the issuer of its certificate.
    pub(crate) fn set_trust(&mut self, heartbeat: &Heartbeat, authority: Option<&KeyId>) {
        // A revision has 16 characters; a longer one was not issued by a receiver.
        let revision = heartbeat.trust_revision.as_ref().filter(|revision| revision.len() <= MAX_REVISION_BYTES);
        self.trust_revision = revision.cloned();
        self.authority = authority.cloned();
    }

    /// Continues the state that an earlier process recorded in KCP's condition: the path until the next request of the
    /// runtime, and the use of contract v3 permanently.
    pub(crate) fn inherit(&mut self, inherited: Option<Inherited>, used_v3: bool) {
        self.inherited = inherited;
        self.unreachable |= inherited == Some(Inherited::Away);
        self.used_v3 |= used_v3;
    }

    /// Notes a request in this contract and the heartbeat interval that its response announces.
    pub(crate) fn request_received(&mut self, contract: Contract, interval: Duration, now: Instant) {
        (self.last_request, self.contract, self.inherited) = (now, contract, None);
        self.used_v3 |= contract == Contract::V3;
        self.announced_intervals = [interval, self.announced_intervals[0]];
    }

    /// Stores if the last reconcile could reach the runtime's API server.
    pub(crate) fn set_api_server_reached(&mut self, reached: bool) {
        self.unreachable = !reached;
        if reached && self.inherited == Some(Inherited::Away) {
            self.inherited = None;
        }
    }

    pub(crate) fn plan_revision(&self) -> &str {
        self.planned.plan.revision()
    }

    /// Applies another plan. Returns the unsettled work that its watches have got with it.
    pub(crate) fn replan(&mut self, planned: Arc<PlanIndex>, now: Instant) -> MissingWork {
        let mut missing = MissingWork::default();
        if self.planned.plan == planned.plan {
            return missing;
        }
        let before = std::mem::replace(&mut self.planned, planned);
        self.since = now;
        let is_new = |name: &str| !before.work(name).is_some_and(|work| work.contains(Work::Forward));
        self.request_forwards(is_new);
        for (_, ledger) in &mut self.epochs {
            ledger.replan(&self.planned);
            for (watch, work) in ledger.missing_since(&before, &self.planned) {
                missing.work |= work.minus(FORWARD | WorkSet::MANIFEST);
                if !work.both(WorkSet::MANIFEST).is_empty() {
                    missing.modules.merge(self.planned.drift(watch));
                }
            }
        }
        missing
    }

    /// Requests the objects of the forwarded watches whose events were dropped because their routes were gone.
    pub(crate) fn request_forwards(&mut self, is_selected: impl Fn(&str) -> bool) {
        let watches = self.planned.plan.watches().iter().filter(|watch| watch.work.contains(&Work::Forward));
        for watch in watches.filter(|watch| is_selected(&watch.name)) {
            self.epochs.iter_mut().for_each(|(_, ledger)| ledger.request_forward(&watch.name));
        }
    }

    /// Records a request, of which it keeps watermarks only; the caller enqueues the resulting work in the same step.
    pub(crate) fn events(&mut self, epoch: Epoch, created: i64, events: Vec<Received>) -> EventsRecord {
        let planned = self.planned.clone();
        let ledger = self.ledger(epoch, created);
        let id = |received: &Received| received.as_ref().map_or_else(|(id, _)| *id, |event| event.id);
        let sequences = events.iter().map(id).filter(|id| id.epoch == epoch).map(|id| id.sequence);
        let first = sequences.min();
        if let Some(first) = first {
            ledger.begin(first);
            ledger.answered_below = ledger.answered_below.max(first);
        }
        let mut recorded = EventsRecord { answered_below: ledger.answered_below, ..EventsRecord::default() };
        for received in events {
            match received {
                Err(refusal) => recorded.refused.push(refusal),
                Ok(event) if event.id.epoch != epoch => recorded.refused.push((event.id, Reason::Malformed)),
                Ok(event) => recorded.add(event, ledger, &planned),
            }
        }
        recorded.accepted = ledger.sequences.accepted();
        recorded.since = ledger.sequences.since();
        recorded.settled = ledger.settled(&planned);
        self.bound();
        recorded
    }

    /// Records a heartbeat.
    pub(crate) fn heartbeat(&mut self, heartbeat: &Heartbeat, created: i64, now: Instant) -> HeartbeatRecord {
        let planned = self.planned.clone();
        let placed_late = self.placed_late;
        self.ledger(heartbeat.epoch, created);
        let newest =
            self.epochs.iter().max_by_key(|(_, ledger)| (ledger.newest, ledger.order)).map(|(epoch, _)| *epoch);
        let is_newest = newest == Some(heartbeat.epoch);
        let ledger = self.ledger(heartbeat.epoch, created);
        let status = match (is_newest, is_newest && ledger.advance_counter(heartbeat.counter)) {
            (false, _) => HeartbeatStatus::OldEpoch,
            (true, false) => HeartbeatStatus::Late,
            (true, true) => HeartbeatStatus::Counted,
        };
        let mut queued = None;
        let mut differing = Vec::new();
        if status == HeartbeatStatus::Counted {
            differing = ledger.heartbeat(heartbeat, placed_late, &planned);
            enqueue_differing(&differing, &planned, &mut queued);
        }
        let settled = ledger.settled(&planned);
        let since = ledger.sequences.since();
        let resend = if is_newest { ledger.compare.resend() } else { Vec::new() };
        if status == HeartbeatStatus::Counted {
            let last_heartbeat = LastHeartbeat::of(heartbeat, &planned, now);
            let same = self.last_heartbeat.as_ref().is_some_and(|before| before.epoch == last_heartbeat.epoch);
            match (last_heartbeat.is_healthy(planned.plan.revision()), self.restarting_since) {
                (true, _) => self.restarting_since = None,
                (false, None) if !same => self.restarting_since = Some(now),
                (false, _) => {}
            }
            self.last_heartbeat = Some(last_heartbeat);
            let others = self.epochs.iter_mut().filter(|(epoch, _)| *epoch != heartbeat.epoch);
            others.for_each(|(_, ledger)| ledger.compare = Compare::default());
        }
        self.bound();
        HeartbeatRecord { status, settled, since, resend, queued, differing: differing.len() as u64 }
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let accepted = self.epochs.iter().map(|(epoch, ledger)| (*epoch, ledger.sequences.accepted())).collect();
        Snapshot { accepted, planned: self.planned.clone() }
    }

    /// Advances the watermarks after work that started from the snapshot has ended and its result is recorded.
    pub(crate) fn ended(&mut self, snapshot: &Snapshot, work: WorkSet) {
        for (epoch, ledger) in &mut self.epochs {
            if let Some((_, accepted)) = snapshot.accepted.iter().find(|(known, _)| known == epoch) {
                ledger.ended(work, *accepted, &snapshot.planned, &self.planned);
            }
        }
    }

    /// Watches with events that are not known to be forwarded.
    pub(crate) fn watches_pending_forward(&self) -> impl Iterator<Item = &str> {
        self.epochs.iter().flat_map(|(_, ledger)| ledger.watches_pending(Work::Forward, &self.planned))
    }

    /// Notes that the watch's manager has taken all events up to the snapshot, except in these epochs, for which that
    /// is unknown.
    pub(crate) fn forwarded(&mut self, snapshot: &Snapshot, watch: &str, except: &[Epoch]) {
        for (epoch, ledger) in self.epochs.iter_mut().filter(|(epoch, _)| !except.contains(epoch)) {
            if let Some((_, accepted)) = snapshot.accepted.iter().find(|(known, _)| known == epoch) {
                ledger.ended_of(watch, FORWARD, *accepted, &snapshot.planned, &self.planned);
            }
        }
    }

    /// Evaluates the state of the event path.
    pub(crate) fn path(&self, thresholds: PathThresholds, now: Instant) -> PathState {
        let since = self.since.max(thresholds.started);
        Evidence {
            since: self.restarting_since.map_or(since, |restarting_since| since.max(restarting_since)),
            interval: self.interval(thresholds),
            away_after: thresholds.away_after,
            last_request: self.last_request.max(thresholds.started),
            legacy: self.contract == Contract::V2 || self.inherited == Some(Inherited::LegacyAgent),
            unreachable: self.unreachable,
            was_away: self.inherited == Some(Inherited::Away),
            plan_revision: self.plan_revision(),
            diverged: self.diverged(),
            last_heartbeat: self.last_heartbeat.as_ref(),
        }
        .evaluate(now)
    }

    /// Longest heartbeat interval that the agent may follow.
    pub(crate) fn interval(&self, thresholds: PathThresholds) -> Duration {
        thresholds.interval.max(self.announced_intervals[0]).max(self.announced_intervals[1])
    }

    /// Watch with a digest mismatch in the epoch that counts.
    fn diverged(&self) -> Option<&str> {
        let counts = self.last_heartbeat.as_ref()?.epoch;
        self.epochs.iter().find(|(epoch, _)| *epoch == counts)?.1.compare.diverged()
    }

    pub(crate) fn epochs(&self) -> Vec<EpochView> {
        self.epochs.iter().map(|(epoch, ledger)| ledger.view(*epoch, &self.planned)).collect()
    }

    /// Ledger of the epoch that a signature of this time names; see [`Ledger::newest`].
    fn ledger(&mut self, epoch: Epoch, created: i64) -> &mut Ledger {
        let at = self.epochs.iter().position(|(known, _)| *known == epoch).unwrap_or_else(|| {
            self.order += 1;
            // A runtime has almost always one epoch.
            self.epochs.reserve_exact(1);
            self.epochs.push((epoch, Ledger::new(created, self.order)));
            self.epochs.len() - 1
        });
        let ledger = &mut self.epochs[at].1;
        ledger.newest = ledger.newest.max(created);
        ledger
    }

    /// Evicts the epoch with the oldest newest signature if there are too many; it may be the one just recorded.
    fn bound(&mut self) {
        if self.epochs.len() > MAX_EPOCHS {
            let oldest = self.epochs.iter().enumerate().min_by_key(|(_, (_, ledger))| (ledger.newest, ledger.order));
            if let Some(at) = oldest.map(|(at, _)| at) {
                self.epochs.remove(at);
            }
        }
    }
}

impl EventsRecord {
    /// Records an event and adds its effects.
    fn add(&mut self, event: Event, ledger: &mut Ledger, planned: &PlanIndex) {
        let recorded = ledger.record(&event, planned);
        let counts = &mut self.counts;
        *counts.by_status.entry(recorded.status.as_str()).or_default() += 1;
        counts.differing += recorded.differing.len() as u64;
        counts.forwards_unblocked |= recorded.unblocked.contains(Work::Forward);
        enqueue_differing(&recorded.differing, planned, &mut self.queued);
        enqueue(&mut self.queued, recorded.unblocked, Drift::None);
        let Some(work) = recorded.work else {
            // The sequence and the delta are recorded, but this plan has no work for the watch.
            self.refused.push((event.id, Reason::UnknownWatch));
            return;
        };
        if !work.is_empty() {
            // A report out of order gets no resourceVersion, so that it is never taken for that of our own write.
            let is_newest = matches!(recorded.status, SequenceStatus::Next { .. } | SequenceStatus::Ahead);
            let drift = match &event.payload {
                Payload::Object(object) if is_newest => Drift::of(object.clone()),
                Payload::Object(object) => Drift::of(Object { resource_version: String::new(), ..object.clone() }),
                Payload::Watch | Payload::Unnamed { .. } => planned.drift(&event.watch),
            };
            enqueue(&mut self.queued, work, drift);
        }
        if work.contains(Work::Forward) {
            self.forwards.push(ForwardedEvent::of(event));
        }
    }
}

fn enqueue_differing(watches: &[String], planned: &PlanIndex, queued: &mut Option<QueuedWork>) {
    for watch in watches {
        if let Some(work) = planned.work(watch) {
            enqueue(queued, work, planned.drift(watch));
        }
    }
}

impl ForwardedEvent {
    fn of(event: Event) -> Self {
        let object = match event.payload {
            Payload::Object(Object { subject: Subject { group, version, namespace, name, .. }, kind, .. }) => {
                Some(v2::Event { namespace, name, group, version, kind })
            }
            // Contract v2 has object events only; one without a name stands for objects that the agent could not name.
            Payload::Unnamed { subject: Subject { group, version, .. }, kind } => {
                Some(v2::Event { group, version, kind, ..v2::Event::default() })
            }
            Payload::Watch => None,
        };
        Self { id: event.id, watch: event.watch, event: object }
    }
}

/// No reconcile does this work: forwarded events are put into the outbox in the step that records them.
const FORWARD: WorkSet = WorkSet::FORWARD;

fn enqueue(queued: &mut Option<QueuedWork>, work: WorkSet, drift: Drift) {
    let work = work.minus(FORWARD);
    if !work.is_empty() {
        merge_into(queued, QueuedWork { work, priority: Priority::User, drift });
    }
}

#[cfg(test)]
mod tests;
