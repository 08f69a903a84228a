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
    /// The removal waits for the resources of users, or a module that was installed by hand for its adoption.
    Blocked(String),
    /// The module is not likely to become ready without a change of its inputs or of its cluster. A reconcile may repeat refused
    /// requests all the same.
    Failed(String),
    /// The status stays, since the reconcile proved nothing against it: the content is not available, or a request failed that
    /// is likely to succeed soon.
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
    /// Requests failed: after the backoff of the caller, and no earlier than `min_backoff`.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::Inventory;

    fn end(state: State, installed: Option<bool>, is_blocked: bool) -> End {
        let operation = "said".to_owned();
        let inventory = Inventory::default();
        let findings = Findings { state, operation, rendered: None, installed, default_created: None, inventory };
        End::of(Some(&findings), is_blocked)
    }

    #[test]
    fn end_follows_from_the_findings() {
        let said = || "said".to_owned();
        assert_eq!(end(State::Ready, Some(true), false), End::Ready(None));
        assert_eq!(end(State::Warning, Some(true), false), End::Ready(Some(said())));
        assert_eq!(end(State::Warning, Some(false), false), End::Waiting(said()), "an object is being deleted");
        assert_eq!(end(State::Warning, Some(false), true), End::Blocked(said()), "installed by hand");
        assert_eq!(end(State::Processing, Some(false), false), End::Waiting(said()));
        assert_eq!(end(State::Error, Some(false), false), End::Failed(said()));
        assert_eq!(end(State::Deleting, None, true), End::Blocked(said()));
        assert_eq!(end(State::Deleting, None, false), End::Waiting(said()));
        assert_eq!(End::of(None, true), End::Unchanged);
    }
}
