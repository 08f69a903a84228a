//! The CA's Secret in KCP: created by the first replica, replaced only at the resourceVersion that was read.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use thiserror::Error;

use super::{
    PkiError,
    ca_state::{CaState, CaStateError},
};

/// Name of the Secret that holds the built-in CA, in the receiver's namespace.
pub const CA_SECRET: &str = "tidewatch-ca";

/// Failure to read or write the Secret.
#[derive(Debug, Error)]
pub enum CaSecretError {
    /// The control plane refused or did not respond.
    #[error("the call for the Secret {CA_SECRET} failed")]
    Api(#[source] Box<kube::Error>),
    /// The content is not a CA; it is never overwritten.
    #[error("the Secret {CA_SECRET} holds no usable CA")]
    Content(#[from] CaStateError),
    /// Generating a root for a new Secret failed.
    #[error("a root could not be generated")]
    Generate(#[from] PkiError),
    /// The Secret was deleted repeatedly between a create and a read.
    #[error("the Secret {CA_SECRET} is deleted repeatedly")]
    Unsteady,
}

impl From<kube::Error> for CaSecretError {
    fn from(error: kube::Error) -> Self {
        Self::Api(Box::new(error))
    }
}

/// Content of the Secret, as read.
#[derive(Clone, Debug)]
pub(crate) struct CaSecret {
    pub(crate) state: CaState,
    /// Preserved by a replace, with the labels and annotations of other writers.
    metadata: ObjectMeta,
}

impl CaSecret {
    pub(crate) fn of(secret: &Secret) -> Result<Self, CaStateError> {
        let state = CaState::read(secret.data.as_ref().unwrap_or(&BTreeMap::new()))?;
        let metadata = ObjectMeta { managed_fields: None, ..secret.metadata.clone() };
        Ok(Self { state, metadata })
    }

    /// resourceVersion of the read.
    pub(crate) fn version(&self) -> &str {
        self.metadata.resource_version.as_deref().unwrap_or_default()
    }
}

/// Reads and writes the Secret.
#[derive(Clone)]
pub(crate) struct Store {
    pub(super) api: Api<Secret>,
}

/// Limit of alternations between a create that found a Secret and a read that found none.
const ATTEMPTS: usize = 5;

impl Store {
    pub(crate) fn new(client: Client, namespace: &str) -> Self {
        Self { api: Api::namespaced(client, namespace) }
    }

    /// Returns the stored state, or creates the Secret with a new one. Of several replicas that start at once one
    /// creates it, and all use it.
    pub(crate) async fn read_or_create(
        &self,
        make: impl Fn() -> Result<CaState, PkiError>,
    ) -> Result<CaSecret, CaSecretError> {
        for _ in 0..ATTEMPTS {
            if let Some(secret) = self.api.get_opt(CA_SECRET).await? {
                return Ok(CaSecret::of(&secret)?);
            }
            if let Some(secret) = self.create(&make()?).await? {
                tracing::info!(root = %secret.state.target().id, "CA created");
                return Ok(secret);
            }
        }
        Err(CaSecretError::Unsteady)
    }

    /// Creates the Secret; `None` when one exists.
    pub(crate) async fn create(&self, state: &CaState) -> Result<Option<CaSecret>, CaSecretError> {
        let metadata = ObjectMeta { name: Some(CA_SECRET.to_owned()), ..ObjectMeta::default() };
        match self.api.create(&PostParams::default(), &manifest(state, metadata)).await {
            Ok(secret) => Ok(Some(CaSecret::of(&secret)?)),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Replaces the Secret at the resourceVersion that was read; `None` on a conflict, or when it is gone.
    pub(crate) async fn replace(&self, secret: &CaSecret, state: &CaState) -> Result<Option<CaSecret>, CaSecretError> {
        let secret = manifest(state, secret.metadata.clone());
        match self.api.replace(CA_SECRET, &PostParams::default(), &secret).await {
            Ok(secret) => Ok(Some(CaSecret::of(&secret)?)),
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

fn manifest(state: &CaState, metadata: ObjectMeta) -> Secret {
    Secret { metadata, data: Some(state.write()), ..Secret::default() }
}

#[cfg(test)]
mod tests;
