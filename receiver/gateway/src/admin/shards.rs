//! Makes the report of the shards.

use std::sync::Arc;

use tidewatch_contract::admin::shards::{HolderView, Ownership, ShardView};

/// Holders of the shards and of the fleet role, as the Leases name them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HolderViews {
    /// Holder of each shard, in order.
    pub shards: Vec<Option<HolderView>>,
    /// Holder of the fleet role.
    pub fleet: Option<HolderView>,
}

/// Returns the current holders.
pub type CurrentHolders = Arc<dyn Fn() -> HolderViews + Send + Sync>;

/// Report of a replica; `runtimes` is the number of each shard.
pub(super) fn ownership(holders: HolderViews, runtimes: Vec<usize>) -> Ownership {
    // Shards without a place in the list have no holder.
    let holder = holders.shards.into_iter().chain(std::iter::repeat(None));
    let shards = (0..).zip(holder).zip(runtimes);
    let shards = shards.map(|((shard, holder), runtimes)| ShardView { shard, holder, runtimes }).collect();
    Ownership { fleet: holders.fleet, shards }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_without_a_known_holder_are_reported_too() {
        let held = HolderView { name: "pod-1".to_owned(), renewed_seconds: 3, moved: None };
        let views = HolderViews { shards: vec![Some(held.clone()), None, Some(held)], fleet: None };
        let report = ownership(views, vec![5, 6, 0]);
        assert_eq!((report.unheld().collect::<Vec<_>>(), report.fleet.is_some()), (vec![1], false));
        // The Leases have not been listed yet.
        let unknown = ownership(HolderViews::default(), vec![5, 6, 0]);
        assert_eq!(unknown.unheld().collect::<Vec<_>>(), [0, 1, 2]);
    }
}
