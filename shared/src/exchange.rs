//! The receiver's answers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{event::Reason, identity::Instance};

/// `POST`, a batch of changes.
pub const EVENTS_PATH: &str = "/v3/events";
/// `POST`, a heartbeat.
pub const HEARTBEAT_PATH: &str = "/v3/heartbeat";

/// Per watch: the sequence up to which all its work has ended.
pub type Settled = BTreeMap<String, u64>;

/// One refused event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// The event's CloudEvents id.
    pub id: String,
    /// Why.
    pub reason: Reason,
}

/// The answer `202` to a batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EventsAnswer {
    /// Which life of the receiver speaks; compared before anything else.
    pub instance: Instance,
    /// Every event up to here is verified, recorded, and its work is wanted.
    pub accepted: u64,
    /// Where the contiguous run that ends at `accepted` begins.
    pub since: u64,
    /// See [`Settled`].
    pub settled: Settled,
    /// Events that were refused one by one.
    #[serde(default)]
    pub refused: Vec<Refused>,
    /// The wanted heartbeat interval, in seconds.
    pub heartbeat_seconds: u32,
}

/// The answer `200` to a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeartbeatAnswer {
    /// Which life of the receiver speaks.
    pub instance: Instance,
    /// See [`Settled`].
    pub settled: Settled,
    /// Where the contiguous run of the heartbeat's epoch begins that [`Self::settled`] speaks of: what was sent below it the receiver has
    /// forgotten, and nothing is settled. Receivers of before it do not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<u64>,
    /// The wanted heartbeat interval, in seconds.
    pub heartbeat_seconds: u32,
    /// The revision of the plan that the receiver wrote last, if it knows one.
    #[serde(default)]
    pub plan_revision: Option<String>,
    /// Revision of the trust bundle that agents should have.
    #[serde(default)]
    pub trust_revision: Option<String>,
    /// RFC 3339.
    pub server_time: String,
    /// Watches whose digest did not agree: a `watch.changed` of each is asked for.
    #[serde(default)]
    pub resend: Vec<String>,
    /// The agent renews its certificate now, for example because its issuer is being replaced.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub renew: bool,
}
