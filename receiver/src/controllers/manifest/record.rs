//! Writes of the Manifest itself. Each fails with a conflict if the Manifest was written since it was read, so that no
//! decision rests on an old inventory.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use tidewatch_api::{
    Manifest,
    key::KymaKey,
    names::{field_manager, finalizer},
};
use tidewatch_cluster::object;
use tidewatch_fleet::stores::manifests::Manifests;

use super::{
    Context, Error,
    memory::Memories,
    status::{self, Findings},
};

/// A Manifest as last read or written.
pub(super) struct Record {
    kcp: Client,
    memories: Memories,
    cache: Manifests,
    pub(super) manifest: Manifest,
}

impl Record {
    pub(super) fn new(ctx: &Context, manifest: Manifest) -> Self {
        let memories = ctx.memories.clone();
        let cache = ctx.stores.manifests.clone();
        Self { kcp: ctx.kcp.clone(), memories, cache, manifest }
    }

    /// Records the result of a write, for a reconcile that begins before the watch delivers it.
    fn wrote(&mut self, written: Manifest) {
        let replaced = self.manifest.resource_version();
        self.manifest = written;
        let key = KymaKey::of(&self.manifest);
        self.memories.wrote(&key, replaced, &self.manifest);
        // The watch may have been faster.
        if let Ok(Some(cached)) = self.cache.get(&key) {
            self.memories.observe(&key, &cached);
        }
    }

    /// Merges members into the metadata. Returns false if that removed the object.
    pub(super) async fn patch_metadata(&mut self, doing: &'static str, mut members: Value) -> Result<bool, Error> {
        members["resourceVersion"] = self.manifest.resource_version().into();
        let name = self.manifest.name_any();
        let patch = Patch::Merge(json!({"metadata": members}));
        let patched = object::if_exists(self.api().patch_metadata(&name, &params(), &patch).await, &name);
        let Some(patched) = patched.map_err(|error| Error::ControlPlane(doing, error))? else { return Ok(false) };
        self.wrote(Manifest { metadata: patched.metadata, ..self.manifest.clone() });
        Ok(true)
    }

    /// Merges members into the status.
    pub(super) async fn patch_status(&mut self, members: &Value) -> Result<(), Error> {
        let name = self.manifest.name_any();
        let patch = json!({"metadata": {"resourceVersion": self.manifest.resource_version()}, "status": members});
        let patched = self.api().patch_status(&name, &params(), &Patch::Merge(&patch)).await;
        self.wrote(patched.map_err(|error| Error::ControlPlane("write the status of the Manifest", error))?);
        Ok(())
    }

    /// Writes the status that follows from the findings if it differs.
    pub(super) async fn write_status(&mut self, findings: &Findings) -> Result<(), Error> {
        let new = status::compute(&self.manifest, findings, &Time(jiff::Timestamp::now()));
        if self.manifest.status.as_ref() == Some(&new) {
            return Ok(());
        }
        self.patch_status(&json!(new)).await
    }

    /// Deletes the Manifest unless it is being deleted, and removes our finalizers.
    pub(super) async fn leave(&mut self) -> Result<(), Error> {
        let name = self.manifest.name_any();
        if self.manifest.metadata.deletion_timestamp.is_none() {
            let left = object::delete(&self.api(), &name, self.manifest.uid()).await;
            match left.map_err(|error| Error::ControlPlane("delete the unmanaged Manifest", error))? {
                Some(left) => self.wrote(left),
                None => return Ok(()),
            }
        }
        let others = self.foreign_finalizers();
        if others.len() < self.manifest.finalizers().len() {
            self.patch_metadata("remove the finalizers of the Manifest", json!({"finalizers": others})).await?;
        }
        Ok(())
    }

    /// Finalizers of other controllers.
    pub(super) fn foreign_finalizers(&self) -> Vec<String> {
        let is_foreign = |name: &&String| !finalizer::MANIFEST.contains(&name.as_str());
        self.manifest.finalizers().iter().filter(is_foreign).cloned().collect()
    }

    fn api(&self) -> Api<Manifest> {
        Api::namespaced(self.kcp.clone(), &self.manifest.namespace().unwrap_or_default())
    }
}

fn params() -> PatchParams {
    PatchParams { field_manager: Some(field_manager::MODULE.to_owned()), ..PatchParams::default() }
}
