//! The incumbent's counter of requeues by reason, with the reasons that exist here.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
};
use tidewatch_shared::metrics::Registry;

use super::Error;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Why {
    requeue_reason: &'static str,
    requeue_type: &'static str,
}

/// Counter of requeues; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Requeues(Family<Why, Counter>);

impl Requeues {
    /// Creates and registers the counter; the caller sets no prefix.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let requeues = Self::default();
        registry.register(
            "lifecycle_mgr_requeue_reason",
            "Kymas that are worked on again, by reason: unexpected after a failure, intended while a deletion is waited for",
            requeues.0.clone(),
        );
        requeues
    }

    /// Counts a failed reconcile.
    pub(super) fn failed(&self, error: &Error) {
        let requeue_type = "unexpected";
        self.0.get_or_create(&Why { requeue_reason: error.requeue_reason(), requeue_type }).inc();
    }

    /// Counts a requeue for objects that are still being deleted.
    pub(super) fn waits(&self) {
        self.0.get_or_create(&Why { requeue_reason: "kyma_deletion", requeue_type: "intended" }).inc();
    }
}
