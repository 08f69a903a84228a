//! All Leases as the watch last delivered them.
//!
//! A watch delivers changes in the order in which the API server made them, of all Leases together. So the view is the
//! state at some earlier time, and never a mixture of two: if a shard's record names a replica, the view contains the
//! membership of that replica, or a later end of it. Records that own writes returned are not part of it.

use std::collections::{BTreeMap, BTreeSet};

use tidewatch_cluster::leader::{Observation, ran_in};
use tokio::time::Instant;

use super::{
    super::record::{LeaseId, Record},
    Settings,
};

/// One Lease, and since when its record has not changed.
#[derive(Debug)]
pub(super) struct Observed {
    pub(super) record: Record,
    observation: Observation,
}

/// State of a membership Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tenure<'a> {
    /// No holder.
    Free,
    /// The holder did not renew it for its duration.
    Lapsed(&'a str),
    /// The holder ran in this replica's place, which runs one process at a time.
    Predecessor(&'a str),
    /// The holder renewed it in time.
    Live(&'a str),
}

impl Observed {
    pub(super) fn tenure(&self, settings: &Settings, now: Instant) -> Tenure<'_> {
        match self.record.holder() {
            None => Tenure::Free,
            Some(holder) if holder != settings.identity && ran_in(holder, settings.place.as_deref()) => {
                Tenure::Predecessor(holder)
            }
            Some(holder) if now >= self.observation.expires(settings.timings.lease) => Tenure::Lapsed(holder),
            Some(holder) => Tenure::Live(holder),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct View {
    leases: BTreeMap<LeaseId, Observed>,
}

impl View {
    /// Takes a record that the watch delivered; `None` if the Lease was deleted.
    pub(super) fn observe(&mut self, id: LeaseId, record: Option<Record>, now: Instant) {
        let Some(record) = record else { return drop(self.leases.remove(&id)) };
        match self.leases.get_mut(&id) {
            Some(observed) => {
                observed.observation.update(record.lease.clone(), now);
                observed.record = record;
            }
            None => {
                let observation = Observation::new(record.lease.clone(), now);
                self.leases.insert(id, Observed { record, observation });
            }
        }
    }

    /// Ids of all Leases that exist.
    pub(super) fn ids(&self) -> BTreeSet<LeaseId> {
        self.leases.keys().copied().collect()
    }

    pub(super) fn record(&self, id: LeaseId) -> Option<&Record> {
        self.leases.get(&id).map(|observed| &observed.record)
    }

    /// Time of the last change of a Lease, on this replica's clock.
    pub(super) fn changed(&self, id: LeaseId) -> Option<Instant> {
        self.leases.get(&id).map(|observed| observed.observation.since)
    }

    /// Membership Leases that exist, in order.
    pub(super) fn members(&self) -> impl Iterator<Item = (u8, &Observed)> {
        self.leases.range(LeaseId::Member(0)..=LeaseId::Member(u8::MAX)).filter_map(|(id, observed)| match id {
            LeaseId::Member(number) => Some((*number, observed)),
            _ => None,
        })
    }

    /// Replicas that a membership Lease names, live or not. Any other replica has ended its membership, and its fences
    /// before it.
    pub(super) fn named(&self) -> BTreeSet<&str> {
        self.members().filter_map(|(_, observed)| observed.record.holder()).collect()
    }
}
