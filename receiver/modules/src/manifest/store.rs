//! Storage of Manifests in KCP.

use std::sync::Arc;

use futures::future::{BoxFuture, FutureExt as _, ready};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use tidewatch_api::{
    Manifest,
    key::{KymaKey, ManifestKey},
    names::{field_manager, label},
};
use tidewatch_cluster::object;
use tidewatch_engine::{Store, StoreError};
use tidewatch_fleet::stores::manifests::ManifestWriter;

use super::Context;

/// The Manifests of one Kyma. The client of KCP fences the writes.
pub(super) struct KcpStore<'a> {
    pub(super) ctx: &'a Context,
}

impl Store for KcpStore<'_> {
    fn patch_metadata<'a>(
        &'a self,
        manifest: &'a Manifest,
        members: &'a Value,
    ) -> BoxFuture<'a, Result<Option<Manifest>, StoreError>> {
        async move {
            let mut members = members.clone();
            members["resourceVersion"] = manifest.resource_version().into();
            let name = manifest.name_any();
            let patch = Patch::Merge(json!({"metadata": members}));
            let patched = self.api(manifest).patch_metadata(&name, &params(), &patch).await;
            let patched = object::if_exists(patched, &name).map_err(|error| self.failed(manifest, error))?;
            let Some(patched) = patched else {
                self.wrote_gone(manifest);
                return Ok(None);
            };
            let written = Manifest { metadata: patched.metadata, ..manifest.clone() };
            // The response shows an object that the removal of its last finalizer has deleted.
            if written.metadata.deletion_timestamp.is_some() && written.finalizers().is_empty() {
                self.wrote_gone(manifest);
                return Ok(None);
            }
            self.wrote(&written);
            Ok(Some(written))
        }
        .boxed()
    }

    fn patch_status<'a>(
        &'a self,
        manifest: &'a Manifest,
        members: &'a Value,
    ) -> BoxFuture<'a, Result<Manifest, StoreError>> {
        async move {
            let name = manifest.name_any();
            let patch = json!({"metadata": {"resourceVersion": manifest.resource_version()}, "status": members});
            let written = self.api(manifest).patch_status(&name, &params(), &Patch::Merge(&patch)).await;
            let written = written.map_err(|error| self.failed(manifest, error))?;
            self.wrote(&written);
            Ok(written)
        }
        .boxed()
    }

    fn delete<'a>(&'a self, manifest: &'a Manifest) -> BoxFuture<'a, Result<Option<Manifest>, StoreError>> {
        async move {
            let left = object::delete(&self.api(manifest), &manifest.name_any(), manifest.uid()).await;
            let left = left.map_err(|error| self.failed(manifest, error))?;
            match &left {
                Some(left) => self.wrote(left),
                None => self.wrote_gone(manifest),
            }
            Ok(left)
        }
        .boxed()
    }

    fn others<'a>(&'a self, manifest: &'a Manifest) -> BoxFuture<'a, Result<Vec<Arc<Manifest>>, StoreError>> {
        ready(self.ctx.others_of_kyma(manifest)).boxed()
    }

    fn wake(&self, other: &ManifestKey) {
        (self.ctx.wake)(other);
    }
}

impl KcpStore<'_> {
    /// Records the response to a write.
    fn wrote(&self, written: &Manifest) {
        self.ctx.stores.manifests.wrote(written, ManifestWriter::Other);
    }

    /// Records that a Manifest is gone.
    fn wrote_gone(&self, manifest: &Manifest) {
        self.ctx.stores.manifests.wrote_gone(&ManifestKey::of(manifest), manifest.uid(), ManifestWriter::Other);
    }

    /// Returns the failure of a write.
    fn failed(&self, manifest: &Manifest, error: kube::Error) -> StoreError {
        if object::is_absent(&error, &manifest.name_any()) {
            self.wrote_gone(manifest);
        }
        StoreError::Request("write the Manifest", error)
    }

    fn api(&self, manifest: &Manifest) -> Api<Manifest> {
        Api::namespaced(self.ctx.kcp.clone(), &manifest.namespace().unwrap_or_default())
    }
}

impl Context {
    /// Returns the other Manifests of the same Kyma, as our last writes returned them.
    fn others_of_kyma(&self, manifest: &Manifest) -> Result<Vec<Arc<Manifest>>, StoreError> {
        let Some(kyma) = manifest.labels().get(label::KYMA_NAME) else { return Ok(Vec::new()) };
        let key = KymaKey::new(manifest.namespace().unwrap_or_default(), kyma);
        let of_kyma = self.stores.manifests.of_kyma(&key, None)?.into_iter();
        let others = of_kyma.filter(|other| other.name_any() != manifest.name_any());
        Ok(others.collect())
    }
}

fn params() -> PatchParams {
    PatchParams { field_manager: Some(field_manager::MODULE.to_owned()), ..PatchParams::default() }
}
