//! Storage of the records of modules in Secrets of the cluster itself, for a cluster without a control plane.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::Arc,
};

use futures::future::{BoxFuture, FutureExt as _};
use json_patch::merge;
use k8s_openapi::{
    ByteString,
    api::core::v1::Secret,
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, PostParams, Preconditions},
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tidewatch_api::{
    Manifest, ManifestSpec,
    key::ManifestKey,
    names::{field_manager, label},
};
use tidewatch_cluster::object;

use super::{Store, StoreError};

/// Type of the Secrets.
const TYPE: &str = "operator.kyma-project.io/tidewatch-module";
/// Key of the Manifest in a Secret.
const KEY: &str = "manifest.json";

/// Keeps each Manifest of a cluster in a Secret of one namespace, as JSON. An API server stores at most 1 MiB of it: an inventory
/// of several thousand objects.
///
/// A Secret has name, namespace, uid, creation time and resource version of its Manifest. Deletion time and finalizers are in
/// the JSON: the engine alone keeps to them.
pub struct SecretStore {
    api: Api<Secret>,
    namespace: String,
    woken: Mutex<BTreeSet<ManifestKey>>,
}

impl SecretStore {
    /// Makes a store in a namespace of the cluster.
    #[must_use]
    pub fn new(client: Client, namespace: &str) -> Self {
        let api = Api::namespaced(client, namespace);
        Self { api, namespace: namespace.to_owned(), woken: Mutex::default() }
    }

    /// Sets the version that a module gets: creates its Manifest, or replaces the spec of the existing one.
    ///
    /// # Errors
    /// A request failed, or another writer was faster (409); or see [`Self::get`].
    pub async fn set(&self, module: &str, spec: ManifestSpec) -> Result<Manifest, StoreError> {
        let Some(manifest) = self.get(module).await? else {
            return self.create(module, spec).await.map_err(|error| StoreError::Request("create the Manifest", error));
        };
        if manifest.spec == spec {
            return Ok(manifest);
        }
        let mut changed = manifest;
        changed.metadata.generation = changed.metadata.generation.map(|generation| generation + 1);
        changed.spec = spec;
        self.replace(&changed).await.map_err(|error| StoreError::Request("replace the spec of the Manifest", error))
    }

    async fn create(&self, module: &str, spec: ManifestSpec) -> kube::Result<Manifest> {
        let mut manifest = Manifest::new(module, spec);
        manifest.metadata.namespace = Some(self.namespace.clone());
        manifest.metadata.generation = Some(1);
        manifest.metadata.labels = Some(BTreeMap::from([(label::MODULE_NAME.to_owned(), module.to_owned())]));
        let created = self.api.create(&params(), &secret_of(&manifest)?).await?;
        manifest_of(&created)
    }

    /// Returns the Manifest of a module; `None` if the module is not installed.
    ///
    /// # Errors
    /// The request failed, or the Secret of this name contains no Manifest.
    pub async fn get(&self, module: &str) -> Result<Option<Manifest>, StoreError> {
        let found = object::get(&self.api, module).await;
        let found = found.map_err(|error| StoreError::Request("read the Manifest", error))?;
        found.as_ref().map(read).transpose()
    }

    /// Takes the keys of the Manifests that [`Store::wake`] named.
    pub fn take_woken(&self) -> BTreeSet<ManifestKey> {
        mem::take(&mut *self.woken.lock())
    }

    async fn replace(&self, manifest: &Manifest) -> kube::Result<Manifest> {
        let replaced = self.api.replace(&manifest.name_any(), &params(), &secret_of(manifest)?).await?;
        manifest_of(&replaced)
    }

    async fn remove(&self, manifest: &Manifest) -> kube::Result<()> {
        let preconditions = Preconditions { uid: manifest.uid(), resource_version: manifest.resource_version() };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let name = manifest.name_any();
        object::if_exists(self.api.delete(&name, &params).await, &name)?;
        Ok(())
    }

    /// Returns all Manifests of the cluster. Without one of them, its objects would be taken for objects of nobody.
    async fn list(&self) -> Result<Vec<Manifest>, StoreError> {
        // A type cannot be changed, a label can.
        let of_type = ListParams::default().fields(&format!("type={TYPE}"));
        let found = self.api.list(&of_type).await;
        let found = found.map_err(|error| StoreError::Request("list the Manifests of the cluster", error))?;
        found.iter().map(read).collect()
    }
}

impl Store for SecretStore {
    fn patch_metadata<'a>(
        &'a self,
        manifest: &'a Manifest,
        members: Value,
    ) -> BoxFuture<'a, kube::Result<Option<Manifest>>> {
        async move {
            let patched = Manifest { metadata: merged(&manifest.metadata, &members)?, ..manifest.clone() };
            if patched.metadata.deletion_timestamp.is_some() && patched.finalizers().is_empty() {
                self.remove(manifest).await?;
                return Ok(None);
            }
            object::if_exists(self.replace(&patched).await, &manifest.name_any())
        }
        .boxed()
    }

    fn patch_status<'a>(&'a self, manifest: &'a Manifest, members: &'a Value) -> BoxFuture<'a, kube::Result<Manifest>> {
        async move {
            let status = merged(&manifest.status, members)?;
            self.replace(&Manifest { status, ..manifest.clone() }).await
        }
        .boxed()
    }

    fn delete<'a>(&'a self, manifest: &'a Manifest) -> BoxFuture<'a, kube::Result<Option<Manifest>>> {
        async move {
            if manifest.finalizers().is_empty() {
                self.remove(manifest).await?;
                return Ok(None);
            }
            let mut deleted = manifest.clone();
            deleted.metadata.deletion_timestamp.get_or_insert_with(|| Time(jiff::Timestamp::now()));
            object::if_exists(self.replace(&deleted).await, &manifest.name_any())
        }
        .boxed()
    }

    fn others<'a>(&'a self, manifest: &'a Manifest) -> BoxFuture<'a, Result<Vec<Arc<Manifest>>, StoreError>> {
        async move {
            let others = self.list().await?.into_iter().filter(|other| other.name_any() != manifest.name_any());
            Ok(others.map(Arc::new).collect())
        }
        .boxed()
    }

    fn wake(&self, other: &ManifestKey) {
        self.woken.lock().insert(other.clone());
    }
}

fn read(secret: &Secret) -> Result<Manifest, StoreError> {
    manifest_of(secret).map_err(|error| StoreError::Malformed(secret.name_any(), error))
}

/// A value with merged members, as an API server merges them.
fn merged<T: serde::Serialize + serde::de::DeserializeOwned>(value: &T, members: &Value) -> kube::Result<T> {
    let mut all = serde_json::to_value(value).map_err(kube::Error::SerdeError)?;
    merge(&mut all, members);
    serde_json::from_value(all).map_err(kube::Error::SerdeError)
}

fn secret_of(manifest: &Manifest) -> kube::Result<Secret> {
    let ObjectMeta { name, namespace, uid, resource_version, .. } = manifest.metadata.clone();
    let text = serde_json::to_vec(&json!({"metadata": {
        "labels": manifest.metadata.labels,
        "annotations": manifest.metadata.annotations,
        "finalizers": manifest.metadata.finalizers,
        "generation": manifest.metadata.generation,
        "deletionTimestamp": manifest.metadata.deletion_timestamp,
    }, "spec": manifest.spec, "status": manifest.status}));
    let text = text.map_err(kube::Error::SerdeError)?;
    let labels = BTreeMap::from([(label::PART_OF.to_owned(), label::PART_OF_TIDEWATCH.to_owned())]);
    Ok(Secret {
        metadata: ObjectMeta { name, namespace, uid, resource_version, labels: Some(labels), ..ObjectMeta::default() },
        type_: Some(TYPE.to_owned()),
        data: Some(BTreeMap::from([(KEY.to_owned(), ByteString(text))])),
        ..Secret::default()
    })
}

fn manifest_of(secret: &Secret) -> kube::Result<Manifest> {
    let text = secret.data.as_ref().and_then(|data| data.get(KEY)).map(|text| text.0.as_slice()).unwrap_or_default();
    let mut whole: Value = serde_json::from_slice(text).map_err(kube::Error::SerdeError)?;
    merge(
        &mut whole,
        &json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest", "metadata": {
            "name": secret.metadata.name,
            "namespace": secret.metadata.namespace,
            "uid": secret.metadata.uid,
            "creationTimestamp": secret.metadata.creation_timestamp,
            "resourceVersion": secret.metadata.resource_version,
        }}),
    );
    serde_json::from_value(whole).map_err(kube::Error::SerdeError)
}

fn params() -> PostParams {
    PostParams { field_manager: Some(field_manager::MODULE.to_owned()), ..PostParams::default() }
}

#[cfg(test)]
mod tests {
    use tidewatch_cluster::testing::FakeApiServer;

    use super::*;
    use crate::testing::check_store;

    fn spec(version: &str) -> ManifestSpec {
        serde_json::from_value(json!({"remote": false, "version": version,
            "install": {"name": "raw-manifest", "source": {"ref": version}}}))
        .unwrap()
    }

    fn store(cluster: &FakeApiServer) -> SecretStore {
        SecretStore::new(cluster.client(), "modules")
    }

    #[tokio::test]
    async fn secrets_keep_the_contract() {
        let cluster = FakeApiServer::runtime();
        let store = store(&cluster);
        let [first, second, third] = ["first", "second", "third"].map(|name| store.set(name, spec("1.0.0")));
        let first = first.await.unwrap();
        let second = second.await.unwrap();
        let third = third.await.unwrap();
        check_store(&store, first, second, third, || ()).await;
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
        let generations = [first.metadata.generation, second.metadata.generation];
        assert_eq!((generations, second.uid()), ([Some(1), Some(2)], first.uid()));
        assert_eq!(store.get("sample").await.unwrap(), Some(second));
        assert_eq!(store.get("other").await.unwrap(), None);
    }

    #[tokio::test]
    async fn edited_secret_stops_the_modules_beside_it_and_is_named() {
        let cluster = FakeApiServer::runtime();
        let store = store(&cluster);
        let sample = store.set("sample", spec("1.0.0")).await.unwrap();
        store.set("broken", spec("1.0.0")).await.unwrap();
        cluster.edit("secrets/broken", |secret| secret["data"][KEY] = json!("bm9uZQ=="));
        let error = store.others(&sample).await.unwrap_err();
        assert_eq!(error.to_string(), "the Secret broken contains no Manifest of a module");
        assert!(store.get("broken").await.is_err() && store.set("broken", spec("2.0.0")).await.is_err());
    }

    #[tokio::test]
    async fn woken_manifests_are_taken_once() {
        let store = store(&FakeApiServer::runtime());
        let key = ManifestKey::new("modules", "other");
        store.wake(&key);
        assert_eq!(store.take_woken(), BTreeSet::from([key]));
        assert_eq!(store.take_woken(), BTreeSet::new());
    }
}
