//! Rotation of the built-in CA: requests, and the progress.

use serde::{Deserialize, Serialize};
use strum::{Display, IntoStaticStr, VariantArray};

use crate::certificate::KeyId;

/// Limit of stragglers that are named.
pub const MAX_NAMED_STRAGGLERS: usize = 100;

/// Progress of the rotation of the built-in CA.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RotationProgress {
    /// Current phase.
    pub phase: PhaseName,
    /// Begin of the phase, in Unix seconds.
    pub since: i64,
    /// Newest root, to which a rotation leads.
    pub target: KeyId,
    /// notAfter of that root, in Unix seconds.
    pub target_not_after: i64,
    /// Seconds in one phase after which the rotation proceeds without the stragglers; `None` waits for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub force_after_seconds: Option<u32>,
    /// State of the CA's Secret.
    pub secret: SecretState,
    /// Number of runtimes.
    pub runtimes: usize,
    /// Number of runtimes that the phase waits for.
    pub waiting_for: usize,
    /// Their names, sorted by Kyma; at most a hundred.
    pub stragglers: Vec<Straggler>,
    /// True while the numbers are old, since not every replica answers; the rotation waits.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub incomplete: bool,
}

/// Phase of a rotation. The name is also that in the CA's Secret and in metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Display, IntoStaticStr, VariantArray)]
#[serde(rename_all = "camelCase")]
#[strum(serialize_all = "camelCase")]
pub enum PhaseName {
    /// No rotation.
    Steady,
    /// The new root is distributed, and agents confirm it.
    Spread,
    /// The new root signs new certificates, and agents renew.
    Reissue,
    /// The old root leaves: first the agents' bundles, then this receiver's.
    Retire,
}

/// State of the CA's Secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SecretState {
    /// Its content is in use.
    Good,
    /// The Secret is gone.
    Lost,
    /// Its content is rejected.
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
    /// Step that it has not completed yet.
    pub behind: StragglerReason,
}

/// Request for a rotation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RotationRequest {
    /// See [`RotationProgress::force_after_seconds`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub force_after_seconds: Option<u32>,
    /// Replaces all roots at once instead: their certificates are worth nothing from then on, and every runtime enrols
    /// again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub compromised: bool,
}

/// Response to a [`RotationRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RotationResponse {
    /// Root to which the current rotation leads.
    pub target: KeyId,
}

/// Reason for which a rotation waits for a runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StragglerReason {
    /// No heartbeat since this receiver started.
    Unheard,
    /// It has not confirmed the newest bundle.
    Bundle,
    /// Its certificate was not issued by the new root.
    Certificate,
}

impl StragglerReason {
    /// Text for people.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unheard => "has not been heard yet",
            Self::Bundle => "has not confirmed the newest roots",
            Self::Certificate => "has no certificate of the new root yet",
        }
    }

    /// Reason of the condition on the Kyma.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Unheard => "NotHeard",
            Self::Bundle => "RootsNotConfirmed",
            Self::Certificate => "OldCertificate",
        }
    }
}
