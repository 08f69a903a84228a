//! Searches for objects in a runtime cluster, on whose result a removal depends.

use thiserror::Error;

/// A search that failed: the removal waits. The text is the operation.
#[derive(Debug, Error)]
pub(super) enum SearchError {
    /// Read of a CRD of the inventory.
    #[error("read the CRD {name}")]
    Definition {
        /// Name of the CRD.
        name: String,
        /// Cause.
        source: kube::Error,
    },
    /// Discovery of the version in which a kind is served.
    #[error("find the kind {kind}")]
    Kind {
        /// Kind.
        kind: String,
        /// Cause.
        source: kube::Error,
    },
    /// Discovery of the kinds of all CRDs.
    #[error("find the kinds that the runtime serves")]
    Kinds(#[source] kube::Error),
    /// Read of an object.
    #[error("read {object}")]
    Object {
        /// The object.
        object: String,
        /// Cause.
        source: kube::Error,
    },
    /// List of the objects of a kind.
    #[error("list the objects of the kind {kind}")]
    List {
        /// Kind.
        kind: String,
        /// Cause.
        source: kube::Error,
    },
}

impl SearchError {
    /// The failed request.
    pub(super) const fn request(&self) -> &kube::Error {
        match self {
            Self::Definition { source, .. }
            | Self::Kind { source, .. }
            | Self::Kinds(source)
            | Self::Object { source, .. }
            | Self::List { source, .. } => source,
        }
    }
}
