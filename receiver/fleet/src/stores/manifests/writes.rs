//! Our writes of Manifests that the cache does not show yet, so that each reconcile begins with what the one before left.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
};

use kube::ResourceExt as _;
use tidewatch_api::{
    Manifest,
    key::{KymaKey, ManifestKey},
};

use tokio::time::Instant;

use super::CachedManifest;

/// Last write of each Manifest; an entry stays until the cache shows it. Bounded by the Manifests.
#[derive(Debug, Default)]
pub(super) struct Writes(HashMap<ManifestKey, Write>);

/// The last write of one Manifest.
#[derive(Debug)]
struct Write {
    /// Time of the last write.
    at: Instant,
    /// Kyma of the Manifest.
    kyma: Option<KymaKey>,
    /// A write began whose result is unknown.
    is_begun: bool,
    left: Option<Left>,
}

impl Default for Write {
    fn default() -> Self {
        Self { at: Instant::now(), kyma: None, is_begun: false, left: None }
    }
}

/// What a write left.
#[derive(Debug)]
enum Left {
    There(Arc<Manifest>),
    /// The one with this uid is gone.
    Gone(String),
}

impl Writes {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Records that a write begins.
    pub(super) fn begin(&mut self, key: ManifestKey, kyma: &KymaKey) {
        let write = self.0.entry(key).or_default();
        write.is_begun = true;
        write.kyma = Some(kyma.clone());
    }

    /// Records that the result of a write which began is known.
    pub(super) fn end(&mut self, key: &ManifestKey) {
        self.change(key, |write| write.is_begun = false);
    }

    /// Records a Manifest as KCP returned it. One that is older than the last changes nothing.
    pub(super) fn there(&mut self, key: ManifestKey, kyma: Option<KymaKey>, manifest: Arc<Manifest>) {
        let write = self.0.entry(key).or_default();
        if !matches!(&write.left, Some(Left::There(known)) if is_older(&manifest, known)) {
            write.at = Instant::now();
            write.left = Some(Left::There(manifest));
            write.kyma = kyma.or(write.kyma.take());
        }
    }

    /// Records that the Manifest with this uid is gone; `None` if its uid is not known.
    pub(super) fn gone(&mut self, key: &ManifestKey, uid: Option<String>) {
        let write = self.0.entry(key.clone()).or_default();
        write.at = Instant::now();
        write.left = uid.map(Left::Gone);
        self.change(key, |_| ());
    }

    /// Drops what is known of a Manifest, except that a write began.
    pub(super) fn forget(&mut self, key: &ManifestKey) {
        self.change(key, |write| write.left = None);
    }

    /// Changes an entry, and drops it if it says nothing any more.
    fn change(&mut self, key: &ManifestKey, change: impl FnOnce(&mut Write)) {
        let Entry::Occupied(mut entry) = self.0.entry(key.clone()) else { return };
        change(entry.get_mut());
        if !entry.get().is_begun && entry.get().left.is_none() {
            entry.remove();
        }
    }

    /// Returns the Manifest as our last write left it if the cache does not show that write, and the cached one otherwise.
    pub(super) fn newest(&self, key: &ManifestKey, cached: Option<Arc<Manifest>>) -> Option<Arc<Manifest>> {
        match (self.0.get(key).and_then(|write| write.left.as_ref()), cached) {
            (Some(Left::There(written)), None) => Some(written.clone()),
            (Some(Left::There(written)), Some(cached)) if is_older(&cached, written) => Some(written.clone()),
            (Some(Left::Gone(uid)), Some(cached)) if cached.uid().as_ref() == Some(uid) => None,
            (_, cached) => cached,
        }
    }

    /// Takes notice of a deletion that the watch delivered. A later Manifest of that name stays.
    pub(super) fn deleted(&mut self, key: &ManifestKey, delivered: &CachedManifest) {
        let is_later = |write: &Write| match (&write.left, delivered) {
            (Some(Left::There(written)), CachedManifest::Whole(delivered)) => {
                written.uid() != delivered.uid() && is_older(delivered, written)
            }
            _ => false,
        };
        self.change(key, |write| {
            if !is_later(write) {
                write.left = None;
            }
        });
    }

    /// Takes notice of the state of the cache.
    pub(super) fn shown(&mut self, key: &ManifestKey, cached: Option<&Manifest>) {
        self.change(key, |write| {
            let is_shown = match (&write.left, cached) {
                (Some(Left::There(written)), Some(cached)) => !is_older(cached, written),
                (Some(Left::Gone(uid)), Some(cached)) => cached.uid().as_ref() != Some(uid),
                (Some(Left::Gone(_)), None) => true,
                (Some(Left::There(_)) | None, None) | (None, Some(_)) => false,
            };
            if is_shown {
                write.left = None;
            }
        });
    }

    /// Returns the Manifests of a Kyma whose last write has an unknown result, or is the only evidence that they exist.
    pub(super) fn uncertain(&self, kyma: &KymaKey, is_cached: impl Fn(&ManifestKey) -> bool) -> Vec<ManifestKey> {
        let of_kyma = self.0.iter().filter(|(_, write)| write.kyma.as_ref() == Some(kyma));
        let uncertain = of_kyma.filter(|(key, write)| match &write.left {
            _ if write.is_begun => true,
            Some(Left::There(written)) => written.metadata.deletion_timestamp.is_some() || !is_cached(key),
            Some(Left::Gone(_)) | None => false,
        });
        uncertain.map(|(key, _)| key.clone()).collect()
    }

    /// Drops what is known of Manifests that were written before a time.
    pub(super) fn expire(&mut self, before: Option<Instant>) {
        let Some(before) = before else { return };
        self.0.retain(|_, write| {
            if write.at < before {
                write.left = None;
            }
            write.is_begun || write.left.is_some()
        });
    }

    /// Drops what is known of the Manifests of a Kyma.
    pub(super) fn forget_kyma(&mut self, kyma: &KymaKey) {
        self.0.retain(|_, write| write.kyma.as_ref() != Some(kyma));
    }
}

/// Returns true if a Manifest is certainly older than another one of its name: the versions of a kind grow.
pub(super) fn is_older(manifest: &Manifest, other: &Manifest) -> bool {
    let version = |manifest: &Manifest| manifest.metadata.resource_version.as_deref()?.parse::<u64>().ok();
    version(manifest).zip(version(other)).is_some_and(|(version, other)| version < other)
}
