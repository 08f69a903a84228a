//! What the receiver answers, one request after the other.

use http::{HeaderMap, StatusCode};
use tidewatch_agent::{
    core::{Core, Seen, Uid, Version},
    link::{Answer, Verdict, judge},
    telemetry::Metrics,
};
use tidewatch_shared::{
    exchange::{EventsAnswer, HeartbeatAnswer},
    identity::{Epoch, Instance},
    plan::Plan,
};
use tokio::time::Instant;

use super::reception::{LATER, RUNTIME, Reception, dirty, heartbeat, read};
use crate::fuzz::seeds::{EPOCH, NOW};

/// Objects of each watch.
const OBJECTS: usize = 3;
/// The one that everybody trusts in the end; fuzzing has the others.
const LAST: Instance = Instance::new(0x5eed_5eed_5eed_5eed);
const PLAN: &str = r#"{"revision": "1", "watches": [
    {"name": "f", "group": "g", "version": "v1", "resource": "things", "field": "spec", "manager": "m", "work": ["forward"]},
    {"name": "w", "group": "g", "version": "v1", "resource": "things", "field": "spec", "manager": "m", "work": ["kyma"]}]}"#;

/// Answers of the receiver, one a line, each a status and a body: 202 answers events, 200 a heartbeat, and everything else refuses
/// events. The epoch that is spoken of is put where a seed has one. No answer takes an event from the agent but by settling it, what is
/// sent is read by the receiver, and a receiver that takes everything ends up with everything.
pub fn answers(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let core = Core::new(RUNTIME.clone(), OBJECTS * 2, Metrics::default()).bounded(OBJECTS * 4);
    let plan = Plan::parse(PLAN).expect("this is a plan");
    fill(&core, &plan);
    let (mut now, mut settled) = (Instant::now(), false);
    let held = dirty(&core);
    for line in text.lines() {
        now += LATER;
        let (status, body) = line.split_once(' ').unwrap_or((line, ""));
        let Ok(status) = status.parse::<StatusCode>() else { continue };
        settled |= if status == StatusCode::OK {
            beat(&core, body, now)
        } else {
            let Some(batch) = core.batch(now) else { continue };
            read(&batch);
            answered(&core, batch.epoch, status, body, now)
        };
        assert!(settled || dirty(&core) >= held, "an event is lost");
    }
    Reception::new(LAST, core, plan, now).take();
}

/// Lists some objects in each watch.
fn fill(core: &Core, plan: &Plan) {
    let object = |number: usize| {
        let seen = Seen { uid: Uid::from("u"), version: Version::Number(1), generation: None, metadata: 0 };
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

/// Answers a heartbeat; true if that may have settled something.
fn beat(core: &Core, body: &str, now: Instant) -> bool {
    let heartbeat = heartbeat(core, now);
    let body = body.replace(EPOCH, &heartbeat.epoch.to_string());
    let Ok(answer) = serde_json::from_str::<HeartbeatAnswer>(&body) else { return false };
    let written = serde_json::to_string(&answer).expect("an answer is JSON");
    assert_eq!(serde_json::from_str::<HeartbeatAnswer>(&written).ok().as_ref(), Some(&answer));
    core.heartbeat_answered(now, heartbeat.epoch, &answer);
    !answer.settled.is_empty()
}

/// Answers events; true if that may have settled something.
fn answered(core: &Core, epoch: Epoch, status: StatusCode, body: &str, now: Instant) -> bool {
    let body = body.replace(EPOCH, &epoch.to_string());
    if status == StatusCode::ACCEPTED {
        let Ok(answer) = serde_json::from_str::<EventsAnswer>(&body) else { return false };
        let written = serde_json::to_string(&answer).expect("an answer is JSON");
        assert_eq!(serde_json::from_str::<EventsAnswer>(&written).ok().as_ref(), Some(&answer));
        core.answered(now, epoch, &answer);
        return !answer.settled.is_empty();
    }
    match judge(&Answer { status, headers: HeaderMap::new(), body: body.into() }, NOW) {
        Verdict::Split => drop(core.refused_whole(now, epoch)),
        Verdict::TooLarge(announced) => drop(core.too_large(now, epoch, announced)),
        Verdict::NewEpoch => core.start_over(),
        Verdict::Clock { .. } | Verdict::Certificate | Verdict::Told(_) | Verdict::BackOff => {}
    }
    false
}
