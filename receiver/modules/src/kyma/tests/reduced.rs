//! Kymas with Manifests, or with an access Secret, of which the cache has only the facts.

use kube::runtime::watcher::Event;
use tidewatch_cluster::body_missing::BodyMissingError;

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

/// The access Secret of a runtime that came into the shard a moment ago has no body yet.
fn without_body(bed: &mut Bed) -> Clients {
    let missing = || BodyMissingError { kind: "access Secret", key: "ns/access".to_owned() };
    std::mem::replace(&mut bed.ctx.clients, Box::new(move |_| Err(missing().into())))
}

#[tokio::test]
async fn access_whose_body_is_missing_is_retried_and_reported_nowhere() {
    let mut bed = Bed::with_keda().await;
    let status = bed.status();
    drop(without_body(&mut bed));
    bed.forget_calls();
    for works in [WorkSet::of(&[Work::Kyma]), WorkSet::of(&[Work::Catalog]), WorkSet::INSTALLER] {
        let outcome = bed.reconcile(works, Drift::None).await;
        assert_eq!((outcome.failed, outcome.class), (works, Some(ErrorClass::Ours)), "{works:?}");
    }
    assert_eq!((bed.status(), bed.kcp.writes(), bed.runtime.calls()), (status, vec![], vec![]));
}

#[tokio::test]
async fn status_that_cannot_be_written_without_the_body_of_the_access_reaches_the_runtime_later() {
    let mut bed = Bed::with_keda().await;
    let usable = without_body(&mut bed);
    let (id, _) = bed.manifest().unwrap();
    bed.kcp.edit(&id, |manifest| manifest["status"] = json!({"state": "Error"}));
    assert_eq!(bed.reconcile(WorkSet::STATUS, Drift::None).await.failed, WorkSet::STATUS);
    bed.ctx.clients = usable;
    bed.kyma().await;
    assert_eq!(bed.shown()["state"], "Error");
}

#[tokio::test]
async fn access_whose_body_is_missing_lets_no_runtime_count_as_gone() {
    let mut bed = Bed::settled().await;
    bed.ctx.settings.runtime_gone_after = Duration::ZERO;
    let usable = without_body(&mut bed);
    bed.delete();
    let status = bed.status();
    for _ in 0..3 {
        let outcome = bed.kyma().await;
        assert_eq!(outcome, ReconcileOutcome::failed(WorkSet::of(&[Work::Kyma]), ErrorClass::Ours));
    }
    assert!(bed.kcp.object("kymas/k").is_some());
    assert_eq!((bed.status(), bed.runtime.writes()), (status, vec![]));
    bed.ctx.clients = usable;
    bed.kyma().await;
    assert_eq!(bed.status()["state"], "Deleting");
}
