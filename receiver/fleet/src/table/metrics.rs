//! Metrics of fleet and queue.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
};
use strum::VariantArray as _;
use tidewatch_api::key::KymaKey;
use tidewatch_kit::{
    metric_set,
    metrics::{PlaceLabel, PriorityLabel, ResultLabel, StateLabel},
    variant::VariantName as _,
};
use tokio::time::Instant;

use crate::{
    EventsRecord, HeartbeatRecord, LastHeartbeat, PathState, forward,
    queue::{Priority, Queue, ReconcileOutcome},
};

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KymaLabel {
    kyma_name: String,
}

metric_set! {
    /// Counters of events, heartbeats and reconciles, totals over the agents' heartbeats, and queue lengths.
    pub struct Metrics {
        /// Events, by ledger result.
        events: Family<ResultLabel, Counter> = "fleet_events",
        /// Events refused individually, by reason.
        refused: Family<ResultLabel, Counter> = "fleet_refused_events",
        /// Heartbeats, by result: counted, late, or of an old epoch.
        heartbeats: Family<ResultLabel, Counter> = "fleet_heartbeats",
        /// Requests of runtimes without a single Kyma in the shards that this receiver holds, by reason.
        pub(super) placement_errors: Family<ResultLabel, Counter> = "fleet_unplaced",
        /// Digest mismatches.
        pub(super) differing: Counter = "fleet_digest_differences",
        /// Watches that heartbeat responses requested to be resent.
        resends: Counter = "fleet_resends_asked",
        /// Heartbeat responses that requested a certificate renewal because the issuer was replaced.
        pub(super) renewals: Counter = "fleet_renewals_asked",
        /// Time from the agent's observation of a request's first event, by the agent's clock, until its acceptance.
        pub(super) accepted: Histogram = "fleet_accepted_seconds" with seconds(),
        /// Time from acceptance of a reconcile's oldest event until the reconcile ended all its work.
        pub(super) settled: Histogram = "fleet_settled_seconds" with seconds(),
        /// Runtimes, by the state of their event path.
        paths: Family<StateLabel, Gauge> = "fleet_paths",
        /// Objects pending in the agents, by their heartbeats.
        agents_waiting: Gauge = "fleet_agents_waiting",
        /// Events that the agents cannot send, by their heartbeats.
        agents_parked: Gauge = "fleet_agents_parked",
        /// Earliest end of the certificate of an agent with current heartbeats; 0 if none is known.
        certificates_end: Gauge = "fleet_first_certificate_end_timestamp_seconds",
        /// Watches that agents with current heartbeats report as coarse: they have more objects than the agent tracks,
        /// and every change makes the whole watch dirty, at most twice a minute.
        coarse: Gauge = "fleet_watches_coarse",
        /// Agents with current heartbeats that report a failing certificate renewal.
        renewals_failing: Gauge = "fleet_renewals_failing",
        /// Reconciles, by result.
        reconciles: Family<ResultLabel, Counter> = "queue_passes",
        /// Kymas, by position in the queue.
        kymas: Family<PlaceLabel, Gauge> = "queue_kymas",
        /// The gauges of `kymas`, looked up once, because each step sets them.
        kymas_by_place: OnceLock<[Gauge; 5]> = _,
        /// Enqueues that merged into work already queued.
        coalesced: Counter = "queue_coalesced",
        /// Reconciles after which their runtime shares the workers of slow runtimes, because its reconciles have taken more
        /// than its share of time.
        busy: Counter = "queue_busy",
        /// Waiting time of the Kyma that has been ready longest, by priority.
        oldest: Family<PriorityLabel, Gauge<f64, AtomicU64>> = "queue_oldest_seconds",
        pub(super) forward: forward::Metrics = ..,
        /// Those with lifecycle-manager's names.
        pub lifecycle_manager: RenewalFailures = _,
    }
}

/// Creates a histogram from 1 ms to about an hour.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.5, 17))
}

metric_set! {
    /// Metric with lifecycle-manager's name, for a registry without prefix: one series for each Kyma with an agent that fails
    /// to renew.
    pub struct RenewalFailures {
        /// Failing certificate renewals: 1 for each Kyma whose agent reports one in its current heartbeats; no series
        /// for others.
        gauge: Family<KymaLabel, Gauge> = "lifecycle_mgr_self_signed_cert_not_renew",
        shown: Arc<Mutex<BTreeSet<KymaKey>>> = _,
    }
}

impl RenewalFailures {
    /// Sets the complete set of failing Kymas; touches changed series only.
    fn set(&self, failing: &BTreeSet<KymaKey>) {
        let shown = &mut *self.shown.lock();
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
    /// Number of paths by the name of their state; other states have none.
    states: BTreeMap<&'static str, i64>,
    waiting: u64,
    parked: u64,
    /// Earliest end of a certificate, Unix seconds.
    ends: Option<i64>,
    /// Agents that cannot renew their certificates.
    renewals_failing: BTreeSet<KymaKey>,
    /// Coarse watches.
    coarse: usize,
}

impl FleetTotals {
    /// Adds a runtime; one without heartbeats counts with its path state only.
    pub(super) fn add(&mut self, key: &KymaKey, path: &PathState, last_heartbeat: Option<&LastHeartbeat>) {
        *self.states.entry(path.as_str()).or_default() += 1;
        if let Some(last_heartbeat) = last_heartbeat.filter(|_| path.receives_heartbeats()) {
            self.waiting = self.waiting.saturating_add(last_heartbeat.waiting);
            self.parked = self.parked.saturating_add(last_heartbeat.parked);
            self.ends = self.ends.into_iter().chain(last_heartbeat.certificate_ends).min();
            self.coarse = self.coarse.saturating_add(last_heartbeat.coarse);
            self.renewals_failing.extend(last_heartbeat.renewal_failed_since.map(|_| key.clone()));
        }
    }
}

impl Metrics {
    pub(super) fn events(&self, recorded: &EventsRecord) {
        for (&result, count) in &recorded.counts.by_status {
            self.events.get_or_create(&ResultLabel { result }).inc_by(*count);
        }
        for (_, reason) in &recorded.refused {
            self.refused.get_or_create(&ResultLabel { result: reason.as_str() }).inc();
        }
        self.differing.inc_by(recorded.counts.differing);
    }

    pub(super) fn heartbeat(&self, record: &HeartbeatRecord) {
        self.heartbeats.get_or_create(&ResultLabel { result: record.status.as_str() }).inc();
        self.differing.inc_by(record.differing);
        self.resends.inc_by(record.resend.len() as u64);
    }

    pub(super) fn set_totals(&self, totals: &FleetTotals) {
        for state in PathState::names() {
            self.paths.get_or_create(&StateLabel { state }).set(totals.states.get(state).copied().unwrap_or(0));
        }
        self.agents_waiting.set(i64::try_from(totals.waiting).unwrap_or(i64::MAX));
        self.agents_parked.set(i64::try_from(totals.parked).unwrap_or(i64::MAX));
        self.certificates_end.set(totals.ends.unwrap_or(0));
        self.renewals_failing.set(i64::try_from(totals.renewals_failing.len()).unwrap_or(i64::MAX));
        self.coarse.set(i64::try_from(totals.coarse).unwrap_or(i64::MAX));
        self.lifecycle_manager.set(&totals.renewals_failing);
    }

    /// Updates the metrics of the queue that change with time alone.
    pub(super) fn observe_ages(&self, queue: &Queue<KymaKey>, now: Instant) {
        for priority in Priority::VARIANTS {
            let age = queue.oldest(*priority).map_or(0.0, |since| now.saturating_duration_since(since).as_secs_f64());
            self.oldest.get_or_create(&PriorityLabel { priority: priority.as_str() }).set(age);
        }
        self.coalesced.inner().store(queue.coalesced(), Ordering::Relaxed);
        self.busy.inner().store(queue.busy(), Ordering::Relaxed);
    }

    pub(super) fn reconciled(&self, outcome: &ReconcileOutcome) {
        let result = outcome.result();
        self.reconciles.get_or_create(&ResultLabel { result }).inc();
    }

    pub(super) fn queue(&self, queue: &Queue<KymaKey>) {
        let gauges = self.kymas_by_place.get_or_init(|| {
            let places = ["user", "catalog", "verification", "waiting", "in-work"];
            places.map(|place| self.kymas.get_or_create_owned(&PlaceLabel { r#where: place }))
        });
        let ready = Priority::VARIANTS.iter().map(|priority| queue.ready(*priority));
        for (gauge, count) in gauges.iter().zip(ready.chain([queue.waiting(), queue.running()])) {
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }
}
