//! Input and output of the decision.

use std::time::Duration;

use strum::IntoStaticStr;
use tidewatch_api::{leases::Unit, shard::ShardCount};
use tidewatch_cluster::leader::Timings;
use tokio::time::Instant;

use super::super::record::LeaseId;

/// What does not change while the process runs.
#[derive(Clone, Debug)]
pub(in crate::shards) struct Settings {
    /// Identity of this replica in Leases, of this process alone.
    pub(in crate::shards) identity: String,
    /// Place that never runs two replicas at the same time.
    pub(in crate::shards) place: Option<String>,
    pub(in crate::shards) shards: ShardCount,
    /// True if this replica shares the shards with no other one.
    pub(in crate::shards) is_alone: bool,
    pub(in crate::shards) timings: Timings,
}

impl Settings {
    /// Number of units: the shards and the fleet role.
    pub(in crate::shards) fn units(&self) -> usize {
        usize::from(self.shards.get()) + 1
    }

    /// Number of shards that this replica shares with others; `None` if it shares them with none.
    pub(in crate::shards) fn shared(&self) -> Option<ShardCount> {
        (!self.is_alone).then_some(self.shards)
    }

    /// Longest time from the request to hand a shard over to the end of its fence.
    pub(in crate::shards) fn hand_over(&self) -> Duration {
        self.timings.lease * 2 / 3
    }

    /// Time after the end of a fence in which a request that was sent before it may still arrive.
    pub(in crate::shards) fn reserve(&self) -> Duration {
        self.timings.lease - self.timings.valid
    }

    /// Time for which the live replicas must be the same before shards are handed over, so that a replica that starts
    /// again and again moves none.
    pub(in crate::shards) fn settle(&self) -> Duration {
        self.timings.lease
    }
}

/// Purpose of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::shards) enum WriteKind {
    /// Take a membership Lease.
    Join,
    /// Renew the own membership Lease.
    Renew { is_leaving: bool },
    /// Give the own membership Lease back.
    Leave,
    /// End the membership of a replica that did not renew it.
    Evict,
    /// Take a shard.
    Claim,
    /// Give a shard back.
    Release,
}

/// A write that is to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::shards) struct Write {
    pub(in crate::shards) id: LeaseId,
    /// The resourceVersion that it replaces; `None` for a renewal that must read the Lease first.
    pub(in crate::shards) version: Option<String>,
    pub(in crate::shards) kind: WriteKind,
}

/// Result of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::shards) enum Outcome {
    /// Succeeded, with this resourceVersion.
    Written(String),
    /// Another writer was first.
    Conflict,
    /// Failed, or has an unknown result.
    Failed,
    /// A renewal found that the Lease is not this replica's any more.
    Taken,
}

/// Why a replica claims no shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, IntoStaticStr, strum::EnumIter)]
#[strum(serialize_all = "kebab-case")]
pub(in crate::shards) enum Refusal {
    /// Another replica holds all shards, and this one shares them with none.
    Standby,
    /// Live replicas have another number of shards, or share theirs with none.
    OtherCount,
    /// All membership Leases have live holders.
    NoMembership,
    /// A Lease does not exist that the installation should contain.
    LeaseMissing,
    /// The control plane does not confirm renewals.
    Unconfirmed,
}

/// Why this replica no longer holds a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub(in crate::shards) enum EndReason {
    /// Another replica gets it; its work had stopped.
    HandedOver,
    /// Another replica gets it; its work had not stopped in time.
    HandOverTimeout,
    /// The membership could not be renewed in time.
    Expired,
    /// Another writer took the shard, or the membership of this replica.
    Taken,
}

/// A change of the shards that this replica holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::shards) enum Effect {
    /// Open a new fence.
    Acquired(Unit),
    /// Ask for the end of all work; the fence is closed at the deadline of the hand-over at the latest.
    HandOver(Unit),
    /// Close the fence.
    Ended(Unit, EndReason),
}

/// Result of a decision.
#[derive(Debug, Default)]
pub(in crate::shards) struct Step {
    /// End of all open fences.
    pub(in crate::shards) until: Option<Instant>,
    pub(in crate::shards) effects: Vec<Effect>,
    pub(in crate::shards) writes: Vec<Write>,
    pub(in crate::shards) refusal: Option<Refusal>,
    /// Shards that this replica wants.
    pub(in crate::shards) wanted: usize,
}
