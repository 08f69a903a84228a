//! Events of module objects, which the reconciles of Manifests settle.

use std::sync::mpsc;

use tidewatch_api::key::ManifestKey;
use tidewatch_kit::metrics::Registry;

use super::*;
use crate::{
    ModuleReport,
    manifest_queue::{self, ManifestQueue},
};

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

/// Reports of a table that no queue settles.
fn reports(fleet: &RuntimeTable) -> mpsc::Receiver<ModuleReport> {
    let (sender, reports) = mpsc::channel();
    fleet.report_modules_to(Box::new(move |report| sender.send(report).unwrap()));
    reports
}

fn settled(fleet: &RuntimeTable, counter: u64) -> u64 {
    send_heartbeat(fleet, 0, counter).settled.get("w").copied().unwrap_or_default()
}

#[tokio::test(start_paused = true)]
async fn report_settles_the_events_before_it() {
    let fleet = table();
    send(&fleet, 0, 1).unwrap();
    let reports = reports(&fleet);
    let report = reports.try_recv().expect("it waited");
    assert_eq!(report.kyma, key(0));
    let Drift::Objects(objects) = &report.drift else { panic!("{:?}", report.drift) };
    let subjects: Vec<_> = objects.iter().map(|object| object.subject.to_string()).collect();
    assert_eq!(subjects, ["/v1/things//"], "any object of the watch");
    send(&fleet, 0, 2).unwrap();
    assert_eq!(settled(&fleet, 1), 0);
    fleet.modules_settled(&report);
    assert_eq!(settled(&fleet, 2), 1);
    let next = reports.try_recv().unwrap();
    fleet.modules_settled(&next);
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
    fleet.connect_modules(queue.clone(), move |_| vec![(manifest.clone(), Drift::All)]);
    send(&fleet, 0, 1).unwrap();
    fleet.drain(fleet.shard_of(Some(&id(0)), "")).await;
    assert!(queue.next().now_or_never().is_none(), "the next holder reconciles the Manifest");
    send(&fleet, 0, 2).unwrap();
    assert_eq!(settled(&fleet, 1), 0);
}

#[tokio::test(start_paused = true)]
async fn report_of_an_earlier_kyma_settles_nothing() {
    let fleet = table();
    let reports = reports(&fleet);
    send(&fleet, 0, 1).unwrap();
    let report = reports.try_recv().unwrap();
    let watch = json!({"name": "w", "version": "v1", "resource": "things", "field": "spec", "manager": "m",
                       "work": ["manifest"]});
    let plan = Plan::parse(&json!({"revision": "1", "watches": [watch]}).to_string()).unwrap();
    fleet.remove(&key(0));
    fleet.place(key(0), "", Some(id(0)), Arc::new(plan));
    send(&fleet, 0, 1).unwrap();
    fleet.modules_settled(&report);
    assert_eq!(settled(&fleet, 1), 0);
}

#[tokio::test(start_paused = true)]
async fn removed_kyma_has_no_report() {
    let fleet = table();
    send(&fleet, 0, 1).unwrap();
    fleet.remove(&key(0));
    assert!(reports(&fleet).try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn report_is_settled_by_the_reconcile_of_its_manifest() {
    let fleet = table();
    let metrics = manifest_queue::Metrics::register(&mut Registry::default());
    let queue = ManifestQueue::new(manifest_queue::Settings::default(), metrics, fleet.tenures());
    let manifest = ManifestKey::new("kcp-system", "m");
    queue.insert(manifest.clone(), key(0));
    fleet.connect_modules(queue.clone(), move |_| vec![(manifest.clone(), Drift::All)]);
    send(&fleet, 0, 1).unwrap();
    let job = queue.next().await;
    // Its reconcile may have read the objects before this change.
    send(&fleet, 0, 2).unwrap();
    queue.done(job, ReconcileOutcome::ended(WorkSet::MANIFEST));
    assert_eq!(settled(&fleet, 1), 1);
    let job = queue.next().await;
    queue.done(job, ReconcileOutcome::ended(WorkSet::MANIFEST));
    assert_eq!(settled(&fleet, 2), 2);
}
