//! The state of a Kyma, a module, a Manifest or a Watcher.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{Display, IntoStaticStr};

/// state of the object, one of Processing, Deleting, Ready, Error, Warning, Unmanaged. Empty until it is first
/// computed.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema, Display, IntoStaticStr,
)]
pub enum State {
    /// Not computed yet; serialized as an empty string.
    #[default]
    #[serde(rename = "")]
    #[strum(serialize = "")]
    Unset,
    /// Being reconciled, not ready yet.
    Processing,
    /// Being deleted.
    Deleting,
    /// The observed state matches the desired state.
    Ready,
    /// Cannot become ready without a change of its inputs or its environment.
    Error,
    /// Operational, but not in the desired state.
    Warning,
    /// Excluded from reconciliation by the user.
    Unmanaged,
}

impl State {
    /// The state, or [`Self::Processing`] if it is not computed yet.
    #[must_use]
    pub const fn known(self) -> Self {
        match self {
            Self::Unset => Self::Processing,
            state => state,
        }
    }
}

#[cfg(test)]
mod tests {
    use tidewatch_kit::variant::VariantName as _;

    use super::*;

    #[test]
    fn every_state_has_one_spelling() {
        use State::{Deleting, Error, Processing, Ready, Unmanaged, Unset, Warning};
        for state in [Unset, Processing, Deleting, Ready, Error, Warning, Unmanaged] {
            assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
            assert_eq!(serde_json::from_value::<State>(state.as_str().into()).unwrap(), state);
            assert_eq!(state.to_string(), state.as_str());
        }
        assert!(serde_json::from_value::<State>("ready".into()).is_err());
    }
}
