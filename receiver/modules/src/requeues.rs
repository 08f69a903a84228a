//! lifecycle-manager's counter of requeues, common to Kymas and Manifests.

use prometheus_client::metrics::{counter::Counter, family::Family};
use tidewatch_kit::{label_sets, metric_set};

label_sets! {
    struct RequeueLabels { requeue_reason, requeue_type }
}

metric_set! {
    /// The counter, with the reasons that exist here, for a registry without prefix.
    #[derive(Debug)]
    pub struct Requeues {
        /// Requeued Kymas and Manifests, by reason: unexpected after a failure, intended at a transition, for instance once
        /// per deletion of a Kyma.
        requeues: Family<RequeueLabels, Counter> = "lifecycle_mgr_requeue_reason",
    }
}

impl Requeues {
    /// Number of counted requeues.
    #[cfg(test)]
    pub(crate) fn counted(&self, requeue_reason: &'static str, requeue_type: &'static str) -> u64 {
        self.requeues.get_or_create(&RequeueLabels { requeue_reason, requeue_type }).get()
    }

    /// Counts a transition; `reason` is from a closed set.
    pub(crate) fn intended(&self, reason: &'static str) {
        self.count(reason, "intended");
    }

    /// Counts a failure; `reason` is from a closed set.
    pub(crate) fn unexpected(&self, reason: &'static str) {
        self.count(reason, "unexpected");
    }

    fn count(&self, requeue_reason: &'static str, requeue_type: &'static str) {
        self.requeues.get_or_create(&RequeueLabels { requeue_reason, requeue_type }).inc();
    }
}
