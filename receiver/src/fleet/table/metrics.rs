//! Metrics of fleet and queue.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
};
use tidewatch_shared::{event::Reason, metrics::Registry};
use tokio::time::Instant;

use super::PlacementError;
use crate::{
    base::key::KymaKey,
    fleet::{
        EventsRecord, HeartbeatRecord, HeartbeatStatus, LastHeartbeat, PathState, forward,
        queue::{Priority, Queue, ReconcileOutcome},
    },
};

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PlaceLabel {
    r#where: &'static str,
}

/// Counters of events, heartbeats and reconciles, and queue lengths.
#[derive(Clone)]
pub struct Metrics {
    events: Family<ResultLabel, Counter>,
    refused: Family<ResultLabel, Counter>,
    heartbeats: Family<ResultLabel, Counter>,
    placement_errors: Family<ResultLabel, Counter>,
    reconciles: Family<ResultLabel, Counter>,
    differing: Counter,
    user: Gauge,
    catalog: Gauge,
    verification: Gauge,
    waiting: Gauge,
    in_progress: Gauge,
    resends: Counter,
    coalesced: Counter,
    accepted: Histogram,
    settled: Histogram,
    agents_waiting: Gauge,
    agents_parked: Gauge,
    certificates_end: Gauge,
    renewals_failing: Gauge,
    not_renewed: RenewalFailures,
    renewals: Counter,
    oldest: Family<PriorityLabel, Gauge<f64, AtomicU64>>,
    paths: Family<StateLabel, Gauge>,
    pub(super) forward: forward::Metrics,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PriorityLabel {
    priority: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KymaLabel {
    kyma_name: String,
}

/// One series for each Kyma with an agent that fails to renew.
#[derive(Clone, Default)]
struct RenewalFailures {
    gauge: Family<KymaLabel, Gauge>,
    shown: Arc<Mutex<BTreeSet<KymaKey>>>,
}

impl RenewalFailures {
    /// Sets the complete set of failing Kymas; touches changed series only.
    fn set(&self, failing: &BTreeSet<KymaKey>) {
        let shown = &mut *self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        if shown == failing {
            return;
        }
        let of = |key: &KymaKey| KymaLabel { kyma_name: key.name.clone() };
        for over in shown.difference(failing) {
            self.gauge.remove(&of(over));
        }
        for key in failing {
            self.gauge.get_or_create(&of(key)).set(1);
        }
        shown.clone_from(failing);
    }
}

/// Totals over all runtimes.
#[derive(Default)]
pub(super) struct FleetTotals {
    /// Number of paths by state.
    states: [i64; PathState::NAMES.len()],
    waiting: u64,
    parked: u64,
    /// Earliest end of a certificate, Unix seconds.
    ends: Option<i64>,
    /// Agents that cannot renew their certificates.
    renewals_failing: BTreeSet<KymaKey>,
}

impl FleetTotals {
    /// Adds a runtime; one without heartbeats counts with its path state only.
    pub(super) fn add(&mut self, key: &KymaKey, path: &PathState, last_heartbeat: Option<&LastHeartbeat>) {
        let name = path.as_str();
        if let Some(at) = PathState::NAMES.iter().position(|known| *known == name) {
            self.states[at] += 1;
        }
        if let Some(last_heartbeat) = last_heartbeat.filter(|_| path.receives_heartbeats()) {
            self.waiting = self.waiting.saturating_add(last_heartbeat.waiting);
            self.parked = self.parked.saturating_add(last_heartbeat.parked);
            self.ends = self.ends.into_iter().chain(last_heartbeat.certificate_ends).min();
            self.renewals_failing.extend(last_heartbeat.renewal_failed_since.map(|_| key.clone()));
        }
    }
}

impl Metrics {
    /// Creates and registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let kymas = Family::<PlaceLabel, Gauge>::default();
        let gauge = |place| kymas.get_or_create_owned(&PlaceLabel { r#where: place });
        let metrics = Self {
            events: Family::default(),
            refused: Family::default(),
            heartbeats: Family::default(),
            placement_errors: Family::default(),
            reconciles: Family::default(),
            differing: Counter::default(),
            user: gauge("user"),
            catalog: gauge("catalog"),
            verification: gauge("verification"),
            waiting: gauge("waiting"),
            in_progress: gauge("in-work"),
            resends: Counter::default(),
            coalesced: Counter::default(),
            // 1 ms to about an hour.
            accepted: Histogram::new(exponential_buckets(0.001, 2.5, 17)),
            settled: Histogram::new(exponential_buckets(0.001, 2.5, 17)),
            agents_waiting: Gauge::default(),
            agents_parked: Gauge::default(),
            certificates_end: Gauge::default(),
            renewals_failing: Gauge::default(),
            not_renewed: RenewalFailures::default(),
            renewals: Counter::default(),
            oldest: Family::default(),
            paths: Family::default(),
            forward: forward::Metrics::register(registry),
        };
        metrics.register_fleet(registry);
        metrics.register_agents(registry);
        metrics.register_queue(registry, kymas);
        metrics
    }

    fn register_fleet(&self, registry: &mut Registry) {
        registry.register("fleet_events", "Events by ledger result", self.events.clone());
        registry.register("fleet_refused_events", "Events refused individually, by reason", self.refused.clone());
        registry.register(
            "fleet_heartbeats",
            "Heartbeats by result: counted, late, or of an old epoch",
            self.heartbeats.clone(),
        );
        registry.register(
            "fleet_unplaced",
            "Requests of runtimes without a single Kyma, by reason",
            self.placement_errors.clone(),
        );
        registry.register("fleet_digest_differences", "Digest mismatches", self.differing.clone());
        let help = "Watches that heartbeat responses requested to be resent";
        registry.register("fleet_resends_asked", help, self.resends.clone());
        let help = "Heartbeat responses that requested a certificate renewal because the issuer was replaced";
        registry.register("fleet_renewals_asked", help, self.renewals.clone());
        let help =
            "Time from the agent's observation of a request's first event, by the agent's clock, until its acceptance";
        registry.register("fleet_accepted_seconds", help, self.accepted.clone());
        let help = "Time from acceptance of a reconcile's oldest event until the reconcile ended all its work";
        registry.register("fleet_settled_seconds", help, self.settled.clone());
        registry.register("fleet_paths", "Runtimes by the state of their event path", self.paths.clone());
    }

    /// Registers totals over the agents' heartbeats.
    fn register_agents(&self, registry: &mut Registry) {
        let help = "Objects pending in the agents, by their heartbeats";
        registry.register("fleet_agents_waiting", help, self.agents_waiting.clone());
        let help = "Events that the agents cannot send, by their heartbeats";
        registry.register("fleet_agents_parked", help, self.agents_parked.clone());
        let help = "Earliest end of the certificate of an agent with current heartbeats; 0 if none is known";
        registry.register("fleet_first_certificate_end_timestamp_seconds", help, self.certificates_end.clone());
        let help = "Agents with current heartbeats that report a failing certificate renewal";
        registry.register("fleet_renewals_failing", help, self.renewals_failing.clone());
    }

    /// Registers the metrics with the incumbent's names, in a registry without prefix.
    pub fn register_incumbent(&self, registry: &mut Registry) {
        let help = "1 for each Kyma with an agent that reports a failing certificate renewal in its current heartbeats; no series for others";
        registry.register("lifecycle_mgr_self_signed_cert_not_renew", help, self.not_renewed.gauge.clone());
    }

    /// Registers the queue's metrics; `kymas` holds the gauges by place.
    fn register_queue(&self, registry: &mut Registry, kymas: Family<PlaceLabel, Gauge>) {
        registry.register("queue_passes", "Reconciles by result", self.reconciles.clone());
        registry.register("queue_kymas", "Kymas by position in the queue", kymas);
        let help = "Enqueues that merged into work already queued";
        registry.register("queue_coalesced", help, self.coalesced.clone());
        let help = "Waiting time of the Kyma that has been ready longest, by priority";
        registry.register("queue_oldest_seconds", help, self.oldest.clone());
    }

    pub(super) fn events(&self, recorded: &EventsRecord) {
        let counts = recorded.counts;
        for (result, count) in [
            ("recorded", counts.recorded),
            ("duplicate", counts.duplicates),
            ("ahead", counts.ahead),
            ("below", counts.below),
            ("too-far", counts.too_far),
        ] {
            if count > 0 {
                self.events.get_or_create(&ResultLabel { result }).inc_by(count);
            }
        }
        for reason in [Reason::UnknownWatch, Reason::UnknownType, Reason::Malformed, Reason::TooLarge] {
            let count = recorded.refused.iter().filter(|(_, refused)| *refused == reason).count();
            if count > 0 {
                self.refused.get_or_create(&ResultLabel { result: reason.as_str() }).inc_by(count as u64);
            }
        }
        self.differing.inc_by(counts.differing);
    }

    pub(super) fn heartbeat(&self, record: &HeartbeatRecord) {
        let result = match record.status {
            HeartbeatStatus::Counted => "counted",
            HeartbeatStatus::Late => "late",
            HeartbeatStatus::OldEpoch => "old-epoch",
        };
        self.heartbeats.get_or_create(&ResultLabel { result }).inc();
        self.differing.inc_by(record.differing);
        self.resends.inc_by(record.resend.len() as u64);
    }

    /// Counts a heartbeat response that requests a renewal.
    pub(super) fn renewal_requested(&self, requested: bool) {
        self.renewals.inc_by(requested.into());
    }

    /// Observes the time from acceptance of the oldest event until a reconcile ended all its work.
    pub(super) fn settled(&self, after: Duration) {
        self.settled.observe(after.as_secs_f64());
    }

    /// Observes the time from the agent's observation of a request's first event until its acceptance.
    pub(super) fn accepted(&self, after: Duration) {
        self.accepted.observe(after.as_secs_f64());
    }

    pub(super) fn set_totals(&self, totals: &FleetTotals) {
        for (state, count) in PathState::NAMES.into_iter().zip(totals.states) {
            self.paths.get_or_create(&StateLabel { state }).set(count);
        }
        self.agents_waiting.set(i64::try_from(totals.waiting).unwrap_or(i64::MAX));
        self.agents_parked.set(i64::try_from(totals.parked).unwrap_or(i64::MAX));
        self.certificates_end.set(totals.ends.unwrap_or(0));
        self.renewals_failing.set(i64::try_from(totals.renewals_failing.len()).unwrap_or(i64::MAX));
        self.not_renewed.set(&totals.renewals_failing);
    }

    /// Updates the metrics that change with time alone.
    pub(super) fn observe_ages(&self, queue: &Queue<KymaKey>, now: Instant) {
        for (name, priority) in
            [("user", Priority::User), ("catalog", Priority::Catalog), ("verification", Priority::Verification)]
        {
            let age = queue.oldest(priority).map_or(0.0, |since| now.saturating_duration_since(since).as_secs_f64());
            self.oldest.get_or_create(&PriorityLabel { priority: name }).set(age);
        }
        self.coalesced.inner().store(queue.coalesced(), Ordering::Relaxed);
    }

    pub(super) fn placement_failed(&self, error: PlacementError) {
        self.placement_errors.get_or_create(&ResultLabel { result: error.as_str() }).inc();
    }

    pub(super) fn reconciled(&self, outcome: &ReconcileOutcome) {
        let result = match (outcome.class, outcome.failed.is_empty(), outcome.ended.is_empty()) {
            (Some(class), ..) => class.as_str(),
            (None, false, _) => "ours",
            (None, true, false) => "ended",
            (None, true, true) => "paused",
        };
        self.reconciles.get_or_create(&ResultLabel { result }).inc();
    }

    pub(super) fn queue(&self, queue: &Queue<KymaKey>) {
        let set = |gauge: &Gauge, count: usize| gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        set(&self.user, queue.ready(Priority::User));
        set(&self.catalog, queue.ready(Priority::Catalog));
        set(&self.verification, queue.ready(Priority::Verification));
        set(&self.waiting, queue.waiting());
        set(&self.in_progress, queue.running());
    }
}
