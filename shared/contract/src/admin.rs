//! Reports of the admin listeners as JSON, which the receiver and the agent serve and the command line reads.

pub mod agent;
pub mod fleet;
pub mod rotation;
pub mod shards;

use std::fmt;

use serde::{Deserialize, Serialize};
use tidewatch_api::{ConditionStatus, identity::Instance};

/// Path of the fleet's report; also the `nonResourceURL` to grant, with the verb `get`, for access by token.
pub const FLEET_PATH: &str = "/fleet";
/// Path of the report of the shards; also the `nonResourceURL` to grant, with the verb `get`.
pub const SHARDS_PATH: &str = "/shards";
/// Path of the progress of a CA rotation; also the `nonResourceURL` to grant, with the verb `get`.
pub const ROTATION_PATH: &str = "/rotation";
/// Path that requests a CA rotation; also the `nonResourceURL` to grant, with the verb `post`.
pub const ROTATE_PATH: &str = "/rotate-ca";

/// Receiver that made a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Receiver {
    /// Random instance of the process.
    pub instance: Instance,
    /// Version of the program.
    pub version: String,
    /// True if this receiver works on runtimes; otherwise the report has none.
    pub active: bool,
    /// Time since the start of the process, in seconds.
    pub uptime_seconds: u64,
}

/// State of an event path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EventPath {
    /// True if the path is proven, False if it is broken, Unknown without proof of either.
    pub state: ConditionStatus,
    /// Reason of the condition `EventPath`. `Unknown` while no evidence is due yet; the condition keeps its previous
    /// reason then.
    pub reason: String,
    /// Details; parts of them come from the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

impl fmt::Display for EventPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { state, reason, message } = self;
        write!(f, "{state}, {reason}")?;
        message.as_ref().map_or(Ok(()), |message| write!(f, ": {message}"))
    }
}
