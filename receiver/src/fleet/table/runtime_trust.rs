//! Trust state of a runtime, the input of CA rotation.

use std::time::Duration;

use tidewatch_shared::{certificate::KeyId, identity::RuntimeId};

use crate::{base::key::KymaKey, fleet::PathState};

/// Certificate and trust bundle of a runtime, by its last heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeTrust {
    /// Its Kyma.
    pub kyma: KymaKey,
    /// Its runtime id.
    pub runtime: RuntimeId,
    /// State of its event path: an agent that is away enrols again, and a contract v2 agent does not take part in
    /// rotation.
    pub path: PathState,
    /// Revision of the agent's bundle, by its last heartbeat; `None` before the first.
    pub trust_revision: Option<String>,
    /// Key that issued the certificate of its last heartbeat.
    pub authority: Option<KeyId>,
    /// Time since its last request, initially since the placement.
    pub silent: Duration,
}
