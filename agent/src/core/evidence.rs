//! Evidence about the event path, as far as the receiver's evaluation depends on it.

use super::{Core, State};

/// Evidence in a heartbeat, without values that change continuously. A difference is worth a heartbeat of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Evidence {
    /// Revision of the plan in force.
    pub(crate) plan_revision: Option<String>,
    /// The newest plan or settings were refused.
    pub(crate) is_plan_refused: bool,
    /// Every watch of the plan is listed and has no error.
    pub(crate) is_listed: bool,
    /// The canary came back recently.
    pub(crate) is_canary_fresh: bool,
    /// See [`tidewatch_contract::heartbeat::Heartbeat::incomplete`].
    pub(crate) is_incomplete: bool,
}

impl Core {
    /// The current evidence of the watches, with that from outside the core.
    pub(crate) fn evidence(&self, is_canary_fresh: bool, is_incomplete: bool) -> Evidence {
        self.with(|state| state.evidence(is_canary_fresh, is_incomplete))
    }
}

impl State {
    fn evidence(&self, is_canary_fresh: bool, is_incomplete: bool) -> Evidence {
        Evidence {
            plan_revision: self.plan_revision.clone(),
            is_plan_refused: self.plan_error.is_some(),
            is_listed: self.watches.values().all(|watched| watched.error.is_none() && watched.counts_as_listed()),
            is_canary_fresh,
            is_incomplete,
        }
    }
}
