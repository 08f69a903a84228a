//! Content of the Leases, and the requests.

use std::collections::BTreeMap;

use k8s_openapi::api::coordination::v1::Lease;
use tidewatch_api::leases;
use tidewatch_cluster::leader::{LeaseApi, LeaseError, acquired, record, released, renewed};

use super::super::{
    Settings,
    ownership::{Outcome, Write, WriteKind},
    record::LeaseId,
};

/// Result of a write, and the Lease as it was written.
pub(super) struct Written {
    pub(super) id: LeaseId,
    pub(super) outcome: Outcome,
    pub(super) lease: Option<Lease>,
    pub(super) error: Option<LeaseError>,
}

/// What this replica writes into Leases.
#[derive(Debug)]
pub(super) struct Content {
    pub(super) settings: Settings,
    /// Identity of this replica.
    pub(super) identity: String,
}

impl Content {
    /// Sends a write; `base` is the Lease at the resourceVersion that it replaces, or `None` if it must be read first. Two
    /// calls at most, each with its timeout.
    pub(super) async fn send(&self, api: &LeaseApi, write: &Write, base: Option<Lease>) -> Written {
        let id = write.id;
        let finished = |outcome, lease, error| Written { id, outcome, lease, error };
        let name = id.name();
        let base = match base {
            Some(base) => base,
            None => match api.read(&name).await {
                Ok(Some(lease)) if record(&lease).holder.as_ref() == Some(&self.identity) => lease,
                Ok(_) => return finished(Outcome::Taken, None, None),
                Err(error) => return finished(Outcome::Failed, None, Some(error)),
            },
        };
        match api.write(&name, &self.content(base, write.kind)).await {
            Ok(Some(lease)) => {
                let version = lease.metadata.resource_version.clone().unwrap_or_default();
                finished(Outcome::Written(version), Some(lease), None)
            }
            Ok(None) => finished(Outcome::Conflict, None, None),
            Err(error) => finished(Outcome::Failed, None, Some(error)),
        }
    }

    fn content(&self, base: Lease, kind: WriteKind) -> Lease {
        let duration = self.settings.lease_duration;
        match kind {
            WriteKind::Join => annotated(acquired(base, &self.identity, duration), |annotations| {
                let address = &self.settings.relay_address;
                annotations.insert(leases::REPLICA.to_owned(), self.settings.name.clone());
                set(annotations, leases::RELAY_ADDRESS, address.clone());
                set(annotations, leases::SHARDS, address.as_ref().map(|_| self.settings.shards.to_string()));
                annotations.remove(leases::LEAVING);
            }),
            WriteKind::Renew { is_leaving } => annotated(renewed(base), |annotations| {
                set(annotations, leases::LEAVING, is_leaving.then(|| true.to_string()));
            }),
            WriteKind::Leave | WriteKind::Evict => annotated(released(base), |annotations| {
                for key in [leases::REPLICA, leases::RELAY_ADDRESS, leases::SHARDS, leases::LEAVING] {
                    annotations.remove(key);
                }
            }),
            // The membership Lease has the duration.
            WriteKind::Claim => acquired(base, &self.identity, duration),
            WriteKind::Release => released(base),
        }
    }
}

fn annotated(mut lease: Lease, change: impl FnOnce(&mut BTreeMap<String, String>)) -> Lease {
    change(lease.metadata.annotations.get_or_insert_default());
    lease
}

fn set(annotations: &mut BTreeMap<String, String>, key: &str, value: Option<String>) {
    match value {
        Some(value) => drop(annotations.insert(key.to_owned(), value)),
        None => drop(annotations.remove(key)),
    }
}
