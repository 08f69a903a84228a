//! Manifests that wait for a layer.

use std::collections::{BTreeSet, HashMap};

use tidewatch_api::key::ManifestKey;
use tidewatch_oci::registry::{Change, Key, LayerKey};

/// The layer of each waiting Manifest; bounded by their number, since each waits for one layer at most.
#[derive(Debug, Default)]
pub(super) struct LayerWaits(HashMap<ManifestKey, LayerKey>);

impl LayerWaits {
    /// Records that a Manifest waits for a layer, instead of any other one.
    pub(super) fn wait(&mut self, key: &ManifestKey, layer: LayerKey) {
        self.0.insert(key.clone(), layer);
    }

    /// Takes the Manifests that wait for a changed lookup. Visits all of them: each change follows a fetch.
    pub(super) fn take(&mut self, change: &Change) -> BTreeSet<ManifestKey> {
        let is_changed = |layer: &LayerKey| match change {
            Change::Key(Key::Layer(changed)) => layer == changed,
            Change::Key(Key::Descriptor(_)) => false,
            Change::All => true,
        };
        self.0.extract_if(|_, layer| is_changed(layer)).map(|(key, _)| key).collect()
    }

    /// Ends the wait of a Manifest.
    pub(super) fn forget(&mut self, key: &ManifestKey) {
        self.0.remove(key);
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
