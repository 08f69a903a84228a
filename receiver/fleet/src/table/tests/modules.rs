//! Events of module objects, which the reconciles of Manifests settle.

use tidewatch_api::key::ManifestKey;
use tidewatch_kit::metrics::Registry;

use super::*;
use crate::manifest_queue::{self, ManifestQueue};

/// A table with a Kyma that has only a watch on module objects.
fn table() -> RuntimeTable {
    let fleet = fleet(4);
    place_watched(&fleet, 0);
    fleet.set_synced();
    fleet
}

/// Places a Kyma that has only a watch on module objects.
fn place_watched(fleet: &RuntimeTable, runtime: u32) {
    let watch = json!({"name": "w", "version": "v1", "resource": "things", "field": "spec", "manager": "m",
                       "work": ["manifest"]});
    let plan = Plan::parse(&json!({"revision": "1", "watches": [watch]}).to_string()).unwrap();
    fleet.place(key(runtime), "", Some(id(runtime)), Arc::new(plan));
}

/// A table with a queue of these Manifests and their Kymas. Reports affect the Manifests in `affected`.
fn connected(manifests: &[(&str, u32)], affected: &[&str]) -> (RuntimeTable, ManifestQueue) {
    let fleet = table();
    let metrics = manifest_queue::Metrics::register(&mut Registry::default());
    let queue = ManifestQueue::new(manifest_queue::Settings::default(), metrics, fleet.tenures());
    let named = |name: &str| ManifestKey::new("kcp-system", name);
    manifests.iter().for_each(|(name, kyma)| queue.insert(named(name), key(*kyma)));
    let affected: Vec<_> = affected.iter().map(|name| (named(name), Drift::All)).collect();
    fleet.connect_modules(queue.clone(), move |_| affected.clone());
    (fleet, queue)
}

fn settled(fleet: &RuntimeTable, counter: u64) -> u64 {
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
async fn report_settles_nothing_while_its_shard_is_drained() {
    let (fleet, queue) = connected(&[("m", 0)], &["m"]);
    send(&fleet, 0, 1).unwrap();
    fleet.drain(fleet.shard_of(Some(&id(0)), "")).await;
    assert!(queue.next().now_or_never().is_none(), "the next holder reconciles the Manifest");
    send(&fleet, 0, 2).unwrap();
    assert!(queue.next().now_or_never().is_none(), "the queue has dropped it");
    assert_eq!(settled(&fleet, 1), 0);
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

#[tokio::test(start_paused = true)]
async fn report_is_settled_by_the_reconcile_of_its_manifest() {
    let (fleet, queue) = connected(&[("m", 0)], &["m"]);
    send(&fleet, 0, 1).unwrap();
    let job = queue.next().await;
    // Its reconcile may have read the objects before this change.
    send(&fleet, 0, 2).unwrap();
    queue.done(job, ReconcileOutcome::ended(WorkSet::MANIFEST));
    assert_eq!(settled(&fleet, 1), 1);
    let job = queue.next().await;
    queue.done(job, ReconcileOutcome::ended(WorkSet::MANIFEST));
    assert_eq!(settled(&fleet, 2), 2);
    send(&fleet, 0, 3).unwrap();
    let job = queue.next().await;
    queue.done(job, ReconcileOutcome::failed(WorkSet::MANIFEST, ErrorClass::Ours));
    assert_eq!(settled(&fleet, 3), 2, "it has no result");
    let job = queue.next().await;
    queue.done(job, ReconcileOutcome::ended(WorkSet::MANIFEST));
    assert_eq!(settled(&fleet, 4), 3);
}

/// A report that affects nothing is settled while the next one is taken.
#[tokio::test(start_paused = true)]
async fn reports_of_many_runtimes_that_affect_nothing_are_settled_by_one_worker() {
    let fleet = fleet(4);
    for runtime in 0..100 {
        place_watched(&fleet, runtime);
    }
    fleet.set_synced();
    let metrics = manifest_queue::Metrics::register(&mut Registry::default());
    let queue = ManifestQueue::new(manifest_queue::Settings::default(), metrics, fleet.tenures());
    (0..50).for_each(|runtime| drop(send(&fleet, runtime, 1).unwrap()));
    fleet.connect_modules(queue.clone(), |_| Vec::new());
    let mut worker = Box::pin(queue.next());
    assert!(worker.as_mut().now_or_never().is_none());
    (50..100).for_each(|runtime| drop(send(&fleet, runtime, 1).unwrap()));
    assert!(worker.as_mut().now_or_never().is_none(), "it was woken");
    for runtime in 0..100 {
        let settled = send_heartbeat(&fleet, runtime, 1).settled;
        assert_eq!(settled.get("w"), Some(&1), "{runtime}");
    }
}

#[tokio::test(start_paused = true)]
async fn report_waits_only_for_known_manifests_of_its_kyma() {
    let (fleet, queue) = connected(&[("theirs", 1)], &["unknown", "theirs"]);
    send(&fleet, 0, 1).unwrap();
    assert!(queue.next().now_or_never().is_none());
    assert_eq!(settled(&fleet, 1), 1);
}

#[tokio::test(start_paused = true)]
async fn report_does_not_wait_for_a_manifest_that_moved_to_another_kyma() {
    let (fleet, queue) = connected(&[("m", 0)], &["m"]);
    send(&fleet, 0, 1).unwrap();
    let _reconcile = queue.next().await;
    assert_eq!(settled(&fleet, 1), 0);
    queue.insert(ManifestKey::new("kcp-system", "m"), key(1));
    assert_eq!(settled(&fleet, 2), 1);
}
