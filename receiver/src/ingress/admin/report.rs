//! What the admin listener shows, as JSON, and what the command line reads again.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tidewatch_shared::{
    api::ConditionStatus,
    identity::{Epoch, Instance},
    plan::Work,
};

use crate::fleet::{EpochView, PathState, Unproven, hub::View, queue::Works};

/// The whole fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Who says it.
    pub receiver: Receiver,
    /// Figures of all runtimes together.
    pub summary: Summary,
    /// Each Kyma: those whose path is broken first, then those of which nobody knows, each by name.
    pub runtimes: Vec<Runtime>,
}

/// See [`Report::receiver`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Receiver {
    /// Drawn at every start.
    pub instance: Instance,
    /// Its version.
    pub version: String,
    /// Whether it is the active one; else it knows no runtimes.
    pub active: bool,
    /// Since its process started, in seconds.
    pub uptime_seconds: u64,
}

/// See [`Report::summary`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Kymas.
    pub kymas: usize,
    /// How many of them have a path of which [`Path::reason`].
    pub paths: BTreeMap<String, usize>,
    /// Objects that wait in agents.
    pub waiting: u64,
    /// Events that agents could not send.
    pub parked: u64,
    /// Events that came while an earlier one was missing.
    pub gaps: u64,
    /// Events that came again.
    pub duplicates: u64,
    /// Kymas of which recorded events still wait for work.
    pub unsettled: usize,
    /// Kymas whose agents fail to renew their certificates.
    #[serde(default)]
    pub renewals_failing: usize,
}

/// One Kyma and its runtime.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Runtime {
    /// Its name in KCP.
    pub kyma: String,
    /// Its namespace in KCP.
    pub namespace: String,
    /// Its runtime id, if it has one.
    pub runtime_id: Option<String>,
    /// Whether another Kyma has the same runtime id: then neither is served.
    pub ambiguous: bool,
    /// Whether its event path is proven: what the condition `EventPath` says, or will say.
    pub path: Path,
    /// The contract in which its agent spoke last: `unheard`, `v2` or `v3`.
    pub contract: String,
    /// Since the last heartbeat that counted, in seconds.
    pub last_seen_seconds: Option<u64>,
    /// The heartbeat interval that the agent follows at most, in seconds.
    pub heartbeat_seconds: u64,
    /// Age of the canary in seconds.
    pub canary_age_seconds: Option<u64>,
    /// The agent's version, in its words.
    pub agent_version: Option<String>,
    /// The plan that the agent follows, in its words.
    pub plan_revision: Option<String>,
    /// Whether that is the plan that it should follow.
    pub plan_is_current: bool,
    /// The end of the agent's certificate, in its words.
    pub certificate_not_after: Option<String>,
    /// Since when its renewal fails, in RFC 3339; absent while it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewal_failed_since: Option<String>,
    /// Objects that waited in the agent at the last heartbeat.
    pub waiting: u64,
    /// Events that it could not send.
    pub parked: u64,
    /// Events that came while an earlier one was missing, in the epochs below.
    pub gaps: u64,
    /// Events that came again, in the epochs below.
    pub duplicates: u64,
    /// Works that recorded events still wait for.
    pub unsettled: Vec<Work>,
    /// Works that are wanted, now or after a backoff.
    pub wanted: Vec<Work>,
    /// Works that wait for the end of a pause.
    pub paused: Vec<Work>,
    /// Whether it is in work.
    pub in_work: bool,
    /// Passes that failed in a row.
    pub failures: u32,
    /// Its epochs, in the order in which they came; at most four.
    pub epochs: Vec<EpochState>,
}

/// See [`Runtime::path`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Path {
    /// Whether it is proven. `Unknown` where nobody claims that something is broken.
    pub state: ConditionStatus,
    /// Why, or why not: one word. `Unknown` while there is no evidence and none is due yet; the condition says then what it said before.
    pub reason: String,
    /// What more is known of it; parts of it are an agent's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// One life of an agent's sequences.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EpochState {
    /// Which.
    pub epoch: Epoch,
    /// Every sequence from `since` up to here was recorded.
    pub accepted: u64,
    /// Where that run begins.
    pub since: u64,
    /// Sequences that are missing now, below one that was recorded.
    pub missing: u64,
    /// Works that recorded events still wait for.
    pub unsettled: Vec<Work>,
    /// Watches of which news is awaited: their digest did not agree, or what their agent sent is not known here.
    pub resend: Vec<String>,
    /// Events that came again.
    pub duplicates: u64,
    /// Events that came after a later one.
    pub reordered: u64,
    /// Events that came while an earlier one was missing.
    pub gaps: u64,
}

impl Report {
    /// Of what the hub knows; `None` when this receiver is not active.
    pub(super) fn new(instance: Instance, uptime: Duration, views: Option<Vec<View>>) -> Self {
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

/// What the reason alone does not say.
fn message(path: &PathState) -> Option<String> {
    let PathState::Unproven(flaw) = path else { return None };
    match flaw {
        Unproven::OldPlan { refused } => refused.as_ref().map(|why| format!("the agent refuses the plan: {why}")),
        Unproven::FailingWatch { watch, error: Some(error) } => Some(format!("{watch}: {error}")),
        Unproven::FailingWatch { watch, error: None } => Some(format!("{watch} is not listed")),
        Unproven::Diverged { watch } => Some(watch.clone()),
        Unproven::StaleCanary { came_back: false } => Some("the canary never came back".to_owned()),
        _ => None,
    }
}

impl From<View> for Runtime {
    fn from(view: View) -> Self {
        let epochs: Vec<_> = view.epochs.into_iter().map(EpochState::from).collect();
        let unsettled: Works = epochs.iter().flat_map(|epoch| epoch.unsettled.iter().copied()).collect();
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
            wanted: view.wanted.iter().collect(),
            paused: view.paused.iter().collect(),
            in_work: view.in_work,
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
    fn a_path_is_told_as_the_condition_tells_it() {
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
            let told = json!(Path::from(&path));
            assert_eq!((&told["state"], &told["reason"]), (&json!(state), &json!(path.as_str())));
        }
    }
}
