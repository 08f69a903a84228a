//! Report of the fleet as JSON, served by the admin listener and read by the command line.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tidewatch_shared::{
    api::ConditionStatus,
    identity::{Epoch, Instance},
    plan::Work,
};

use crate::fleet::{EpochView, PathState, Unproven, queue::WorkSet, table::RuntimeView};

/// Report of the fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Receiver that made the report.
    pub receiver: Receiver,
    /// Totals of all runtimes.
    pub summary: Summary,
    /// Kymas, those with a broken event path first, then those in an unknown state, each group by namespace and name.
    pub runtimes: Vec<Runtime>,
}

/// Receiver of a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Receiver {
    /// Random instance of the process.
    pub instance: Instance,
    /// Version of the program.
    pub version: String,
    /// True if this receiver holds the Lease; otherwise the report has no runtimes.
    pub active: bool,
    /// Time since the start of the process, in seconds.
    pub uptime_seconds: u64,
}

/// Totals of a report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Number of Kymas.
    pub kymas: usize,
    /// Number of Kymas by [`Path::reason`].
    pub paths: BTreeMap<String, usize>,
    /// Objects pending in agents.
    pub waiting: u64,
    /// Events that agents could not send.
    pub parked: u64,
    /// Events received above a gap.
    pub gaps: u64,
    /// Events received more than once.
    pub duplicates: u64,
    /// Kymas with recorded events that are not settled.
    pub unsettled: usize,
    /// Kymas with agents that fail to renew their certificates.
    #[serde(default)]
    pub renewals_failing: usize,
}

/// One Kyma and its runtime.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Runtime {
    /// Name in KCP.
    pub kyma: String,
    /// Namespace in KCP.
    pub namespace: String,
    /// Runtime id, if the Kyma has one.
    pub runtime_id: Option<String>,
    /// True if another Kyma has the same runtime id: then neither is served.
    pub ambiguous: bool,
    /// State of the event path, as the condition `EventPath` has it or will have it.
    pub path: Path,
    /// Contract of the agent's last request: `unheard`, `v2` or `v3`.
    pub contract: String,
    /// Age of the last counted heartbeat, in seconds.
    pub last_seen_seconds: Option<u64>,
    /// Longest heartbeat interval that the agent may follow, in seconds.
    pub heartbeat_seconds: u64,
    /// Age of the canary, in seconds.
    pub canary_age_seconds: Option<u64>,
    /// Version that the agent reports.
    pub agent_version: Option<String>,
    /// Plan revision that the agent reports.
    pub plan_revision: Option<String>,
    /// True if that is the current plan.
    pub plan_is_current: bool,
    /// End of the agent's certificate, as the agent reports it.
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
    pub wanted: Vec<Work>,
    /// Paused work.
    pub paused: Vec<Work>,
    /// True while a reconcile runs.
    pub in_work: bool,
    /// Consecutive failed reconciles.
    pub failures: u32,
    /// Epochs of the agent in the order of arrival; at most four.
    pub epochs: Vec<EpochState>,
}

/// State of an event path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Path {
    /// True if the path is proven, False if it is broken, Unknown without proof of either.
    pub state: ConditionStatus,
    /// Reason of the state. `Unknown` while no evidence is due yet; the condition keeps its previous reason then.
    pub reason: String,
    /// Details; parts of them come from the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// One epoch of an agent's sequences.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EpochState {
    /// Number of the epoch.
    pub epoch: Epoch,
    /// Upper end of the contiguous recorded sequences that begin at `since`.
    pub accepted: u64,
    /// Lower end of these sequences.
    pub since: u64,
    /// Missing sequences below a recorded one.
    pub missing: u64,
    /// Work for which recorded events are not settled.
    pub unsettled: Vec<Work>,
    /// Watches that the agent is requested to resend, because their digest differs, or because their state is unknown
    /// here.
    pub resend: Vec<String>,
    /// Events received more than once.
    pub duplicates: u64,
    /// Events received after a later one.
    pub reordered: u64,
    /// Events received above a gap.
    pub gaps: u64,
}

impl Report {
    /// Makes the report from the views of the runtime table; `None` if this receiver is not active.
    pub(super) fn new(instance: Instance, uptime: Duration, views: Option<Vec<RuntimeView>>) -> Self {
        let receiver = Receiver {
            instance,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            active: views.is_some(),
            uptime_seconds: uptime.as_secs(),
        };
        let mut runtimes: Vec<_> = views.unwrap_or_default().into_iter().map(Runtime::from).collect();
        runtimes.sort_unstable_by(|a, b| {
            let order = |runtime: &Runtime| match runtime.path.state {
                ConditionStatus::False => 0,
                ConditionStatus::Unknown => 1,
                ConditionStatus::True => 2,
            };
            order(a).cmp(&order(b)).then_with(|| (&a.namespace, &a.kyma).cmp(&(&b.namespace, &b.kyma)))
        });
        Self { receiver, summary: Summary::of(&runtimes), runtimes }
    }
}

impl Summary {
    fn of(runtimes: &[Runtime]) -> Self {
        let mut summary = Self { kymas: runtimes.len(), ..Self::default() };
        for runtime in runtimes {
            *summary.paths.entry(runtime.path.reason.clone()).or_default() += 1;
            summary.waiting += runtime.waiting;
            summary.parked += runtime.parked;
            summary.gaps += runtime.gaps;
            summary.duplicates += runtime.duplicates;
            summary.unsettled += usize::from(!runtime.unsettled.is_empty());
            summary.renewals_failing += usize::from(runtime.renewal_failed_since.is_some());
        }
        summary
    }
}

impl From<&PathState> for Path {
    fn from(path: &PathState) -> Self {
        Self { state: path.status(), reason: path.as_str().to_owned(), message: message(path) }
    }
}

fn rfc3339(unix_seconds: u32) -> String {
    Timestamp::from_second(unix_seconds.into()).unwrap_or(Timestamp::MAX).to_string()
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

impl From<RuntimeView> for Runtime {
    fn from(view: RuntimeView) -> Self {
        let epochs: Vec<_> = view.epochs.into_iter().map(EpochState::from).collect();
        let unsettled: WorkSet = epochs.iter().flat_map(|epoch| epoch.unsettled.iter().copied()).collect();
        let seconds = |age: Option<Duration>| age.map(|age| age.as_secs());
        Self {
            kyma: view.key.name.clone(),
            namespace: view.key.namespace.clone(),
            runtime_id: view.runtime.map(|id| id.as_str().to_owned()),
            ambiguous: view.ambiguous,
            path: Path::from(&view.path),
            contract: view.contract.as_str().to_owned(),
            last_seen_seconds: seconds(view.last_seen),
            heartbeat_seconds: view.heartbeat.as_secs(),
            canary_age_seconds: seconds(view.canary_age),
            agent_version: view.agent_version,
            plan_revision: view.plan_revision,
            plan_is_current: view.plan_is_current,
            certificate_not_after: view.certificate_not_after,
            renewal_failed_since: view.renewal_failed_since.map(rfc3339),
            waiting: view.waiting,
            parked: view.parked,
            gaps: view.gaps,
            duplicates: view.duplicates,
            unsettled: unsettled.iter().collect(),
            wanted: view.queued.iter().collect(),
            paused: view.paused.iter().collect(),
            in_work: view.in_progress,
            failures: view.failures,
            epochs,
        }
    }
}

impl From<EpochView> for EpochState {
    fn from(view: EpochView) -> Self {
        Self {
            epoch: view.epoch,
            accepted: view.accepted,
            since: view.since,
            missing: view.missing,
            unsettled: view.unsettled.iter().collect(),
            resend: view.resend,
            duplicates: view.duplicates,
            reordered: view.reordered,
            gaps: view.gaps,
        }
    }
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
            let path_json = json!(Path::from(&path));
            assert_eq!((&path_json["state"], &path_json["reason"]), (&json!(state), &json!(path.as_str())));
        }
    }
}
