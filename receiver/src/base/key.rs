//! The name of a Kyma in KCP.

use std::{fmt, ops::Deref, sync::Arc};

/// Namespace and name of a Kyma in KCP: the key of the queue and of all that is kept per runtime. Clones share their text, as each
/// runtime has its key in a dozen tables.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KymaKey(Arc<Name>);

/// What a [`KymaKey`] says.
#[derive(Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl KymaKey {
    /// Makes a key of namespace and name.
    #[must_use]
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self(Arc::new(Name { namespace: namespace.into(), name: name.into() }))
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
