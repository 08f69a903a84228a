//! What the decision reads of each Lease.

use std::collections::BTreeMap;

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
    /// A membership Lease, by its number.
    Member(u8),
    /// The Lease of a shard, or of the fleet role.
    Unit(Unit),
}

/// The Leases of one installation, by name.
pub(super) fn leases_by_name(shards: ShardCount) -> BTreeMap<String, LeaseId> {
    let members = (0..leases::MAX_REPLICAS).map(LeaseId::Member);
    let ids = members.chain(Unit::all(shards).map(LeaseId::Unit));
    ids.map(|id| (id.name(), id)).collect()
}

impl LeaseId {
    pub(super) fn name(self) -> String {
        match self {
            Self::Member(number) => leases::member(number),
            Self::Unit(unit) => leases::unit(unit),
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
    /// Number of shards that the replica of a membership Lease shares with others; `None` if it shares them with none.
    pub(super) shared: Option<ShardCount>,
    /// True if the replica of a membership Lease stops.
    pub(super) leaving: bool,
}

impl Record {
    pub(super) fn of(lease: &Lease) -> Self {
        Self {
            version: lease.metadata.resource_version.clone().unwrap_or_default(),
            lease: leader::record(lease),
            shared: annotation(lease, leases::SHARDS).and_then(|count| count.parse().ok()),
            leaving: annotation(lease, leases::LEAVING).is_some(),
        }
    }

    pub(super) fn holder(&self) -> Option<&str> {
        self.lease.holder.as_deref()
    }
}

/// Value of an annotation, if it is not longer than a name or an address may be.
pub(super) fn annotation(lease: &Lease, key: &str) -> Option<String> {
    lease.metadata.annotations.as_ref()?.get(key).filter(|value| value.len() <= MAX_ADDRESS).cloned()
}
