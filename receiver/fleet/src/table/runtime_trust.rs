//! Trust state of a runtime, the input of CA rotation.

use std::time::Duration;

use tidewatch_api::{identity::RuntimeId, key::KymaKey};
use tidewatch_contract::certificate::KeyId;

use super::RuntimeTable;
use crate::PathState;

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

impl RuntimeTable {
    /// Trust state of each served runtime, in the order of their Kymas.
    #[must_use]
    pub fn runtime_trust(&self) -> Vec<RuntimeTrust> {
        let mut trust = Vec::new();
        self.in_chunks(|state, keys, now| {
            let thresholds = state.thresholds(state.started);
            trust.extend(state.served(keys).map(|(key, id, runtime)| RuntimeTrust {
                kyma: key.clone(),
                runtime: id.clone(),
                path: runtime.path(thresholds, now),
                trust_revision: runtime.trust_revision.clone(),
                authority: runtime.authority.clone(),
                silent: now.saturating_duration_since(runtime.last_request),
            }));
        });
        trust.sort_by(|one, other| one.kyma.cmp(&other.kyma));
        trust.dedup_by(|one, other| one.kyma == other.kyma);
        trust
    }
}
