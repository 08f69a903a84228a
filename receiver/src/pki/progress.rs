//! How far a rotation is, as the admin listener and the command line show it.

use serde::{Deserialize, Serialize};
use tidewatch_shared::certificate::KeyId;

use super::stored::PhaseName;

/// How many runtimes are named, at most.
pub(crate) const NAMED: usize = 100;

/// How far the rotation of the built-in CA is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    /// The phase.
    pub phase: PhaseName,
    /// When it began, in Unix seconds.
    pub since: i64,
    /// The newest root: the one that a rotation leads to.
    pub target: KeyId,
    /// End of that root, in Unix seconds.
    pub target_not_after: i64,
    /// After so many seconds in one phase it goes on without those who did not follow; `None` waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub force_after_seconds: Option<u32>,
    /// Whether the CA's Secret is there and is what is used.
    pub secret: SecretState,
    /// Runtimes.
    pub runtimes: usize,
    /// How many of them the phase waits for.
    pub waiting_for: usize,
    /// Which, by name; the first hundred.
    pub stragglers: Vec<Straggler>,
}

/// See [`Progress::secret`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SecretState {
    /// It is what is used.
    Good,
    /// It is gone.
    Lost,
    /// Its content is refused.
    Refused,
}

/// A runtime that a phase waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Straggler {
    /// Its Kyma, `namespace/name`.
    pub kyma: String,
    /// Its runtime id.
    pub runtime_id: String,
    /// The state of its event path.
    pub path: String,
    /// What it has not done yet.
    pub behind: Behind,
}

/// What is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Order {
    /// See [`Progress::force_after_seconds`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub force_after_seconds: Option<u32>,
}

/// The answer to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ordered {
    /// The root to which the rotation leads that is under way now.
    pub target: KeyId,
}

/// Why a runtime holds a rotation up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Behind {
    /// It has said nothing since this receiver started.
    Unheard,
    /// It has not confirmed the newest bundle.
    Bundle,
    /// Its certificate is not one of the new root.
    Certificate,
}

impl Behind {
    /// In words.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unheard => "has not been heard yet",
            Self::Bundle => "has not confirmed the newest roots",
            Self::Certificate => "has no certificate of the new root yet",
        }
    }

    /// As the condition on the Kyma names it.
    #[must_use]
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Unheard => "NotHeard",
            Self::Bundle => "RootsNotConfirmed",
            Self::Certificate => "OldCertificate",
        }
    }
}
