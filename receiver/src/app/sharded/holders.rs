//! The relay's view of the holders of the shards.

use std::sync::Arc;

use tidewatch_shared::identity::RuntimeId;
use tokio::time::Instant;

use crate::{
    base::shard::ShardCount,
    ingress::{
        admin::shards::{CurrentHolders, HolderView, HolderViews},
        relay::{self, Directory, Replica},
    },
    kube::shards::{Holder, HoldersHandle},
};

/// Holders of the shards, as the elector published them.
#[derive(Clone)]
pub struct ShardHolders {
    holders: HoldersHandle,
    shards: ShardCount,
}

impl ShardHolders {
    /// Finds the shards of the runtimes in the holders that an elector publishes.
    #[must_use]
    pub fn new(holders: HoldersHandle, shards: ShardCount) -> Self {
        Self { holders, shards }
    }

    /// Returns the holders for the report of the shards.
    pub(super) fn views(&self) -> CurrentHolders {
        let Self { holders, shards } = self.clone();
        Arc::new(move || {
            let (holders, now) = (holders.current(), Instant::now());
            let view = |holder: Option<&Holder>| holder.map(|holder| HolderView::of(holder, now));
            let fleet = view(holders.fleet());
            HolderViews { shards: shards.shards().map(|shard| view(holders.get(shard))).collect(), fleet }
        })
    }
}

impl relay::Holders for ShardHolders {
    fn holder(&self, runtime: &RuntimeId) -> relay::Holder {
        place(self.holders.current().get(self.shards.of_runtime(runtime)))
    }
}

fn place(holder: Option<&Holder>) -> relay::Holder {
    match holder {
        Some(holder) if holder.is_own => relay::Holder::Here,
        Some(holder) => replica(holder).map_or(relay::Holder::Unknown, relay::Holder::At),
        None => relay::Holder::Unknown,
    }
}

/// The replica that a Lease names; `None` if its name or address is invalid.
fn replica(holder: &Holder) -> Option<Arc<Replica>> {
    let (name, address) = (holder.name.parse().ok()?, holder.relay_address.as_ref()?.parse().ok()?);
    Some(Arc::new(Replica { name, address }))
}

impl Directory for ShardHolders {
    fn shards(&self) -> ShardCount {
        self.shards
    }

    fn replicas(&self) -> Vec<Arc<Replica>> {
        let holders = self.holders.current();
        let units = self.shards.shards().filter_map(|shard| holders.get(shard)).chain(holders.fleet());
        let others = units.filter(|holder| !holder.is_own).filter_map(replica);
        others.fold(Vec::new(), |mut replicas, replica| {
            if !replicas.contains(&replica) {
                replicas.push(replica);
            }
            replicas
        })
    }

    fn fleet_holder(&self) -> relay::Holder {
        place(self.holders.current().fleet())
    }
}
