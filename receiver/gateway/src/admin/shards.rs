//! Report of the shards as JSON, served by the admin listener and read by the command line.

use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tidewatch_api::shard::ShardId;
use tidewatch_fleet::shards;
use tokio::time::Instant;

use super::report::Receiver;

/// Report of the shards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShardsReport {
    /// Receiver that made the report.
    pub receiver: Receiver,
    /// Holders; `None` if this receiver is not active.
    pub ownership: Option<Ownership>,
}

/// Holders of the shards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase", tag = "mode")]
pub enum Ownership {
    /// This receiver holds all shards, by its Lease.
    Single {
        /// Number of shards.
        shards: usize,
        /// Number of runtimes.
        runtimes: usize,
    },
    /// Each shard has a replica that holds it, by a Lease.
    Sharded {
        /// Holder of the role that runs the fleet-wide tasks; `None` if it has none.
        fleet: Option<HolderView>,
        /// Shards in order.
        shards: Vec<ShardView>,
    },
}

/// One shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShardView {
    /// Its number.
    pub shard: u16,
    /// Its holder; `None` if it has none.
    pub holder: Option<HolderView>,
    /// Number of runtimes.
    pub runtimes: usize,
}

/// Holder of a shard or of the fleet role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HolderView {
    /// Name of the replica.
    pub name: String,
    /// Time since the last renewal that the reporting replica observed, in seconds.
    pub renewed_seconds: u64,
    /// Time of the last move, by the holder's clock, in RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved: Option<Timestamp>,
}

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

impl HolderView {
    /// View of a holder at `now`.
    #[must_use]
    pub fn of(holder: &shards::Holder, now: Instant) -> Self {
        Self { name: holder.name.to_string(), renewed_seconds: holder.age(now).as_secs(), moved: holder.moved }
    }
}

impl Ownership {
    /// Report of a receiver that holds all shards; `runtimes` is the number of each.
    pub(super) fn single(runtimes: &[usize]) -> Self {
        Self::Single { shards: runtimes.len(), runtimes: runtimes.iter().sum() }
    }

    /// Report of a replica; `runtimes` is the number of each shard.
    pub(super) fn sharded(holders: HolderViews, runtimes: Vec<usize>) -> Self {
        // Shards without a place in the list have no holder.
        let holder = holders.shards.into_iter().chain(std::iter::repeat(None));
        let shards = (0..).zip(holder).zip(runtimes);
        let shards = shards.map(|((shard, holder), runtimes)| ShardView { shard, holder, runtimes }).collect();
        Self::Sharded { fleet: holders.fleet, shards }
    }

    /// Shards without a holder.
    pub fn unheld(&self) -> impl Iterator<Item = u16> {
        let shards = match self {
            Self::Single { .. } => &[][..],
            Self::Sharded { shards, .. } => shards,
        };
        shards.iter().filter(|shard| shard.holder.is_none()).map(|shard| shard.shard)
    }

    /// True if the fleet role has a holder.
    #[must_use]
    pub fn has_fleet_holder(&self) -> bool {
        matches!(self, Self::Single { .. } | Self::Sharded { fleet: Some(_), .. })
    }
}

impl HolderViews {
    /// Views of the holders of `shards` and of the fleet role at `now`.
    #[must_use]
    pub fn of<'a>(
        shards: impl Iterator<Item = ShardId>,
        holder: impl Fn(ShardId) -> Option<&'a shards::Holder>,
        fleet: Option<&shards::Holder>,
        now: Instant,
    ) -> Self {
        let view = |holder: &shards::Holder| HolderView::of(holder, now);
        Self { shards: shards.map(|shard| holder(shard).map(view)).collect(), fleet: fleet.map(view) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;
    use tidewatch_api::shard::ShardCount;

    use super::*;

    fn holder(name: &str, renewed: Instant) -> shards::Holder {
        let moved = Some("2026-11-25T20:00:00Z".parse().unwrap());
        shards::Holder { name: name.into(), relay_address: None, is_own: false, renewed, moved }
    }

    #[tokio::test(start_paused = true)]
    async fn report_names_each_holder_and_the_shards_without_one() {
        let now = Instant::now();
        let held = holder("pod-1", now - Duration::from_secs(3));
        let shards = ShardCount::new(3).unwrap();
        let views = HolderViews::of(shards.shards(), |shard| (shard.number() != 1).then_some(&held), None, now);
        let ownership = Ownership::sharded(views, vec![5, 6, 0]);
        let holder = json!({"name": "pod-1", "renewedSeconds": 3, "moved": "2026-11-25T20:00:00Z"});
        let expected = json!({"mode": "sharded", "fleet": null, "shards": [
            {"shard": 0, "holder": holder, "runtimes": 5},
            {"shard": 1, "holder": null, "runtimes": 6},
            {"shard": 2, "holder": holder, "runtimes": 0},
        ]});
        assert_eq!(json!(ownership), expected);
        assert_eq!(serde_json::from_value::<Ownership>(expected).unwrap(), ownership);
        assert_eq!((ownership.unheld().collect::<Vec<_>>(), ownership.has_fleet_holder()), (vec![1], false));
        // The Leases have not been listed yet.
        let unknown = Ownership::sharded(HolderViews::default(), vec![5, 6, 0]);
        assert_eq!(unknown.unheld().collect::<Vec<_>>(), [0, 1, 2]);
        let single = Ownership::single(&[5, 6, 0]);
        assert_eq!(json!(single), json!({"mode": "single", "shards": 3, "runtimes": 11}));
        assert_eq!((single.unheld().count(), single.has_fleet_holder()), (0, true));
    }
}
