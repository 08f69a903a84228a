//! Kinds of the tests: how the handlers of the watch keep their indexes current, and what their readers find.

use kube::{Client, runtime::reflector::Store};

use super::*;

/// Names and versions of the objects of a Kyma, sorted.
pub(super) type Expected = [(String, u64)];

pub(super) trait TestKind: ObjectCache {
    /// Observations of the test.
    type Probe;

    fn of(cache: Store<Self::Cached>) -> (Self, Self::Probe)
    where
        Self: Sized;

    fn api(kcp: Client) -> Api<DeserializeGuard<Self::Listed>>;

    /// An object is in the shard of its own label, not in that of a Kyma that has another label now.
    const MOVES_ALONE: bool = false;

    /// An object as the API server stores it.
    fn object(name: &str, kyma: &str, version: u64) -> Value;

    /// What the handler does with an object that is new or changed in the cache.
    fn index(&self, cached: &Self::Cached);

    /// What the handler does with an object that is deleted from the cache.
    fn unindex(&self, cached: &Self::Cached);

    /// Returns whether the readers of a Kyma find exactly these objects in these versions.
    fn finds(&self, kyma: &KymaKey, expected: &Expected) -> Result<bool, BodyMissingError>;

    fn parsed(object: Value) -> Self::Listed {
        serde_json::from_value(object).unwrap()
    }
}

impl TestKind for ManifestCache {
    type Probe = ();

    fn of(cache: Store<CachedManifest>) -> (Self, ()) {
        (Manifests::from(cache).into(), ())
    }

    fn api(kcp: Client) -> Api<DeserializeGuard<Manifest>> {
        Api::namespaced(kcp, NAMESPACE)
    }

    fn object(name: &str, kyma: &str, version: u64) -> Value {
        manifest(name, kyma, version)
    }

    fn index(&self, cached: &CachedManifest) {
        self.manifests.apply(cached);
    }

    fn unindex(&self, cached: &CachedManifest) {
        self.manifests.delete(cached);
    }

    fn finds(&self, kyma: &KymaKey, expected: &Expected) -> Result<bool, BodyMissingError> {
        let found = self.manifests.of_kyma(kyma, None)?;
        let object = |(name, version): &(String, u64)| Arc::new(Self::parsed(manifest(name, &kyma.name, *version)));
        Ok(found == expected.iter().map(object).collect::<Vec<_>>())
    }
}
