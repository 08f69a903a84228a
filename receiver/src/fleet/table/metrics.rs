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

use super::Unplaced;
use crate::{
    base::key::KymaKey,
    fleet::{
        Beat, Counted, PathState, Pulse, Recorded, forward,
        queue::{Outcome, Priority, Queue},
    },
};

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Result {
    result: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Where {
    r#where: &'static str,
}

/// Counts of events, heartbeats and passes, and the lengths of the queue.
#[derive(Clone)]
pub struct Metrics {
    events: Family<Result, Counter>,
    refused: Family<Result, Counter>,
    heartbeats: Family<Result, Counter>,
    unplaced: Family<Result, Counter>,
    passes: Family<Result, Counter>,
    differing: Counter,
    dropped_stamps: Counter,
    user: Gauge,
    catalog: Gauge,
    verification: Gauge,
    waiting: Gauge,
    in_work: Gauge,
    resends: Counter,
    coalesced: Counter,
    accepted: Histogram,
    settled: Histogram,
    agents_waiting: Gauge,
    agents_parked: Gauge,
    certificates_end: Gauge,
    renewals_failing: Gauge,
    not_renewed: NotRenewed,
    renewals: Counter,
    oldest: Family<OfPriority, Gauge<f64, AtomicU64>>,
    paths: Family<OfState, Gauge>,
    pub(super) forward: forward::Metrics,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfPriority {
    priority: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfState {
    state: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfKyma {
    kyma_name: String,
}

/// One series for each Kyma whose agent fails to renew, none for the others.
#[derive(Clone, Default)]
struct NotRenewed {
    gauge: Family<OfKyma, Gauge>,
    shown: Arc<Mutex<BTreeSet<KymaKey>>>,
}

impl NotRenewed {
    /// These are all. Only what is new or over is touched.
    fn set(&self, failing: &BTreeSet<KymaKey>) {
        let shown = &mut *self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        if shown == failing {
            return;
        }
        let of = |key: &KymaKey| OfKyma { kyma_name: key.name.clone() };
        for over in shown.difference(failing) {
            self.gauge.remove(&of(over));
        }
        for key in failing {
            self.gauge.get_or_create(&of(key)).set(1);
        }
        shown.clone_from(failing);
    }
}

/// What all runtimes come to.
#[derive(Default)]
pub(super) struct Sum {
    /// How many paths there are of each state.
    states: [i64; PathState::NAMES.len()],
    waiting: u64,
    parked: u64,
    /// The earliest end of a certificate, in unix seconds.
    ends: Option<i64>,
    /// Agents that cannot renew their certificates.
    renewals_failing: BTreeSet<KymaKey>,
}

impl Sum {
    /// Agents that are not heard of count with their state alone.
    pub(super) fn add(&mut self, key: &KymaKey, path: &PathState, pulse: Option<&Pulse>) {
        let name = path.as_str();
        if let Some(at) = PathState::NAMES.iter().position(|known| *known == name) {
            self.states[at] += 1;
        }
        if let Some(pulse) = pulse.filter(|_| path.is_heard()) {
            self.waiting = self.waiting.saturating_add(pulse.waiting);
            self.parked = self.parked.saturating_add(pulse.parked);
            self.ends = self.ends.into_iter().chain(pulse.certificate_ends).min();
            self.renewals_failing.extend(pulse.renewal_failed_since.map(|_| key.clone()));
        }
    }
}

impl Metrics {
    /// Makes and registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let kymas = Family::<Where, Gauge>::default();
        let gauge = |place| kymas.get_or_create_owned(&Where { r#where: place });
        let metrics = Self {
            events: Family::default(),
            refused: Family::default(),
            heartbeats: Family::default(),
            unplaced: Family::default(),
            passes: Family::default(),
            differing: Counter::default(),
            dropped_stamps: Counter::default(),
            user: gauge("user"),
            catalog: gauge("catalog"),
            verification: gauge("verification"),
            waiting: gauge("waiting"),
            in_work: gauge("in-work"),
            resends: Counter::default(),
            coalesced: Counter::default(),
            // 1 ms to about an hour.
            accepted: Histogram::new(exponential_buckets(0.001, 2.5, 17)),
            settled: Histogram::new(exponential_buckets(0.001, 2.5, 17)),
            agents_waiting: Gauge::default(),
            agents_parked: Gauge::default(),
            certificates_end: Gauge::default(),
            renewals_failing: Gauge::default(),
            not_renewed: NotRenewed::default(),
            renewals: Counter::default(),
            oldest: Family::default(),
            paths: Family::default(),
            forward: forward::Metrics::register(registry),
        };
        metrics.register_fleet(registry);
        metrics.register_agents(registry);
        metrics.register_queue(registry, kymas);
        let help = "Stamps that the file could not keep up with";
        registry.register("stamps_dropped", help, metrics.dropped_stamps.clone());
        metrics
    }

    fn register_fleet(&self, registry: &mut Registry) {
        registry.register("fleet_events", "Events by what the ledger made of them", self.events.clone());
        registry.register("fleet_refused_events", "Events refused one by one, by reason", self.refused.clone());
        registry.register("fleet_heartbeats", "Heartbeats by whether they counted", self.heartbeats.clone());
        registry.register("fleet_unplaced", "Requests of runtimes that could not be served", self.unplaced.clone());
        registry.register("fleet_digest_differences", "Digests that did not agree", self.differing.clone());
        let help = "Watches that a heartbeat's answer asked to be told anew";
        registry.register("fleet_resends_asked", help, self.resends.clone());
        let help = "Heartbeats whose answer asked the agent to renew its certificate, because the issuer was replaced";
        registry.register("fleet_renewals_asked", help, self.renewals.clone());
        let help = "Time from when the agent saw the first event of a request, by its own clock, until that event was accepted";
        registry.register("fleet_accepted_seconds", help, self.accepted.clone());
        let help = "Time from accepting the oldest event of a pass until that pass had ended all its work";
        registry.register("fleet_settled_seconds", help, self.settled.clone());
        registry.register("fleet_paths", "Runtimes by the state of their event path", self.paths.clone());
    }

    /// What the agents' heartbeats come to.
    fn register_agents(&self, registry: &mut Registry) {
        let help = "Objects that wait in the agents, as their heartbeats said";
        registry.register("fleet_agents_waiting", help, self.agents_waiting.clone());
        let help = "Events that the agents cannot send, as their heartbeats said";
        registry.register("fleet_agents_parked", help, self.agents_parked.clone());
        let help = "When the first certificate of an agent that is heard of ends; 0 if none is known";
        registry.register("fleet_first_certificate_end_timestamp_seconds", help, self.certificates_end.clone());
        let help = "Agents that are heard of and fail to renew their certificates, as their heartbeats said";
        registry.register("fleet_renewals_failing", help, self.renewals_failing.clone());
    }

    /// Registers those that have the incumbent's names, where no prefix is given.
    pub fn register_incumbent(&self, registry: &mut Registry) {
        let help = "1 for each Kyma whose agent is heard of and fails to renew its certificate, as its heartbeat said; no series for the others";
        registry.register("lifecycle_mgr_self_signed_cert_not_renew", help, self.not_renewed.gauge.clone());
    }

    /// `kymas` holds the gauges of the queue's places.
    fn register_queue(&self, registry: &mut Registry, kymas: Family<Where, Gauge>) {
        registry.register("queue_passes", "Passes by how they ended", self.passes.clone());
        registry.register("queue_kymas", "Kymas by where they stand in the queue", kymas);
        let help = "Wants of a Kyma that was wanted already, and so cost no pass";
        registry.register("queue_coalesced", help, self.coalesced.clone());
        let help = "How long the Kyma waits that has been ready for the longest, by priority";
        registry.register("queue_oldest_seconds", help, self.oldest.clone());
    }

    pub(super) fn dropped_stamps(&self) -> Counter {
        self.dropped_stamps.clone()
    }

    pub(super) fn events(&self, recorded: &Recorded) {
        let tally = recorded.tally;
        for (result, count) in [
            ("recorded", tally.recorded),
            ("duplicate", tally.duplicates),
            ("ahead", tally.ahead),
            ("below", tally.below),
            ("too-far", tally.too_far),
        ] {
            if count > 0 {
                self.events.get_or_create(&Result { result }).inc_by(count);
            }
        }
        for reason in [Reason::UnknownWatch, Reason::UnknownType, Reason::Malformed, Reason::TooLarge] {
            let count = recorded.refused.iter().filter(|(_, refused)| *refused == reason).count();
            if count > 0 {
                self.refused.get_or_create(&Result { result: reason.as_str() }).inc_by(count as u64);
            }
        }
        self.differing.inc_by(tally.differing);
    }

    pub(super) fn heartbeat(&self, beat: &Beat) {
        let result = match beat.counted {
            Counted::Yes => "counted",
            Counted::Late => "late",
            Counted::OldEpoch => "old-epoch",
        };
        self.heartbeats.get_or_create(&Result { result }).inc();
        self.differing.inc_by(beat.differing);
        self.resends.inc_by(beat.resend.len() as u64);
    }

    /// A heartbeat's answer asked its agent to renew, or did not.
    pub(super) fn renewal_asked(&self, asked: bool) {
        self.renewals.inc_by(asked.into());
    }

    /// A pass has ended all work of events of which the oldest was accepted so long ago.
    pub(super) fn settled(&self, after: Duration) {
        self.settled.observe(after.as_secs_f64());
    }

    /// The first event of a request was accepted so long after its agent saw the change.
    pub(super) fn accepted(&self, after: Duration) {
        self.accepted.observe(after.as_secs_f64());
    }

    pub(super) fn summed(&self, sum: &Sum) {
        for (state, count) in PathState::NAMES.into_iter().zip(sum.states) {
            self.paths.get_or_create(&OfState { state }).set(count);
        }
        self.agents_waiting.set(i64::try_from(sum.waiting).unwrap_or(i64::MAX));
        self.agents_parked.set(i64::try_from(sum.parked).unwrap_or(i64::MAX));
        self.certificates_end.set(sum.ends.unwrap_or(0));
        self.renewals_failing.set(i64::try_from(sum.renewals_failing.len()).unwrap_or(i64::MAX));
        self.not_renewed.set(&sum.renewals_failing);
    }

    /// What moves with the time alone.
    pub(super) fn aged(&self, queue: &Queue<KymaKey>, now: Instant) {
        for (name, priority) in
            [("user", Priority::User), ("catalog", Priority::Catalog), ("verification", Priority::Verification)]
        {
            let age = queue.oldest(priority).map_or(0.0, |since| now.saturating_duration_since(since).as_secs_f64());
            self.oldest.get_or_create(&OfPriority { priority: name }).set(age);
        }
        self.coalesced.inner().store(queue.coalesced(), Ordering::Relaxed);
    }

    pub(super) fn unplaced(&self, unplaced: Unplaced) {
        self.unplaced.get_or_create(&Result { result: unplaced.as_str() }).inc();
    }

    pub(super) fn pass(&self, outcome: &Outcome) {
        let result = match (outcome.class, outcome.failed.is_empty(), outcome.ended.is_empty()) {
            (Some(class), ..) => class.as_str(),
            (None, false, _) => "ours",
            (None, true, false) => "ended",
            (None, true, true) => "paused",
        };
        self.passes.get_or_create(&Result { result }).inc();
    }

    pub(super) fn queue(&self, queue: &Queue<KymaKey>) {
        let set = |gauge: &Gauge, count: usize| gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        set(&self.user, queue.ready(Priority::User));
        set(&self.catalog, queue.ready(Priority::Catalog));
        set(&self.verification, queue.ready(Priority::Verification));
        set(&self.waiting, queue.waiting());
        set(&self.in_work, queue.running());
    }
}
