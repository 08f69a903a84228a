//! Cache of the Manifests, whose whole and reduced forms share the parts that many have in common.

use std::sync::Arc;

use parking_lot::Mutex;
use tidewatch_api::{
    Manifest,
    key::{KymaKey, ManifestKey, OfManifest},
};
use tidewatch_fleet::{
    CommonParts,
    stores::manifests::{CachedManifest, Manifests},
};
use tidewatch_kit::metrics::KindLabel;

use super::{CachedObject, ObjectCache};

/// See the module documentation.
pub(in crate::app::changes) struct ManifestCache {
    pub(super) manifests: Manifests,
    parts: Mutex<CommonParts>,
}

impl From<Manifests> for ManifestCache {
    fn from(manifests: Manifests) -> Self {
        Self { manifests, parts: Mutex::default() }
    }
}

impl ObjectCache for ManifestCache {
    const KIND: KindLabel = KindLabel { kind: "manifests" };
    type Listed = Manifest;
    type Cached = CachedManifest;

    fn find(&self, key: &ManifestKey) -> Option<CachedManifest> {
        self.manifests.find(key)
    }

    fn of_kyma(&self, kyma: &KymaKey) -> Vec<CachedManifest> {
        self.manifests.find_of_kyma(kyma, None)
    }

    fn all(&self, reduced: bool) -> Vec<Arc<CachedManifest>> {
        self.manifests.all(reduced)
    }

    async fn missed(&self) {
        self.manifests.missed().await;
    }

    fn whole(&self, mut listed: Manifest) -> CachedManifest {
        self.parts.lock().share(&mut listed);
        listed.into()
    }

    fn reduce(&self, whole: &CachedManifest) -> Option<CachedManifest> {
        let CachedManifest::Whole(manifest) = whole else { return None };
        let key = self.manifests.shared_key(whole.key());
        Some(CachedManifest::Reduced(Arc::new(self.parts.lock().reduce(key, manifest)?)))
    }
}

impl CachedObject for CachedManifest {
    type Of = OfManifest;

    fn key(&self) -> ManifestKey {
        self.key()
    }

    fn kyma(&self) -> Option<KymaKey> {
        self.kyma()
    }

    fn is_reduced(&self) -> bool {
        self.is_reduced()
    }

    fn object_version(&self) -> Option<&str> {
        self.object_version()
    }

    fn has_other_owner(&self, uid: &str) -> bool {
        self.owner_uids().any(|owner| owner != uid)
    }
}
