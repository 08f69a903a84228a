//! The incumbent's counter of requeues by reason, with the reasons that exist here.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
};
use tidewatch_shared::metric_set;

use super::Error;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequeueLabels {
    requeue_reason: &'static str,
    requeue_type: &'static str,
}

metric_set! {
    /// Counter of requeues, for a registry without prefix; clones share it.
    #[derive(Debug)]
    pub(crate) struct Requeues {
        /// Requeued Kymas, by reason: unexpected after a failure, intended while a deletion is pending.
        requeues: Family<RequeueLabels, Counter> = "lifecycle_mgr_requeue_reason",
    }
}

impl Requeues {
    /// Counts a failed reconcile.
    pub(super) fn failed(&self, error: &Error) {
        let labels = RequeueLabels { requeue_reason: error.requeue_reason(), requeue_type: "unexpected" };
        self.requeues.get_or_create(&labels).inc();
    }

    /// Counts a requeue for objects that are still being deleted.
    pub(super) fn waits(&self) {
        let labels = RequeueLabels { requeue_reason: "kyma_deletion", requeue_type: "intended" };
        self.requeues.get_or_create(&labels).inc();
    }
}
