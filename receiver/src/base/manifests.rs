//! Cache of the Manifests of KCP with an index by Kyma, so that a reconcile reads only the Manifests of its Kyma.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use kube::{
    ResourceExt,
    runtime::reflector::{ObjectRef, Store},
};
use tidewatch_shared::{api::Manifest, names::label};

use super::{key::KymaKey, labels::is_true};

/// Cache and index. Clones share them. The watch updates the cache first and the index directly afterwards; a read
/// verifies each object that the index names, so an index that is behind yields no Manifest of another Kyma.
#[derive(Clone)]
pub struct Manifests {
    cache: Store<Manifest>,
    index: Arc<RwLock<Index>>,
}

/// Manifests by owner, and the owners of each Manifest at its last event; bounded by the cache. Both share their keys, because a
/// control plane has thousands of Manifests.
#[derive(Default)]
struct Index {
    owners: HashMap<KymaKey, Box<[Owner]>>,
    manifests: HashMap<Owner, BTreeSet<KymaKey>>,
}

/// Owner of a Manifest, within its namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Owner {
    /// Kyma that the label names.
    Name(KymaKey),
    /// Namespace of the Manifest, and the uid in an owner reference.
    Uid(Arc<(String, String)>),
}

impl From<Store<Manifest>> for Manifests {
    fn from(cache: Store<Manifest>) -> Self {
        Self { cache, index: Arc::default() }
    }
}

impl Manifests {
    /// Indexes a Manifest of the cache that is new or changed. Returns the Kymas that its label names and named before.
    pub fn apply(&self, manifest: &Manifest) -> BTreeSet<KymaKey> {
        self.write().set(KymaKey::of(manifest), owners(manifest))
    }

    /// Removes a deleted Manifest from the index. Returns the Kyma that its label named.
    pub fn delete(&self, manifest: &Manifest) -> BTreeSet<KymaKey> {
        self.write().set(KymaKey::of(manifest), BTreeSet::new())
    }

    /// Returns a Manifest by name.
    #[must_use]
    pub fn get(&self, manifest: &KymaKey) -> Option<Arc<Manifest>> {
        self.cache.get(&ObjectRef::new(&manifest.name).within(&manifest.namespace))
    }

    /// Returns the Manifests of a Kyma, by label or by the uid in an owner reference, sorted by name. The cost depends
    /// on their number alone.
    #[must_use]
    pub fn of_kyma(&self, kyma: &KymaKey, uid: Option<&str>) -> Vec<Arc<Manifest>> {
        let wanted = wanted(kyma, uid);
        let found = self.read().of(&wanted);
        let cached = found.into_iter().filter_map(|manifest| self.get(&manifest));
        cached.filter(|manifest| !owners(manifest).is_disjoint(&wanted)).collect()
    }

    /// Returns the Manifests of a module in all Kymas. Scans the cache, so only for changes of the catalog.
    #[must_use]
    pub fn of_module(&self, module: &str) -> Vec<Arc<Manifest>> {
        let of_module = |manifest: &Manifest| manifest.labels().get(label::MODULE_NAME).is_some_and(|of| of == module);
        self.cache.state_filter(of_module)
    }

    /// Returns the Manifests with this label set to `true`. Scans the cache, so only for metrics.
    #[must_use]
    pub fn with_label(&self, key: &str) -> Vec<Arc<Manifest>> {
        self.cache.state_filter(|manifest| is_true(Some(manifest.labels()), key))
    }

    fn read(&self) -> RwLockReadGuard<'_, Index> {
        // No change panics half-way.
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The owners by which a Manifest belongs to a Kyma.
fn wanted(kyma: &KymaKey, uid: Option<&str>) -> BTreeSet<Owner> {
    let uid = uid.map(|uid| Owner::uid(&kyma.namespace, uid));
    uid.into_iter().chain([Owner::Name(kyma.clone())]).collect()
}

fn owners(manifest: &Manifest) -> BTreeSet<Owner> {
    let namespace = manifest.namespace().unwrap_or_default();
    let label = manifest.labels().get(label::KYMA_NAME);
    let name = label.map(|name| Owner::Name(KymaKey::new(&namespace, name)));
    let uids = manifest.owner_references().iter();
    uids.map(|owner| Owner::uid(&namespace, &owner.uid)).chain(name).collect()
}

impl Owner {
    fn uid(namespace: &str, uid: &str) -> Self {
        Self::Uid(Arc::new((namespace.to_owned(), uid.to_owned())))
    }
}

impl Index {
    fn of(&self, owners: &BTreeSet<Owner>) -> BTreeSet<KymaKey> {
        owners.iter().filter_map(|owner| self.manifests.get(owner)).flatten().cloned().collect()
    }

    /// Replaces the owners of a Manifest. Returns the Kymas that its label names and named before.
    fn set(&mut self, manifest: KymaKey, owners: BTreeSet<Owner>) -> BTreeSet<KymaKey> {
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
    fn add(&mut self, owner: Owner, manifest: &KymaKey) -> Owner {
        let entry = self.manifests.entry(owner);
        let shared = entry.key().clone();
        let manifests = entry.or_default();
        if !manifests.contains(manifest) {
            manifests.insert(manifest.clone());
        }
        shared
    }
}

#[cfg(test)]
mod tests;
