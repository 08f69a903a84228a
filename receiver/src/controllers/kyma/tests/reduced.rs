//! Kymas with Manifests of which the cache has only the facts.

use kube::runtime::watcher::Event;

use super::*;

/// One that took them for deleted ones would create them again, or remove the modules of deselected ones.
#[tokio::test]
async fn manifests_without_bodies_are_read_from_the_control_plane() {
    let mut bed = Bed::settled().await;
    bed.enable();
    bed.kyma().await;
    bed.kyma().await;
    bed.watch_manifests();
    let manifests = bed.ctx.stores.manifests.of_kyma(&bed.key, None).unwrap();
    assert_eq!(manifests.len(), 1);
    for manifest in &manifests {
        bed.manifests.apply_watcher_event(&Event::Apply(CachedManifest::reduced(manifest)));
    }
    bed.forget_calls();
    let queued = QueuedWork { work: WorkSet::of(&[Work::Kyma]), priority: Priority::User, drift: Drift::None };
    let outcome = run_within(&bed.ctx, &bed.key, &queued, TIME_LIMIT).await;
    assert_eq!(outcome, ReconcileOutcome::ended(queued.work));
    let calls = bed.kcp.calls();
    assert!(calls.contains(&"GET manifests".to_owned()), "{calls:?}");
    assert!(calls.iter().all(|call| call.starts_with("GET")), "{calls:?}");
    assert_eq!(bed.status()["modules"].as_array().unwrap().len(), 1);
}
