//! Keys and results of lookups.

use std::{fmt, sync::Arc};

use thiserror::Error;

use crate::{
    component::ComponentVersion,
    credentials::CredentialsError,
    descriptor::{Descriptor, Resource},
    digest::Digest,
    fetch::FetchError,
    layer::LayerKind,
    signature::SignatureError,
};

/// A component descriptor or a layer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Key {
    /// Component descriptor.
    Descriptor(ComponentVersion),
    /// Layer.
    Layer(LayerKey),
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Descriptor(component) => write!(f, "component descriptor {component}"),
            Self::Layer(LayerKey { repository, digests, .. }) => {
                let first = digests.first().map(ToString::to_string).unwrap_or_default();
                write!(f, "layer {repository}@{first}")
            }
        }
    }
}

/// A layer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerKey {
    /// Repository below the registry's path.
    pub repository: Arc<str>,
    /// Blobs whose concatenation is the layer; usually one.
    pub digests: Arc<[Digest]>,
    /// Form of the content.
    pub kind: LayerKind,
}

/// Answer to a lookup, without waiting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lookup<T> {
    /// Fetched, verified and decoded.
    Ready(Arc<T>),
    /// Being fetched; a [`Change`](super::Change) follows.
    Pending,
    /// The last fetch failed. It is repeated; a [`Change`](super::Change) follows when the result is another.
    Failed(Arc<LookupError>),
}

/// Failed lookup. Texts are one bounded line without secrets.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LookupError {
    /// The Secret of `--oci-registry-cred-secret` does not exist.
    #[error("the Secret {secret} with the registry and its credentials does not exist")]
    SecretMissing {
        /// Name of the Secret.
        secret: String,
    },
    /// The Secret of `--oci-registry-cred-secret` is malformed, and no valid one was there before.
    #[error("the Secret {secret} is not usable: {error}")]
    SecretMalformed {
        /// Name of the Secret.
        secret: String,
        /// Mistake.
        error: CredentialsError,
    },
    /// The artefact cannot be fetched.
    #[error("cannot fetch the {key}: {error}{}", remedy(.error))]
    Fetch {
        /// Descriptor or layer.
        key: Key,
        /// Cause.
        error: FetchError,
    },
    /// The content was fetched, but is not of the specified form.
    #[error("the {key} is not usable: {text}")]
    Unusable {
        /// Descriptor or layer.
        key: Key,
        /// Mistake: one bounded line.
        text: String,
    },
    /// The component descriptor was fetched, but no trusted key signed it.
    #[error("the {key} is not trusted: {error}")]
    Untrusted {
        /// Descriptor.
        key: Key,
        /// Cause.
        error: SignatureError,
    },
    /// The layer consists of no blob, or of too many.
    #[error("the {0} does not consist of 1 to 128 blobs")]
    Blobs(Key),
    /// A defect: the fetch ended without a result.
    #[error("the fetch of the {0} ended unexpectedly")]
    Aborted(Key),
}

/// What gives the receiver the credentials that it lacks.
const fn remedy(error: &FetchError) -> &'static str {
    match error {
        FetchError::Unauthorized { with_credentials: false }
        | FetchError::Denied { with_credentials: false, .. }
        | FetchError::NotFound { with_credentials: false, .. } => {
            "; credentials come from the Secret of --oci-registry-cred-secret, or with --oci-registry-google-credentials"
        }
        _ => "",
    }
}

impl LookupError {
    /// Returns whether a repetition may succeed soon without a change elsewhere.
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::Fetch { error, .. } => error.is_retryable(),
            Self::Aborted(_) => true,
            Self::SecretMissing { .. }
            | Self::SecretMalformed { .. }
            | Self::Unusable { .. }
            | Self::Untrusted { .. }
            | Self::Blobs(_) => false,
        }
    }

    /// Cause of a failed fetch.
    pub const fn fetch(&self) -> Option<&FetchError> {
        match self {
            Self::Fetch { error, .. } => Some(error),
            _ => None,
        }
    }
}

/// Result of a fetch.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Descriptor(Arc<Descriptor>),
    Layer(Arc<String>),
}

impl Value {
    /// Estimated memory, in bytes.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Layer(text) => text.len(),
            Self::Descriptor(descriptor) => {
                let resource = |resource: &Resource| {
                    let Resource { name, version, kind, access, image, digest, .. } = resource;
                    let digest = digest.as_ref().map_or(0, |digest| digest.value.len());
                    let image = image.as_ref().map_or(0, String::len);
                    size_of::<Resource>() + name.len() + version.len() + kind.len() + access.len() + image + digest
                };
                let images: usize = descriptor.images.iter().map(|image| size_of::<String>() + image.len()).sum();
                size_of::<Descriptor>() + images + descriptor.resources.iter().map(resource).sum::<usize>()
            }
        }
    }
}
