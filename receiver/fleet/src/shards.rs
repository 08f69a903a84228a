//! Ownership of the shards by Leases in KCP: each shard has at most one holder at a time, among all replicas. The fleet
//! role, whose holder runs the tasks of the whole fleet, is owned in the same way as one more shard.
//!
//! `ownership` decides purely; `elector` watches and writes the Leases, and opens and closes a write fence per shard;
//! `changes` delivers acquired, handed over and lost shards to the consumer, and `follow` carries them out; `holders` is the relay's view of the holders of
//! all shards; `guard` closes ended fences even if the executor hangs.
//!
//! | Lease | holder | renewed |
//! |---|---|---|
//! | `tidewatch-replica-0` … `-7` | one replica each | by it, every third of the duration |
//! | `tidewatch-shard-00` …, `tidewatch-fleet` | the replica that owns the shard or the fleet role | never: it lasts as long as the membership of its holder |
//! | that of the unsharded receiver | all sharded replicas together, with the number of shards as annotation | by the first that sees it older than a third of the duration |
//!
//! With 15 s, three replicas and 24 shards that is 0.6 writes a second for the memberships and 0.2 to 0.6 for the Lease of
//! the unsharded receiver, whatever the number of shards, and one watch per replica that delivers as many events. Single
//! renewals of the shards would be 4.8 more.

mod changes;
mod elector;
mod follow;
mod guard;
mod holders;
mod metrics;
pub mod names;
mod ownership;
mod record;

use std::{fmt, time::Duration};

use tidewatch_api::shard::{ShardCount, ShardId};

pub use self::{
    changes::{HeldShard, ShardChange, ShardChanges},
    elector::{ShardElector, ShardOwnership},
    follow::{Consumer, follow},
    holders::{Holder, Holders, HoldersHandle},
    metrics::Metrics,
};

/// What a Lease stands for, and one replica holds: a shard, or the fleet role. Sorted as the shards, the fleet role last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unit {
    /// A shard.
    Shard(ShardId),
    /// The role of the replica that runs the tasks of the whole fleet.
    Fleet,
}

impl Unit {
    /// All units: the shards and the fleet role.
    pub(crate) fn all(shards: ShardCount) -> impl Iterator<Item = Self> {
        shards.shards().map(Self::Shard).chain([Self::Fleet])
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shard(shard) => write!(f, "shard {shard}"),
            Self::Fleet => f.write_str("fleet role"),
        }
    }
}

/// Settings of a replica.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of this replica, such as that of its pod.
    pub name: String,
    /// Namespace of the Leases.
    pub namespace: String,
    /// Name of a place that never runs two replicas concurrently, such as the pod's uid; the memberships of earlier
    /// processes in the same place end at once.
    pub place: Option<String>,
    /// Duration of the Leases; another replica takes over from a killed one only after it.
    pub lease_duration: Duration,
    /// Name of the Lease of a receiver without shards.
    pub unsharded_lease: String,
    /// Number of shards.
    pub shards: ShardCount,
    /// Host and port at which this replica accepts relayed requests, if it does.
    pub relay_address: Option<String>,
}
