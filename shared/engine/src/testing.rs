//! The contract of [`Store`], which each implementation proves in its tests.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic, in its helpers too")]

use kube::ResourceExt as _;
use serde_json::{Value, json};
use tidewatch_api::Manifest;
use tidewatch_cluster::object::is_conflict;

use super::Store;

/// Checks a store with three Manifests of a cluster that nobody else writes. They have different names and no finalizers. A
/// store that caches has the current state after `refresh`, but its own writes also before.
///
/// # Panics
/// If the store breaks the contract.
pub async fn check_store(
    store: &dyn Store,
    manifest: Manifest,
    other: Manifest,
    last: Manifest,
    mut refresh: impl FnMut(),
) {
    let finalizers = ["a.test/first", "b.test/second"];
    let held = patched(store, &manifest, json!({"finalizers": finalizers})).await;
    assert_eq!(held.finalizers(), finalizers);
    let annotated = patched(store, &held, json!({"annotations": {"a": "1", "b": "2"}})).await;
    let annotated = patched(store, &annotated, json!({"annotations": {"a": Value::Null}})).await;
    assert_eq!(annotated.annotations().iter().collect::<Vec<_>>(), [(&"b".to_owned(), &"2".to_owned())]);
    assert_eq!(
        (annotated.finalizers(), annotated.labels(), &annotated.spec),
        (held.finalizers(), manifest.labels(), &manifest.spec)
    );
    let same_object = |stored: &Manifest| stored.uid() == manifest.uid() && stored.uid().is_some();
    assert!(same_object(&annotated) && annotated.metadata.generation == manifest.metadata.generation);

    let synced = json!([{"group": "", "version": "v1", "kind": "ConfigMap", "namespace": "kyma-system", "name": "m"}]);
    let recorded = store.patch_status(&annotated, &json!({"state": "Processing", "synced": synced})).await.unwrap();
    let shown = store.patch_status(&recorded, &json!({"state": "Ready"})).await.unwrap();
    let status = shown.status.clone().unwrap();
    assert_eq!((json!(status.synced())[0]["name"].as_str(), json!(status.state)), (Some("m"), json!("Ready")));
    assert_eq!((shown.annotations(), &shown.spec), (annotated.annotations(), &manifest.spec));

    // Every older version is refused, whatever it would change.
    for old in [&manifest, &held, &annotated, &recorded] {
        let labelled = store.patch_metadata(old, json!({"labels": {"late": "true"}})).await;
        assert!(is_conflict(&labelled.unwrap_err()));
        assert!(is_conflict(&store.patch_status(old, &json!({"state": "Error"})).await.unwrap_err()));
    }

    let names = async || names(store, &other).await;
    let others = names().await;
    assert_eq!(others, sorted([manifest.name_any(), last.name_any()]));
    let seen = store.others(&other).await.unwrap();
    let seen = seen.iter().find(|seen| seen.name_any() == manifest.name_any()).unwrap();
    assert_eq!(seen.resource_version(), shown.resource_version(), "as last written");

    // Finalizers hold it.
    let deleted = store.delete(&shown).await.unwrap().unwrap();
    assert!(deleted.metadata.deletion_timestamp.is_some() && same_object(&deleted));
    assert_eq!(names().await, others, "its objects may still exist");
    let again = store.delete(&deleted).await.unwrap().unwrap();
    assert_eq!(again.metadata.deletion_timestamp, deleted.metadata.deletion_timestamp);
    let one_left = patched(store, &again, json!({"finalizers": [finalizers[0]]})).await;
    let none = Vec::<String>::new();
    assert!(store.patch_metadata(&one_left, json!({"finalizers": none})).await.unwrap().is_none());
    refresh();
    assert_eq!(names().await, [last.name_any()]);
    assert!(store.patch_metadata(&one_left, json!({"labels": {"late": "true"}})).await.unwrap().is_none());
    store.patch_status(&one_left, &json!({"state": "Error"})).await.unwrap_err();
    assert!(store.delete(&one_left).await.unwrap().is_none());

    // Nothing holds this one.
    assert!(store.delete(&last).await.unwrap().is_none());
    refresh();
    assert_eq!(names().await, Vec::<String>::new());
}

async fn patched(store: &dyn Store, manifest: &Manifest, members: Value) -> Manifest {
    let stored = store.patch_metadata(manifest, members).await.unwrap().unwrap();
    assert_ne!(stored.resource_version(), manifest.resource_version());
    stored
}

async fn names(store: &dyn Store, manifest: &Manifest) -> Vec<String> {
    let others = store.others(manifest).await.unwrap();
    sorted(others.iter().map(|other| other.name_any()))
}

fn sorted(names: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut names: Vec<_> = names.into_iter().collect();
    names.sort_unstable();
    names
}
