//! Manifests that wait for a layer, by layer.

use std::collections::{BTreeSet, HashMap, hash_map::Entry};

use tidewatch_api::key::ManifestKey;
use tidewatch_oci::registry::{Change, Key, LayerKey};

/// Waiting Manifests; bounded by their number, since each waits for one layer at most.
#[derive(Debug, Default)]
pub(super) struct LayerWaits {
    manifests: HashMap<LayerKey, BTreeSet<ManifestKey>>,
    layers: HashMap<ManifestKey, LayerKey>,
}

impl LayerWaits {
    /// Records that a Manifest waits for a layer, instead of any other one.
    pub(super) fn wait(&mut self, key: &ManifestKey, layer: LayerKey) {
        self.forget(key);
        self.manifests.entry(layer.clone()).or_default().insert(key.clone());
        self.layers.insert(key.clone(), layer);
    }

    /// Takes the Manifests that wait for a changed lookup.
    pub(super) fn take(&mut self, change: &Change) -> BTreeSet<ManifestKey> {
        match change {
            Change::Key(Key::Layer(layer)) => {
                let taken = self.manifests.remove(layer).unwrap_or_default();
                taken.iter().for_each(|key| drop(self.layers.remove(key)));
                taken
            }
            Change::Key(Key::Descriptor(_)) => BTreeSet::new(),
            Change::All => {
                self.manifests.clear();
                self.layers.drain().map(|(key, _)| key).collect()
            }
        }
    }

    /// Ends the wait of a Manifest.
    pub(super) fn forget(&mut self, key: &ManifestKey) {
        let Some(layer) = self.layers.remove(key) else { return };
        if let Entry::Occupied(mut waiting) = self.manifests.entry(layer) {
            waiting.get_mut().remove(key);
            if waiting.get().is_empty() {
                waiting.remove();
            }
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.manifests.is_empty() && self.layers.is_empty()
    }
}
