//! Heartbeats of contract v3.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tidewatch_api::identity::Epoch;

use crate::digest::Digest;

/// Watches per heartbeat, at most; a heartbeat with more is malformed.
pub const MAX_WATCHES: usize = 1_000;

/// Heartbeat intervals for which evidence is awaited and stays valid.
pub const EVIDENCE_INTERVALS: u32 = 3;
/// Seconds after which a watch without any message counts as failing, regardless of the agent's own assessment. API
/// servers send a bookmark about once a minute, and an agent without bookmarks relists within about 200 seconds, which
/// counts as a message.
pub const SILENT_AFTER_SECONDS: u64 = 300;
/// The error reported for such a watch.
pub const SILENT_MESSAGE: &str = "no event or bookmark for more than 300 seconds";

/// Step of the wall clock at which agents send heartbeats. Those of a fleet reach the receiver in short bursts: one that
/// comes alone wakes its threads and finds their caches cold, at several times the CPU time.
const STEP: Duration = Duration::from_millis(250);

/// Returns the pause until the next heartbeat: at least `pause`, and until the next step of the wall clock. Agents whose
/// clocks differ send at other times, which is harmless.
pub fn aligned(pause: Duration, since_unix_epoch: Duration) -> Duration {
    let step = STEP.as_nanos();
    let beyond = (since_unix_epoch.as_nanos() + pause.as_nanos()) % step;
    // Below one step, so it fits.
    let rest = u64::try_from((step - beyond) % step).unwrap_or_default();
    pause.saturating_add(Duration::from_nanos(rest))
}

/// The state of an agent, sent once per heartbeat interval.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Heartbeat {
    /// The epoch of the agent's sequences.
    pub epoch: Epoch,
    /// The last sequence assigned to an event.
    pub sequence: u64,
    /// Increases within the epoch; a heartbeat counts only if its counter is higher than that of the last one.
    pub counter: u64,
    /// Objects with events that wait to be sent.
    pub waiting: u64,
    /// Events that the agent parked because they cannot be sent.
    pub parked: u64,
    /// The revision of the plan that the agent applies; `None` before it has read one.
    pub plan_revision: Option<String>,
    /// The error for which the newest plan or settings were rejected or could not be read; `None` if both were read and
    /// accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan_error: Option<String>,
    /// The version of the agent.
    pub agent_version: String,
    /// The certificate of the agent.
    pub certificate: CertificateState,
    /// The revision of the trust bundle that the agent has.
    pub trust_revision: Option<String>,
    /// The canary; `None` until its first renewal came back through the watch.
    pub canary: Option<Canary>,
    /// The agent's Lease or Secret is missing, or the Secret does not contain its identity. The agent is not authorised
    /// to create either.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub incomplete: bool,
    /// The state of each watch of the plan.
    pub watches: Vec<WatchState>,
}

impl Heartbeat {
    /// Parses a heartbeat; `None` if it is not JSON of this shape, or has more than [`MAX_WATCHES`].
    pub fn parse(body: &[u8]) -> Option<Self> {
        serde_json::from_slice(body).ok().filter(|heartbeat: &Self| heartbeat.watches.len() <= MAX_WATCHES)
    }
}

/// The state of the agent's certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CertificateState {
    /// End of validity in RFC 3339.
    pub not_after: String,
    /// SHA-256 of the leaf, in hex.
    pub fingerprint: String,
    /// Time of the first failed renewal since the last success, in RFC 3339; `None` while renewals do not fail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewal_failed_since: Option<String>,
}

/// The end-to-end check of the watch path: the agent renews its Lease and waits for the change to arrive through its
/// watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Canary {
    /// Seconds since a renewal of the Lease last arrived through the watch.
    pub age_seconds: u64,
}

/// The state of one watch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchState {
    /// The name of the watch in the plan.
    pub name: String,
    /// The number of objects in the index.
    pub objects: u64,
    /// The digest of all that was sent up to the heartbeat's sequence; absent until the initial list is complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Seconds since the last completed list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listed_seconds_ago: Option<u64>,
    /// Seconds since the last message of the watch, including bookmarks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alive_seconds_ago: Option<u64>,
    /// True if the watch reports changes without naming objects, because it exceeds its object limit.
    #[serde(default)]
    pub coarse: bool,
    /// The API server does not serve the kind: the watch counts as listed and empty, and the agent looks the kind up
    /// until it appears. Absent if false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub not_served: bool,
    /// The error of the watch; absent while there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A failing watch and its error; no error if its initial list is merely incomplete. A watch with an error takes
/// precedence over one with an incomplete list.
pub fn failing(watches: &[WatchState]) -> Option<(&str, Option<&str>)> {
    let is_silent = |watch: &WatchState| watch.alive_seconds_ago.is_some_and(|seconds| seconds > SILENT_AFTER_SECONDS);
    let fails = |watch: &&WatchState| watch.error.is_some() || watch.listed_seconds_ago.is_none() || is_silent(watch);
    let watch = watches.iter().filter(fails).max_by_key(|watch| watch.error.is_some())?;
    Some((&watch.name, watch.error.as_deref().or_else(|| is_silent(watch).then_some(SILENT_MESSAGE))))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use tidewatch_api::plan::Plan;

    use super::*;
    use crate::exchange::{EventsResponse, HeartbeatResponse};

    /// A heartbeat of an agent of an earlier minor version, without members that were added later.
    fn early() -> Value {
        json!({"epoch": "0000000000000007", "sequence": 1, "counter": 1, "waiting": 0, "parked": 0, "agentVersion": "0.0.9",
               "certificate": {"notAfter": "", "fingerprint": ""},
               "watches": [{"name": "w", "objects": 1}]})
    }

    proptest! {
        #[test]
        fn heartbeat_is_due_at_a_step_of_the_clock_and_at_most_one_step_later(pause: u32, now: u64) {
            let pause = Duration::from_micros(pause.into());
            let now = Duration::from_nanos(now);
            let aligned = aligned(pause, now);
            prop_assert_eq!((now + aligned).as_nanos() % STEP.as_nanos(), 0);
            prop_assert!(aligned >= pause && aligned - pause < STEP, "{:?}", aligned);
        }
    }

    #[test]
    fn messages_of_adjacent_versions_are_compatible() {
        let mut later = early();
        for at in ["", "/certificate", "/watches/0"] {
            later.pointer_mut(at).unwrap()["later"] = json!({"a": [1]});
        }
        for message in [early(), later] {
            let heartbeat = Heartbeat::parse(message.to_string().as_bytes()).unwrap();
            assert!(!heartbeat.watches[0].not_served);
            assert_eq!((heartbeat.agent_version.as_str(), heartbeat.watches.len()), ("0.0.9", 1));
        }
        let response = json!({"instance": "00000000000000ff", "settled": {}, "heartbeatSeconds": 30, "serverTime": "",
            "later": true, "resend": []});
        assert!(!serde_json::from_value::<HeartbeatResponse>(response).unwrap().renew);
        let response = json!({"instance": "00000000000000ff", "accepted": 1, "since": 1, "settled": {}, "refused": [],
            "heartbeatSeconds": 30, "later": true});
        assert_eq!(serde_json::from_value::<EventsResponse>(response).unwrap().accepted, 1);
        let watch = json!({"name": "w", "version": "v1", "resource": "things", "field": "spec", "manager": "m",
            "work": ["kyma"], "later": 1});
        assert!(Plan::parse(&json!({"revision": "1", "watches": [watch], "later": 1}).to_string()).is_ok());
    }
}
