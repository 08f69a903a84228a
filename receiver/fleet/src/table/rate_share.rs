//! Part of this process in rates that limit the whole fleet.

use tidewatch_api::shard::ShardCount;

use super::RuntimeTable;

impl RuntimeTable {
    /// Part of a rate of the whole fleet that this process may use, by the shards that it holds; at least 1.
    pub fn share_of_rate(&self, rate: u32) -> u32 {
        share(rate, self.held().len(), self.0.shared.shards)
    }

    /// Returns true if all Kymas of each shard that is held are placed, so that no runtime of these shards is missing.
    pub fn is_synced(&self) -> bool {
        self.held().into_iter().all(|shard| self.lock(shard).as_ref().is_none_or(|state| state.synced))
    }
}

/// Rounded down, so that the parts of all replicas do not exceed a rate that has one for each of them.
fn share(rate: u32, held: usize, shards: ShardCount) -> u32 {
    let held = u64::try_from(held).unwrap_or(u64::MAX);
    let shards = u64::from(shards.get());
    let share = u64::from(rate).saturating_mul(held) / shards;
    u32::try_from(share).unwrap_or(u32::MAX).clamp(1, rate.max(1))
}

#[cfg(test)]
mod tests {
    use tidewatch_api::identity::Instance;
    use tidewatch_cluster::leader::WriteFence;
    use tokio::time::Instant;

    use super::*;
    use crate::table::{self, Settings};

    #[test]
    fn parts_of_all_replicas_keep_the_rate_and_are_never_zero() {
        let shards = ShardCount::default();
        for (rate, held, expected) in
            [(50, 24, 50), (50, 12, 25), (20, 8, 6), (1, 8, 1), (20, 0, 1), (0, 24, 1), (1, 24, 1)]
        {
            assert_eq!(share(rate, held, shards), expected, "{rate} with {held}");
        }
        for held in [[8, 8, 8], [24, 0, 0], [1, 11, 12]] {
            let holders = held.iter().filter(|held| **held > 0);
            let sum: u32 = holders.map(|held| share(100, *held, shards)).sum();
            assert!((97..=100).contains(&sum), "{held:?}: {sum}");
        }
        assert_eq!(share(u32::MAX, 24, shards), u32::MAX);
    }

    #[test]
    fn share_and_completeness_follow_the_held_shards() {
        let metrics = table::Metrics::register(&mut tidewatch_kit::metrics::Registry::default());
        let table = RuntimeTable::new(ShardCount::default(), Settings::default(), metrics);
        assert!(table.is_synced(), "no runtime of a held shard is missing");
        let fence = WriteFence::default();
        let started = Instant::now();
        for shard in ShardCount::default().shards().take(12) {
            table.acquire(shard, Instance::new(1), &fence, started);
        }
        assert_eq!((table.share_of_rate(50), table.is_synced()), (25, false));
        table.set_synced();
        assert!(table.is_synced());
        let [first, second] = [0, 1].map(|number| ShardCount::default().shard(number).unwrap());
        table.acquire(first, Instance::new(2), &fence, started);
        assert!(!table.is_synced(), "it was acquired anew");
        table.release(first);
        table.release(second);
        assert_eq!((table.share_of_rate(48), table.is_synced()), (20, true));
    }
}
