//! Storage of the records of a cluster's modules.

use std::sync::Arc;

use futures::future::BoxFuture;
use serde_json::Value;
use thiserror::Error;
use tidewatch_api::{Manifest, key::ManifestKey};
use tidewatch_cluster::body_missing::BodyMissingError;

/// Keeps the Manifests of the modules of one cluster.
///
/// Every write names the resource version that it replaces, and fails with a conflict (409) if that is not the stored one. So no
/// decision rests on an old inventory, and of two engines only one writes. A process that may no longer write, such as a
/// replica that has lost its Lease, must fail as well.
pub trait Store: Send + Sync {
    /// Merges members into the metadata of a Manifest. Returns the Manifest as stored; `None` if it is gone: the last
    /// finalizer of a deleted one was removed.
    fn patch_metadata<'a>(
        &'a self,
        manifest: &'a Manifest,
        members: Value,
    ) -> BoxFuture<'a, kube::Result<Option<Manifest>>>;

    /// Merges members into the status of a Manifest. Returns the Manifest as stored.
    fn patch_status<'a>(&'a self, manifest: &'a Manifest, members: &'a Value) -> BoxFuture<'a, kube::Result<Manifest>>;

    /// Deletes a Manifest. Returns it while finalizers hold it.
    fn delete<'a>(&'a self, manifest: &'a Manifest) -> BoxFuture<'a, kube::Result<Option<Manifest>>>;

    /// Returns the Manifests of the other modules in the cluster, as last written.
    fn others<'a>(&'a self, manifest: &'a Manifest) -> BoxFuture<'a, Result<Vec<Arc<Manifest>>, StoreError>>;

    /// Has another Manifest reconciled with all of its objects compared: it gets an object of this one.
    fn wake(&self, other: &ManifestKey);
}

/// The record of a module was not read or written.
#[derive(Debug, Error)]
pub enum StoreError {
    /// A request failed, with its operation.
    #[error("{0}")]
    Request(&'static str, #[source] kube::Error),
    /// The store has not loaded a Manifest or a Secret; it wakes the Manifest when it has.
    #[error(transparent)]
    Body(#[from] BodyMissingError),
    /// A Secret of this name does not contain a Manifest: it is another Secret, or was edited.
    #[error("the Secret {0} contains no Manifest of a module")]
    Malformed(String, #[source] kube::Error),
}
