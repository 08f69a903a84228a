//! Status of an agent, which its admin listener serves.

mod page;

use serde::{Deserialize, Serialize};
use strum::Display;
use tidewatch_api::identity::{Epoch, Instance};

use super::EventPath;
use crate::{exchange::Settled, heartbeat::WatchState};

/// Path of the status.
pub const STATUS_PATH: &str = "/status";
/// Default port of the admin listener, on the loopback of the agent's pod.
pub const DEFAULT_PORT: u16 = 2113;

/// Status of one agent at one instant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// The agent's version.
    pub version: String,
    /// Pending readiness conditions; empty if the agent is ready.
    pub pending: Vec<String>,
    /// Time since the last accepted request, in seconds by the wall clock.
    pub answered_seconds_ago: Option<u64>,
    /// Age of the canary in seconds; absent before its first round trip.
    pub canary_age_seconds: Option<u64>,
    /// Expiry of the certificate, in RFC 3339; absent before there is one.
    pub certificate_not_after: Option<String>,
    /// Source of the certificate, and errors of its renewal.
    #[serde(default)]
    pub identity: IdentityReport,
    /// Offset added to the clock for signatures, in seconds.
    pub clock_offset_seconds: i64,
    /// Watches and events; absent until the runtime ID is known.
    pub runtime: Option<Runtime>,
}

/// Origin of the identity in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Display, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum IdentitySource {
    /// Files that another component renews.
    Files,
    /// The agent's own Secret, written by an earlier agent process.
    #[strum(to_string = "the agent's Secret")]
    Secret,
    /// Requested with a token.
    Enrolment,
    /// Requested with the previous certificate.
    Renewal,
}

/// Status of the identity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IdentityReport {
    /// Origin; absent before there is an identity.
    pub from: Option<IdentitySource>,
    /// The agent's Secret does not contain the identity, so the next agent process has to enrol. Never set for files.
    #[serde(rename = "unkept")]
    pub unsaved: bool,
    /// Time since which certificate requests fail, in RFC 3339.
    pub failing_since: Option<String>,
    /// Text of the last failure.
    pub error: Option<String>,
}

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

/// The receiver's response to the last answered heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LastHeartbeat {
    /// Age of the response, in seconds.
    pub seconds_ago: u64,
    /// Heartbeat interval that the receiver requests, in seconds.
    pub interval_seconds: u32,
    /// Revision of the plan that the receiver wrote last.
    pub plan_revision: Option<String>,
    /// Per watch, the sequence up to which all reconciles have ended; absent if the response is from an earlier epoch.
    pub settled: Option<Settled>,
    /// Watches to resend, because their digest differs or their sent events are unknown to the receiver; absent if the
    /// response is from an earlier epoch.
    pub resend: Option<Vec<String>>,
}
