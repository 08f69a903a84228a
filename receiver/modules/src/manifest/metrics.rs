//! Metrics of the reconcile of Manifests.

use std::time::Duration;

use prometheus_client::metrics::{
    counter::Counter,
    family::Family,
    histogram::{Histogram, exponential_buckets},
};
use tidewatch_cluster::FallbackMetrics;
use tidewatch_fleet::queue::ReconcileOutcome;
use tidewatch_kit::{metric_set, metrics::OutcomeLabel, variant::VariantName as _};

use crate::requeues::Requeues;

metric_set! {
    /// Outcomes and durations of the reconciles of Manifests.
    #[derive(Debug)]
    pub struct Metrics {
        /// Reconciles of Manifests, by outcome.
        reconciles: Family<OutcomeLabel, Counter> = "manifest_passes",
        /// Duration of the reconciles of Manifests.
        ///
        /// From 1 ms, nothing to do, to about half a minute, an unresponsive runtime cluster.
        duration: Histogram = "manifest_pass_duration_seconds" with Histogram::new(exponential_buckets(0.001, 2.0, 16)),
        /// Writes besides plain applies.
        pub(crate) fallbacks: FallbackMetrics = ..,
        /// Shared with the reconcile of Kymas.
        pub requeues: Requeues = _,
    }
}

impl Metrics {
    pub(super) fn ended(&self, outcome: &ReconcileOutcome, took: Duration) {
        let outcome = match (outcome.failed.is_empty(), outcome.class) {
            (false, Some(class)) => class.as_str(),
            (false, None) => "ours",
            (true, _) if outcome.ended.is_empty() => "parked",
            (true, _) => "ended",
        };
        self.reconciles.get_or_create(&OutcomeLabel { outcome }).inc();
        self.duration.observe(took.as_secs_f64());
    }
}
