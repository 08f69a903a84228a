//! Kymas of one shard, each with the state of its runtime.

use std::{collections::BTreeMap, ops::Bound};

use tidewatch_api::{identity::RuntimeId, key::KymaKey};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::traces::TraceLinks;
use crate::{PathState, Runtime};

/// Kymas that one step under the lock of a shard visits at most. A walk over a fleet of thousands takes milliseconds, in
/// which no request would be answered.
pub(super) const CHUNK: usize = 64;

/// A Kyma and the state of its runtime.
pub(super) struct Entry {
    pub(super) id: Option<RuntimeId>,
    /// Distinguishes successive Kymas of one name: a reconcile of an earlier one settles nothing.
    pub(super) generation: u64,
    pub(super) runtime: Runtime,
    /// Path state at the last [`RuntimeTable::changed_paths`](super::RuntimeTable::changed_paths).
    pub(super) reported_path: Option<PathState>,
    /// Time from which no write of the replica that served the Kyma before can land.
    pub(super) safe: Option<Instant>,
    /// Acceptance time of the oldest event that no reconcile has started with.
    pub(super) accepted: Option<Instant>,
    /// The agent has caused work since the last reconcile began.
    pub(super) has_new_reports: bool,
    /// Traces of events that wait for a reconcile; boxed, since few Kymas have some.
    pub(super) traces: Option<Box<TraceLinks>>,
    /// Cancelled when the Kyma is removed.
    pub(super) cancellation: CancellationToken,
}

impl Entry {
    /// Records that an event was accepted whose work is enqueued.
    pub(super) fn accept(&mut self, now: Instant) {
        self.accepted.get_or_insert(now);
        self.has_new_reports = true;
    }
}

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
