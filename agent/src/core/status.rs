//! Form of the agent's status.

use serde::{Deserialize, Serialize};
use strum::Display;
use tidewatch_api::identity::{Epoch, Instance};
use tidewatch_contract::heartbeat::WatchState;

use super::LastHeartbeat;

/// Status of the runtime's watches and events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Runtime {
    /// ID of the runtime.
    pub id: String,
    /// Current epoch of the sequences.
    pub epoch: Epoch,
    /// Last sequence assigned to an event.
    pub sequence: u64,
    /// Sequence of this epoch up to which all events were accepted.
    pub accepted: u64,
    /// Receiver instance that answered last.
    pub instance: Option<Instance>,
    /// The event path by this agent's own evidence; the condition `EventPath` has the receiver's.
    pub path: EventPath,
    /// Response to the last answered heartbeat; absent before.
    pub heartbeat: Option<LastHeartbeat>,
    /// Revision of the plan in force.
    pub plan_revision: Option<String>,
    /// Error of the newest plan or settings, or of reading them.
    pub plan_error: Option<String>,
    /// Events waiting to be sent.
    pub waiting: usize,
    /// Parked events, which cannot be sent.
    pub parked: usize,
    /// Sent events that are not settled.
    pub unsettled: usize,
    /// Number of times since start that the receiver had lost accepted events; each causes a resend of all unsettled
    /// events.
    pub gaps: u64,
    /// Resends since start that the receiver requested, counted per watch.
    pub resends: u64,
    /// State of each watch of the plan.
    pub watches: Vec<WatchState>,
}

/// Condition of the event path. The reasons are those of the condition `EventPath` that the receiver writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EventPath {
    /// Status of the condition.
    pub state: ConditionStatus,
    /// Reason in CamelCase.
    pub reason: String,
    /// Details of the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Status of a condition, spelled as in the Kubernetes API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Display, Serialize, Deserialize)]
pub enum ConditionStatus {
    /// The event path is proven.
    True,
    /// There is evidence against it.
    False,
    /// No heartbeat has been sent.
    Unknown,
}
