//! Result of a reconcile and its effect on the next one.

use std::time::Duration;

use tidewatch_cluster::error_class::ErrorClass;
use tidewatch_kit::variant::VariantName as _;

use super::WorkSet;

/// Result of one reconcile of a Kyma or a Manifest. Queued work in none of the sets waits, for the end of a pause or for a
/// component descriptor: its events stay accepted and unsettled, and it is parked until the next enqueue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReconcileOutcome {
    /// Work with a recorded result: success, or a user error that a status shows.
    pub ended: WorkSet,
    /// Work that failed transiently: requeued with backoff, settles nothing. Wins over `ended`.
    pub failed: WorkSet,
    /// Work that failed transiently without affecting other work: requeued with its own backoff, settles nothing.
    pub deferred: WorkSet,
    /// ErrorClass of the failure; `None` counts as [`ErrorClass::Ours`] if work failed.
    pub class: Option<ErrorClass>,
    /// Delay of the next reconcile of the work that ended, even if other work failed.
    pub requeue_after: Option<Duration>,
    /// Lower bound of the backoff of failed work.
    pub min_backoff: Option<Duration>,
    /// Work beyond its own that the reconcile found necessary: enqueued at once, at the same priority.
    pub follow_up: WorkSet,
    /// Delay of any further reconcile, of a user's change too: the runtime has used up its share of the writes to the
    /// control plane.
    pub rest: Option<Duration>,
    /// Delay until the Kyma's rollout slot, or until a date of one of its modules, whichever is first: it is reconciled
    /// then even if other work failed.
    pub rollout_after: Option<Duration>,
}

impl ReconcileOutcome {
    /// All of this work ended.
    #[must_use]
    pub fn ended(work: WorkSet) -> Self {
        Self { ended: work, ..Self::default() }
    }

    /// All of this work failed transiently.
    #[must_use]
    pub fn failed(work: WorkSet, class: ErrorClass) -> Self {
        Self { failed: work, class: Some(class), ..Self::default() }
    }

    /// Result as the value of a metric's label.
    pub(crate) fn result(&self) -> &'static str {
        match (self.class, self.failed.is_empty(), self.ended.is_empty()) {
            (Some(class), ..) => class.as_str(),
            (None, false, _) => "ours",
            (None, true, false) => "ended",
            (None, true, true) => "paused",
        }
    }
}
