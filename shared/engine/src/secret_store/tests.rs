use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::json;
use tidewatch_api::Resource;
use tidewatch_cluster::testing::FakeApiServer;

use super::{
    record::{KEY, MAX_BYTES},
    *,
};
use crate::testing::check_store;

fn spec(version: &str) -> ManifestSpec {
    serde_json::from_value(json!({"remote": false, "version": version,
        "install": {"name": "raw-manifest", "source": {"ref": version}}}))
    .unwrap()
}

fn store(cluster: &FakeApiServer) -> SecretStore {
    SecretStore::new(cluster.client(), "modules")
}

/// A Secret that is not one of a module.
fn put_foreign_secret(cluster: &FakeApiServer, name: &str) {
    cluster.edit(&format!("secrets/{name}"), |secret| {
        *secret = json!({"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "data": {KEY: "bm9uZQ=="},
            "metadata": {"name": name, "namespace": "modules"}});
    });
}

#[tokio::test]
async fn secrets_keep_the_contract() {
    let cluster = FakeApiServer::runtime();
    put_foreign_secret(&cluster, "first");
    let store = store(&cluster);
    let [first, second, third] = ["first", "second", "third"].map(|name| store.set(name, spec("1.0.0")));
    let first = first.await.unwrap();
    let second = second.await.unwrap();
    let third = third.await.unwrap();
    check_store(&store, first, second, third, || ()).await;
    assert!(cluster.object("secrets/first").is_some());
}

#[tokio::test]
async fn another_version_is_a_new_generation_and_the_same_one_no_write() {
    let cluster = FakeApiServer::runtime();
    let store = store(&cluster);
    let first = store.set("sample", spec("1.0.0")).await.unwrap();
    assert_eq!(first.labels()[label::MODULE_NAME], "sample");
    cluster.calls();
    assert_eq!(store.set("sample", spec("1.0.0")).await.unwrap(), first);
    assert_eq!(cluster.writes(), Vec::<String>::new());
    let second = store.set("sample", spec("2.0.0")).await.unwrap();
    assert_eq!([first.metadata.generation, second.metadata.generation], [Some(1), Some(2)]);
    assert_eq!(second.uid(), first.uid());
    assert_eq!(store.get("sample").await.unwrap(), Some(second));
    assert_eq!(store.get("other").await.unwrap(), None);
}

#[tokio::test]
async fn module_that_is_being_removed_gets_no_version() {
    let cluster = FakeApiServer::runtime();
    let store = store(&cluster);
    let sample = store.set("sample", spec("1.0.0")).await.unwrap();
    let held = store.patch_metadata(&sample, &json!({"finalizers": ["a.test/f"]})).await.unwrap().unwrap();
    store.delete(&held).await.unwrap().unwrap();
    for version in ["1.0.0", "2.0.0"] {
        assert!(matches!(store.set("sample", spec(version)).await, Err(StoreError::Leaving)), "{version}");
    }
}

#[tokio::test]
async fn metadata_of_others_on_the_secret_stay() {
    let cluster = FakeApiServer::runtime();
    let store = store(&cluster);
    store.set("sample", spec("1.0.0")).await.unwrap();
    cluster.edit("secrets/tidewatch.v1.sample", |secret| secret["metadata"]["labels"]["backup"] = json!("daily"));
    store.set("sample", spec("2.0.0")).await.unwrap();
    let secret = cluster.object("secrets/tidewatch.v1.sample").unwrap();
    assert_eq!(secret["metadata"]["labels"], json!({"app.kubernetes.io/part-of": "tidewatch", "backup": "daily"}));
}

#[tokio::test]
async fn edited_secret_stops_the_modules_beside_it_and_is_named() {
    let cluster = FakeApiServer::runtime();
    let store = store(&cluster);
    let sample = store.set("sample", spec("1.0.0")).await.unwrap();
    store.set("broken", spec("1.0.0")).await.unwrap();
    let said = "the Secret tidewatch.v1.broken does not contain the record of a module: ";
    for (data, problem) in [
        (json!({KEY: "bm9uZQ=="}), "its content is not compressed by gzip"),
        (json!({"other": "bm9uZQ=="}), "it lacks the key manifest.json.gz"),
    ] {
        cluster.edit("secrets/tidewatch.v1.broken", |secret| secret["data"] = data);
        let error = store.others(&sample).await.unwrap_err();
        assert_eq!(error.to_string(), format!("{said}{problem}"));
        store.get("broken").await.unwrap_err();
        store.set("broken", spec("2.0.0")).await.unwrap_err();
    }
    put_foreign_secret(&cluster, "tidewatch.v1.foreign");
    assert!(store.get("foreign").await.unwrap_err().to_string().ends_with("it has another type"));
}

#[tokio::test]
async fn record_that_no_secret_can_hold_is_refused_before_the_write() {
    let cluster = FakeApiServer::runtime();
    let store = store(&cluster);
    let sample = store.set("sample", spec("1.0.0")).await.unwrap();
    cluster.calls();
    // Names that cannot be compressed.
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let name = || {
        let next = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        format!("{:016x}", next ^ (next >> 31))
    };
    let object = || Resource {
        name: name(),
        ..serde_json::from_value(json!({"group": "", "version": "v1",
        "kind": "ConfigMap", "namespace": "n", "name": ""}))
        .unwrap()
    };
    let synced: Vec<_> = std::iter::repeat_with(object).take(120_000).collect();
    let error = store.patch_status(&sample, &json!({"state": "Processing", "synced": synced})).await.unwrap_err();
    assert!(matches!(error, StoreError::TooLarge(_, MAX_BYTES)), "{error}");
    assert_eq!(cluster.writes(), Vec::<String>::new());
}

#[tokio::test]
async fn woken_manifests_are_taken_once() {
    let store = store(&FakeApiServer::runtime());
    let key = ManifestKey::new("modules", "other");
    store.wake(&key);
    assert_eq!(store.take_woken(), BTreeSet::from([key]));
    assert_eq!(store.take_woken(), BTreeSet::new());
}
