//! The CA's Secret in KCP: made by whoever is first, changed only as it was read.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use thiserror::Error;

use super::stored::{ReadStored, Stored};

/// Name of the Secret that holds the built-in CA, in the receiver's namespace.
pub const CA_SECRET: &str = "tidewatch-ca";

/// Why the Secret was not read or not written.
#[derive(Debug, Error)]
pub enum Keep {
    /// The control plane refused or did not answer.
    #[error("the control plane could not be asked for the Secret {CA_SECRET}")]
    Api(#[source] Box<kube::Error>),
    /// What stands in it is not a CA; it is never written over.
    #[error("the Secret {CA_SECRET} holds no usable CA")]
    Content(#[from] ReadStored),
    /// It was deleted again and again between a create and a read.
    #[error("the Secret {CA_SECRET} comes and goes")]
    Unsteady,
}

impl From<kube::Error> for Keep {
    fn from(error: kube::Error) -> Self {
        Self::Api(Box::new(error))
    }
}

/// The content of the Secret, as it was read.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    pub(crate) stored: Stored,
    /// What others have noted on it stays when it is written.
    metadata: ObjectMeta,
}

impl Kept {
    pub(crate) fn of(secret: &Secret) -> Result<Self, ReadStored> {
        let stored = Stored::read(secret.data.as_ref().unwrap_or(&BTreeMap::new()))?;
        let metadata = ObjectMeta { managed_fields: None, ..secret.metadata.clone() };
        Ok(Self { stored, metadata })
    }

    /// The version that it was read at.
    pub(crate) fn version(&self) -> &str {
        self.metadata.resource_version.as_deref().unwrap_or_default()
    }
}

/// Reads and writes it.
#[derive(Clone)]
pub(crate) struct Store {
    api: Api<Secret>,
}

/// How often a create that found a Secret and a read that found none may alternate.
const ATTEMPTS: usize = 5;

impl Store {
    pub(crate) fn new(client: Client, namespace: &str) -> Self {
        Self { api: Api::namespaced(client, namespace) }
    }

    pub(crate) const fn api(&self) -> &Api<Secret> {
        &self.api
    }

    /// What stands there, or else this, which is then written. Of several replicas that begin at once one writes, and all have the same.
    pub(crate) async fn read_or_create(&self, make: impl Fn() -> Result<Stored, super::Pki>) -> Result<Kept, Create> {
        for _ in 0..ATTEMPTS {
            if let Some(secret) = self.api.get_opt(CA_SECRET).await.map_err(Keep::from)? {
                return Ok(Kept::of(&secret).map_err(Keep::from)?);
            }
            if let Some(kept) = self.create(&make()?).await? {
                tracing::info!(root = %kept.stored.target().id, "Made a CA");
                return Ok(kept);
            }
        }
        Err(Keep::Unsteady.into())
    }

    /// Writes it where there is none; `None` when there is one.
    pub(crate) async fn create(&self, stored: &Stored) -> Result<Option<Kept>, Keep> {
        let metadata = ObjectMeta { name: Some(CA_SECRET.to_owned()), ..ObjectMeta::default() };
        match self.api.create(&PostParams::default(), &secret(stored, metadata)).await {
            Ok(secret) => Ok(Some(Kept::of(&secret)?)),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes it over what was read; `None` when that is not there any more.
    pub(crate) async fn replace(&self, kept: &Kept, stored: &Stored) -> Result<Option<Kept>, Keep> {
        let secret = secret(stored, kept.metadata.clone());
        match self.api.replace(CA_SECRET, &PostParams::default(), &secret).await {
            Ok(secret) => Ok(Some(Kept::of(&secret)?)),
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// Why there is no CA to begin with.
#[derive(Debug, Error)]
pub enum Create {
    /// The Secret.
    #[error(transparent)]
    Keep(#[from] Keep),
    /// A new root.
    #[error("no root could be made")]
    Make(#[from] super::Pki),
}

fn secret(stored: &Stored, metadata: ObjectMeta) -> Secret {
    Secret { metadata, data: Some(stored.write()), ..Secret::default() }
}

#[cfg(test)]
mod tests;
