//! Content of a module's version, which the engine does not fetch itself.

use std::{fmt, sync::Arc};

use futures::future::{BoxFuture, FutureExt as _, ready};
use serde_json::Value;
use thiserror::Error;
use tidewatch_api::Manifest;

use super::injected::SecretData;

/// Source of the content of modules' versions.
pub trait Content: Send + Sync {
    /// Returns the objects of the version that a Manifest names. Where reconciles share workers, it does not wait for a
    /// registry: the caller reconciles the Manifest again once the objects are available.
    fn objects<'a>(&'a self, manifest: &'a Manifest) -> BoxFuture<'a, ModuleObjects>;

    /// Returns the data for the Secrets among the objects that [`wants_injected_data`](super::wants_injected_data) selects.
    /// None by default.
    ///
    /// # Errors
    /// The data are not available.
    fn secrets<'a>(
        &'a self,
        _manifest: &'a Manifest,
        _objects: &'a [Value],
    ) -> BoxFuture<'a, Result<SecretData, SecretsError>> {
        ready(Ok(SecretData::default())).boxed()
    }
}

/// Availability of the objects of a module's version.
#[derive(Clone, Debug, PartialEq)]
pub enum ModuleObjects {
    /// Fetched, verified and parsed.
    Ready(Arc<Vec<Value>>),
    /// Being fetched.
    Pending,
    /// Not available; one sentence.
    Failed(String),
}

/// The data for Secrets of a module are not available.
#[derive(Debug, Error)]
pub enum SecretsError {
    /// The request failed: the reconcile ends, and is repeated.
    #[error("{0}")]
    Request(&'static str, #[source] kube::Error),
    /// The version cannot be rendered; one sentence for the status.
    #[error("{0}")]
    Invalid(String),
}

/// Image pull secret that the pods of modules get.
#[derive(Clone)]
pub struct PullSecret {
    /// Name in the cluster.
    pub name: String,
    /// Data and type, to copy into the namespaces of the modules; `None` if it is not available.
    pub content: Option<Arc<Value>>,
}

impl fmt::Debug for PullSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PullSecret").field("name", &self.name).finish_non_exhaustive()
    }
}
