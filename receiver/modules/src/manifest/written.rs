//! Our writes of Manifests that the watch has not delivered yet. Without them a reconcile that follows at once would
//! begin with an old version, and fail with a conflict.

use std::{collections::HashMap, sync::Arc};

use kube::ResourceExt as _;
use parking_lot::Mutex;
use tidewatch_api::{Manifest, key::ManifestKey};

/// Replaced versions of one Manifest at most; an older one leads to a conflict.
const MAX_REPLACED: usize = 32;

/// Manifests as our last write returned them, until the watch delivers that version or another one. Clones share one state.
#[derive(Clone, Debug, Default)]
pub(super) struct WrittenManifests(Arc<Mutex<HashMap<ManifestKey, Written>>>);

#[derive(Debug)]
struct Written {
    manifest: Arc<Manifest>,
    /// Resource versions that our writes replaced.
    replaced: Vec<String>,
}

impl WrittenManifests {
    /// Returns the Manifest that our last write returned if `cached` is a version that our writes replaced, and `cached`
    /// otherwise.
    pub(super) fn newest(&self, key: &ManifestKey, cached: Arc<Manifest>) -> Arc<Manifest> {
        self.0
            .lock()
            .get(key)
            .filter(|written| written.has_replaced(&cached))
            .map_or(cached, |written| written.manifest.clone())
    }

    /// Records a write that replaced a version.
    pub(super) fn wrote(&self, key: &ManifestKey, replaced: Option<String>, manifest: &Manifest) {
        let Some(replaced) = replaced.filter(|version| manifest.metadata.resource_version.as_ref() != Some(version))
        else {
            return;
        };
        let manifest = Arc::new(manifest.clone());
        let mut all = self.0.lock();
        match all.get_mut(key).filter(|written| written.manifest.metadata.resource_version.as_ref() == Some(&replaced))
        {
            Some(written) => {
                written.manifest = manifest;
                written.replaced.push(replaced);
                let excess = written.replaced.len().saturating_sub(MAX_REPLACED);
                written.replaced.drain(..excess);
            }
            None => drop(all.insert(key.clone(), Written { manifest, replaced: vec![replaced] })),
        }
    }

    /// Drops our write once the watch has delivered it, or a version of another writer.
    pub(super) fn observe(&self, key: &ManifestKey, delivered: &Manifest) {
        let mut all = self.0.lock();
        if all.get(key).is_some_and(|written| !written.has_replaced(delivered)) {
            all.remove(key);
        }
    }

    pub(super) fn forget(&self, key: &ManifestKey) {
        self.0.lock().remove(key);
    }
}

impl Written {
    fn has_replaced(&self, manifest: &Manifest) -> bool {
        let version = manifest.resource_version();
        manifest.uid() == self.manifest.uid() && version.is_some_and(|version| self.replaced.contains(&version))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tidewatch_api::key::KymaKey;

    use super::*;

    fn manifest(uid: &str, version: usize) -> Manifest {
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": "m", "namespace": "ns", "uid": uid, "resourceVersion": version.to_string()},
            "spec": {"remote": true, "install": {"name": "i", "source": {}}}}))
        .unwrap()
    }

    fn newest(written: &WrittenManifests, uid: &str, version: usize) -> Option<String> {
        written.newest(&KymaKey::new("ns", "m"), Arc::new(manifest(uid, version))).resource_version()
    }

    #[test]
    fn replaced_version_yields_the_last_write_and_another_one_itself() {
        let written = WrittenManifests::default();
        let key = KymaKey::new("ns", "m");
        assert_eq!(newest(&written, "u", 1).as_deref(), Some("1"));
        written.wrote(&key, Some("1".into()), &manifest("u", 3));
        written.wrote(&key, Some("3".into()), &manifest("u", 5));
        // A write without a difference returns the same version.
        written.wrote(&key, Some("5".into()), &manifest("u", 5));
        for (uid, cached, expected) in
            [("u", 1, "5"), ("u", 3, "5"), ("u", 5, "5"), ("u", 4, "4"), ("u", 7, "7"), ("other", 1, "1")]
        {
            assert_eq!(newest(&written, uid, cached).as_deref(), Some(expected), "{uid} {cached}");
        }
    }

    #[test]
    fn write_is_kept_until_the_watch_delivers_it_or_another_version() {
        let written = WrittenManifests::default();
        let key = KymaKey::new("ns", "m");
        let is_kept = |written: &WrittenManifests| !written.0.lock().is_empty();
        for (delivered, stays) in [(1, true), (3, true), (5, false)] {
            written.wrote(&key, Some("1".into()), &manifest("u", 3));
            written.wrote(&key, Some("3".into()), &manifest("u", 5));
            written.observe(&key, &manifest("u", delivered));
            assert_eq!(is_kept(&written), stays, "{delivered}");
            written.forget(&key);
            assert!(!is_kept(&written));
        }
        // After a foreign version, ours begins anew.
        written.wrote(&key, Some("1".into()), &manifest("u", 3));
        written.wrote(&key, Some("6".into()), &manifest("u", 7));
        assert_eq!(newest(&written, "u", 1).as_deref(), Some("1"));
    }

    #[test]
    fn replaced_versions_are_bounded() {
        let written = WrittenManifests::default();
        let key = KymaKey::new("ns", "m");
        for version in 0..1_000 {
            written.wrote(&key, Some(version.to_string()), &manifest("u", version + 1));
        }
        assert_eq!(newest(&written, "u", 0).as_deref(), Some("0"));
        assert_eq!(newest(&written, "u", 999 - MAX_REPLACED + 1).as_deref(), Some("1000"));
        assert_eq!(written.0.lock()[&key].replaced.len(), MAX_REPLACED);
    }
}
