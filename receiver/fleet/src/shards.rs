//! Ownership of the shards by Leases in KCP: each shard has at most one holder at a time, among all replicas. The fleet
//! role, whose holder runs the tasks of the whole fleet, is owned in the same way as one more shard.
//!
//! `ownership` decides purely; `elector` watches and writes the Leases, and opens and closes a write fence per shard;
//! `changes` delivers acquired, handed over and lost shards to the consumer, and `follow` carries them out; `holders` is the
//! relay's view of the holders of all shards.
//!
//! | Lease | holder | renewed |
//! |---|---|---|
//! | `tidewatch-replica-0` … `-7` | one replica each | by it, every third of the duration |
//! | `tidewatch-shard-00` …, `tidewatch-fleet` | the replica that owns the shard or the fleet role | never: it lasts as long as the membership of its holder |
//!
//! With 15 s, three replicas and 24 shards that is 0.6 writes a second, whatever the number of shards, and one watch per
//! replica that delivers as many events. Single renewals of the shards would be 4.8 more.
//!
//! A replica without a relay address shares its shards with no other one: a second one waits until the membership of the
//! first has ended.

mod changes;
mod elector;
mod follow;
mod holders;
mod metrics;
mod ownership;
mod record;

use std::time::Duration;

use tidewatch_api::shard::ShardCount;

pub use self::{
    changes::{HeldShard, ShardChange, ShardChanges},
    elector::{ShardElector, ShardOwnership},
    follow::{Consumer, follow},
    holders::{Holder, Holders, HoldersHandle},
    metrics::Metrics,
};

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
    /// Number of shards.
    pub shards: ShardCount,
    /// Host and port at which this replica accepts relayed requests; without it, it shares the shards with no other one.
    pub relay_address: Option<String>,
}
