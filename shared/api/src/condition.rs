//! Status of a condition, which reports without custom resources have too.

use serde::{Deserialize, Serialize};
use strum::{Display, IntoStaticStr};

/// status of the condition, one of True, False, Unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, Display, IntoStaticStr)]
#[cfg_attr(feature = "resources", derive(schemars::JsonSchema))]
pub enum ConditionStatus {
    /// The condition is met.
    True,
    /// The condition is not met.
    False,
    /// The condition has not been determined.
    #[default]
    Unknown,
}

impl From<bool> for ConditionStatus {
    fn from(holds: bool) -> Self {
        if holds { Self::True } else { Self::False }
    }
}
