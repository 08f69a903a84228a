//! Cache of the Manifests of KCP with an index by Kyma, so that a reconcile reads only the Manifests of its Kyma, and with our
//! last writes, so that it begins with them.

mod cached;
mod index;
mod writes;

use std::{
    collections::BTreeSet,
    sync::{Arc, OnceLock},
    time::Duration,
};

use kube::{
    ResourceExt as _,
    runtime::reflector::{ObjectRef, Store},
};
use parking_lot::RwLock;
use tidewatch_api::{
    Manifest,
    key::{KymaKey, ManifestKey},
};
use tidewatch_cluster::body_missing::BodyMissingError;
use tokio::{sync::Notify, time::Instant};

pub use self::cached::CachedManifest;
use self::{
    index::{Index, Owner},
    writes::{Writes, is_older},
};

/// Time that a list of all Manifests takes at most.
const LIST_TIME: Duration = Duration::from_secs(60);

/// A writer of Manifests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ManifestWriter {
    /// The reconcile of a Kyma, which shows the written Manifest in the status of the Kyma itself.
    Kyma,
    /// One whose result the status of the Kyma does not show yet.
    Other,
}

/// Change of a Manifest that the response to a request shows.
#[derive(Clone, Copy, Debug)]
pub enum Notice<'a> {
    /// It was written.
    Written(&'a CachedManifest, ManifestWriter),
    /// It is gone, and the watch may have delivered its deletion before our last write of it was known.
    Gone(&'a CachedManifest),
}

/// Takes the changes that responses show.
type OnNotice = Box<dyn Fn(Notice<'_>) + Send + Sync>;

/// Cache, index, and our writes that the cache does not show yet. Clones share them. The watch updates the cache first and the
/// index directly afterwards; a read verifies each object that the index names, so an index that is behind yields no Manifest
/// of another Kyma.
///
/// Manifests of runtimes in other replicas' shards are reduced to their facts. Readers that need the body of one get
/// [`BodyMissingError`], never the answer that it does not exist.
#[derive(Clone)]
pub struct Manifests {
    cache: Store<CachedManifest>,
    index: Arc<RwLock<Index>>,
    writes: Arc<RwLock<Writes>>,
    on_notice: Arc<OnceLock<OnNotice>>,
    /// Notified when a reader needs the body of a reduced Manifest.
    missed: Arc<Notify>,
}

impl From<Store<CachedManifest>> for Manifests {
    fn from(cache: Store<CachedManifest>) -> Self {
        Self { cache, index: Arc::default(), writes: Arc::default(), on_notice: Arc::default(), missed: Arc::default() }
    }
}

impl Manifests {
    /// Indexes a Manifest of the cache that is new or changed. Returns the Kymas that its label names and named before.
    pub fn apply(&self, manifest: &CachedManifest) -> BTreeSet<KymaKey> {
        let key = manifest.key();
        self.settle(&key);
        self.index.write().set(key, manifest.owners())
    }

    /// Removes a Manifest, which the watch has reported as deleted, from the index. Returns the Kyma that its label named.
    pub fn delete(&self, manifest: &CachedManifest) -> BTreeSet<KymaKey> {
        let key = manifest.key();
        self.writes.write().deleted(&key, manifest);
        let later = self.find(&key).map(|later| later.owners()).unwrap_or_default();
        self.index.write().set(key, later)
    }

    /// Calls a function with each response to a write from now on: it is the first notice of the change, before the watch
    /// delivers it. Only the first call has an effect.
    pub fn on_notice(&self, take: OnNotice) {
        let _ = self.on_notice.set(take);
    }

    /// Records that the reconcile of a Kyma begins to write a Manifest.
    pub fn begin_write(&self, manifest: ManifestKey, kyma: &KymaKey) {
        self.writes.write().begin(manifest, kyma);
    }

    /// Records the response to a write, which is what all readers get until the cache shows it or a later version.
    pub fn wrote(&self, written: &Manifest, by: ManifestWriter) {
        let mut written = written.clone();
        written.metadata.managed_fields = None;
        let written = CachedManifest::from(written);
        self.record(&written);
        if by == ManifestWriter::Kyma {
            self.writes.write().end(&written.key());
        }
        self.notify(Notice::Written(&written, by));
    }

    /// Records that a Manifest, which had this uid, is gone.
    pub fn wrote_gone(&self, manifest: &ManifestKey, uid: Option<String>, by: ManifestWriter) {
        let known = self.find(manifest);
        let mut writes = self.writes.write();
        writes.gone(manifest, uid);
        if by == ManifestWriter::Kyma {
            writes.end(manifest);
        }
        drop(writes);
        self.settle(manifest);
        if let (Some(known), None) = (known, self.cached(manifest)) {
            self.notify(Notice::Gone(&known));
        }
    }

    /// Drops our writes from before a list of all Manifests, which shows them, or a state of the control plane that was
    /// restored from a backup.
    pub fn listed(&self) {
        self.writes.write().expire(Instant::now().checked_sub(LIST_TIME));
    }

    /// Returns the Manifests of a Kyma that must be read from KCP: the result of a write is not known, or the cache has
    /// never shown the Manifest, or it lacks its deletion, which may have ended.
    pub fn uncertain(&self, kyma: &KymaKey) -> Vec<ManifestKey> {
        self.writes.read().uncertain(kyma, |manifest| self.cached(manifest).is_some())
    }

    /// Records the state of a Manifest that was read from KCP; `None` if it does not exist.
    pub fn found(&self, manifest: &ManifestKey, found: Option<Manifest>) {
        match found {
            Some(found) => {
                self.record(&found.into());
                self.writes.write().end(manifest);
            }
            None => {
                let known = self.find(manifest);
                let uid =
                    known.and_then(|known| if let CachedManifest::Whole(known) = known { known.uid() } else { None });
                self.wrote_gone(manifest, uid, ManifestWriter::Kyma);
            }
        }
    }

    /// Drops our writes of the Manifests of a Kyma, which another replica writes from now on.
    pub fn forget_writes(&self, kyma: &KymaKey) {
        self.writes.write().forget_kyma(kyma);
    }

    /// Returns true if a Manifest that the watch delivers is older than our last write of it.
    pub fn is_outdated(&self, delivered: &CachedManifest) -> bool {
        let CachedManifest::Whole(delivered) = delivered else { return false };
        let known = self.find(&ManifestKey::of(delivered.as_ref()));
        matches!(known, Some(CachedManifest::Whole(known)) if is_older(delivered, &known))
    }

    fn notify(&self, notice: Notice<'_>) {
        if let Some(take) = self.on_notice.get() {
            take(notice);
        }
    }

    fn record(&self, manifest: &CachedManifest) {
        let key = manifest.key();
        if let CachedManifest::Whole(whole) = manifest {
            self.writes.write().there(key.clone(), manifest.kyma(), whole.clone());
        }
        // The watch may have been faster.
        self.settle(&key);
        if let Some(newest) = self.find(&key) {
            self.index.write().set(key, newest.owners());
        }
    }

    /// Drops our write of a Manifest if the cache shows it.
    fn settle(&self, manifest: &ManifestKey) {
        if self.writes.read().is_empty() {
            return;
        }
        let cached = self.cached(manifest);
        let whole = match &cached {
            Some(CachedManifest::Whole(whole)) => Some(whole.as_ref()),
            Some(CachedManifest::Reduced(_)) => {
                self.writes.write().forget(manifest);
                return;
            }
            None => None,
        };
        self.writes.write().shown(manifest, whole);
    }

    /// Returns a Manifest by name; `None` if there is none.
    ///
    /// # Errors
    /// The cache has only its facts.
    pub fn get(&self, manifest: &ManifestKey) -> Result<Option<Arc<Manifest>>, BodyMissingError> {
        self.find(manifest).map(|found| self.body(found)).transpose()
    }

    /// Returns a Manifest by name, reduced or not.
    pub fn find(&self, manifest: &ManifestKey) -> Option<CachedManifest> {
        // Locked before the cache is read: a write is dropped once the cache shows it.
        let writes = self.writes.read();
        let whole = match self.cached(manifest) {
            Some(CachedManifest::Whole(whole)) => Some(whole),
            Some(reduced @ CachedManifest::Reduced(_)) => return Some(reduced),
            None => None,
        };
        writes.newest(manifest, whole).map(CachedManifest::Whole)
    }

    fn cached(&self, manifest: &ManifestKey) -> Option<CachedManifest> {
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
    pub fn find_of_kyma(&self, kyma: &KymaKey, uid: Option<&str>) -> Vec<CachedManifest> {
        let wanted = wanted(kyma, uid);
        let found = self.index.read().of(&wanted);
        let cached = found.into_iter().filter_map(|manifest| self.find(&manifest));
        cached.filter(|manifest| !manifest.owners().is_disjoint(&wanted)).collect()
    }

    /// Returns the Manifests of a module in all Kymas. Scans the cache, so only for changes of the catalog.
    pub fn of_module(&self, module: &str) -> Vec<Arc<CachedManifest>> {
        self.cache.state_filter(|manifest| manifest.is_of_module(module))
    }

    /// Returns the Manifests with the label of mandatory modules. Scans the cache, so only for metrics.
    pub fn mandatory(&self) -> Vec<Arc<CachedManifest>> {
        self.cache.state_filter(CachedManifest::is_mandatory)
    }

    /// Returns all Manifests that are reduced, or all that are not.
    pub fn all(&self, reduced: bool) -> Vec<Arc<CachedManifest>> {
        self.cache.state_filter(|manifest| manifest.is_reduced() == reduced)
    }

    /// Returns the index's clone of a key, to share its text.
    pub fn shared_key(&self, manifest: ManifestKey) -> ManifestKey {
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
                Err(BodyMissingError { kind: "Manifest", key: found.key().to_string() })
            }
        }
    }
}

/// The owners by which a Manifest belongs to a Kyma.
fn wanted(kyma: &KymaKey, uid: Option<&str>) -> BTreeSet<Owner> {
    let uid = uid.map(|uid| Owner::uid(&kyma.namespace, uid));
    uid.into_iter().chain([Owner::Name(kyma.clone())]).collect()
}

#[cfg(test)]
mod tests;
