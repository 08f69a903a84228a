//! Pending removal of objects, shared by the controllers that clean up a runtime.

use std::time::Duration;

/// Delay until the deletion of objects is checked again.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A removal that has not finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PendingRemoval {
    /// Delay until the next check.
    pub(crate) requeue_after: Duration,
    /// Blockers of the removal as one sentence, stable while they are the same.
    pub(crate) message: Option<String>,
}

impl PendingRemoval {
    /// Waits without a message, if the reason is reported elsewhere.
    pub(crate) const fn after(requeue_after: Duration) -> Self {
        Self { requeue_after, message: None }
    }

    /// Waits for objects of a runtime that are being deleted; `blockers` describes those that are not deleted at once.
    pub(crate) fn of_objects(blockers: &[String]) -> Self {
        let message =
            (!blockers.is_empty()).then(|| format!("waiting for {} to be deleted in the runtime", blockers.join(", ")));
        Self { requeue_after: RECHECK_INTERVAL, message }
    }
}
