//! A watch of the plan, and a receiver that accepts its events.

use tidewatch_agent::{
    core::Core,
    telemetry::Metrics,
    testing::{self, Decoded, WatchDecoder},
};
use tidewatch_api::{identity::Instance, plan::Plan};
use tokio::time::Instant;

use super::receiver_peer::{RUNTIME, ReceiverPeer, watches};

/// Most objects of the watch.
const MAX_OBJECTS: usize = 6;
/// Most bytes of a resource version.
const MAX_VERSION_BYTES: usize = 128;
const PLAN: &str = r#"{"revision": "1", "watches": [{"name": "w", "group": "operator.kyma-project.io", "version": "v1beta2",
    "resource": "kymas", "field": "status", "manager": "lifecycle-manager", "work": ["kyma"]}]}"#;

/// Pages of a list until the last one, then lines of a watch until one ends it, and so on; an empty line lets the agent
/// send its events. A refused line changes nothing, versions do not go back, objects are bounded, the receiver can
/// parse every batch, and its digest equals the agent's. Frame boundaries do not matter.
pub fn watch(data: &[u8]) {
    let lines = testing::lines([data]);
    for size in [1, 7] {
        assert_eq!(testing::lines(data.chunks(size)), lines);
    }
    let core = Core::new(RUNTIME.clone(), MAX_OBJECTS, Metrics::default()).bounded(MAX_OBJECTS);
    let plan = Plan::parse(PLAN).expect("this is a plan");
    let started = core.follow(&plan).started.remove(0);
    let mut reading = WatchDecoder::new(started, "kyma-system", core.clone());
    let now = Instant::now();
    let mut receiver = ReceiverPeer::new(Instance::new(1), core.clone(), plan, now);
    let mut watching = false;
    for line in lines.unwrap_or_default() {
        let version = reading.version().to_owned();
        if line.is_empty() {
            receiver.accept_all();
        } else if watching {
            let before = (core.figures(), watches(&core, now));
            let outcome = reading.line(&line);
            watching = outcome != Decoded::Relist;
            if outcome == Decoded::Accepted {
                follows(&version, reading.version());
            } else {
                assert_eq!((core.figures(), watches(&core, now)), before, "a refused line changes nothing");
                assert_eq!(reading.version(), version);
            }
        } else {
            watching = reading.page(&line) == Decoded::Accepted && !reading.is_listing();
        }
        assert!(core.figures().objects <= MAX_OBJECTS);
    }
    receiver.accept_all();
}

fn follows(before: &str, after: &str) {
    assert!((1..=MAX_VERSION_BYTES).contains(&after.len()));
    if let (Ok(before), Ok(after)) = (before.parse::<u64>(), after.parse::<u64>()) {
        assert!(before <= after, "the resource version went back without a relist");
    }
}
