//! Assesses the runtimes of the shards that this replica holds, for its own task and for the replica that decides.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tidewatch_api::{facts::KymaFacts, key::KymaKey};
use tidewatch_fleet::{
    PathState, Unproven,
    evidence::Replicas,
    pause::Pause,
    peers::{AskError, Topic},
    stores::{Stores, kymas},
    table::{RuntimeReport, RuntimeTable},
    takeover::Takeover,
};
use tokio::time::Instant;

use super::{
    UpgradeHandle, UpgradeState,
    members::Fleet,
    summary::Summary,
    table::{AssessmentTable, Observation},
};

/// Question about the runtimes of each replica. All are assessed for the same state, whichever a replica has observed last.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Question {
    /// State in effect, as the ConfigMap has it.
    state: BTreeMap<String, String>,
    /// Target of the next state.
    target: String,
    /// Asks for the order of the runtimes as well.
    with_order: bool,
}

impl Question {
    pub(super) fn new(current: &UpgradeState, retargeted: &UpgradeState, with_order: bool) -> Self {
        Self { state: current.to_data(), target: retargeted.target.to_string(), with_order }
    }
}

/// Inputs of an assessment, and its memory. Clones share it.
#[derive(Clone)]
pub(super) struct Assessor {
    pub(super) fleet: RuntimeTable,
    pub(super) stores: Stores,
    pub(super) pause: Pause,
    pub(super) takeover: Takeover,
    pub(super) handle: UpgradeHandle,
    /// Time after which an upgraded runtime without a proven event path has failed.
    pub(super) deadline: Duration,
    pub(super) table: Arc<Mutex<AssessmentTable>>,
}

impl Assessor {
    /// Answers the questions of the replica that decides.
    pub(super) fn respond(&self, replicas: &Replicas) {
        let assessor = self.clone();
        let answer = move |question| assessor.answer(&question, Instant::now());
        replicas.respond(Topic::AgentUpgrade, answer);
    }

    fn answer(&self, question: &Question, now: Instant) -> Result<Summary, AskError> {
        let current = UpgradeState::from_data(&question.state).map_err(|_| AskError::Unavailable)?;
        // A shard that was acquired just now may lack Kymas that count.
        if !self.fleet.is_synced() {
            return Err(AskError::Unavailable);
        }
        let retargeted = current.retarget(&question.target, current.since);
        let fleet = self.assess(&current, &retargeted, now);
        Ok(Summary::of(&retargeted, &fleet, question.with_order))
    }

    /// Assesses the runtimes of this replica. `current` is the state in effect, `retargeted` the next one.
    pub(super) fn assess(&self, current: &UpgradeState, retargeted: &UpgradeState, now: Instant) -> Fleet {
        let mut table = self.table.lock();
        let reports = self.fleet.runtime_reports();
        let known: HashSet<_> = reports.iter().map(|report| &report.kyma).collect();
        table.retain(|key| known.contains(key));
        self.handle.retain(|key| known.contains(key));
        table.set_target(&retargeted.target);
        let mut fleet = Fleet::default();
        for report in &reports {
            if !self.is_eligible(report) {
                fleet.excluded.push(report.kyma.clone());
                table.suspend(&report.kyma);
                continue;
            }
            let rank = table.rank(&report.kyma, &report.runtime);
            let decision = if current.target == retargeted.target {
                current.image_for_rank(rank)
            } else {
                current.image_for(&report.runtime)
            };
            let observation = Observation { report, observed: self.handle.observed_image(&report.kyma), decision };
            fleet.members.extend(table.assess(observation, self.deadline, now));
        }
        fleet
    }

    /// Returns whether a runtime counts.
    fn is_eligible(&self, report: &RuntimeReport) -> bool {
        if matches!(report.path, PathState::Unproven(Unproven::Away | Unproven::LegacyAgent)) {
            return false;
        }
        let key: &KymaKey = &report.kyma;
        let kyma = kymas::find(&self.stores.kymas, key);
        let is_reconciled = |kyma: KymaFacts<'_>| !kyma.is_deleting() && self.takeover.reconciles(kyma, &self.pause);
        kyma.is_some_and(|kyma| is_reconciled(kyma.facts())) && !self.takeover.is_pending(key)
    }
}
