//! A watch of the plan, and a receiver that takes what comes of it.

use tidewatch_agent::{
    core::Core,
    reading::{self, Heard, WatchReading},
    telemetry::Metrics,
};
use tidewatch_shared::{identity::Instance, plan::Plan};
use tokio::time::Instant;

use super::reception::{RUNTIME, Reception, watches};

/// Objects of the watch, at most.
const CAP: usize = 6;
/// Bytes of a resource version, at most.
const VERSION: usize = 128;
const PLAN: &str = r#"{"revision": "1", "watches": [{"name": "w", "group": "operator.kyma-project.io", "version": "v1beta2",
    "resource": "kymas", "field": "status", "manager": "lifecycle-manager", "work": ["kyma"]}]}"#;

/// Pages of a list until one is the last, then lines of a watch until one ends it, and so on; an empty line has the events sent. A line
/// that is refused changes nothing, versions do not go back, objects are bounded, what is sent is read by the receiver, and its digest
/// is that of the agent. Where frames end is nothing to lines.
pub fn watch(data: &[u8]) {
    let lines = reading::lines([data]);
    for size in [1, 7] {
        assert_eq!(reading::lines(data.chunks(size)), lines);
    }
    let core = Core::new(RUNTIME.clone(), CAP, Metrics::default()).bounded(CAP);
    let plan = Plan::parse(PLAN).expect("this is a plan");
    let started = core.follow(&plan).started.remove(0);
    let mut reading = WatchReading::new(started, "kyma-system", core.clone());
    let now = Instant::now();
    let mut reception = Reception::new(Instance::new(1), core.clone(), plan, now);
    let mut watching = false;
    for line in lines.unwrap_or_default() {
        let version = reading.version().to_owned();
        if line.is_empty() {
            reception.take();
        } else if watching {
            let before = (core.figures(), watches(&core, now));
            let heard = reading.line(&line);
            watching = heard != Heard::Relist;
            if heard == Heard::Taken {
                follows(&version, reading.version());
            } else {
                assert_eq!((core.figures(), watches(&core, now)), before, "what is not taken changes nothing");
                assert_eq!(reading.version(), version);
            }
        } else {
            watching = reading.page(&line) == Heard::Taken && !reading.is_listing();
        }
        assert!(core.figures().objects <= CAP);
    }
    reception.take();
}

fn follows(before: &str, after: &str) {
    assert!((1..=VERSION).contains(&after.len()));
    if let (Ok(before), Ok(after)) = (before.parse::<u64>(), after.parse::<u64>()) {
        assert!(before <= after, "versions went back, and nobody said so");
    }
}
