//! Report of each runtime, for the upgrade of the agents and the rotation of the CA.

use std::time::Duration;

use tidewatch_api::{identity::RuntimeId, key::KymaKey};
use tidewatch_contract::certificate::KeyId;
use tokio::time::Instant;

use super::RuntimeTable;
use crate::PathState;

/// Event path, certificate and trust bundle of a runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeReport {
    /// Its Kyma.
    pub kyma: KymaKey,
    /// Its runtime id.
    pub runtime: RuntimeId,
    /// State of its event path: an agent that is away enrols again, and a contract v2 agent does not take part in the
    /// rotation of the CA.
    pub path: PathState,
    /// Time of the last counted heartbeat.
    pub last_heartbeat: Option<Instant>,
    /// Revision of the agent's bundle, by its last heartbeat; `None` before the first.
    pub trust_revision: Option<String>,
    /// Key that issued the certificate of its last heartbeat.
    pub authority: Option<KeyId>,
    /// Time since its last request, initially since the placement.
    pub silent: Duration,
}

impl RuntimeTable {
    /// Report of each served runtime, in the order of their Kymas.
    pub fn runtime_reports(&self) -> Vec<RuntimeReport> {
        let mut reports = Vec::new();
        self.in_chunks(|state, keys, now| {
            let thresholds = state.thresholds(state.started);
            reports.extend(state.served(keys).map(|(key, id, runtime)| RuntimeReport {
                kyma: key.clone(),
                runtime: id.clone(),
                path: runtime.path(thresholds, now),
                last_heartbeat: runtime.last_heartbeat.as_ref().map(|heartbeat| heartbeat.at),
                trust_revision: runtime.trust_revision.clone(),
                authority: runtime.authority.clone(),
                silent: now.saturating_duration_since(runtime.last_request),
            }));
        });
        reports.sort_by(|one, other| one.kyma.cmp(&other.kyma));
        reports.dedup_by(|one, other| one.kyma == other.kyma);
        reports
    }
}
