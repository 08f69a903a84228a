//! Heartbeats on the wire.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{digest::Digest, identity::Epoch};

/// Watches of one heartbeat, at most; more is malformed.
pub const MAX_WATCHES: usize = 1_000;

/// Evidence is awaited, and stays good, for so many heartbeat intervals.
pub const EVIDENCE_INTERVALS: u32 = 3;
/// A watch that was last heard so long ago, in seconds, does not stand, whatever its agent thinks of it. API servers send a bookmark about
/// once a minute, and an agent that misses them lists anew within some 200 seconds, which is a sign of life as well.
pub const SILENT_AFTER: u64 = 300;
/// What is said of such a watch.
pub const SILENT: &str = "nothing was heard of it for more than 300 seconds";

/// What an agent says of itself, once per heartbeat interval.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Heartbeat {
    /// The life of the agent's sequences.
    pub epoch: Epoch,
    /// The last sequence given to an event.
    pub sequence: u64,
    /// Per epoch; a heartbeat counts only if it is higher than the last.
    pub counter: u64,
    /// Objects that wait to be sent.
    pub waiting: u64,
    /// Events that cannot be sent.
    pub parked: u64,
    /// The plan that the agent follows; `None` before it has read one.
    #[serde(default)]
    pub plan_revision: Option<String>,
    /// Why the newest plan, or the settings beside it, was refused, in words; `None` when both were taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan_error: Option<String>,
    /// The agent's version.
    pub agent_version: String,
    /// The agent's certificate.
    pub certificate: CertificateState,
    /// Revision of the trust bundle that the agent has.
    #[serde(default)]
    pub trust_revision: Option<String>,
    /// The canary, once it has come back.
    #[serde(default)]
    pub canary: Option<Canary>,
    /// Its Lease or its Secret is not there, or the Secret does not keep its identity. The agent may make neither.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub incomplete: bool,
    /// Each watch of the plan.
    pub watches: Vec<WatchState>,
}

/// Why bytes are no heartbeat.
#[derive(Debug, Error)]
pub enum ParseHeartbeat {
    /// Not JSON of a heartbeat's shape.
    #[error("the heartbeat is not readable")]
    Json(#[from] serde_json::Error),
    /// More than [`MAX_WATCHES`].
    #[error("the heartbeat has more than {MAX_WATCHES} watches")]
    TooMany,
}

impl Heartbeat {
    /// Reads a heartbeat.
    ///
    /// # Errors
    /// [`ParseHeartbeat`].
    pub fn parse(body: &[u8]) -> Result<Self, ParseHeartbeat> {
        let heartbeat: Self = serde_json::from_slice(body)?;
        if heartbeat.watches.len() > MAX_WATCHES { Err(ParseHeartbeat::TooMany) } else { Ok(heartbeat) }
    }
}

/// See [`Heartbeat::certificate`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CertificateState {
    /// RFC 3339.
    pub not_after: String,
    /// Hex SHA-256 of the leaf.
    pub fingerprint: String,
    /// Since when its renewal fails, in RFC 3339; `None` while nothing is wrong with that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewal_failed_since: Option<String>,
}

/// See [`Heartbeat::canary`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Canary {
    /// Seconds since a renewal of the Lease was last seen to come back through the watch.
    pub age_seconds: u64,
}

/// One watch, as it stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchState {
    /// Its name in the plan.
    pub name: String,
    /// Objects that it holds.
    pub objects: u64,
    /// Digest of what was sent up to the heartbeat's sequence; absent until the watch is completely listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Seconds since the last completed list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listed_seconds_ago: Option<u64>,
    /// Seconds since the watch last said anything, bookmarks included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alive_seconds_ago: Option<u64>,
    /// Whether it only tells that something changed, because it holds too many objects.
    #[serde(default)]
    pub coarse: bool,
    /// What is wrong with it, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A watch that does not stand, and what is wrong with it in words; no words while it is only not listed yet. An error says more than a
/// list that is not complete yet.
#[must_use]
pub fn failing(watches: &[WatchState]) -> Option<(&str, Option<&str>)> {
    let is_silent = |watch: &WatchState| watch.alive_seconds_ago.is_some_and(|seconds| seconds > SILENT_AFTER);
    let fails = |watch: &&WatchState| watch.error.is_some() || watch.listed_seconds_ago.is_none() || is_silent(watch);
    let watch = watches.iter().filter(fails).max_by_key(|watch| watch.error.is_some())?;
    Some((&watch.name, watch.error.as_deref().or_else(|| is_silent(watch).then_some(SILENT))))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        exchange::{EventsAnswer, HeartbeatAnswer},
        plan::Plan,
    };

    /// What an agent of an earlier minor version says: nothing that came later.
    fn early() -> Value {
        json!({"epoch": "0000000000000007", "sequence": 1, "counter": 1, "waiting": 0, "parked": 0, "agentVersion": "0.0.9",
               "certificate": {"notAfter": "", "fingerprint": ""},
               "watches": [{"name": "w", "objects": 1}]})
    }

    #[test]
    fn an_agent_one_version_apart_is_understood_and_understands() {
        let mut later = early();
        for at in ["", "/certificate", "/watches/0"] {
            later.pointer_mut(at).unwrap()["later"] = json!({"a": [1]});
        }
        for said in [early(), later] {
            let heartbeat = Heartbeat::parse(said.to_string().as_bytes()).unwrap();
            assert_eq!((heartbeat.agent_version.as_str(), heartbeat.watches.len()), ("0.0.9", 1));
        }
        let answer = json!({"instance": "00000000000000ff", "settled": {}, "heartbeatSeconds": 30, "serverTime": "",
            "later": true, "resend": []});
        assert!(!serde_json::from_value::<HeartbeatAnswer>(answer).unwrap().renew);
        let answer = json!({"instance": "00000000000000ff", "accepted": 1, "since": 1, "settled": {}, "refused": [],
            "heartbeatSeconds": 30, "later": true});
        assert_eq!(serde_json::from_value::<EventsAnswer>(answer).unwrap().accepted, 1);
        let watch = json!({"name": "w", "version": "v1", "resource": "things", "field": "spec", "manager": "m",
            "work": ["kyma"], "later": 1});
        assert!(Plan::parse(&json!({"revision": "1", "watches": [watch], "later": 1}).to_string()).is_ok());
    }
}
