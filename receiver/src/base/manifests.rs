//! Cache of the Manifests of KCP with an index by Kyma, so that a reconcile reads only the Manifests of its Kyma.

use std::{
    collections::{BTreeSet, HashMap, hash_map::Entry},
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

/// Names of the Manifests by owner, and the owners of each Manifest at its last event; bounded by the cache.
#[derive(Default)]
struct Index {
    owners: HashMap<KymaKey, BTreeSet<Owner>>,
    names: HashMap<Owner, BTreeSet<String>>,
}

/// Owner of a Manifest, within its namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Owner {
    /// Kyma that the label names.
    Name(KymaKey),
    /// Namespace of the Manifest, and the uid in an owner reference.
    Uid(String, String),
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
        let names = self.read().names(&wanted);
        let cached = names.into_iter().filter_map(|name| self.get(&KymaKey::new(&kyma.namespace, name)));
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
    let uid = uid.map(|uid| Owner::Uid(kyma.namespace.clone(), uid.to_owned()));
    uid.into_iter().chain([Owner::Name(kyma.clone())]).collect()
}

fn owners(manifest: &Manifest) -> BTreeSet<Owner> {
    let namespace = manifest.namespace().unwrap_or_default();
    let label = manifest.labels().get(label::KYMA_NAME);
    let name = label.map(|name| Owner::Name(KymaKey::new(&namespace, name)));
    let uids = manifest.owner_references().iter();
    uids.map(|owner| Owner::Uid(namespace.clone(), owner.uid.clone())).chain(name).collect()
}

impl Index {
    fn names(&self, owners: &BTreeSet<Owner>) -> BTreeSet<String> {
        owners.iter().filter_map(|owner| self.names.get(owner)).flatten().cloned().collect()
    }

    /// Replaces the owners of a Manifest. Returns the Kymas that its label names and named before.
    fn set(&mut self, manifest: KymaKey, owners: BTreeSet<Owner>) -> BTreeSet<KymaKey> {
        let previous = self.owners.remove(&manifest).unwrap_or_default();
        for owner in previous.difference(&owners) {
            if let Entry::Occupied(mut names) = self.names.entry(owner.clone()) {
                names.get_mut().remove(&manifest.name);
                if names.get().is_empty() {
                    names.remove();
                }
            }
        }
        for owner in owners.difference(&previous) {
            self.names.entry(owner.clone()).or_default().insert(manifest.name.clone());
        }
        let kymas = previous.union(&owners).filter_map(|owner| match owner {
            Owner::Name(kyma) => Some(kyma.clone()),
            Owner::Uid(..) => None,
        });
        let kymas = kymas.collect();
        if !owners.is_empty() {
            self.owners.insert(manifest, owners);
        }
        kymas
    }
}

#[cfg(test)]
mod tests;
