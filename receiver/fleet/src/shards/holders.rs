//! Which replica holds each shard, as this replica last observed it.

use std::{collections::BTreeMap, sync::Arc};

use arc_swap::ArcSwap;
use jiff::Timestamp;
use tidewatch_api::{
    leases::Unit,
    shard::{ShardCount, ShardId},
};
use tidewatch_contract::admin::shards::HolderView;
use tokio::time::Instant;

/// Holder of one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Name of the replica.
    pub name: Arc<str>,
    /// Host and port at which it accepts relayed requests, as it published them; `None` if it accepts none. At most 260
    /// bytes, otherwise unchecked.
    pub relay_address: Option<Arc<str>>,
    /// True if it is this replica. It may hold the Lease and have lost the shard all the same.
    pub is_own: bool,
    /// Time at which this replica observed the last renewal of the holder.
    pub renewed: Instant,
    /// Time of the last move of the shard, by the holder's wall clock. For display.
    pub moved: Option<Timestamp>,
}

impl Holder {
    /// View of the holder at `now`.
    pub fn view(&self, now: Instant) -> HolderView {
        let renewed_seconds = now.saturating_duration_since(self.renewed).as_secs();
        HolderView { name: self.name.to_string(), renewed_seconds, moved: self.moved }
    }
}

/// Holders of all shards and of the fleet role, of those that have one.
#[derive(Clone, Debug, Default)]
pub struct Holders(BTreeMap<Unit, Holder>);

impl Holders {
    pub(super) fn new(shards: ShardCount, holder: impl Fn(Unit) -> Option<Holder>) -> Self {
        Self(Unit::all(shards).filter_map(|unit| Some((unit, holder(unit)?))).collect())
    }

    /// Holder of a shard; `None` if it has none, if the membership of the last one has ended, or if the Leases have not
    /// been listed yet.
    pub fn get(&self, shard: ShardId) -> Option<&Holder> {
        self.0.get(&Unit::Shard(shard))
    }

    /// True if each shard and the fleet role have a holder.
    pub fn are_complete(&self, shards: ShardCount) -> bool {
        Unit::all(shards).all(|unit| self.0.contains_key(&unit))
    }

    /// Holder of the fleet role; `None` as for a shard.
    pub fn fleet(&self) -> Option<&Holder> {
        self.0.get(&Unit::Fleet)
    }
}

/// Shared snapshot of the holders. Reading it takes no lock.
#[derive(Clone, Debug, Default)]
pub struct HoldersHandle(Arc<ArcSwap<Holders>>);

impl HoldersHandle {
    /// The current snapshot.
    pub fn current(&self) -> Arc<Holders> {
        self.0.load_full()
    }

    pub(super) fn publish(&self, holders: Holders) {
        self.0.store(Arc::new(holders));
    }
}

#[cfg(any(test, feature = "testing"))]
impl HoldersHandle {
    /// Holders that do not change.
    pub fn fixed(shards: ShardCount, holder: impl Fn(Unit) -> Option<Holder>) -> Self {
        let holders = Self::default();
        holders.publish(Holders::new(shards, holder));
        holders
    }
}
