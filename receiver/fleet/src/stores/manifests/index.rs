//! Index of the Manifests by their owners.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use tidewatch_api::key::{KymaKey, ManifestKey};

/// Manifests by owner, and the owners of each Manifest at its last event; bounded by the cache. Both share their keys, because a
/// control plane has thousands of Manifests.
#[derive(Default)]
pub(super) struct Index {
    pub(super) owners: HashMap<ManifestKey, Box<[Owner]>>,
    pub(super) manifests: HashMap<Owner, BTreeSet<ManifestKey>>,
}

/// Owner of a Manifest, within its namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Owner {
    /// Kyma that the label names.
    Name(KymaKey),
    /// Namespace of the Manifest, and the uid in an owner reference.
    Uid(Arc<(String, String)>),
}

impl Owner {
    pub(super) fn uid(namespace: &str, uid: &str) -> Self {
        Self::Uid(Arc::new((namespace.to_owned(), uid.to_owned())))
    }
}

impl Index {
    pub(super) fn of(&self, owners: &BTreeSet<Owner>) -> BTreeSet<ManifestKey> {
        owners.iter().filter_map(|owner| self.manifests.get(owner)).flatten().cloned().collect()
    }

    /// Replaces the owners of a Manifest. Returns the Kymas that its label names and named before.
    pub(super) fn set(&mut self, manifest: ManifestKey, owners: BTreeSet<Owner>) -> BTreeSet<KymaKey> {
        let (manifest, previous) = self.owners.remove_entry(&manifest).unwrap_or((manifest, Box::default()));
        let kymas = previous.iter().chain(&owners).filter_map(|owner| match owner {
            Owner::Name(kyma) => Some(kyma.clone()),
            Owner::Uid(_) => None,
        });
        let kymas = kymas.collect();
        for owner in previous.iter().filter(|owner| !owners.contains(*owner)) {
            if let Some(manifests) = self.manifests.get_mut(owner) {
                manifests.remove(&manifest);
                if manifests.is_empty() {
                    self.manifests.remove(owner);
                }
            }
        }
        let owners: Box<[_]> = owners.into_iter().map(|owner| self.add(owner, &manifest)).collect();
        if !owners.is_empty() {
            self.owners.insert(manifest, owners);
        }
        kymas
    }

    /// Adds a Manifest to those of an owner. Returns the key that the Manifests of this owner share.
    fn add(&mut self, owner: Owner, manifest: &ManifestKey) -> Owner {
        let entry = self.manifests.entry(owner);
        let shared = entry.key().clone();
        let manifests = entry.or_default();
        if !manifests.contains(manifest) {
            manifests.insert(manifest.clone());
        }
        shared
    }
}
