//! Maintenance windows: `parse` reads a policy in lifecycle-manager's format, and `policy` decides by it for one runtime and one
//! time.

mod parse;
mod policy;

use std::time::Duration;

use jiff::Timestamp;
use tidewatch_api::facts::KymaFacts;

pub use self::{
    parse::{MAX_BYTES, Mistakes, PolicyError},
    policy::{NoWindowError, WindowState},
};

use self::policy::Policy;

/// First words of the message of a module whose window cannot be determined: lifecycle-manager's.
pub const UNKNOWN: &str = "failed to determine if maintenance window is active";

/// Maintenance windows of all runtimes by one policy. The default has none.
#[derive(Clone, Debug, Default)]
pub struct Windows {
    policy: Option<Policy>,
    /// Time that an open window must last at least, in seconds.
    min_left: i64,
}

impl Windows {
    /// Makes the windows of a policy file's content. An open window counts only if it lasts for `min_left`.
    ///
    /// # Errors
    /// [`PolicyError`].
    pub fn parse(policy: &[u8], min_left: Duration) -> Result<Self, PolicyError> {
        let min_left = i64::try_from(min_left.as_secs()).unwrap_or(i64::MAX);
        Ok(Self { policy: Some(parse::policy(policy)?), min_left })
    }

    /// Mistakes of the policy.
    pub fn mistakes(&self) -> Mistakes {
        self.policy.as_ref().map(|policy| policy.mistakes.clone()).unwrap_or_default()
    }

    /// Number of rules of the policy.
    pub fn rules(&self) -> usize {
        self.policy.as_ref().map_or(0, |policy| policy.rules.len())
    }

    /// Window of a Kyma, always open if it skips maintenance windows.
    pub fn state<'a>(&self, kyma: impl Into<KymaFacts<'a>>, now: Timestamp) -> WindowState {
        let kyma = kyma.into();
        if kyma.skips_windows() {
            return WindowState::Open;
        }
        match &self.policy {
            Some(policy) => policy.state(kyma.labels(), self.min_left, now),
            None => WindowState::Unknown(NoWindowError::NoPolicy),
        }
    }
}
