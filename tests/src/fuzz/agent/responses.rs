//! Responses of the receiver, one request after the other.

use http::{HeaderMap, StatusCode};
use tidewatch_agent::{
    core::{Core, ObjectState, Uid, Version},
    receiver::{BufferedResponse, RefusalAction, classify_refusal},
    telemetry::Metrics,
};
use tidewatch_api::{
    identity::{Epoch, Instance},
    plan::Plan,
};
use tidewatch_contract::exchange::{EventsResponse, HeartbeatResponse};
use tokio::time::Instant;

use super::receiver_peer::{LONG_WAIT, RUNTIME, ReceiverPeer, heartbeat, read, unfinished};
use crate::fuzz::seeds::{EPOCH, NOW};

/// Objects of each watch.
const OBJECTS: usize = 3;
/// The instance that ends the run; seeds and mutations hardly contain its id.
const FINAL_INSTANCE: Instance = Instance::new(0x5eed_5eed_5eed_5eed);
const PLAN: &str = r#"{"revision": "1", "watches": [
    {"name": "f", "group": "g", "version": "v1", "resource": "things", "field": "spec", "manager": "m", "work": ["forward"]},
    {"name": "w", "group": "g", "version": "v1", "resource": "things", "field": "spec", "manager": "m", "work": ["kyma"]}]}"#;

/// Responses of the receiver, one per line, each a status and a body: 202 answers events, 200 a heartbeat, and any
/// other status refuses events. The epoch placeholder of a seed is replaced by the current epoch. No response removes
/// an event from the agent except by settling it, the receiver can parse every batch, and a receiver that accepts
/// everything ends up with everything.
pub fn answers(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let core = Core::new(RUNTIME.clone(), OBJECTS * 2, Metrics::default()).bounded(OBJECTS * 4);
    let plan = Plan::parse(PLAN).expect("this is a plan");
    fill(&core, &plan);
    let mut now = Instant::now();
    let mut settled = false;
    let held = unfinished(&core);
    for line in text.lines() {
        now += LONG_WAIT;
        let (status, body) = line.split_once(' ').unwrap_or((line, ""));
        let Ok(status) = status.parse::<StatusCode>() else { continue };
        settled |= if status == StatusCode::OK {
            beat(&core, body, now)
        } else {
            let Some(batch) = core.batch(now) else { continue };
            read(&batch);
            answered(&core, batch.epoch, status, body, now)
        };
        assert!(settled || unfinished(&core) >= held, "an event is lost");
    }
    ReceiverPeer::new(FINAL_INSTANCE, core, plan, now).accept_all();
}

/// Lists some objects in each watch.
fn fill(core: &Core, plan: &Plan) {
    let object = |number: usize| {
        let seen = ObjectState { uid: Uid::from("u"), version: Version::Number(1), generation: None, metadata: 0 };
        (format!("ns/{number}").into(), seen)
    };
    let now = Instant::now();
    for started in core.follow(plan).started {
        core.list_begun(started.id);
        core.list_complete(started.id, now);
        for (key, seen) in (0..OBJECTS).map(object) {
            let key: Box<str> = key;
            core.present(started.id, &key, seen, now);
        }
    }
}

/// Answers a heartbeat; true if the response settles events.
fn beat(core: &Core, body: &str, now: Instant) -> bool {
    let heartbeat = heartbeat(core, now);
    let body = body.replace(EPOCH, &heartbeat.epoch.to_string());
    let Ok(response) = serde_json::from_str::<HeartbeatResponse>(&body) else { return false };
    let written = serde_json::to_string(&response).expect("an response is JSON");
    assert_eq!(serde_json::from_str::<HeartbeatResponse>(&written).ok().as_ref(), Some(&response));
    core.apply_heartbeat_response(now, heartbeat.epoch, &response);
    !response.settled.is_empty()
}

/// Answers events; true if the response settles events.
fn answered(core: &Core, epoch: Epoch, status: StatusCode, body: &str, now: Instant) -> bool {
    let body = body.replace(EPOCH, &epoch.to_string());
    if status == StatusCode::ACCEPTED {
        let Ok(response) = serde_json::from_str::<EventsResponse>(&body) else { return false };
        let written = serde_json::to_string(&response).expect("an response is JSON");
        assert_eq!(serde_json::from_str::<EventsResponse>(&written).ok().as_ref(), Some(&response));
        core.apply_response(now, epoch, &response);
        return !response.settled.is_empty();
    }
    match classify_refusal(&BufferedResponse { status, headers: HeaderMap::new(), body: body.into() }, NOW) {
        RefusalAction::Split => drop(core.refused_whole(now, epoch)),
        RefusalAction::TooLarge(announced) => drop(core.too_large(now, epoch, announced)),
        RefusalAction::NewEpoch => core.restart_epoch(),
        RefusalAction::Clock { .. }
        | RefusalAction::Certificate
        | RefusalAction::RetryAfter(_)
        | RefusalAction::BackOff => {}
    }
    false
}
