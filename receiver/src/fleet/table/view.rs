//! Summaries of runtimes for the admin API, rollouts and tests.

use serde::{Deserialize, Serialize};
use tidewatch_shared::{api::ConditionStatus, identity::RuntimeId, plan::Work};
use tokio::time::Instant;

use crate::{
    base::key::KymaKey,
    fleet::{EpochView, PathState, Unproven},
};

/// Summary of one Kyma and its runtime; serialized, a runtime of the admin API's report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RuntimeView {
    /// Name in KCP.
    pub kyma: String,
    /// Namespace in KCP.
    pub namespace: String,
    /// Runtime id, if the Kyma has one.
    pub runtime_id: Option<String>,
    /// True if another Kyma has the same runtime id: then neither is served.
    pub ambiguous: bool,
    /// State of the event path, as the condition `EventPath` has it or will have it.
    pub path: PathView,
    /// Contract of the agent's last request: `unheard`, `v2` or `v3`.
    pub contract: String,
    /// Age of the last counted heartbeat, in seconds.
    pub last_seen_seconds: Option<u64>,
    /// Longest heartbeat interval that the agent may follow, in seconds.
    pub heartbeat_seconds: u64,
    /// Current age of the canary, in seconds; `None` if it never returned.
    pub canary_age_seconds: Option<u64>,
    /// Version that the agent reports, at most 256 characters.
    pub agent_version: Option<String>,
    /// Plan revision that the agent reports, at most 256 characters.
    pub plan_revision: Option<String>,
    /// True if that is the current plan.
    pub plan_is_current: bool,
    /// End of the agent's certificate as it reports it: RFC 3339 from an honest agent, at most 256 characters.
    pub certificate_not_after: Option<String>,
    /// Start of the agent's failure to renew its certificate, in RFC 3339; absent while renewals succeed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewal_failed_since: Option<String>,
    /// Objects pending in the agent at the last heartbeat.
    pub waiting: u64,
    /// Events that the agent could not send.
    pub parked: u64,
    /// Events received above a gap, in the epochs below.
    pub gaps: u64,
    /// Events received more than once, in the epochs below.
    pub duplicates: u64,
    /// Work for which recorded events are not settled.
    pub unsettled: Vec<Work>,
    /// Work that is ready or in backoff.
    #[serde(rename = "wanted")]
    pub queued: Vec<Work>,
    /// Paused work.
    pub paused: Vec<Work>,
    /// True while a reconcile runs.
    #[serde(rename = "inWork")]
    pub in_progress: bool,
    /// Consecutive failed reconciles.
    pub failures: u32,
    /// Epochs of the agent in the order of arrival; at most four.
    pub epochs: Vec<EpochView>,
}

/// State of an event path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PathView {
    /// True if the path is proven, False if it is broken, Unknown without proof of either.
    pub state: ConditionStatus,
    /// Reason of the state. `Unknown` while no evidence is due yet; the condition keeps its previous reason then.
    pub reason: String,
    /// Details; parts of them come from the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

impl From<&PathState> for PathView {
    fn from(path: &PathState) -> Self {
        Self { state: path.status(), reason: path.as_str().to_owned(), message: message(path) }
    }
}

/// Details that the reason does not contain.
fn message(path: &PathState) -> Option<String> {
    let PathState::Unproven(flaw) = path else { return None };
    match flaw {
        Unproven::OldPlan { refused } => refused.as_ref().map(|error| format!("the agent refuses the plan: {error}")),
        Unproven::FailingWatch { watch, error: Some(error) } => Some(format!("{watch}: {error}")),
        Unproven::FailingWatch { watch, error: None } => Some(format!("{watch} is not listed")),
        Unproven::Diverged { watch } => Some(watch.clone()),
        Unproven::StaleCanary { came_back: false } => Some("the canary never came back".to_owned()),
        _ => None,
    }
}

/// Path state of one runtime, the basis of its agent's upgrade.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PathReport {
    /// Its Kyma.
    pub(crate) kyma: KymaKey,
    /// Its runtime id.
    pub(crate) runtime: RuntimeId,
    /// State of its event path.
    pub(crate) path: PathState,
    /// Time of the last counted heartbeat.
    pub(crate) last_heartbeat: Option<Instant>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn path_has_the_state_and_reason_of_the_condition() {
        let watch = || "pods".to_owned();
        for (path, state) in [
            (PathState::Unknown, "Unknown"),
            (PathState::Proven, "True"),
            (PathState::Unproven(Unproven::NoHeartbeat), "False"),
            (PathState::Unproven(Unproven::Away), "Unknown"),
            (PathState::Unproven(Unproven::LegacyAgent), "Unknown"),
            (PathState::Unproven(Unproven::OldPlan { refused: None }), "False"),
            (PathState::Unproven(Unproven::FailingWatch { watch: watch(), error: None }), "False"),
            (PathState::Unproven(Unproven::Diverged { watch: watch() }), "False"),
            (PathState::Unproven(Unproven::StaleCanary { came_back: true }), "False"),
        ] {
            let path_json = json!(PathView::from(&path));
            assert_eq!((&path_json["state"], &path_json["reason"]), (&json!(state), &json!(path.as_str())));
        }
    }
}
