//! The state of a runtime's identity, as a CA rotation judges it.

use std::time::Duration;

use tidewatch_shared::{certificate::KeyId, identity::RuntimeId};

use crate::{base::key::KymaKey, fleet::PathState};

/// What is known of a runtime's identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Follower {
    /// Its Kyma.
    pub kyma: KymaKey,
    /// Its id.
    pub runtime: RuntimeId,
    /// Whether its path is proven: who is away enrols again, and who speaks contract v2 alone has no part in this.
    pub path: PathState,
    /// The revision of the bundle that its agent has, by its last heartbeat; `None` before one was heard.
    pub trust_revision: Option<String>,
    /// The key that signed the certificate of its last heartbeat.
    pub authority: Option<KeyId>,
    /// Since it was last heard of, or could first have been.
    pub silent: Duration,
}
