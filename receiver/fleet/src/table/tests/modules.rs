//! Events of module objects, which the reconciles of Manifests settle.

use tidewatch_api::key::ManifestKey;
use tidewatch_kit::metrics::Registry;

use super::*;
use crate::manifest_queue::{self, ManifestQueue};

/// A table with a Kyma that has only a watch on module objects.
fn table() -> RuntimeTable {
    let watch = json!({"name": "w", "version": "v1", "resource": "things", "field": "spec", "manager": "m",
                       "work": ["manifest"]});
    let plan = Plan::parse(&json!({"revision": "1", "watches": [watch]}).to_string()).unwrap();
    let fleet = fleet(4);
    fleet.place(key(0), "", Some(id(0)), Arc::new(plan));
    fleet.set_synced();
    fleet
}

fn settled(fleet: &RuntimeTable, counter: u64) -> u64 {
    send_heartbeat(fleet, 0, counter).settled.get("w").copied().unwrap_or_default()
}

#[tokio::test(start_paused = true)]
async fn report_settles_the_events_before_it() {
    let fleet = table();
    assert!(fleet.next_module_report().now_or_never().is_none());
    send(&fleet, 0, 1).unwrap();
    let report = fleet.next_module_report().await;
    assert_eq!(report.ticket.kyma, key(0));
    let Drift::Objects(objects) = &report.drift else { panic!("{:?}", report.drift) };
    let subjects: Vec<_> = objects.iter().map(|object| object.subject.to_string()).collect();
    assert_eq!(subjects, ["/v1/things//"], "any object of the watch");
    send(&fleet, 0, 2).unwrap();
    assert_eq!(settled(&fleet, 1), 0);
    fleet.modules_settled(&report.ticket);
    assert_eq!(settled(&fleet, 2), 1);
    let next = fleet.next_module_report().await;
    fleet.modules_settled(&next.ticket);
    assert_eq!(settled(&fleet, 3), 2);
    assert!(fleet.next().now_or_never().is_none(), "no work on the Kyma");
}

#[tokio::test(start_paused = true)]
async fn report_settles_nothing_while_its_shard_is_drained() {
    let fleet = table();
    let metrics = manifest_queue::Metrics::register(&mut Registry::default());
    let queue = ManifestQueue::new(manifest_queue::Settings::default(), metrics, fleet.tenures());
    let manifest = ManifestKey::new("kcp-system", "m");
    queue.insert(manifest.clone(), key(0));
    send(&fleet, 0, 1).unwrap();
    let report = || fleet.next_module_report().now_or_never().expect("a report").ticket;
    queue.report(vec![(manifest.clone(), Drift::All)], report());
    fleet.drain(fleet.shard_of(Some(&id(0)), "")).await;
    assert!(queue.next().now_or_never().is_none(), "the next holder reconciles the Manifest");
    send(&fleet, 0, 2).unwrap();
    queue.report(vec![(manifest, Drift::All)], report());
    fleet.modules_settled(&queue.next_settled().now_or_never().expect("no Manifest is left"));
    while let Some(ticket) = queue.next_settled().now_or_never() {
        fleet.modules_settled(&ticket);
    }
    assert_eq!(settled(&fleet, 1), 0);
}

#[tokio::test(start_paused = true)]
async fn report_of_an_earlier_kyma_settles_nothing() {
    let fleet = table();
    send(&fleet, 0, 1).unwrap();
    let report = fleet.next_module_report().await;
    let watch = json!({"name": "w", "version": "v1", "resource": "things", "field": "spec", "manager": "m",
                       "work": ["manifest"]});
    let plan = Plan::parse(&json!({"revision": "1", "watches": [watch]}).to_string()).unwrap();
    fleet.remove(&key(0));
    fleet.place(key(0), "", Some(id(0)), Arc::new(plan));
    send(&fleet, 0, 1).unwrap();
    fleet.modules_settled(&report.ticket);
    assert_eq!(settled(&fleet, 1), 0);
}

#[tokio::test(start_paused = true)]
async fn removed_kyma_has_no_report() {
    let fleet = table();
    send(&fleet, 0, 1).unwrap();
    fleet.remove(&key(0));
    assert!(fleet.next_module_report().now_or_never().is_none());
}
