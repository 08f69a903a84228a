//! Events of module objects, until a queue takes them.

use super::*;

/// A table with a Kyma that has only a watch on module objects.
pub(crate) fn table() -> RuntimeTable {
    let fleet = fleet(4);
    place_watched(&fleet, 0);
    fleet.set_synced();
    fleet
}

/// Places a Kyma that has only a watch on module objects.
pub(crate) fn place_watched(fleet: &RuntimeTable, runtime: u32) {
    let watch = json!({"name": "w", "version": "v1", "resource": "things", "field": "spec", "manager": "m",
                       "work": ["manifest"]});
    let plan = Plan::parse(&json!({"revision": "1", "watches": [watch]}).to_string()).unwrap();
    fleet.place(key(runtime), "", Some(id(runtime)), Arc::new(plan));
}

pub(crate) fn settled(fleet: &RuntimeTable, counter: u64) -> u64 {
    send_heartbeat(fleet, 0, counter).settled.get("w").copied().unwrap_or_default()
}

#[tokio::test(start_paused = true)]
async fn report_settles_the_events_before_it() {
    let fleet = table();
    send(&fleet, 0, 1).unwrap();
    let report = fleet.take_module_report().unwrap();
    assert_eq!(report.events.kyma, key(0));
    let Drift::Objects(objects) = &report.drift else { panic!("{:?}", report.drift) };
    let subjects: Vec<_> = objects.iter().map(|object| object.subject.to_string()).collect();
    assert_eq!(subjects, ["/v1/things//"], "any object of the watch");
    send(&fleet, 0, 2).unwrap();
    assert_eq!(settled(&fleet, 1), 0);
    fleet.modules_settled(&report.events);
    assert_eq!(settled(&fleet, 2), 1);
    let next = fleet.take_module_report().unwrap();
    fleet.modules_settled(&next.events);
    assert_eq!(settled(&fleet, 3), 2);
    assert!(fleet.next().now_or_never().is_none(), "no work on the Kyma");
}

#[tokio::test(start_paused = true)]
async fn report_of_an_earlier_kyma_settles_nothing() {
    let fleet = table();
    send(&fleet, 0, 1).unwrap();
    let report = fleet.take_module_report().unwrap();
    fleet.remove(&key(0));
    place_watched(&fleet, 0);
    send(&fleet, 0, 1).unwrap();
    fleet.modules_settled(&report.events);
    assert_eq!(settled(&fleet, 1), 0);
}

#[tokio::test(start_paused = true)]
async fn removed_kyma_has_no_report() {
    let fleet = table();
    send(&fleet, 0, 1).unwrap();
    fleet.remove(&key(0));
    assert!(fleet.take_module_report().is_none());
}
