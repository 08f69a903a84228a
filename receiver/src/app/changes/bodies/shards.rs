//! Shards of the Kymas in the cache, and of the objects that concern them.

use kube::runtime::reflector::Store;
use tidewatch_api::{
    facts::KymaFacts,
    shard::{ShardCount, ShardId},
};
use tidewatch_fleet::stores::kymas::{self, CachedKyma};

use super::CachedObject;

/// See the module documentation.
pub(in crate::app::changes) struct KymaShards {
    kymas: Store<CachedKyma>,
    shards: ShardCount,
}

impl KymaShards {
    pub(super) fn new(kymas: Store<CachedKyma>, shards: ShardCount) -> Self {
        Self { kymas, shards }
    }

    /// Shard of a Kyma, which its label or uid determines.
    pub(super) fn of(&self, kyma: KymaFacts<'_>) -> ShardId {
        kyma.runtime().map_or_else(|| self.shards.of_kyma(kyma.uid()), |runtime| self.shards.of_runtime(&runtime))
    }

    /// Shard of the Kyma that the label of an object names; `None` if it is not known, or if an owner reference of a whole
    /// object names another one.
    pub(super) fn of_object(&self, object: &impl CachedObject) -> Option<ShardId> {
        let kyma = kymas::find(&self.kymas, &object.kyma()?)?;
        let facts = kyma.facts();
        let is_of_other = !object.is_reduced() && object.has_other_owner(facts.uid());
        (!is_of_other).then(|| self.of(facts))
    }
}
