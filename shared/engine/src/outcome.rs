//! Result of a reconcile, and progress on the way.

use std::time::Duration;

use tidewatch_api::State;
use tidewatch_cluster::error_class::ErrorClass;

use super::status::Findings;

/// Result of a reconcile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// End that the reconcile reached.
    pub end: End,
    /// Time of the next reconcile.
    pub next: Next,
}

/// End that a reconcile reached; texts are one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// All objects are applied, and the manager is ready; with a warning, if there is one.
    Ready(Option<String>),
    /// The module is not ready, or not removed, and may become so by itself.
    Waiting(String),
    /// The removal waits for the resources of users.
    Blocked(String),
    /// The module cannot become ready without a change of its inputs or of its cluster.
    Failed(String),
    /// Nothing is known that is newer than the status: the content is not available.
    Unchanged,
    /// A newer Manifest of the same module is applied instead.
    Superseded,
    /// The module is removed or released, and its record is gone.
    Gone,
}

/// Time of the next reconcile of a Manifest, besides those that changes cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Only changes cause one.
    OnChange,
    /// After this delay.
    After(Duration),
    /// Requests failed: with the backoff of the caller, which is at least `min_backoff` if none succeeds sooner.
    Retry {
        /// Class of the gravest failure.
        class: ErrorClass,
        /// Least delay.
        min_backoff: Option<Duration>,
    },
}

/// Progress of a reconcile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The first inventory is about to be recorded.
    Begun,
    /// An inventory is about to be recorded, before its objects are written.
    Recorded,
    /// The removal waits for the default module CR, or for what belongs to it.
    AwaitsDefault,
    /// The module has become ready.
    Ready,
}

impl End {
    /// The end that follows from the findings; none if they keep the status.
    pub(crate) fn of(findings: Option<&Findings>, is_blocked: bool) -> Self {
        let Some(Findings { state, operation, installed, .. }) = findings else { return Self::Unchanged };
        let operation = operation.clone();
        match state {
            _ if *installed == Some(true) => Self::Ready((*state == State::Warning).then_some(operation)),
            State::Error => Self::Failed(operation),
            _ if is_blocked => Self::Blocked(operation),
            _ => Self::Waiting(operation),
        }
    }
}
