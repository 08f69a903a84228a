//! Metrics of the Kyma reconcile.

use std::time::Duration;

use prometheus_client::metrics::{
    counter::Counter,
    family::Family,
    gauge::Gauge,
    histogram::{Histogram, exponential_buckets},
};
use tidewatch_fleet::queue::ReconcileOutcome;
use tidewatch_kit::{metric_set, metrics::OutcomeLabel, variant::VariantName as _};

use super::inputs;
use crate::requeues::Requeues;

metric_set! {
    /// Outcomes and durations of Kyma reconciles.
    #[derive(Debug)]
    pub struct Metrics {
        /// Reconciles of Kymas, by outcome.
        reconciles: Family<OutcomeLabel, Counter> = "kyma_passes",
        /// Duration of Kyma reconciles.
        ///
        /// From 1 ms, two reads, to about half a minute, an unresponsive runtime cluster.
        duration: Histogram = "kyma_pass_duration_seconds" with Histogram::new(exponential_buckets(0.001, 2.0, 16)),
        /// Validity of the modules' image pull secret: 0 if one is configured that is missing or invalid, 1 otherwise.
        pub pull_secret: Gauge = "modules_pull_secret_good",
        /// Requeues by reason, common to Kymas and Manifests.
        pub requeues: Requeues = _,
        /// Records of inputs that wait.
        pub inputs: inputs::Metrics = ..,
    }
}

impl Metrics {
    pub(super) fn ended(&self, outcome: &ReconcileOutcome, took: Duration) {
        let outcome = match (outcome.failed.is_empty() && outcome.deferred.is_empty(), outcome.class) {
            (false, Some(class)) => class.as_str(),
            (false, None) => "ours",
            (true, _) if outcome.ended.is_empty() => "parked",
            (true, _) => "ended",
        };
        self.reconciles.get_or_create(&OutcomeLabel { outcome }).inc();
        self.duration.observe(took.as_secs_f64());
    }
}
