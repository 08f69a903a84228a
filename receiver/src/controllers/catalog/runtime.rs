//! The calls that catalog sync makes to one runtime's API server. Deadlines and byte limits are the client's.

use std::collections::BTreeMap;

use k8s_openapi::{api::core::v1::ConfigMap, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions},
    core::DynamicObject,
};
use tidewatch_shared::names::{CATALOG_INVENTORY, SKR_NAMESPACE, field_manager, label};

use super::{
    desired::{Desired, Kind, ObjectId},
    diff,
    metrics::{Metrics, Operation},
};
use crate::{
    kube::object::is_absent,
    kube::runtime_access::{ListError, ListLimits, list_all},
};

/// How an object went in.
pub(super) struct Written {
    /// As the last answer showed it.
    pub(super) object: DynamicObject,
    /// Calls that wrote.
    pub(super) writes: usize,
}

/// One runtime, as catalog sync uses it.
#[derive(Clone)]
pub(super) struct Runtime {
    client: Client,
    metrics: Metrics,
}

impl Runtime {
    pub(super) fn new(client: Client, metrics: Metrics) -> Self {
        Self { client, metrics }
    }

    fn api(&self, kind: Kind) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), SKR_NAMESPACE, &kind.api_resource())
    }

    fn count<T, E>(&self, operation: Operation, result: Result<T, E>) -> Result<T, E> {
        self.metrics.called(operation, result.is_ok());
        result
    }

    /// Every object of a kind, within the limits of a list.
    pub(super) async fn list(&self, kind: Kind) -> Result<Vec<DynamicObject>, ListError> {
        let listed = list_all(&self.api(kind), &ListParams::default(), &ListLimits::default()).await;
        self.count(Operation::List, listed)
    }

    pub(super) async fn get(&self, id: &ObjectId) -> kube::Result<Option<DynamicObject>> {
        self.count(Operation::Get, self.api(id.kind).get_opt(&id.name).await)
    }

    /// Brings an object to what it shall be. Server-side apply takes back edits and what we no longer set; what others
    /// added stays in its answer, and a PUT of that answer's version removes it. An object that still differs is kept by its
    /// runtime (an older schema, an admission webhook): writing again would change nothing.
    pub(super) async fn put(&self, desired: &Desired) -> kube::Result<Written> {
        let api = self.api(desired.id.kind);
        let name = &*desired.id.name;
        let apply = PatchParams::apply(field_manager::CATALOG_SYNC).force();
        let applied = api.patch(name, &apply, &Patch::Apply(&desired.body)).await;
        let object = self.count(Operation::Apply, applied)?;
        if diff::holds(desired, &object) {
            return Ok(Written { object, writes: 1 });
        }
        let params =
            PostParams { field_manager: Some(field_manager::CATALOG_SYNC.to_owned()), ..PostParams::default() };
        let replaced = api.replace(name, &params, &diff::purged(desired, object)).await;
        let object = self.count(Operation::Replace, replaced)?;
        if !diff::holds(desired, &object) {
            tracing::warn!(object = %desired.id, "the runtime keeps a catalog object different from what was written");
        }
        Ok(Written { object, writes: 2 })
    }

    /// Deletes the object with this uid; one that is gone already is well deleted. `false`: another object has its name.
    pub(super) async fn delete(&self, id: &ObjectId, uid: &str) -> kube::Result<bool> {
        let preconditions = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::background() };
        let result = match self.api(id.kind).delete(&id.name, &params).await {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(true),
            Err(kube::Error::Api(status)) if status.is_conflict() => Ok(false),
            Err(error) => Err(error),
        };
        self.count(Operation::Delete, result)
    }

    fn inventories(&self) -> Api<ConfigMap> {
        Api::namespaced(self.client.clone(), SKR_NAMESPACE)
    }

    /// The ConfigMap that holds the inventory.
    pub(super) async fn inventory(&self) -> kube::Result<Option<ConfigMap>> {
        self.count(Operation::GetInventory, self.inventories().get_opt(CATALOG_INVENTORY).await)
    }

    /// Writes the inventory, if it is still at this version, or still absent. Returns its new version.
    pub(super) async fn write_inventory(
        &self,
        data: BTreeMap<String, String>,
        version: Option<&str>,
    ) -> kube::Result<String> {
        let labels = BTreeMap::from([(label::MANAGED_BY.to_owned(), label::MANAGED_BY_SKR.to_owned())]);
        let metadata = ObjectMeta {
            name: Some(CATALOG_INVENTORY.to_owned()),
            namespace: Some(SKR_NAMESPACE.to_owned()),
            resource_version: version.map(str::to_owned),
            labels: Some(labels),
            ..ObjectMeta::default()
        };
        let map = ConfigMap { metadata, data: Some(data), ..ConfigMap::default() };
        let params = PostParams { field_manager: Some(field_manager::TIDEWATCH.to_owned()), ..PostParams::default() };
        let api = self.inventories();
        let written = match version {
            Some(_) => api.replace(CATALOG_INVENTORY, &params, &map).await,
            None => api.create(&params, &map).await,
        };
        let written = self.count(Operation::WriteInventory, written)?;
        Ok(written.metadata.resource_version.unwrap_or_default())
    }

    /// Deletes the inventory; one that is not there is well deleted.
    pub(super) async fn delete_inventory(&self) -> kube::Result<()> {
        match self.inventories().delete(CATALOG_INVENTORY, &DeleteParams::background()).await {
            Ok(_) => Ok(()),
            Err(error) if is_absent(&error, CATALOG_INVENTORY) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
