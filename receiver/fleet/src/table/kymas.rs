//! Kymas of one shard.

use std::{collections::BTreeMap, ops::Bound};

use tidewatch_api::key::KymaKey;

use super::entry::Entry;

/// Kymas that one step under the lock of a shard visits at most. A walk over a fleet of thousands takes milliseconds, in
/// which no request would be answered.
pub(super) const CHUNK: usize = 64;

/// All Kymas of a shard by key. It has no iterator on purpose: walks go through [`RuntimeTable::in_chunks`](super::RuntimeTable::in_chunks).
#[derive(Default)]
pub(super) struct Kymas(BTreeMap<KymaKey, Entry>);

impl Kymas {
    pub(super) fn get(&self, key: &KymaKey) -> Option<&Entry> {
        self.0.get(key)
    }

    pub(super) fn get_mut(&mut self, key: &KymaKey) -> Option<&mut Entry> {
        self.0.get_mut(key)
    }

    pub(super) fn insert(&mut self, key: KymaKey, entry: Entry) {
        self.0.insert(key, entry);
    }

    pub(super) fn remove(&mut self, key: &KymaKey) -> Option<Entry> {
        self.0.remove(key)
    }

    pub(super) fn into_keys(self) -> Vec<KymaKey> {
        self.0.into_keys().collect()
    }

    /// Returns the next keys after this one, at most [`CHUNK`]; `None` begins with the first.
    pub(super) fn after(&self, last: Option<&KymaKey>) -> Vec<KymaKey> {
        let start = last.map_or(Bound::Unbounded, Bound::Excluded);
        self.0.range((start, Bound::Unbounded)).take(CHUNK).map(|(key, _)| key.clone()).collect()
    }
}
