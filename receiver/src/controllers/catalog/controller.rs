//! The catalog reconcile of one Kyma: brings its runtime cluster to the desired catalog and writes the condition `ModuleCatalog`.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{Client, ResourceExt as _};
use thiserror::Error;
use tidewatch_shared::api::{Kyma, KymaStatus};

use super::{Catalog, SyncError};
use crate::{
    base::{key::KymaKey, stores::Stores},
    controllers::status::{Access, Conditions, StatusWriter, WriteStatusError},
    fleet::queue::Drift,
    kube::runtime_access::RuntimeAccessError,
};

/// The inputs of one reconcile.
pub(crate) struct CatalogReconcile<'a> {
    pub(crate) catalog: &'a Catalog,
    pub(crate) stores: &'a Stores,
    pub(crate) status: StatusWriter,
    pub(crate) key: &'a KymaKey,
    /// The Kyma in the control plane as last read or written.
    pub(crate) kyma: &'a Kyma,
    /// Client of the runtime cluster.
    pub(crate) client: Result<Client, RuntimeAccessError>,
    /// Synced objects whose state in the runtime cluster is uncertain.
    pub(crate) drift: &'a Drift,
}

/// The runtime cluster does not have its desired catalog.
#[derive(Debug, Error)]
pub(crate) enum CatalogError {
    /// There is no client for the runtime cluster.
    #[error("access the runtime")]
    Access(#[source] RuntimeAccessError),
    /// The sync failed.
    #[error("bring the catalog to the runtime")]
    Sync(#[source] SyncError),
}

/// A finished reconcile.
pub(crate) struct CatalogReconciled {
    /// Result of the sync; the condition reports it.
    pub(crate) result: Result<(), CatalogError>,
    /// Status of the Kyma in the control plane and its resourceVersion, as stored.
    pub(crate) status: (KymaStatus, Option<String>),
}

impl CatalogReconcile<'_> {
    /// Syncs the catalog, then writes the condition if it changed.
    ///
    /// # Errors
    /// [`WriteStatusError`]; a failed sync is part of the result.
    pub(crate) async fn run(self, now: &Time) -> Result<CatalogReconciled, WriteStatusError> {
        let mut conditions = Conditions::default();
        let result = match self.client {
            Err(error) => {
                conditions.access = Some(Access::from(&error));
                conditions.catalog = Some(Err(error.to_string()));
                Err(CatalogError::Access(error))
            }
            Ok(client) => {
                let synced = self.catalog.sync(self.key, &client, self.kyma.labels(), self.stores, self.drift).await;
                let held = || self.catalog.held().map(|held| held.to_string());
                conditions.catalog = Some(synced.as_ref().map(|_| held()).map_err(SyncError::describe));
                synced.map(drop).map_err(CatalogError::Sync)
            }
        };
        let status = self.status.write_conditions(self.kyma, &conditions, now).await?;
        Ok(CatalogReconciled { result, status })
    }
}
