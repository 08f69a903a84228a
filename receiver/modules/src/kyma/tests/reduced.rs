//! Kymas with Manifests, or with an access Secret, of which the cache has only the facts.

use kube::runtime::watcher::Event;
use tidewatch_cluster::body_missing::BodyMissingError;

use super::*;

/// One that took them for deleted ones would create them again, or remove the modules of deselected ones.
#[tokio::test]
async fn manifests_without_bodies_are_read_from_the_control_plane() {
    let mut fixture = Fixture::settled().await;
    fixture.enable();
    fixture.kyma().await;
    fixture.kyma().await;
    fixture.watch_manifests();
    let manifests = fixture.ctx.stores.manifests.of_kyma(&fixture.key, None).unwrap();
    assert_eq!(manifests.len(), 1);
    for manifest in &manifests {
        fixture.manifests.apply_watcher_event(&Event::Apply(CachedManifest::reduced(manifest)));
    }
    fixture.forget_calls();
    let queued = QueuedWork { work: WorkSet::of(&[Work::Kyma]), priority: Priority::User, drift: Drift::None };
    let outcome = run_within(&fixture.ctx, &fixture.key, &queued, TIME_LIMIT).await;
    assert_eq!(outcome, ReconcileOutcome::ended(queued.work));
    let calls = fixture.kcp.calls();
    assert!(calls.contains(&"GET manifests".to_owned()), "{calls:?}");
    assert!(calls.iter().all(|call| call.starts_with("GET")), "{calls:?}");
    assert_eq!(fixture.status()["modules"].as_array().unwrap().len(), 1);
}

/// The access Secret of a runtime that came into the shard a moment ago has no body yet.
fn without_body(fixture: &mut Fixture) -> Clients {
    let missing = || BodyMissingError { kind: "access Secret", key: "ns/access".to_owned() };
    std::mem::replace(&mut fixture.ctx.clients, Box::new(move |_| Err(missing().into())))
}

#[tokio::test]
async fn access_whose_body_is_missing_is_retried_and_reported_nowhere() {
    let mut fixture = Fixture::with_keda().await;
    let status = fixture.status();
    drop(without_body(&mut fixture));
    fixture.forget_calls();
    for works in [WorkSet::of(&[Work::Kyma]), WorkSet::of(&[Work::Catalog]), WorkSet::INSTALLER] {
        let outcome = fixture.reconcile(works, Drift::None).await;
        assert_eq!((outcome.failed, outcome.class), (works, Some(ErrorClass::Ours)), "{works:?}");
    }
    assert_eq!((fixture.status(), fixture.kcp.writes(), fixture.runtime.calls()), (status, vec![], vec![]));
}

#[tokio::test]
async fn status_that_cannot_be_written_without_the_body_of_the_access_reaches_the_runtime_later() {
    let mut fixture = Fixture::with_keda().await;
    let usable = without_body(&mut fixture);
    let (id, _) = fixture.manifest().unwrap();
    fixture.kcp.edit(&id, |manifest| manifest["status"] = json!({"state": "Error"}));
    assert_eq!(fixture.reconcile(WorkSet::STATUS, Drift::None).await.failed, WorkSet::STATUS);
    fixture.ctx.clients = usable;
    fixture.kyma().await;
    assert_eq!(fixture.shown()["state"], "Error");
}

#[tokio::test]
async fn access_whose_body_is_missing_lets_no_runtime_count_as_gone() {
    let mut fixture = Fixture::settled().await;
    fixture.ctx.runtime_gone_after = Duration::ZERO;
    let usable = without_body(&mut fixture);
    fixture.delete();
    let status = fixture.status();
    for _ in 0..3 {
        let outcome = fixture.kyma().await;
        assert_eq!(outcome, ReconcileOutcome::failed(WorkSet::of(&[Work::Kyma]), ErrorClass::Ours));
    }
    assert!(fixture.kcp.object("kymas/k").is_some());
    assert_eq!((fixture.status(), fixture.runtime.writes()), (status, vec![]));
    fixture.ctx.clients = usable;
    fixture.kyma().await;
    assert_eq!(fixture.status()["state"], "Deleting");
}
