//! Forms in which the cache has Manifests: the whole object, or its facts.

use std::{collections::BTreeSet, sync::Arc};

use kube::ResourceExt as _;
use tidewatch_api::{
    Manifest,
    facts::{ManifestFacts, ReducedManifest},
    key::{KymaKey, ManifestKey},
    labels::is_true,
    names::label,
};
use tidewatch_cluster::lookup::LookupKey;

use super::index::Owner;

/// A Manifest in the cache.
#[derive(Clone, Debug)]
pub enum CachedManifest {
    /// The object.
    Whole(Arc<Manifest>),
    /// Facts about an object of a runtime in another replica's shard.
    Reduced(Arc<ReducedManifest>),
}

impl From<Manifest> for CachedManifest {
    fn from(manifest: Manifest) -> Self {
        Self::Whole(Arc::new(manifest))
    }
}

impl CachedManifest {
    /// Facts about the Manifest.
    pub fn facts(&self) -> ManifestFacts<'_> {
        match self {
            Self::Whole(manifest) => manifest.as_ref().into(),
            Self::Reduced(reduced) => reduced.as_ref().into(),
        }
    }

    /// Namespace and name of the Manifest.
    pub fn key(&self) -> ManifestKey {
        match self {
            Self::Whole(manifest) => ManifestKey::of(manifest.as_ref()),
            Self::Reduced(reduced) => reduced.key.clone(),
        }
    }

    /// Kyma that the label names.
    pub fn kyma(&self) -> Option<KymaKey> {
        let kyma = match self {
            Self::Whole(manifest) => manifest.labels().get(label::KYMA_NAME)?,
            Self::Reduced(reduced) => &*reduced.kyma,
        };
        Some(KymaKey::new(self.lookup_key().namespace.unwrap_or_default(), kyma))
    }

    /// Returns true if the label names this module.
    pub fn is_of_module(&self, module: &str) -> bool {
        match self {
            Self::Whole(manifest) => manifest.labels().get(label::MODULE_NAME).is_some_and(|of| of == module),
            Self::Reduced(reduced) => ManifestFacts::from(reduced.as_ref()).module == Some(module),
        }
    }

    /// Returns true if the label of mandatory modules is set. Costs less than all facts.
    pub fn is_mandatory(&self) -> bool {
        match self {
            Self::Whole(manifest) => is_true(Some(manifest.labels()), label::MANDATORY_MODULE),
            Self::Reduced(reduced) => ManifestFacts::from(reduced.as_ref()).flags.is_mandatory,
        }
    }

    /// Returns true if the body is not in the cache.
    pub const fn is_reduced(&self) -> bool {
        matches!(self, Self::Reduced(_))
    }

    /// resourceVersion of the object.
    pub fn object_version(&self) -> Option<&str> {
        match self {
            Self::Whole(manifest) => manifest.metadata.resource_version.as_deref(),
            Self::Reduced(reduced) => reduced.object_version.as_deref(),
        }
    }

    /// Uids in the owner references.
    pub fn owner_uids(&self) -> impl Iterator<Item = &str> {
        let (references, owner) = match self {
            Self::Whole(manifest) => (manifest.owner_references(), None),
            Self::Reduced(reduced) => (&[] as &[_], reduced.owner.as_ref()),
        };
        references.iter().map(|owner| owner.uid.as_str()).chain(owner.map(|owner| owner.as_str()))
    }

    /// Owners by which the Manifest belongs to Kymas.
    pub(super) fn owners(&self) -> BTreeSet<Owner> {
        let namespace = self.lookup_key().namespace.unwrap_or_default();
        let uids = self.owner_uids().map(|uid| Owner::uid(namespace, uid));
        uids.chain(self.kyma().map(Owner::Name)).collect()
    }

    fn lookup_key(&self) -> LookupKey<'_> {
        match self {
            Self::Whole(manifest) => LookupKey::from(&manifest.metadata),
            Self::Reduced(reduced) => {
                LookupKey { namespace: Some(&reduced.key.namespace), name: Some(&reduced.key.name) }
            }
        }
    }
}

tidewatch_cluster::lookup_by_key!(CachedManifest as Manifest);

#[cfg(any(test, feature = "testing"))]
impl<'de> serde::Deserialize<'de> for CachedManifest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Manifest::deserialize(deserializer).map(Self::from)
    }
}

#[cfg(any(test, feature = "testing"))]
impl CachedManifest {
    /// Reduced form of a Manifest.
    #[allow(clippy::unwrap_used, reason = "test support")]
    pub fn reduced(manifest: &Manifest) -> Self {
        let reduced = ReducedManifest::of(ManifestKey::of(manifest), manifest, |text| text.to_owned().into());
        Self::Reduced(Arc::new(reduced.unwrap()))
    }
}
