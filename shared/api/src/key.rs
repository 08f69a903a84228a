//! Keys of Kymas and Manifests.

use std::{fmt, ops::Deref, sync::Arc};

use kube::{Resource, ResourceExt as _};

/// Namespace and name of a Kyma in KCP: the key of the queue and of all state of a runtime. Clones share their text,
/// since a dozen tables hold the key of each runtime.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KymaKey(Arc<Name>);

/// Key of a Manifest: its namespace and name in KCP.
pub type ManifestKey = KymaKey;

/// Fields of a [`KymaKey`].
#[derive(Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name {
    /// Namespace in KCP.
    pub namespace: String,
    /// Name in KCP.
    pub name: String,
}

impl KymaKey {
    /// Makes a key from namespace and name.
    #[must_use]
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self(Arc::new(Name { namespace: namespace.into(), name: name.into() }))
    }

    /// Key of a namespaced object.
    #[must_use]
    pub fn of(object: &impl Resource) -> Self {
        Self::new(object.namespace().unwrap_or_default(), object.name_any())
    }
}

impl Deref for KymaKey {
    type Target = Name;

    fn deref(&self) -> &Name {
        &self.0
    }
}

impl fmt::Display for KymaKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}
