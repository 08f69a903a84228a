//! Evidence about the event path in heartbeats, as far as the receiver's evaluation depends on it, and the receiver's
//! responses.

use tidewatch_api::identity::Epoch;
use tidewatch_contract::{admin::agent::LastHeartbeat, exchange::HeartbeatResponse};
use tokio::time::Instant;

use super::Core;

/// Heartbeats sent and answered.
#[derive(Debug, Default)]
pub(super) struct HeartbeatLog {
    /// A heartbeat has been sent.
    pub(super) sent: bool,
    last: Option<LastResponse>,
    /// Resends that the receiver requested, counted per watch.
    pub(super) resends: u64,
}

/// The last response, with its time and epoch.
#[derive(Debug)]
struct LastResponse {
    at: Instant,
    epoch: Epoch,
    response: HeartbeatResponse,
}

impl HeartbeatLog {
    /// Records the response to a heartbeat.
    pub(super) fn apply_response(&mut self, now: Instant, epoch: Epoch, response: &HeartbeatResponse) {
        self.last = Some(LastResponse { at: now, epoch, response: response.clone() });
    }

    /// The last response. Its statements about events hold in their own epoch only.
    pub(super) fn last_response(&self, epoch: Epoch, now: Instant) -> Option<LastHeartbeat> {
        let LastResponse { at, epoch: of, response } = self.last.as_ref()?;
        let is_current = *of == epoch;
        Some(LastHeartbeat {
            seconds_ago: now.saturating_duration_since(*at).as_secs(),
            interval_seconds: response.heartbeat_seconds,
            plan_revision: response.plan_revision.clone(),
            settled: is_current.then(|| response.settled.clone()),
            resend: is_current.then(|| response.resend.clone()),
        })
    }
}

/// Evidence in a heartbeat, without values that change continuously. A difference is worth a heartbeat of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Evidence {
    /// Revision of the plan in force.
    pub(crate) plan_revision: Option<String>,
    /// The newest plan or settings were refused.
    pub(crate) is_plan_refused: bool,
    /// Every watch of the plan is listed and has no error.
    pub(crate) is_listed: bool,
    /// The canary came back recently.
    pub(crate) is_canary_fresh: bool,
    /// See [`tidewatch_contract::heartbeat::Heartbeat::incomplete`].
    pub(crate) is_incomplete: bool,
}

impl Core {
    /// The current evidence of the watches, with that from outside the core.
    pub(crate) fn evidence(&self, is_canary_fresh: bool, is_incomplete: bool) -> Evidence {
        self.with(|state| Evidence {
            plan_revision: state.plan_revision.clone(),
            is_plan_refused: state.plan_error.is_some(),
            is_listed: state.watches.values().all(|watched| watched.error.is_none() && watched.counts_as_listed()),
            is_canary_fresh,
            is_incomplete,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};
    use tidewatch_api::plan::Plan;
    use tidewatch_contract::exchange::EventsResponse;

    use super::*;
    use crate::{core::event_path, telemetry::Metrics};

    fn response(more: &Value) -> HeartbeatResponse {
        let mut response = json!({"instance": "00000000000000ff", "settled": {"w": 7}, "heartbeatSeconds": 30,
            "planRevision": "p", "serverTime": ""});
        response.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(response).unwrap()
    }

    #[test]
    fn settled_and_resend_hold_in_their_own_epoch_only() {
        let mut heartbeats = HeartbeatLog::default();
        let at = Instant::now();
        assert_eq!(heartbeats.last_response(Epoch::new(1), at), None);
        heartbeats.apply_response(at, Epoch::new(1), &response(&json!({"resend": ["v"]})));
        let response = LastHeartbeat {
            seconds_ago: 5,
            interval_seconds: 30,
            plan_revision: Some("p".into()),
            settled: Some([("w".to_owned(), 7)].into()),
            resend: Some(vec!["v".into()]),
        };
        let now = at + Duration::from_secs(5);
        assert_eq!(heartbeats.last_response(Epoch::new(1), now), Some(response.clone()));
        assert_eq!(
            heartbeats.last_response(Epoch::new(2), now),
            Some(LastHeartbeat { settled: None, resend: None, ..response })
        );
    }

    #[test]
    fn resends_and_lost_events_are_counted() {
        let core = Core::new("r-1".parse().unwrap(), 100, Metrics::default());
        let now = Instant::now();
        let watch = json!({"name": "w", "group": "g", "version": "v1", "resource": "things", "field": "spec",
            "manager": "m", "work": ["kyma"]});
        let plan = Plan::parse(&json!({"revision": "p", "watches": [watch]}).to_string()).unwrap();
        let id = core.follow(&plan).started[0].id;
        core.list_begun(id);
        core.list_complete(id, now);
        assert_eq!(core.snapshot(now, None).path, event_path::unknown());
        let epoch = core.plain_heartbeat().epoch;
        assert_ne!(core.snapshot(now, None).path, event_path::unknown());
        core.apply_heartbeat_response(
            now,
            epoch,
            &response(&json!({"settled": {}, "resend": ["w", "of another plan"]})),
        );
        let snapshot = core.snapshot(now, None);
        assert_eq!((snapshot.resends, snapshot.gaps, snapshot.accepted), (1, 0, 0));

        let batch = core.batch(now).unwrap();
        let instance = response(&json!({})).instance;
        let settled = [].into();
        let refused = Vec::new();
        let accepted = EventsResponse { instance, accepted: 1, since: 1, settled, refused, heartbeat_seconds: 30 };
        core.apply_response(now, batch.epoch, &accepted);
        assert_eq!(core.snapshot(now, None).accepted, 1);
        core.apply_heartbeat_response(now, batch.epoch, &response(&json!({"settled": {}, "since": 2})));
        let snapshot = core.snapshot(now, None);
        assert_eq!((snapshot.resends, snapshot.gaps, snapshot.accepted), (1, 1, 0), "a new epoch has begun");
        assert!(snapshot.heartbeat.is_some_and(|heartbeat| heartbeat.resend.is_none()));
    }
}
