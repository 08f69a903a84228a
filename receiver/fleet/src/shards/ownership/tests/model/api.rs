//! The API server: Leases with compare-and-swap, and a log of the changes for watches.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use tidewatch_api::{
    leases::{MAX_REPLICAS, Unit},
    shard::ShardCount,
};

use super::super::super::{super::record::Record, LeaseId, Outcome, Settings, Write, WriteKind};

#[derive(Debug)]
pub(in crate::shards::ownership) struct ApiServer {
    leases: BTreeMap<LeaseId, Record>,
    /// Every change, in order.
    pub(in crate::shards::ownership) log: Vec<(LeaseId, Record)>,
}

impl ApiServer {
    pub(in crate::shards::ownership) fn new(shards: ShardCount) -> Self {
        let members = (0..MAX_REPLICAS).map(LeaseId::Member);
        let ids = members.chain(Unit::all(shards).map(LeaseId::Unit));
        let mut server = Self { leases: BTreeMap::new(), log: Vec::new() };
        ids.for_each(|id| drop(server.store(id, Record::default())));
        server
    }

    pub(in crate::shards::ownership) fn all(&self) -> BTreeMap<LeaseId, Record> {
        self.leases.clone()
    }

    pub(in crate::shards::ownership) fn get(&self, id: LeaseId) -> &Record {
        &self.leases[&id]
    }

    /// Stores a record with a new resourceVersion.
    fn store(&mut self, id: LeaseId, record: Record) -> String {
        let version = (self.log.len() + 1).to_string();
        let record = Record { version: version.clone(), ..record };
        self.log.push((id, record.clone()));
        self.leases.insert(id, record);
        version
    }

    /// Stores a record if the current one has the given resourceVersion.
    pub(in crate::shards::ownership) fn swap(&mut self, id: LeaseId, version: &str, record: Record) -> Outcome {
        if self.leases[&id].version == version { Outcome::Written(self.store(id, record)) } else { Outcome::Conflict }
    }

    /// Executes a write of a replica whose wall clock shows `wall`.
    pub(in crate::shards::ownership) fn write(
        &mut self,
        write: &Write,
        settings: &Settings,
        wall: Timestamp,
    ) -> Outcome {
        let mut record = self.leases[&write.id].clone();
        let me = Some(settings.identity.clone());
        let version = write.version.clone().unwrap_or_else(|| record.version.clone());
        if write.version.is_none() && record.lease.holder != me {
            return Outcome::Taken;
        }
        let seconds = settings.timings.lease.as_secs();
        record.lease.renewed = Some(wall);
        match write.kind {
            WriteKind::Join | WriteKind::Claim => {
                record.lease.holder = me;
                record.lease.duration = Some(Duration::from_secs(seconds));
                record.lease.transitions += 1;
                record.leaving = false;
                record.shared = settings.shared();
            }
            WriteKind::Renew { is_leaving } => record.leaving = is_leaving,
            WriteKind::Leave | WriteKind::Evict | WriteKind::Release => record.lease.holder = None,
        }
        self.swap(write.id, &version, record)
    }
}
