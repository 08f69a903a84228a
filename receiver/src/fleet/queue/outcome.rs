//! How a pass ended, and what that means for the next one.

use std::time::Duration;

use super::Works;
use crate::base::class::Class;

/// How a pass over one Kyma ended. Wanted works that stand in neither set were paused: they stay accepted and unsettled, and wait for
/// a wake.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Works with a recorded outcome: success, or an error of the user's that a status shows.
    pub ended: Works,
    /// Works that failed in passing: wanted again with backoff, they settle nothing. Wins over `ended`.
    pub failed: Works,
    /// Works that failed in passing, in a way that is nobody else's: wanted again with a backoff of their own, which holds up no
    /// other work. They settle nothing.
    pub put_off: Works,
    /// What kind of failure it was; `None` counts as [`Class::Ours`] when something failed.
    pub class: Option<Class>,
    /// Work on it again after this long: as verification when all ended, or no sooner than this when something failed.
    pub again_in: Option<Duration>,
    /// Reconcile after this long whatever failed: then a version has its turn, which no other work waits for.
    pub turn: Option<Duration>,
}

impl Outcome {
    /// All these works ended.
    #[must_use]
    pub fn ended(works: Works) -> Self {
        Self { ended: works, ..Self::default() }
    }

    /// All these works failed in passing.
    #[must_use]
    pub fn failed(works: Works, class: Class) -> Self {
        Self { failed: works, class: Some(class), ..Self::default() }
    }
}
