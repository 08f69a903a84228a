//! The state of a Kyma, a module, a Manifest or a Watcher.

use std::{fmt, str::FromStr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The error of parsing a text that is not a [`State`].
#[derive(Debug, Error, PartialEq, Eq)]
#[error("a state is empty or one of Processing, Deleting, Ready, Error, Warning, Unmanaged")]
pub struct UnknownStateError;

/// state of the object, one of Processing, Deleting, Ready, Error, Warning, Unmanaged. Empty until it is first
/// computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum State {
    /// Not computed yet; serialized as an empty string.
    #[default]
    #[serde(rename = "")]
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
    /// Every state.
    pub const ALL: [Self; 7] =
        [Self::Unset, Self::Processing, Self::Deleting, Self::Ready, Self::Error, Self::Warning, Self::Unmanaged];

    /// The spelling in the custom resources.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unset => "",
            Self::Processing => "Processing",
            Self::Deleting => "Deleting",
            Self::Ready => "Ready",
            Self::Error => "Error",
            Self::Warning => "Warning",
            Self::Unmanaged => "Unmanaged",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for State {
    type Err = UnknownStateError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|state| state.as_str() == text).ok_or(UnknownStateError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_has_one_spelling() {
        for state in State::ALL {
            assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
            assert_eq!(serde_json::from_value::<State>(state.as_str().into()).unwrap(), state);
            assert_eq!(state.to_string().parse(), Ok(state));
        }
        assert_eq!("ready".parse::<State>(), Err(UnknownStateError));
    }
}
