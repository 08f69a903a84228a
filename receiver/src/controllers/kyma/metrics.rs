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
use tidewatch_shared::{metric_set, metrics::OutcomeLabel, variant::VariantName as _};

use crate::fleet::queue::ReconcileOutcome;

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
        pub(crate) requeues: Requeues = _,
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

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequeueLabels {
    requeue_reason: &'static str,
    requeue_type: &'static str,
}

metric_set! {
    /// The incumbent's counter of requeues, with the reasons that exist here, for a registry without prefix.
    #[derive(Debug)]
    pub(crate) struct Requeues {
        /// Requeued Kymas, by reason: unexpected after a failure, intended once per deletion of a Kyma.
        requeues: Family<RequeueLabels, Counter> = "lifecycle_mgr_requeue_reason",
    }
}

impl Requeues {
    /// Number of counted requeues.
    #[cfg(test)]
    pub(super) fn counted(&self, requeue_reason: &'static str, requeue_type: &'static str) -> u64 {
        self.requeues.get_or_create(&RequeueLabels { requeue_reason, requeue_type }).get()
    }

    pub(super) fn count(&self, requeue_reason: &'static str, requeue_type: &'static str) {
        self.requeues.get_or_create(&RequeueLabels { requeue_reason, requeue_type }).inc();
    }
}
