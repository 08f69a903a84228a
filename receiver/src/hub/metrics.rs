//! Metrics of fleet and queue.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use tidewatch_shared::event::Reason;

use super::Unplaced;
use crate::{
    fleet::{Beat, Counted, Recorded},
    key::KymaKey,
    queue::{Outcome, Priority, Queue},
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Result {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
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
        };
        registry.register("fleet_events", "Events by what the ledger made of them", metrics.events.clone());
        registry.register("fleet_refused_events", "Events refused one by one, by reason", metrics.refused.clone());
        registry.register("fleet_heartbeats", "Heartbeats by whether they counted", metrics.heartbeats.clone());
        registry.register("fleet_unplaced", "Requests of runtimes that could not be served", metrics.unplaced.clone());
        registry.register("fleet_digest_differences", "Digests that did not agree", metrics.differing.clone());
        registry.register("queue_passes", "Passes by how they ended", metrics.passes.clone());
        registry.register("queue_kymas", "Kymas by where they stand in the queue", kymas.clone());
        registry.register(
            "stamps_dropped",
            "Stamps that the file could not keep up with",
            metrics.dropped_stamps.clone(),
        );
        metrics
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
