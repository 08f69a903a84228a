//! Shares of the replicas, and the order in which each claims and hands over.

use std::hash::Hash;

use tidewatch_api::leases::Unit;
use tidewatch_kit::hash::hash;

/// Number of shards that a replica wants. `rank` is its place among the live replicas, in the order of their membership
/// Leases: the first ones take what the division leaves over, so that all shares add up to the number of shards.
pub(super) fn share(units: usize, live: usize, rank: usize) -> usize {
    let live = live.max(1);
    units / live + usize::from(rank < units % live)
}

/// Preference of a replica for a shard; the lowest first. Among several replicas that claim at the same time each begins
/// with the shards for which it comes first (rendezvous hashing), so that two of them rarely claim the same one. Replicas
/// whose versions hash differently conflict more often, and nothing else.
pub(super) fn preference(me: &str, live: &[String], unit: Unit) -> (usize, u64) {
    let own = score(me, unit);
    let position = live.iter().filter(|other| *other != me && score(other, unit) < own).count();
    (position, own)
}

/// Pseudo-random number of a pair, for orders that differ per replica.
pub(super) fn score(replica: &str, item: impl Hash) -> u64 {
    hash(&(replica, item))
}

#[cfg(test)]
mod tests {
    use tidewatch_api::shard::ShardCount;

    use super::*;

    #[test]
    fn shares_add_up_and_differ_by_at_most_one() {
        for (shards, live) in (1..=256).flat_map(|shards| (1..=8).map(move |live| (shards, live))) {
            let shares: Vec<_> = (0..live).map(|rank| share(shards, live, rank)).collect();
            assert_eq!(shares.iter().sum::<usize>(), shards);
            assert!(shares.first().unwrap() - shares.last().unwrap() <= 1, "{shares:?}");
        }
        assert_eq!(share(1, 0, 0), 1);
    }

    #[test]
    fn replicas_prefer_different_shards() {
        let count = ShardCount::new(24).unwrap();
        let live = ["a_1", "b_2", "c_3"].map(str::to_owned);
        let order = |me: &str| {
            let mut shards: Vec<_> = Unit::all(count).collect();
            shards.sort_by_key(|unit| preference(me, &live, *unit));
            shards
        };
        let firsts: Vec<_> = live.iter().flat_map(|me| order(me).into_iter().take(4)).collect();
        let distinct: std::collections::BTreeSet<_> = firsts.iter().collect();
        assert_eq!(distinct.len(), firsts.len(), "{firsts:?}");
        assert_eq!(order("a_1"), order("a_1"));
        // Each shard has one replica that comes first.
        for unit in Unit::all(count) {
            assert_eq!(live.iter().filter(|me| preference(me, &live, unit).0 == 0).count(), 1);
        }
    }
}
