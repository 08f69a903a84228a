//! Metrics of the Kyma reconcile.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        histogram::{Histogram, exponential_buckets},
    },
};
use tidewatch_shared::metrics::Registry;

use super::Requeues;
use crate::fleet::queue::ReconcileOutcome;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    outcome: &'static str,
}

/// Outcomes and durations of Kyma reconciles.
#[derive(Clone, Debug)]
pub struct Metrics {
    passes: Family<Labels, Counter>,
    duration: Histogram,
    pub(super) requeues: Requeues,
}

impl Metrics {
    /// Registers the metrics.
    pub fn register(registry: &mut Registry, requeues: Requeues) -> Self {
        let passes = Family::default();
        registry.register("kyma_passes", "Passes over Kymas by how they ended", passes.clone());
        // 1 ms to about half a minute: from two reads to an unresponsive runtime cluster.
        let duration = Histogram::new(exponential_buckets(0.001, 2.0, 16));
        registry.register("kyma_pass_duration_seconds", "Time that passes over Kymas took", duration.clone());
        Self { passes, duration, requeues }
    }

    pub(super) fn ended(&self, outcome: &ReconcileOutcome, took: Duration) {
        let outcome = match (outcome.failed.is_empty() && outcome.deferred.is_empty(), outcome.class) {
            (false, Some(class)) => class.as_str(),
            (false, None) => "ours",
            (true, _) if outcome.ended.is_empty() => "parked",
            (true, _) => "ended",
        };
        self.passes.get_or_create(&Labels { outcome }).inc();
        self.duration.observe(took.as_secs_f64());
    }
}
