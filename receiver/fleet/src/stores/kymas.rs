//! Forms in which the cache has Kymas: the whole object, or its facts.

use std::sync::Arc;

use kube::runtime::reflector::{ObjectRef, Store};
use tidewatch_api::{
    Kyma,
    facts::{KymaFacts, ReducedKyma},
    key::KymaKey,
};
use tidewatch_cluster::lookup::LookupKey;

/// A Kyma in the cache. Both forms have [`KymaFacts`]; all other parts are in the whole object alone.
#[derive(Clone, Debug)]
pub enum CachedKyma {
    /// The object, without its unread parts.
    Whole(Arc<Kyma>),
    /// Facts about a Kyma in another replica's shard.
    Reduced(Arc<ReducedKyma>),
}

/// Returns a Kyma of the cache by its key.
pub fn find(kymas: &Store<CachedKyma>, key: &KymaKey) -> Option<Arc<CachedKyma>> {
    kymas.get(&ObjectRef::new(&key.name).within(&key.namespace))
}

impl From<Kyma> for CachedKyma {
    fn from(kyma: Kyma) -> Self {
        Self::Whole(Arc::new(kyma))
    }
}

impl<'a> From<&'a CachedKyma> for KymaFacts<'a> {
    fn from(kyma: &'a CachedKyma) -> Self {
        kyma.facts()
    }
}

impl CachedKyma {
    /// Facts about the Kyma.
    pub fn facts(&self) -> KymaFacts<'_> {
        match self {
            Self::Whole(kyma) => KymaFacts::Whole(kyma),
            Self::Reduced(reduced) => KymaFacts::Reduced(reduced),
        }
    }

    /// The object, if its body is in the cache.
    pub const fn whole(&self) -> Option<&Arc<Kyma>> {
        match self {
            Self::Whole(kyma) => Some(kyma),
            Self::Reduced(_) => None,
        }
    }

    /// Returns true if the body is not in the cache.
    pub const fn is_reduced(&self) -> bool {
        matches!(self, Self::Reduced(_))
    }

    /// Namespace and name of the Kyma.
    pub fn key(&self) -> KymaKey {
        match self {
            Self::Whole(kyma) => KymaKey::of(kyma.as_ref()),
            Self::Reduced(reduced) => KymaKey::new(&**reduced.namespace, &*reduced.name),
        }
    }

    fn lookup_key(&self) -> LookupKey<'_> {
        match self {
            Self::Whole(kyma) => LookupKey::from(&kyma.metadata),
            Self::Reduced(reduced) => LookupKey { namespace: Some(&reduced.namespace), name: Some(&reduced.name) },
        }
    }
}

tidewatch_cluster::lookup_by_key!(CachedKyma as Kyma);

#[cfg(any(test, feature = "testing"))]
impl<'de> serde::Deserialize<'de> for CachedKyma {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Kyma::deserialize(deserializer).map(Self::from)
    }
}

#[cfg(any(test, feature = "testing"))]
impl CachedKyma {
    /// Reduced form of a Kyma.
    pub fn reduced(kyma: &Kyma) -> Self {
        Self::Reduced(Arc::new(ReducedKyma::of(kyma, tidewatch_api::facts::RestDigest::default())))
    }
}

#[cfg(test)]
mod tests;
