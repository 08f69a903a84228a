//! Storage of the Manifests of a cluster's modules.

use std::sync::Arc;

use futures::future::BoxFuture;
use serde_json::Value;
use thiserror::Error;
use tidewatch_api::{Manifest, key::ManifestKey};
use tidewatch_cluster::{body_missing::BodyMissingError, object};

/// Keeps the Manifests of the modules of one cluster.
///
/// A write names the resource version that it replaces, and fails with a conflict (409) if that is not the stored one; a
/// deletion names at least the uid. So no decision rests on an old inventory. A store fences its own writes alone: the caller
/// sees to it that two processes do not reconcile one Manifest at the same time.
pub trait Store: Send + Sync {
    /// Merges labels, annotations and finalizers into a Manifest. Returns the Manifest as stored; `None` if it does not exist
    /// (any more), also because the last finalizer of a deleted one was removed.
    fn patch_metadata<'a>(
        &'a self,
        manifest: &'a Manifest,
        members: &'a Value,
    ) -> BoxFuture<'a, Result<Option<Manifest>, StoreError>>;

    /// Merges members into the status of a Manifest. Returns the Manifest as stored.
    fn patch_status<'a>(
        &'a self,
        manifest: &'a Manifest,
        members: &'a Value,
    ) -> BoxFuture<'a, Result<Manifest, StoreError>>;

    /// Deletes a Manifest. Returns it while finalizers hold it.
    fn delete<'a>(&'a self, manifest: &'a Manifest) -> BoxFuture<'a, Result<Option<Manifest>, StoreError>>;

    /// Returns the other Manifests of the cluster, those of the same module included, as last written.
    fn others<'a>(&'a self, manifest: &'a Manifest) -> BoxFuture<'a, Result<Vec<Arc<Manifest>>, StoreError>>;

    /// Has another Manifest reconciled with all of its objects compared: it gets an object of the one at hand.
    fn wake(&self, other: &ManifestKey);
}

/// A Manifest was not read or written.
#[derive(Debug, Error)]
pub enum StoreError {
    /// A request failed, with its operation.
    #[error("{0}")]
    Request(&'static str, #[source] kube::Error),
    /// The store has not loaded the body of an object. It wakes the Manifest when it has.
    #[error(transparent)]
    NotLoaded(#[from] BodyMissingError),
    /// The Secret of a record was edited, or has another type.
    #[error("the Secret {0} does not contain the record of a module: {1}")]
    Malformed(String, &'static str),
    /// The record of a module exceeds a limit; with its size and the limit in bytes.
    #[error("the record of the module has {0} bytes, and at most {1} are stored")]
    TooLarge(usize, usize),
    /// A version was set for a module that is being removed.
    #[error("the module is being removed")]
    Leaving,
}

impl StoreError {
    /// Returns true if another writer was faster.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Request(_, error) if object::is_conflict(error))
    }

    /// Names the operation of a failed request.
    pub(crate) fn during(self, operation: &'static str) -> Self {
        match self {
            Self::Request(_, error) => Self::Request(operation, error),
            other => other,
        }
    }
}
