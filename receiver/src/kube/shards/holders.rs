//! Which replica holds each shard, as this replica last observed it.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use jiff::Timestamp;
use tokio::time::Instant;

use crate::base::shard::{ShardCount, ShardId};

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
    /// Time since the last observed renewal.
    #[must_use]
    pub fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.renewed)
    }
}

/// Holders of all shards.
#[derive(Clone, Debug, Default)]
pub struct Holders(Vec<Option<Holder>>);

impl Holders {
    pub(super) fn new(shards: ShardCount, holder: impl Fn(ShardId) -> Option<Holder>) -> Self {
        Self(shards.shards().map(holder).collect())
    }

    /// Holder of a shard; `None` if it has none, if the membership of the last one has ended, or if the Leases have not
    /// been listed yet.
    #[must_use]
    pub fn get(&self, shard: ShardId) -> Option<&Holder> {
        self.0.get(shard.index())?.as_ref()
    }
}

/// Shared snapshot of the holders. Reading it takes no lock.
#[derive(Clone, Debug, Default)]
pub struct HoldersHandle(Arc<ArcSwap<Holders>>);

impl HoldersHandle {
    /// The current snapshot.
    #[must_use]
    pub fn current(&self) -> Arc<Holders> {
        self.0.load_full()
    }

    pub(super) fn publish(&self, holders: Holders) {
        self.0.store(Arc::new(holders));
    }
}
