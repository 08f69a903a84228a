//! Cache of the Manifests of KCP with an index by Kyma, so that a reconcile reads only the Manifests of its Kyma.

mod cached;
mod index;

use std::{collections::BTreeSet, sync::Arc};

use kube::runtime::reflector::{ObjectRef, Store};
use parking_lot::{RwLock, RwLockWriteGuard};
use tidewatch_api::{Manifest, key::KymaKey};
use tidewatch_cluster::body_missing::BodyMissingError;
use tokio::sync::Notify;

pub use self::cached::CachedManifest;
use self::index::{Index, Owner};

/// Cache and index. Clones share them. The watch updates the cache first and the index directly afterwards; a read
/// verifies each object that the index names, so an index that is behind yields no Manifest of another Kyma.
///
/// Manifests of runtimes in other replicas' shards are reduced to their facts. Readers that need the body of one get
/// [`BodyMissingError`], never the answer that it does not exist.
#[derive(Clone)]
pub struct Manifests {
    cache: Store<CachedManifest>,
    index: Arc<RwLock<Index>>,
    /// Notified when a reader needs the body of a reduced Manifest.
    missed: Arc<Notify>,
}

impl From<Store<CachedManifest>> for Manifests {
    fn from(cache: Store<CachedManifest>) -> Self {
        Self { cache, index: Arc::default(), missed: Arc::default() }
    }
}

impl Manifests {
    /// Indexes a Manifest of the cache that is new or changed. Returns the Kymas that its label names and named before.
    pub fn apply(&self, manifest: &CachedManifest) -> BTreeSet<KymaKey> {
        self.write().set(manifest.key(), manifest.owners())
    }

    /// Removes a deleted Manifest from the index. Returns the Kyma that its label named.
    pub fn delete(&self, manifest: &KymaKey) -> BTreeSet<KymaKey> {
        self.write().set(manifest.clone(), BTreeSet::new())
    }

    /// Returns a Manifest by name; `None` if the cache has none.
    ///
    /// # Errors
    /// The cache has only its facts.
    pub fn get(&self, manifest: &KymaKey) -> Result<Option<Arc<Manifest>>, BodyMissingError> {
        self.find(manifest).map(|found| self.body(found)).transpose()
    }

    /// Returns a Manifest by name, reduced or not.
    #[must_use]
    pub fn find(&self, manifest: &KymaKey) -> Option<CachedManifest> {
        let found = self.cache.get(&ObjectRef::new(&manifest.name).within(&manifest.namespace))?;
        Some((*found).clone())
    }

    /// Returns the Manifests of a Kyma, by label or by the uid in an owner reference, sorted by name. The cost depends
    /// on their number alone.
    ///
    /// # Errors
    /// The cache has only the facts of one of them.
    pub fn of_kyma(&self, kyma: &KymaKey, uid: Option<&str>) -> Result<Vec<Arc<Manifest>>, BodyMissingError> {
        self.find_of_kyma(kyma, uid).into_iter().map(|found| self.body(found)).collect()
    }

    /// As [`Self::of_kyma`], reduced or not.
    #[must_use]
    pub fn find_of_kyma(&self, kyma: &KymaKey, uid: Option<&str>) -> Vec<CachedManifest> {
        let wanted = wanted(kyma, uid);
        let found = self.index.read().of(&wanted);
        let cached = found.into_iter().filter_map(|manifest| self.find(&manifest));
        cached.filter(|manifest| !manifest.owners().is_disjoint(&wanted)).collect()
    }

    /// Returns the Manifests of a module in all Kymas. Scans the cache, so only for changes of the catalog.
    #[must_use]
    pub fn of_module(&self, module: &str) -> Vec<Arc<CachedManifest>> {
        self.cache.state_filter(|manifest| manifest.is_of_module(module))
    }

    /// Returns the Manifests with the label of mandatory modules. Scans the cache, so only for metrics.
    #[must_use]
    pub fn mandatory(&self) -> Vec<Arc<CachedManifest>> {
        self.cache.state_filter(CachedManifest::is_mandatory)
    }

    /// Returns all Manifests that are reduced, or all that are not.
    pub fn all(&self, reduced: bool) -> Vec<Arc<CachedManifest>> {
        self.cache.state_filter(|manifest| manifest.is_reduced() == reduced)
    }

    /// Returns the index's clone of a key, to share its text.
    pub fn shared_key(&self, manifest: KymaKey) -> KymaKey {
        let index = self.index.read();
        index.owners.get_key_value(&manifest).map(|(known, _)| known.clone()).unwrap_or(manifest)
    }

    /// Waits until a reader needs the body of a reduced Manifest. Supports one caller. Cancel safe.
    pub async fn missed(&self) {
        self.missed.notified().await;
    }

    fn body(&self, found: CachedManifest) -> Result<Arc<Manifest>, BodyMissingError> {
        match found {
            CachedManifest::Whole(manifest) => Ok(manifest),
            CachedManifest::Reduced(_) => {
                self.missed.notify_one();
                Err(BodyMissingError { kind: "Manifest", key: found.key() })
            }
        }
    }

    fn write(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write()
    }
}

/// The owners by which a Manifest belongs to a Kyma.
fn wanted(kyma: &KymaKey, uid: Option<&str>) -> BTreeSet<Owner> {
    let uid = uid.map(|uid| Owner::uid(&kyma.namespace, uid));
    uid.into_iter().chain([Owner::Name(kyma.clone())]).collect()
}

#[cfg(test)]
mod tests;
