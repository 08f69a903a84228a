//! A summary of one Kyma for logs, metrics and tests.

use std::time::Duration;

use tidewatch_shared::identity::RuntimeId;
use tokio::time::Instant;

use crate::{
    base::key::KymaKey,
    fleet::{Contract, EpochView, PathState, queue::Works},
};

/// What is known of one Kyma and its runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Which Kyma.
    pub key: KymaKey,
    /// Its runtime id, if it has one.
    pub runtime: Option<RuntimeId>,
    /// Whether another Kyma has the same runtime id.
    pub ambiguous: bool,
    /// Whether its path is proven.
    pub path: PathState,
    /// The contract of its last request.
    pub contract: Contract,
    /// How long ago the last heartbeat came that counted.
    pub last_seen: Option<Duration>,
    /// The heartbeat interval that it follows at most.
    pub heartbeat: Duration,
    /// How old the canary is by now; `None` if it never came back.
    pub canary_age: Option<Duration>,
    /// The agent's version, as it said, at most 256 characters.
    pub agent_version: Option<String>,
    /// The plan that the agent follows, as it said, at most 256 characters.
    pub plan_revision: Option<String>,
    /// Whether that is the plan that it should follow.
    pub plan_is_current: bool,
    /// The end of the agent's certificate, as it said: RFC 3339 from an honest one, at most 256 characters.
    pub certificate_not_after: Option<String>,
    /// Since when its renewal fails, as the agent said, in unix seconds; `None` while it does not.
    pub renewal_failed_since: Option<u32>,
    /// Objects that waited in the agent at the last heartbeat.
    pub waiting: u64,
    /// Events that it could not send.
    pub parked: u64,
    /// Events that came while an earlier one was missing, in the epochs that are remembered.
    pub gaps: u64,
    /// Events that came again, in the epochs that are remembered.
    pub duplicates: u64,
    /// Its epochs, in the order in which they came; at most four.
    pub epochs: Vec<EpochView>,
    /// What is wanted of it, now or after its backoff.
    pub wanted: Works,
    /// What waits for the end of a pause.
    pub paused: Works,
    /// Whether it is in work.
    pub in_work: bool,
    /// Passes that failed in a row.
    pub failures: u32,
}

/// How the path of one runtime stands: what the upgrade of its agent is judged by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stand {
    /// Its Kyma.
    pub(crate) kyma: KymaKey,
    /// Its id.
    pub(crate) runtime: RuntimeId,
    /// Whether it is proven.
    pub(crate) path: PathState,
    /// When the last heartbeat came that counted.
    pub(crate) beat: Option<Instant>,
}
