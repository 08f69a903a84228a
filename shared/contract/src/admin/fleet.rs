//! Report of the fleet.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tidewatch_api::{identity::Epoch, plan::Work};

use super::{EventPath, Receiver};

/// Report of the fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Receiver that made the report.
    pub receiver: Receiver,
    /// Totals of all runtimes.
    pub summary: Summary,
    /// Kymas, those with a broken event path first, then those in an unknown state, each group by namespace and name.
    pub runtimes: Vec<RuntimeView>,
}

/// Totals of a report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Number of Kymas.
    pub kymas: usize,
    /// Number of Kymas by the reason of their event path.
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

/// Summary of one Kyma and its runtime.
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
    pub path: EventPath,
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
    /// Watches of kinds that the runtime's API server does not serve, at the last heartbeat.
    #[serde(default)]
    pub not_served: usize,
    /// Watches with too many objects to report each change by its object, at the last heartbeat.
    #[serde(default)]
    pub coarse: usize,
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

/// Summary of one epoch of a runtime.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EpochView {
    /// The epoch.
    pub epoch: Epoch,
    /// Every sequence from `since` to this one was recorded.
    pub accepted: u64,
    /// Start of that run; 1 before the first event.
    pub since: u64,
    /// Number of missing sequences below the highest recorded.
    pub missing: u64,
    /// Work for which recorded events are not settled.
    pub unsettled: Vec<Work>,
    /// Watches for which a `watch.changed` is awaited, after a digest mismatch or because events sent earlier are
    /// unknown here.
    pub resend: Vec<String>,
    /// Events received more than once.
    pub duplicates: u64,
    /// Events received after a later one.
    pub reordered: u64,
    /// Events received while an earlier one was missing.
    pub gaps: u64,
}
