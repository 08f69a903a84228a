//! Versions of the objects that our writes produced, until they are reported: the reconcile that wrote an object has
//! compared the response, so that its report requires no further one.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use parking_lot::Mutex;
use tidewatch_api::key::ManifestKey;
use tidewatch_kit::hash::hash;

use super::inventory::ObjectKey;

/// Hashes of the resourceVersions by hashes of the keys, by Manifest; bounded by the objects of the modules. Clones
/// share one state.
#[derive(Clone, Debug, Default)]
pub(super) struct OwnWrites(Arc<Mutex<HashMap<ManifestKey, BTreeMap<u64, u64>>>>);

impl OwnWrites {
    /// Records the version that a write returned.
    pub(super) fn wrote(&self, manifest: &ManifestKey, key: &ObjectKey, version: &str) {
        self.0.lock().entry(manifest.clone()).or_default().insert(hash(key), hash(version));
    }

    /// Returns true once if a reported version is that of our own write, after which no other writer has written.
    pub(super) fn is_echo(&self, manifest: &ManifestKey, key: &ObjectKey, version: &str) -> bool {
        let mut all = self.0.lock();
        let Some(written) = all.get_mut(manifest) else { return false };
        let is_echo = written.remove(&hash(key)) == Some(hash(version));
        if written.is_empty() {
            all.remove(manifest);
        }
        is_echo
    }

    /// Drops the versions of a Manifest that is gone, or whose objects are all read again.
    pub(super) fn forget(&self, manifest: &ManifestKey) {
        self.0.lock().remove(manifest);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn report_of_our_own_version_is_an_echo_once() {
        let map =
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "kyma-system"}});
        let writes = OwnWrites::default();
        let manifest = ManifestKey::new("ns", "m");
        let key = ObjectKey::of(&map);
        assert!(!writes.is_echo(&manifest, &key, "7"));
        writes.wrote(&manifest, &key, "7");
        assert!(!writes.is_echo(&ManifestKey::new("ns", "other"), &key, "7"));
        assert!(writes.is_echo(&manifest, &key, "7") && !writes.is_echo(&manifest, &key, "7"));
        assert!(writes.0.lock().is_empty());
        writes.wrote(&manifest, &key, "7");
        assert!(!writes.is_echo(&manifest, &key, "8"), "another writer came after us");
        assert!(!writes.is_echo(&manifest, &key, "7"), "a later report is none of ours");
        writes.wrote(&manifest, &key, "7");
        writes.forget(&manifest);
        assert!(!writes.is_echo(&manifest, &key, "7"));
    }
}
