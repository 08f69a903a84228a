//! Content of the Leases, and the requests.

use std::collections::BTreeMap;

use k8s_openapi::api::coordination::v1::Lease;
use tidewatch_api::leases;
use tidewatch_cluster::leader::{LeaseApi, LeaseError, acquired, record, released, renewed, renewed_for};

use super::super::{
    Settings,
    ownership::{Outcome, Write, WriteKind},
    record::{LeaseId, LeaseNames, lock_duration},
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
    /// Holder of the Lease of the unsharded receiver.
    pub(super) sharded: String,
    pub(super) names: LeaseNames,
}

impl Content {
    /// Sends a write; `base` is the Lease at the resourceVersion that it replaces, or `None` if it must be read first. Two
    /// calls at most, each with its timeout.
    pub(super) async fn send(&self, api: &LeaseApi, write: &Write, base: Option<Lease>) -> Written {
        let id = write.id;
        let finished = |outcome, lease, error| Written { id, outcome, lease, error };
        let name = self.names.name(id);
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
                annotations.insert(leases::REPLICA.to_owned(), self.settings.name.clone());
                set(annotations, leases::RELAY_ADDRESS, self.settings.relay_address.clone());
                annotations.remove(leases::LEAVING);
            }),
            WriteKind::Renew { is_leaving } => annotated(renewed(base), |annotations| {
                set(annotations, leases::LEAVING, is_leaving.then(|| true.to_string()));
            }),
            WriteKind::Leave | WriteKind::Evict => annotated(released(base), |annotations| {
                for key in [leases::REPLICA, leases::RELAY_ADDRESS, leases::LEAVING] {
                    annotations.remove(key);
                }
            }),
            WriteKind::Lock => {
                let before = record(&base);
                let lasting = lock_duration(&before, &self.sharded, duration);
                let lease = match before.holder {
                    Some(holder) if holder == self.sharded => renewed_for(base, lasting),
                    _ => acquired(base, &self.sharded, lasting),
                };
                annotated(lease, |annotations| {
                    annotations.insert(leases::SHARDS.to_owned(), self.settings.shards.to_string());
                })
            }
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
