//! Keys of Kymas and Manifests.

use std::{fmt, marker::PhantomData, ops::Deref, sync::Arc};

use kube::{Resource, ResourceExt as _};

/// Namespace and name of an object of the kind `K` in KCP. Clones share their text, since a dozen tables hold the key of each
/// runtime.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key<K>(Arc<Name>, PhantomData<K>);

/// Key of a Kyma, and so of all state of a runtime.
pub type KymaKey = Key<OfKyma>;
/// Key of a Manifest.
pub type ManifestKey = Key<OfManifest>;

/// The kind of a [`KymaKey`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OfKyma {}
/// The kind of a [`ManifestKey`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OfManifest {}

/// Fields of a [`Key`].
#[derive(Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name {
    /// Namespace in KCP.
    pub namespace: String,
    /// Name in KCP.
    pub name: String,
}

impl<K> Key<K> {
    /// Makes a key from namespace and name.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self(Arc::new(Name { namespace: namespace.into(), name: name.into() }), PhantomData)
    }

    /// Key of a namespaced object.
    pub fn of(object: &impl Resource) -> Self {
        Self::new(object.namespace().unwrap_or_default(), object.name_any())
    }
}

impl<K> Deref for Key<K> {
    type Target = Name;

    fn deref(&self) -> &Name {
        &self.0
    }
}

impl<K> fmt::Display for Key<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}
