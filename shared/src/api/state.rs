//! The state of a Kyma, a module, a Manifest or a Watcher.

use std::{fmt, str::FromStr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A text that names no state.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("a state is empty or one of Processing, Deleting, Ready, Error, Warning, Unmanaged")]
pub struct UnknownState;

/// How far something is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum State {
    /// Nothing is known of it yet; written as an empty text.
    #[default]
    #[serde(rename = "")]
    Unset,
    /// Work on it has begun and has not come to an end.
    Processing,
    /// It is on its way out.
    Deleting,
    /// It is as it shall be.
    Ready,
    /// It cannot become ready without a change from outside.
    Error,
    /// It works, but not as it shall.
    Warning,
    /// Nobody looks after it, by the user's wish.
    Unmanaged,
}

impl State {
    /// Every state.
    pub const ALL: [Self; 7] =
        [Self::Unset, Self::Processing, Self::Deleting, Self::Ready, Self::Error, Self::Warning, Self::Unmanaged];

    /// As the custom resources spell it.
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
    type Err = UnknownState;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|state| state.as_str() == text).ok_or(UnknownState)
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
        assert_eq!("ready".parse::<State>(), Err(UnknownState));
    }
}
