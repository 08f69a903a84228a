//! Directory of the fleet's Kymas.

use std::collections::HashMap;

use tidewatch_api::{
    key::KymaKey,
    shard::{ShardCount, ShardId},
};

use crate::Tenure;

/// The shard of each Kyma of the fleet, and the shards that this process holds. Its lock is a leaf: no other is acquired while
/// it is held.
pub(super) struct Directory {
    kymas: HashMap<KymaKey, Placed>,
    /// Number of Kymas with a runtime id.
    runtimes: usize,
    /// Tenure of each shard that is held.
    held: Vec<Option<Tenure>>,
}

/// Place of a Kyma, in a shard that is held or not.
#[derive(Clone, Copy)]
struct Placed {
    shard: ShardId,
    has_runtime: bool,
}

impl Directory {
    pub(super) fn new(shards: ShardCount) -> Self {
        let held = vec![None; usize::from(shards.get())];
        Self { kymas: HashMap::new(), runtimes: 0, held }
    }

    /// Shard of a Kyma.
    pub(super) fn shard_of(&self, key: &KymaKey) -> Option<ShardId> {
        self.kymas.get(key).map(|placed| placed.shard)
    }

    /// Records the shard of a Kyma.
    pub(super) fn place(&mut self, key: &KymaKey, shard: ShardId, has_runtime: bool) {
        let before = self.kymas.insert(key.clone(), Placed { shard, has_runtime });
        self.runtimes -= usize::from(before.is_some_and(|before| before.has_runtime));
        self.runtimes += usize::from(has_runtime);
    }

    pub(super) fn remove(&mut self, key: &KymaKey) {
        let removed = self.kymas.remove(key);
        self.runtimes -= usize::from(removed.is_some_and(|removed| removed.has_runtime));
    }

    /// Number of Kymas of the fleet, in all shards.
    pub(super) fn kymas(&self) -> usize {
        self.kymas.len()
    }

    /// Number of Kymas of the fleet with a runtime id, in all shards.
    pub(super) fn runtimes(&self) -> usize {
        self.runtimes
    }

    /// Number of Kymas with a runtime id in shards that are not held.
    pub(super) fn runtimes_elsewhere(&self) -> usize {
        if self.held.iter().all(Option::is_some) {
            return 0;
        }
        self.kymas.values().filter(|placed| placed.has_runtime && self.tenure(placed.shard).is_none()).count()
    }

    /// Number of Kymas of each shard, in order.
    pub(super) fn kymas_by_shard(&self) -> Vec<usize> {
        let mut kymas = vec![0; self.held.len()];
        for placed in self.kymas.values() {
            if let Some(count) = kymas.get_mut(placed.shard.index()) {
                *count += 1;
            }
        }
        kymas
    }

    /// Sets the tenure of a shard. Returns the one before.
    pub(super) fn hold(&mut self, shard: ShardId, tenure: Option<Tenure>) -> Option<Tenure> {
        self.held.get_mut(shard.index()).and_then(|held| std::mem::replace(held, tenure))
    }

    /// Shards that are held, in order.
    pub(super) fn held(&self) -> Vec<ShardId> {
        self.held.iter().flatten().filter_map(|tenure| tenure.shard).collect()
    }

    /// Tenure of a shard; `None` if it is not held.
    pub(super) fn tenure(&self, shard: ShardId) -> Option<&Tenure> {
        self.held.get(shard.index())?.as_ref()
    }

    /// Tenure of the shard of a Kyma; `None` if the Kyma is unknown, or its shard is not held.
    pub(super) fn tenure_of(&self, key: &KymaKey) -> Option<&Tenure> {
        self.tenure(self.shard_of(key)?)
    }
}
