//! Holders of the shards, by the Leases in KCP.

use std::collections::BTreeMap;

use anyhow::Result;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, api::ListParams};
use tidewatch_api::{
    leases::{self, Unit},
    shard::ShardCount,
};

use super::Landscape;

impl Landscape {
    /// Replica that holds each shard and the fleet role; those without a holder are absent.
    ///
    /// # Errors
    /// When the Leases cannot be listed.
    pub async fn holders(&self) -> Result<BTreeMap<Unit, String>> {
        let leases: Api<Lease> = Api::namespaced(self.operator(), self.namespace());
        let leases = leases.list(&ListParams::default()).await?.items;
        let holder = |unit: Unit| {
            let lease = leases.iter().find(|lease| lease.metadata.name.as_deref() == Some(&leases::unit(unit)))?;
            let identity = lease.spec.as_ref()?.holder_identity.as_deref().filter(|identity| !identity.is_empty())?;
            Some((unit, identity.rsplit_once('_')?.0.to_owned()))
        };
        let shards = ShardCount::default().shards().map(Unit::Shard);
        Ok(shards.chain([Unit::Fleet]).filter_map(holder).collect())
    }
}
