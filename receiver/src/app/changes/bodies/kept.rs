//! Shards of which a replica keeps whole objects. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tidewatch_api::shard::ShardId;
use tokio::time::Instant;

/// Time for which the objects of a released shard stay whole. A replica whose Leases have lapsed while the API server stalled claims
/// the same shards again, and needs no fetch then.
const LINGER: Duration = Duration::from_secs(60);

/// Shards of which whole objects are kept.
#[derive(Debug)]
pub(super) struct KeptShards {
    /// Shards that are held or being acquired.
    own: BTreeSet<ShardId>,
    /// Shards that were released, and the times from which on they are reduced.
    released: BTreeMap<ShardId, Instant>,
    /// Until the shards have been divided for the first time, those of others are kept as well.
    others: bool,
}

impl Default for KeptShards {
    fn default() -> Self {
        Self { own: BTreeSet::new(), released: BTreeMap::new(), others: true }
    }
}

impl KeptShards {
    /// Returns true if whole objects of a shard stay whole.
    pub(super) fn contains(&self, shard: ShardId) -> bool {
        self.others || self.is_own(shard) || self.released.contains_key(&shard)
    }

    /// Returns true if a shard is held or being acquired, so that its objects have to be whole.
    pub(super) fn is_own(&self, shard: ShardId) -> bool {
        self.own.contains(&shard)
    }

    /// Keeps the objects of a shard from now on.
    pub(super) fn keep(&mut self, shard: ShardId) {
        self.own.insert(shard);
        self.released.remove(&shard);
    }

    /// A shard is no longer held.
    pub(super) fn release(&mut self, shard: ShardId, now: Instant) {
        if self.own.remove(&shard) {
            self.released.insert(shard, now + LINGER);
        }
    }

    /// Ends the time of shards that were released. Returns true if there was one.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        let before = self.released.len();
        self.released.retain(|_, until| now < *until);
        self.released.len() < before
    }

    /// Keeps only the shards that are held, being acquired or just released from now on.
    pub(super) const fn reduce_others(&mut self) {
        self.others = false;
    }
}

#[cfg(test)]
mod tests {
    use tidewatch_api::shard::ShardCount;

    use super::*;

    #[test]
    fn other_shards_are_kept_until_the_shards_are_divided_and_for_a_time_after_their_release() {
        let shards: Vec<_> = ShardCount::new(3).unwrap().shards().collect();
        let mut kept = KeptShards::default();
        let start = Instant::now();
        let kept_of = |kept: &KeptShards| shards.iter().map(|shard| kept.contains(*shard)).collect::<Vec<_>>();
        kept.keep(shards[0]);
        assert_eq!(kept_of(&kept), [true, true, true]);
        kept.reduce_others();
        assert_eq!(kept_of(&kept), [true, false, false]);
        kept.keep(shards[2]);
        kept.release(shards[0], start);
        assert_eq!((kept_of(&kept), kept.is_own(shards[0])), (vec![true, false, true], false));
        assert!(!kept.expire(start + LINGER - Duration::from_millis(1)));
        assert_eq!(kept_of(&kept), [true, false, true]);
        assert!(kept.expire(start + LINGER));
        assert_eq!(kept_of(&kept), [false, false, true]);
    }

    #[test]
    fn shard_that_is_acquired_again_stays() {
        let shard = ShardCount::ONE.shard(0).unwrap();
        let mut kept = KeptShards::default();
        let start = Instant::now();
        kept.reduce_others();
        kept.release(shard, start);
        assert!(!kept.contains(shard), "it was not held");
        kept.keep(shard);
        kept.release(shard, start);
        kept.keep(shard);
        assert!(!kept.expire(start + 2 * LINGER));
        assert!(kept.contains(shard) && kept.is_own(shard));
    }
}
