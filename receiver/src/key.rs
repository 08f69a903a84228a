//! The name of a Kyma in KCP.

use std::fmt;

/// Namespace and name of a Kyma in KCP: the key of the queue and of all that is kept per runtime.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KymaKey {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl KymaKey {
    /// Makes a key of namespace and name.
    #[must_use]
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for KymaKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}
