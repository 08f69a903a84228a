//! Bodies of all caches whose objects are reduced.

use tidewatch_api::{key::KymaKey, shard::ShardId};

use super::{Bodies, KymaCache, ManifestCache, SecretCache};

/// Bodies of the caches. Clones share their state.
#[derive(Clone)]
pub(in crate::app::changes) struct CacheBodies {
    pub(in crate::app::changes) kymas: Bodies<KymaCache>,
    pub(in crate::app::changes) manifests: Bodies<ManifestCache>,
    pub(in crate::app::changes) secrets: Bodies<SecretCache>,
}

impl CacheBodies {
    /// Keeps the whole objects of a shard from now on; the missing bodies are fetched.
    pub(in crate::app::changes) fn keep(&self, shard: ShardId) {
        self.kymas.keep(shard);
        self.manifests.keep(shard);
        self.secrets.keep(shard);
    }

    /// Waits until no body of a shard's objects is missing, or the shard is released. Cancel safe.
    pub(in crate::app::changes) async fn are_complete(&self, shard: ShardId) {
        self.kymas.are_complete(shard).await;
        self.manifests.are_complete(shard).await;
        self.secrets.are_complete(shard).await;
    }

    /// Lets the objects of a shard that is not held any longer be reduced, after a time.
    pub(in crate::app::changes) fn release(&self, shard: ShardId) {
        self.kymas.release(shard);
        self.manifests.release(shard);
        self.secrets.release(shard);
    }

    /// Reduces the objects of all shards that are neither held nor being acquired.
    pub(in crate::app::changes) fn reduce_others(&self) {
        self.kymas.reduce_others();
        self.manifests.reduce_others();
        self.secrets.reduce_others();
    }

    /// Records that a Kyma in the cache is new or may have come into another shard, and so may its objects. Its own form was
    /// chosen by its watch event.
    pub(in crate::app::changes) fn kyma_moved(&self, kyma: &KymaKey) {
        self.manifests.kyma_moved(kyma);
        self.secrets.kyma_moved(kyma);
    }
}
