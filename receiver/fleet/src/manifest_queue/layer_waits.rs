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

    /// Takes the Manifests that wait for a changed lookup. A change of a layer, which is rare, visits all of them.
    pub(super) fn take(&mut self, change: &Change) -> BTreeSet<ManifestKey> {
        let changed = match change {
            Change::Key(Key::Descriptor(_)) => return BTreeSet::new(),
            Change::Key(Key::Layer(changed)) => Some(changed),
            Change::All => None,
        };
        self.0.extract_if(|_, layer| changed.is_none_or(|changed| layer == changed)).map(|(key, _)| key).collect()
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
