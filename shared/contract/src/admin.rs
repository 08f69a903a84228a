//! Reports of the admin listeners as JSON, which the receiver and the agent serve and the command line reads.

pub mod agent;
pub mod fleet;
pub mod rotation;
pub mod shards;

use serde::{Deserialize, Serialize};
use tidewatch_api::identity::Instance;

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
