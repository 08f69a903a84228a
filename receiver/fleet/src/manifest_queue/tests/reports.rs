//! Reports of changed module objects, which the reconciles of Manifests settle.

use super::*;
use crate::table::tests::{
    fleet, id, key,
    modules::{place_watched, settled, table},
    send, send_heartbeat,
};

/// A table with a queue of these Manifests and their Kymas. Reports affect the Manifests in `affected`.
fn connected(manifests: &[(&str, u32)], affected: &[&str]) -> (RuntimeTable, ManifestQueue) {
    let fleet = table();
    let metrics = Metrics::register(&mut Registry::default());
    let queue = ManifestQueue::new(Settings::default(), metrics, fleet.tenures());
    let named = |name: &str| ManifestKey::new("kcp-system", name);
    manifests.iter().for_each(|(name, kyma)| queue.insert(named(name), key(*kyma)));
    let affected: Vec<_> = affected.iter().map(|name| (named(name), Drift::All)).collect();
    queue.connect_reports(&fleet, move |_| affected.clone());
    (fleet, queue)
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
    let metrics = Metrics::register(&mut Registry::default());
    let queue = ManifestQueue::new(Settings::default(), metrics, fleet.tenures());
    (0..50).for_each(|runtime| drop(send(&fleet, runtime, 1).unwrap()));
    queue.connect_reports(&fleet, |_| Vec::new());
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
