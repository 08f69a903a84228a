//! The catalog reconcile of one Kyma: brings its runtime cluster to the desired catalog and writes the condition
//! `ModuleCatalog`.

use kube::{Client, ResourceExt as _};
use thiserror::Error;
use tidewatch_api::{Kyma, key::KymaKey};
use tidewatch_cluster::{
    body_missing::BodyMissingError,
    runtime_access::{ClientError, RuntimeAccessError},
};
use tidewatch_fleet::{queue::Drift, stores::Stores};
use tidewatch_installer::Readiness;

use super::{Catalog, SyncError};
use crate::status::{Conditions, StatusWriter, WriteStatusError};

/// The inputs of one reconcile.
pub(crate) struct CatalogReconcile<'a> {
    pub(crate) catalog: &'a Catalog,
    pub(crate) stores: &'a Stores,
    pub(crate) status: StatusWriter,
    pub(crate) key: &'a KymaKey,
    /// Client of the runtime cluster.
    pub(crate) client: Result<Client, ClientError>,
    /// Synced objects whose state in the runtime cluster is uncertain.
    pub(crate) drift: &'a Drift,
}

/// The runtime cluster does not have its desired catalog.
#[derive(Debug, Error)]
pub(crate) enum CatalogError {
    /// There is no client for the runtime cluster.
    #[error("access the runtime")]
    Access(#[source] RuntimeAccessError),
    /// The access Secret has no body in the cache yet.
    #[error(transparent)]
    Body(BodyMissingError),
    /// The sync failed.
    #[error("bring the catalog to the runtime")]
    Sync(#[source] SyncError),
}

impl CatalogReconcile<'_> {
    /// Syncs the catalog, then writes the condition to the Kyma in the control plane if it changed. Returns the result
    /// of the sync, which the condition reports. A body that is missing is reported in no condition.
    ///
    /// # Errors
    /// [`WriteStatusError`] if the condition cannot be written.
    pub(crate) async fn run(self, kyma: &mut Kyma) -> Result<Result<(), CatalogError>, WriteStatusError> {
        let mut conditions = Conditions::default();
        let result = match self.client {
            Ok(client) => {
                let synced = self.catalog.sync(self.key, &client, kyma.labels(), self.stores, self.drift).await;
                let held = || {
                    let lost = self.catalog.lost().map(|lost| lost.to_string());
                    lost.or_else(|| {
                        Some(self.catalog.held()).filter(|held| !held.is_empty()).map(|held| held.to_string())
                    })
                };
                conditions.catalog = Some(synced.as_ref().map(|_| held()).map_err(SyncError::describe));
                synced.map(drop).map_err(CatalogError::Sync)
            }
            Err(ClientError::Body(missing)) => return Ok(Err(CatalogError::Body(missing))),
            Err(ClientError::Access(error)) => {
                conditions.access = Some(Readiness::from(&error));
                conditions.catalog = Some(Err(error.to_string()));
                Err(CatalogError::Access(error))
            }
        };
        self.status.write_conditions(kyma, &conditions).await?;
        Ok(result)
    }
}
