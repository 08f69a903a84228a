//! The CA's Secret in KCP: filled by the first replica, replaced only at the resourceVersion that was read. It is a part
//! of the installation, since the right to create Secrets would include those with tokens of other accounts.

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

/// Name of the Secret that holds the built-in CA.
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
    /// The Secret was deleted or changed repeatedly between a read and a write.
    #[error("the Secret {CA_SECRET} is deleted or changed repeatedly")]
    Unsteady,
    /// There is none, and this receiver has no right to create it.
    #[error("the Secret {CA_SECRET} is missing: create an empty one, which the receiver fills")]
    Missing(#[source] Box<kube::Error>),
}

impl From<kube::Error> for CaSecretError {
    fn from(error: kube::Error) -> Self {
        Self::Api(Box::new(error))
    }
}

/// Content of the Secret, as read.
#[derive(Clone, Debug)]
pub struct CaSecret {
    /// Roots and phase.
    pub state: CaState,
    /// Preserved by a replace, with the labels and annotations of other writers.
    metadata: ObjectMeta,
}

impl CaSecret {
    /// Reads a Secret.
    ///
    /// # Errors
    /// [`CaStateError`].
    pub fn of(secret: &Secret) -> Result<Self, CaStateError> {
        let state = CaState::read(secret.data.as_ref().unwrap_or(&BTreeMap::new()))?;
        let metadata = ObjectMeta { managed_fields: None, ..secret.metadata.clone() };
        Ok(Self { state, metadata })
    }

    /// resourceVersion of the read.
    pub fn version(&self) -> &str {
        self.metadata.resource_version.as_deref().unwrap_or_default()
    }
}

/// Reads and writes the Secret.
#[derive(Clone)]
pub struct Store {
    pub(super) api: Api<Secret>,
}

/// True for a Secret as it is installed, without content.
pub(super) fn is_empty(secret: &Secret) -> bool {
    secret.data.as_ref().is_none_or(BTreeMap::is_empty)
}

/// Limit of alternations between a write that found a CA and a read that found none.
const ATTEMPTS: usize = 5;

impl Store {
    /// Accesses the Secret in a namespace.
    pub fn new(client: Client, namespace: &str) -> Self {
        Self { api: Api::namespaced(client, namespace) }
    }

    /// Returns the stored state, or stores a new one. Of several replicas that start at once one stores it, and all use
    /// it.
    pub async fn read_or_fill(&self, make: impl Fn() -> Result<CaState, PkiError>) -> Result<CaSecret, CaSecretError> {
        for _ in 0..ATTEMPTS {
            if let Some(secret) = self.api.get_opt(CA_SECRET).await?.filter(|secret| !is_empty(secret)) {
                return Ok(CaSecret::of(&secret)?);
            }
            if let Some(secret) = self.fill(&make()?).await? {
                tracing::info!(root = %secret.state.target().id, "CA created");
                return Ok(secret);
            }
        }
        Err(CaSecretError::Unsteady)
    }

    /// Stores a state in the empty Secret, or creates the Secret where the account may; `None` when there is a CA.
    pub async fn fill(&self, state: &CaState) -> Result<Option<CaSecret>, CaSecretError> {
        let params = PostParams::default();
        let written = match self.api.get_opt(CA_SECRET).await? {
            Some(secret) if !is_empty(&secret) => return Ok(None),
            Some(secret) => {
                let metadata = ObjectMeta { managed_fields: None, ..secret.metadata };
                self.api.replace(CA_SECRET, &params, &manifest(state, metadata)).await
            }
            None => {
                let metadata = ObjectMeta { name: Some(CA_SECRET.to_owned()), ..ObjectMeta::default() };
                match self.api.create(&params, &manifest(state, metadata)).await {
                    Err(error) if is_forbidden(&error) => return Err(CaSecretError::Missing(Box::new(error))),
                    created => created,
                }
            }
        };
        match written {
            Ok(secret) => Ok(Some(CaSecret::of(&secret)?)),
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Replaces the Secret at the resourceVersion that was read; `None` on a conflict, or when it is gone.
    pub async fn replace(&self, secret: &CaSecret, state: &CaState) -> Result<Option<CaSecret>, CaSecretError> {
        let secret = manifest(state, secret.metadata.clone());
        match self.api.replace(CA_SECRET, &PostParams::default(), &secret).await {
            Ok(secret) => Ok(Some(CaSecret::of(&secret)?)),
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

fn is_forbidden(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 403)
}

fn manifest(state: &CaState, metadata: ObjectMeta) -> Secret {
    Secret { metadata, data: Some(state.write()), ..Secret::default() }
}

#[cfg(test)]
mod tests;
