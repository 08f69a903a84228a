//! Summaries of runtimes for the admin API, rollouts and tests.

use std::time::Duration;

use tidewatch_shared::identity::RuntimeId;
use tokio::time::Instant;

use crate::{
    base::key::KymaKey,
    fleet::{Contract, EpochView, PathState, queue::WorkSet},
};

/// Summary of one Kyma and its runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeView {
    /// The Kyma.
    pub key: KymaKey,
    /// Its runtime id, if it has one.
    pub runtime: Option<RuntimeId>,
    /// Another Kyma has the same runtime id.
    pub ambiguous: bool,
    /// State of its event path.
    pub path: PathState,
    /// Contract of its last request.
    pub contract: Contract,
    /// Age of the last counted heartbeat.
    pub last_seen: Option<Duration>,
    /// Longest heartbeat interval that the agent may follow.
    pub heartbeat: Duration,
    /// Current age of the canary; `None` if it never returned.
    pub canary_age: Option<Duration>,
    /// Version that the agent reports, at most 256 characters.
    pub agent_version: Option<String>,
    /// Plan revision that the agent reports, at most 256 characters.
    pub plan_revision: Option<String>,
    /// True if that is the current plan.
    pub plan_is_current: bool,
    /// End of the agent's certificate as it reports it: RFC 3339 from an honest agent, at most 256 characters.
    pub certificate_not_after: Option<String>,
    /// Start of the agent's failure to renew, as it reports it, Unix seconds; `None` while renewals succeed.
    pub renewal_failed_since: Option<u32>,
    /// Objects pending in the agent at the last heartbeat.
    pub waiting: u64,
    /// Events that the agent could not send.
    pub parked: u64,
    /// Events received above a gap, in the epochs kept.
    pub gaps: u64,
    /// Events received more than once, in the epochs kept.
    pub duplicates: u64,
    /// Its epochs in the order of arrival; at most four.
    pub epochs: Vec<EpochView>,
    /// Work that is ready or in backoff.
    pub queued: WorkSet,
    /// Paused work.
    pub paused: WorkSet,
    /// A reconcile runs.
    pub in_progress: bool,
    /// Consecutive failed reconciles.
    pub failures: u32,
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
