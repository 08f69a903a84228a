//! Storage of Manifests in Secrets of the cluster itself, for a cluster without a control plane.

mod record;
#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, mem, sync::Arc};

use futures::future::{BoxFuture, FutureExt as _};
use json_patch::merge;
use k8s_openapi::{api::core::v1::Secret, apimachinery::pkg::apis::meta::v1::Time};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions},
};
use parking_lot::Mutex;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use tidewatch_api::{
    Manifest, ManifestSpec,
    key::ManifestKey,
    names::{field_manager, label},
};
use tidewatch_cluster::object;

use self::record::{TYPE, content, manifest_of, name_of, secret_of};
use super::{Store, StoreError};

/// Keeps each Manifest of a cluster in the Secret `tidewatch.v1.<module>` of one namespace, as compressed JSON.
///
/// The Manifest has namespace, uid, creation time and resource version of its Secret. Deletion time and finalizers are in the
/// JSON, so that they bind the engine alone: whoever deletes the Secret leaves the objects of the module behind.
pub struct SecretStore {
    api: Api<Secret>,
    namespace: String,
    woken: Mutex<BTreeSet<ManifestKey>>,
}

impl SecretStore {
    /// Makes a store in a namespace of the cluster.
    pub fn new(client: Client, namespace: &str) -> Self {
        let api = Api::namespaced(client, namespace);
        Self { api, namespace: namespace.to_owned(), woken: Mutex::default() }
    }

    /// Sets the version that a module gets: creates its Manifest, or replaces the spec of the existing one.
    ///
    /// # Errors
    /// The module is being removed, a request failed, or another writer was faster (409); or see [`Self::get`].
    pub async fn set(&self, module: &str, spec: ManifestSpec) -> Result<Manifest, StoreError> {
        let Some(mut manifest) = self.get(module).await? else { return self.create(module, spec).await };
        if manifest.metadata.deletion_timestamp.is_some() {
            return Err(StoreError::Leaving);
        }
        if manifest.spec == spec {
            return Ok(manifest);
        }
        manifest.metadata.generation = manifest.metadata.generation.map(|generation| generation + 1);
        manifest.spec = spec;
        self.write(&manifest).await
    }

    /// Returns the Manifest of a module; `None` if the module is not installed.
    ///
    /// # Errors
    /// The request failed, or the Secret does not contain the record of a module.
    pub async fn get(&self, module: &str) -> Result<Option<Manifest>, StoreError> {
        let found = object::get(&self.api, &name_of(module)).await;
        let found = found.map_err(|error| StoreError::Request("read the record of the module", error))?;
        found.as_ref().map(manifest_of).transpose()
    }

    /// Takes the keys of the Manifests that [`Store::wake`] named since the last call. The caller reconciles each, with all of
    /// its objects compared.
    #[must_use]
    pub fn take_woken(&self) -> BTreeSet<ManifestKey> {
        mem::take(&mut *self.woken.lock())
    }

    async fn create(&self, module: &str, spec: ManifestSpec) -> Result<Manifest, StoreError> {
        let mut manifest = Manifest::new(module, spec);
        manifest.metadata.namespace = Some(self.namespace.clone());
        manifest.metadata.generation = Some(1);
        manifest.labels_mut().insert(label::MODULE_NAME.to_owned(), module.to_owned());
        let params = PostParams { field_manager: Some(field_manager::TIDEWATCH.to_owned()), ..PostParams::default() };
        let created = self.api.create(&params, &secret_of(&manifest)?).await;
        manifest_of(&created.map_err(|error| StoreError::Request("create the record of the module", error))?)
    }

    /// Replaces the content of a Secret, and leaves the labels and annotations of others on it alone.
    async fn write(&self, manifest: &Manifest) -> Result<Manifest, StoreError> {
        let params = PatchParams { field_manager: Some(field_manager::TIDEWATCH.to_owned()), ..PatchParams::default() };
        let patch = Patch::Merge(content(manifest)?);
        let written = self.api.patch(&name_of(&manifest.name_any()), &params, &patch).await;
        manifest_of(&written.map_err(|error| StoreError::Request("write the record of the module", error))?)
    }

    /// As [`Self::write`]; `None` if the Secret does not exist.
    async fn write_existing(&self, manifest: &Manifest) -> Result<Option<Manifest>, StoreError> {
        match self.write(manifest).await {
            Err(StoreError::Request(_, error)) if object::is_absent(&error, &name_of(&manifest.name_any())) => Ok(None),
            written => written.map(Some),
        }
    }

    async fn remove(&self, manifest: &Manifest) -> Result<(), StoreError> {
        let preconditions = Preconditions { uid: manifest.uid(), resource_version: manifest.resource_version() };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let name = name_of(&manifest.name_any());
        let deleted = object::if_exists(self.api.delete(&name, &params).await, &name);
        deleted.map_err(|error| StoreError::Request("delete the record of the module", error))?;
        Ok(())
    }
}

impl Store for SecretStore {
    fn patch_metadata<'a>(
        &'a self,
        manifest: &'a Manifest,
        members: &'a Value,
    ) -> BoxFuture<'a, Result<Option<Manifest>, StoreError>> {
        async move {
            let patched = Manifest { metadata: merged(&manifest.metadata, members)?, ..manifest.clone() };
            if patched.metadata.deletion_timestamp.is_some() && patched.finalizers().is_empty() {
                self.remove(manifest).await?;
                return Ok(None);
            }
            self.write_existing(&patched).await
        }
        .boxed()
    }

    fn patch_status<'a>(
        &'a self,
        manifest: &'a Manifest,
        members: &'a Value,
    ) -> BoxFuture<'a, Result<Manifest, StoreError>> {
        async move {
            let status = merged(&manifest.status, members)?;
            self.write(&Manifest { status, ..manifest.clone() }).await
        }
        .boxed()
    }

    fn delete<'a>(&'a self, manifest: &'a Manifest) -> BoxFuture<'a, Result<Option<Manifest>, StoreError>> {
        async move {
            if manifest.finalizers().is_empty() {
                self.remove(manifest).await?;
                return Ok(None);
            }
            let mut deleted = manifest.clone();
            deleted.metadata.deletion_timestamp.get_or_insert_with(|| Time(jiff::Timestamp::now()));
            self.write_existing(&deleted).await
        }
        .boxed()
    }

    /// Fails if one record cannot be read: its objects would be taken for those of nobody.
    fn others<'a>(&'a self, manifest: &'a Manifest) -> BoxFuture<'a, Result<Vec<Arc<Manifest>>, StoreError>> {
        async move {
            // A type cannot be changed, a label can.
            let of_type = ListParams::default().fields(&format!("type={TYPE}"));
            let found = self.api.list(&of_type).await;
            let found = found.map_err(|error| StoreError::Request("list the records of the modules", error))?;
            let own = name_of(&manifest.name_any());
            let others = found.iter().filter(|secret| secret.name_any() != own);
            others.map(|secret| manifest_of(secret).map(Arc::new)).collect()
        }
        .boxed()
    }

    fn wake(&self, other: &ManifestKey) {
        self.woken.lock().insert(other.clone());
    }
}

/// A value with merged members, as an API server merges them.
fn merged<T: Serialize + DeserializeOwned>(value: &T, members: &Value) -> Result<T, StoreError> {
    let failed = |error| StoreError::Request("merge into the record of the module", kube::Error::SerdeError(error));
    let mut all = serde_json::to_value(value).map_err(failed)?;
    merge(&mut all, members);
    serde_json::from_value(all).map_err(failed)
}
