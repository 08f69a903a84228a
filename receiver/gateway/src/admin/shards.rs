//! Makes the report of the shards.

use tidewatch_api::shard::ShardCount;
use tidewatch_contract::admin::shards::{Ownership, ShardView};
use tidewatch_fleet::shards::{Holder, Holders};
use tokio::time::Instant;

/// Report of the holders that the Leases name; `runtimes` is the number of each shard.
pub(super) fn ownership(holders: &Holders, shards: ShardCount, runtimes: Vec<usize>) -> Ownership {
    let now = Instant::now();
    let view = |holder: Option<&Holder>| holder.map(|holder| holder.view(now));
    let shards = shards.shards().zip(runtimes).map(|(shard, runtimes)| ShardView {
        shard: shard.number(),
        holder: view(holders.get(shard)),
        runtimes,
    });
    Ownership { shards: shards.collect(), fleet: view(holders.fleet()) }
}

#[cfg(test)]
mod tests {
    use tidewatch_api::leases::Unit;
    use tidewatch_fleet::shards::HoldersHandle;

    use super::*;

    #[test]
    fn report_names_the_holders_of_all_units_and_shards_without_a_known_holder_too() {
        let shards = ShardCount::new(3).unwrap();
        let holder =
            Holder { name: "pod-1".into(), relay_address: None, is_own: false, renewed: Instant::now(), moved: None };
        let held = |unit: Unit| matches!(unit, Unit::Shard(shard) if shard.number() != 1).then(|| holder.clone());
        let report = ownership(&HoldersHandle::fixed(shards, held).current(), shards, vec![5, 6, 0]);
        assert_eq!((report.unheld().collect::<Vec<_>>(), report.fleet.is_some()), (vec![1], false));
        assert_eq!(report.shards.iter().map(|shard| shard.runtimes).collect::<Vec<_>>(), [5, 6, 0]);
        let of_fleet = HoldersHandle::fixed(shards, |unit| (unit == Unit::Fleet).then(|| holder.clone())).current();
        assert_eq!(ownership(&of_fleet, shards, vec![5, 6, 0]).fleet.unwrap().name, "pod-1");
        // The Leases have not been listed yet.
        let unknown = ownership(&Holders::default(), shards, vec![5, 6, 0]);
        assert_eq!(unknown.unheld().collect::<Vec<_>>(), [0, 1, 2]);
    }
}
