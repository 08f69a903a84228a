//! Manifests of which the cache has only the facts, or only those of the access Secret of their runtime.

use super::*;

async fn outcome(fixture: &Fixture) -> ReconcileOutcome {
    let queued = QueuedWork { work: WorkSet::MANIFEST, priority: Priority::User, drift: Drift::All };
    run_within(&fixture.ctx, &key(), &queued, Duration::from_secs(60)).await
}

/// A reconcile that took one for a deleted Manifest would settle its changes.
#[tokio::test(start_paused = true)]
async fn manifest_without_a_body_is_reconciled_later_and_causes_no_request() {
    let mut fixture = Fixture::new();
    fixture.reconcile().await;
    let whole = fixture.manifest().unwrap();
    fixture.manifests.apply_watcher_event(&watcher::Event::Apply(CachedManifest::reduced(&whole)));
    for server in [&fixture.kcp, &fixture.runtime] {
        server.calls();
    }
    let failed = ReconcileOutcome::failed(WorkSet::MANIFEST, ErrorClass::Ours);
    assert_eq!(outcome(&fixture).await, failed);
    assert_eq!((fixture.kcp.calls(), fixture.runtime.calls()), (Vec::new(), Vec::new()));

    fixture.manifests.apply_watcher_event(&watcher::Event::Apply(whole.into()));
    assert_ne!(outcome(&fixture).await, failed);
    assert!(!fixture.runtime.calls().is_empty());
}

/// Whether another Manifest replaces it is not known before the body of that one is.
#[tokio::test(start_paused = true)]
async fn manifest_beside_one_without_a_body_is_reconciled_later() {
    let mut fixture = Fixture::new();
    fixture.edit(|manifest| manifest["metadata"]["labels"][label::MODULE_NAME] = json!("sample"));
    let whole = fixture.manifest().unwrap();
    let mut other = whole.clone();
    other.metadata.name = Some("other".to_owned());
    let other = CachedManifest::reduced(&other);
    fixture.manifests.apply_watcher_event(&watcher::Event::Apply(whole.into()));
    fixture.manifests.apply_watcher_event(&watcher::Event::Apply(other.clone()));
    fixture.ctx.stores.manifests.apply(&other);
    fixture.kcp.calls();
    assert_eq!(outcome(&fixture).await, ReconcileOutcome::failed(WorkSet::MANIFEST, ErrorClass::Ours));
    assert_eq!((fixture.kcp.writes(), fixture.runtime.calls()), (Vec::new(), Vec::new()));
}

#[tokio::test(start_paused = true)]
async fn access_whose_body_is_missing_is_retried_and_changes_nothing() {
    let mut fixture = Fixture::installed().await;
    let before = fixture.state();
    let key = KymaKey::new("ns", "access");
    fixture.ctx.clients =
        Box::new(move |_| Err(BodyMissingError { kind: "access Secret", key: key.to_string() }.into()));
    assert_eq!(fixture.reconcile().await, ReconcileOutcome::failed(WorkSet::MANIFEST, ErrorClass::Ours));
    assert_eq!(fixture.state(), before);
}
