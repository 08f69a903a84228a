//! The paths of contract v3 and the receiver's responses.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tidewatch_api::identity::Instance;

use crate::event::Reason;

/// `POST`, a batch of events.
pub const EVENTS_PATH: &str = "/v3/events";
/// `POST`, a heartbeat.
pub const HEARTBEAT_PATH: &str = "/v3/heartbeat";

/// Per watch, the sequence up to which all events are settled: all work that they need has ended with its result recorded.
pub type Settled = BTreeMap<String, u64>;

/// One rejected event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedEvent {
    /// The CloudEvents id of the event.
    pub id: String,
    /// The reason.
    pub reason: Reason,
}

/// The response `202` to a batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EventsResponse {
    /// The instance of the receiver that responds. The agent compares it before it evaluates any other member.
    pub instance: Instance,
    /// Every event up to this sequence is verified and recorded, and its work is enqueued.
    pub accepted: u64,
    /// The first sequence of the contiguous range that ends at `accepted`.
    pub since: u64,
    /// See [`Settled`].
    pub settled: Settled,
    /// Events that were rejected one by one.
    #[serde(default)]
    pub refused: Vec<RefusedEvent>,
    /// The requested heartbeat interval, in seconds.
    pub heartbeat_seconds: u32,
}

/// The response `200` to a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeartbeatResponse {
    /// The instance of the receiver that responds.
    pub instance: Instance,
    /// See [`Settled`].
    pub settled: Settled,
    /// The first sequence of the contiguous range of the heartbeat's epoch that [`Self::settled`] refers to: the
    /// receiver has no record of earlier events, so they are not settled. Absent in responses of older receivers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<u64>,
    /// The requested heartbeat interval, in seconds.
    pub heartbeat_seconds: u32,
    /// The revision of the plan that the receiver wrote last; absent if the receiver has not written one.
    pub plan_revision: Option<String>,
    /// The revision of the trust bundle that agents should have.
    pub trust_revision: Option<String>,
    /// The receiver's time in RFC 3339.
    pub server_time: String,
    /// Watches with a differing digest: the agent sends a `watch.changed` for each.
    #[serde(default)]
    pub resend: Vec<String>,
    /// Requests the renewal of the agent's certificate, for example because its issuer is being replaced.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub renew: bool,
}
