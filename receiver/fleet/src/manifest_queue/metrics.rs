//! Metrics of the queue of the Manifests.

use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering},
};

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use strum::VariantArray as _;
use tidewatch_api::key::{KymaKey, ManifestKey};
use tidewatch_kit::{
    metric_set,
    metrics::{PlaceLabel, PriorityLabel, ResultLabel},
    variant::VariantName as _,
};
use tokio::time::Instant;

use crate::queue::{Priority, Queue, ReconcileOutcome};

metric_set! {
    /// Counters of reconciles of Manifests, and lengths of their queue.
    pub struct Metrics {
        /// Reconciles of Manifests, by result.
        reconciles: Family<ResultLabel, Counter> = "manifest_queue_passes",
        /// Manifests, by position in their queue; `held` are those that wait for another Manifest of their runtime.
        manifests: Family<PlaceLabel, Gauge> = "manifest_queue_manifests",
        /// The gauges of `manifests`, looked up once, because each step under the queue's lock sets them.
        manifests_by_place: OnceLock<[Gauge; 6]> = _,
        /// Enqueues of Manifests that merged into work already queued.
        coalesced: Counter = "manifest_queue_coalesced",
        /// Reconciles after which their runtime shares the workers of slow runtimes, because its reconciles have taken more
        /// than its share of time.
        busy: Counter = "manifest_queue_busy",
        /// Waiting time of the Manifest that has been ready longest, by priority.
        oldest: Family<PriorityLabel, Gauge<f64, AtomicU64>> = "manifest_queue_oldest_seconds",
    }
}

impl Metrics {
    /// Updates the metrics that change with time alone.
    pub(super) fn observe_ages(&self, queue: &Queue<ManifestKey, KymaKey>, now: Instant) {
        for priority in Priority::VARIANTS {
            let age = queue.oldest(*priority).map_or(0.0, |since| now.saturating_duration_since(since).as_secs_f64());
            self.oldest.get_or_create(&PriorityLabel { priority: priority.as_str() }).set(age);
        }
        self.coalesced.inner().store(queue.coalesced(), Ordering::Relaxed);
        self.busy.inner().store(queue.busy(), Ordering::Relaxed);
    }

    pub(super) fn reconciled(&self, outcome: &ReconcileOutcome) {
        self.reconciles.get_or_create(&ResultLabel { result: outcome.result() }).inc();
    }

    pub(super) fn queue(&self, queue: &Queue<ManifestKey, KymaKey>) {
        let gauges = self.manifests_by_place.get_or_init(|| {
            let places = ["user", "catalog", "verification", "held", "waiting", "in-work"];
            places.map(|place| self.manifests.get_or_create_owned(&PlaceLabel { r#where: place }))
        });
        let ready = Priority::VARIANTS.iter().map(|priority| queue.ready(*priority));
        for (gauge, count) in gauges.iter().zip(ready.chain([queue.held(), queue.waiting(), queue.running()])) {
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// Manifests at a position.
    #[cfg(test)]
    pub(super) fn at(&self, place: &'static str) -> i64 {
        self.manifests.get_or_create(&PlaceLabel { r#where: place }).get()
    }

    /// Waiting time of the Manifest of a priority that has been ready longest, in seconds.
    #[cfg(test)]
    pub(super) fn oldest(&self, priority: Priority) -> f64 {
        self.oldest.get_or_create(&PriorityLabel { priority: priority.as_str() }).get()
    }

    /// Number of reconciles with a result.
    #[cfg(test)]
    pub(super) fn reconciles(&self, result: &'static str) -> u64 {
        self.reconciles.get_or_create(&ResultLabel { result }).get()
    }
}
