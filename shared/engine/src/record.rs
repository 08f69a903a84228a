//! The Manifest during a reconcile: as last read or written, with the writes that decisions need.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;
use serde_json::{Value, json};
use tidewatch_api::{Manifest, names::finalizer};

use super::{
    Store, StoreError,
    status::{self, Findings},
};

/// A Manifest as last read or written.
pub(super) struct Record<'a> {
    store: &'a dyn Store,
    pub(super) manifest: Manifest,
}

impl<'a> Record<'a> {
    pub(super) fn new(store: &'a dyn Store, manifest: Manifest) -> Self {
        Self { store, manifest }
    }

    /// Merges members into the metadata. Returns false if that removed the Manifest.
    pub(super) async fn patch_metadata(&mut self, doing: &'static str, members: Value) -> Result<bool, StoreError> {
        let patched = self.store.patch_metadata(&self.manifest, &members).await;
        let Some(patched) = patched.map_err(|error| error.during(doing))? else { return Ok(false) };
        self.manifest = patched;
        Ok(true)
    }

    /// Merges members into the status.
    pub(super) async fn patch_status(&mut self, members: &Value) -> Result<(), StoreError> {
        let patched = self.store.patch_status(&self.manifest, members).await;
        self.manifest = patched.map_err(|error| error.during("write the status of the Manifest"))?;
        Ok(())
    }

    /// Writes the status that follows from the findings if it differs.
    pub(super) async fn write_status(&mut self, findings: &Findings) -> Result<(), StoreError> {
        let new = status::compute(&self.manifest, findings, &Time(jiff::Timestamp::now()));
        if self.manifest.status.as_ref() == Some(&new) {
            return Ok(());
        }
        self.patch_status(&json!(new)).await
    }

    /// Deletes the Manifest unless it is being deleted, and removes our finalizers.
    pub(super) async fn leave(&mut self) -> Result<(), StoreError> {
        if self.manifest.metadata.deletion_timestamp.is_none() {
            let left = self.store.delete(&self.manifest).await;
            match left.map_err(|error| error.during("delete the unmanaged Manifest"))? {
                Some(left) => self.manifest = left,
                None => return Ok(()),
            }
        }
        let others = self.foreign_finalizers();
        if others.len() < self.manifest.finalizers().len() {
            self.patch_metadata("remove the finalizers of the Manifest", json!({"finalizers": others})).await?;
        }
        Ok(())
    }

    /// Finalizers of other controllers: also after [`Self::leave`], which may leave ours in the Manifest at hand.
    pub(super) fn foreign_finalizers(&self) -> Vec<String> {
        let is_foreign = |name: &&String| !finalizer::MANIFEST.contains(&name.as_str());
        self.manifest.finalizers().iter().filter(is_foreign).cloned().collect()
    }
}
