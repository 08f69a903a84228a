//! What the decision reads of each Lease.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::api::coordination::v1::Lease;
use tidewatch_api::{
    leases::{self, Unit},
    shard::ShardCount,
};
use tidewatch_cluster::leader::{self, LeaseRecord};

/// Longest name or address of a replica that is read, in bytes: a DNS name and a port.
const MAX_ADDRESS: usize = 260;

/// One of the Leases that decide on shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum LeaseId {
    /// The Lease of a receiver without shards, which all sharded replicas keep alive together.
    Unsharded,
    /// A membership Lease, by its number.
    Member(u8),
    /// The Lease of a shard, or of the fleet role.
    Unit(Unit),
}

/// Names of the Leases of one installation.
#[derive(Debug)]
pub(super) struct LeaseNames {
    ids: BTreeMap<String, LeaseId>,
    unsharded: String,
}

impl LeaseNames {
    pub(super) fn new(unsharded: &str, shards: ShardCount) -> Self {
        let members = (0..leases::MAX_REPLICAS).map(|number| (leases::member(number), LeaseId::Member(number)));
        let units = Unit::all(shards).map(|unit| (leases::unit(unit), LeaseId::Unit(unit)));
        let unsharded_lease = (unsharded.to_owned(), LeaseId::Unsharded);
        // Last, so that it wins over another Lease of the same name.
        let ids = members.chain(units).chain([unsharded_lease]).collect();
        Self { ids, unsharded: unsharded.to_owned() }
    }

    /// The Lease of a name; `None` for Leases of others.
    pub(super) fn id(&self, name: &str) -> Option<LeaseId> {
        self.ids.get(name).copied()
    }

    /// Name of a Lease.
    pub(super) fn name(&self, id: LeaseId) -> String {
        match id {
            LeaseId::Unsharded => self.unsharded.clone(),
            LeaseId::Member(number) => leases::member(number),
            LeaseId::Unit(unit) => leases::unit(unit),
        }
    }
}

/// The relevant fields of a Lease at one resourceVersion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Record {
    /// The resourceVersion. Compared for equality only.
    pub(super) version: String,
    /// Holder and renewal.
    pub(super) lease: LeaseRecord,
    /// Stored number of shards, in the Lease of the unsharded receiver.
    pub(super) shards: Option<String>,
    /// True if the replica of a membership Lease stops.
    pub(super) leaving: bool,
}

impl Record {
    pub(super) fn of(lease: &Lease) -> Self {
        Self {
            version: lease.metadata.resource_version.clone().unwrap_or_default(),
            lease: leader::record(lease),
            shards: lease.metadata.annotations.as_ref().and_then(|all| all.get(leases::SHARDS)).cloned(),
            leaving: annotation(lease, leases::LEAVING).is_some(),
        }
    }

    pub(super) fn holder(&self) -> Option<&str> {
        self.lease.holder.as_deref()
    }
}

/// Duration that a renewal of the Lease of the unsharded receiver records. While replicas hold it, it is the longest of theirs:
/// a receiver without shards waits for so long, and the fences of each replica may last for its own.
pub(super) fn lock_duration(before: &LeaseRecord, sharded: &str, own: Duration) -> Duration {
    let recorded = before.duration.filter(|_| before.holder.as_deref() == Some(sharded));
    recorded.map_or(own, |recorded| recorded.max(own))
}

/// Value of an annotation, if it is not longer than a name or an address may be.
pub(super) fn annotation(lease: &Lease, key: &str) -> Option<String> {
    lease.metadata.annotations.as_ref()?.get(key).filter(|value| value.len() <= MAX_ADDRESS).cloned()
}
