//! The contract of [`Store`], which each implementation proves in its tests, and state that tests of other crates prepare.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic, in its helpers too")]

use std::time::Duration;

use kube::ResourceExt as _;
use serde_json::{Value, json};
use tidewatch_api::{
    Manifest,
    key::{KymaKey, ManifestKey},
};

use super::{Memories, ObjectKey, PodSelection, Store, StoreError};

/// Time after which the pods of a manager that is not ready are read.
pub const WATCH_PODS_AFTER: Duration = crate::reconcile::WATCH_PODS_AFTER;

/// Checks a store with three Manifests of one cluster that nobody else writes. They have different names, and no finalizers.
/// A store that caches has the current state after `refresh`, but its own writes also before.
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
    let names = async || sorted(store.others(&other).await.unwrap().iter().map(|other| other.name_any()));
    assert_eq!(names().await, sorted([manifest.name_any(), last.name_any()]));

    let shown = writes_merge(store, &manifest).await;
    let seen = store.others(&other).await.unwrap();
    let seen = seen.iter().find(|seen| seen.name_any() == manifest.name_any()).unwrap();
    assert_eq!(seen.resource_version(), shown.resource_version(), "others are as last written");

    finalizers_hold(store, &shown, &other).await;
    refresh();
    assert_eq!(names().await, [last.name_any()], "the deleted Manifest is gone");

    assert!(store.delete(&last).await.unwrap().is_none(), "no finalizer holds this one");
    refresh();
    assert_eq!(names().await, Vec::<String>::new());
}

/// A write merges, changes nothing else, and replaces the newest version alone. Returns the Manifest as stored.
async fn writes_merge(store: &dyn Store, manifest: &Manifest) -> Manifest {
    let held = patched(store, manifest, json!({"finalizers": ["a.test/first", "b.test/second"]})).await;
    let annotated = patched(store, &held, json!({"annotations": {"a": "1", "b": "2"}})).await;
    let annotated = patched(store, &annotated, json!({"annotations": {"a": Value::Null}})).await;
    assert_eq!(json!(annotated.annotations()), json!({"b": "2"}));
    assert_eq!(annotated.finalizers(), ["a.test/first", "b.test/second"]);

    let synced = json!([{"group": "", "version": "v1", "kind": "ConfigMap", "namespace": "kyma-system", "name": "m"}]);
    let recorded = store.patch_status(&annotated, &json!({"state": "Processing", "synced": synced})).await.unwrap();
    let shown = store.patch_status(&recorded, &json!({"state": "Ready"})).await.unwrap();
    let status = json!(shown.status);
    assert_eq!(status["synced"][0]["name"], "m", "what a write does not name stays");
    assert_eq!(status["state"], "Ready");

    assert_eq!(shown.annotations(), annotated.annotations());
    assert_eq!(shown.labels(), manifest.labels());
    assert_eq!(shown.spec, manifest.spec);
    assert!(shown.uid().is_some(), "it has a uid");
    assert_eq!(shown.uid(), manifest.uid());
    assert_eq!(shown.metadata.creation_timestamp, manifest.metadata.creation_timestamp);
    assert_eq!(shown.metadata.generation, manifest.metadata.generation);

    for old in [manifest, &held, &annotated, &recorded] {
        let labelled = store.patch_metadata(old, &json!({"labels": {"late": "true"}})).await;
        assert!(labelled.unwrap_err().is_conflict(), "an older version is refused");
        let stated = store.patch_status(old, &json!({"state": "Error"})).await;
        assert!(stated.unwrap_err().is_conflict(), "an older version is refused");
    }
    shown
}

/// A deleted Manifest stays while finalizers hold it, and nothing can be written to it afterwards.
async fn finalizers_hold(store: &dyn Store, manifest: &Manifest, other: &Manifest) {
    let deleted = store.delete(manifest).await.unwrap().unwrap();
    let since = deleted.metadata.deletion_timestamp.clone();
    assert!(since.is_some(), "it is being deleted");
    assert_eq!(deleted.uid(), manifest.uid());
    let seen = store.others(other).await.unwrap();
    let seen = seen.iter().find(|seen| seen.name_any() == manifest.name_any()).unwrap();
    assert_eq!(seen.metadata.deletion_timestamp, since, "others see the deletion");
    let again = store.delete(&deleted).await.unwrap().unwrap();
    assert_eq!(again.metadata.deletion_timestamp, since, "a second deletion changes nothing");

    let first = json!({"finalizers": ["a.test/first"]});
    let none = json!({"finalizers": []});
    let one_left = store.patch_metadata(&again, &first).await.unwrap().unwrap();
    let late = store.patch_metadata(&again, &none).await;
    assert!(late.unwrap_err().is_conflict(), "an older version does not end the deletion");
    assert!(store.patch_metadata(&one_left, &none).await.unwrap().is_none(), "the last finalizer was removed");
    assert!(store.patch_metadata(&one_left, &first).await.unwrap().is_none(), "it does not exist any more");
    assert!(store.delete(&one_left).await.unwrap().is_none(), "it does not exist any more");
    let refused = store.patch_status(&one_left, &json!({"state": "Error"})).await.unwrap_err();
    let StoreError::Request(_, kube::Error::Api(status)) = &refused else { unreachable!("{refused}") };
    assert!([404, 409].contains(&status.code), "{refused}");
}

async fn patched(store: &dyn Store, manifest: &Manifest, members: Value) -> Manifest {
    let stored = store.patch_metadata(manifest, &members).await.unwrap().unwrap();
    assert_ne!(stored.resource_version(), manifest.resource_version());
    stored
}

fn sorted(names: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut names: Vec<_> = names.into_iter().collect();
    names.sort_unstable();
    names
}

impl Memories {
    /// Sets the pods that explain a manager which is not ready, as a reconcile does.
    pub fn put_pods(&self, manifest: &ManifestKey, cluster: &KymaKey, pods: Option<PodSelection>) {
        self.pods.set(manifest, cluster, pods);
    }

    /// Records the version of an object that a write returned, as a reconcile does.
    pub fn put_write(&self, manifest: &ManifestKey, object: &ObjectKey, version: &str) {
        self.own_writes.wrote(manifest, object, version);
    }
}
