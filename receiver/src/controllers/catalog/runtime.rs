//! Calls of catalog sync to one runtime's API server. The client enforces deadlines and byte limits.

use std::collections::BTreeMap;

use k8s_openapi::{api::core::v1::ConfigMap, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions},
    core::DynamicObject,
};
use tidewatch_shared::names::{CATALOG_INVENTORY, SKR_NAMESPACE, field_manager, label};

use super::{
    desired::{DesiredObject, Kind, ObjectId},
    diff,
    metrics::{Metrics, Operation},
};
use crate::{
    kube::object::if_exists,
    kube::runtime_access::{ListError, ListLimits, list_all},
};

/// Result of applying one object.
pub(super) struct WriteResult {
    /// Object as in the last response.
    pub(super) object: DynamicObject,
    /// Writing calls made.
    pub(super) writes: usize,
}

/// API of one runtime.
#[derive(Clone)]
pub(super) struct Runtime {
    client: Client,
    pub(super) metrics: Metrics,
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

    /// Lists all objects of a kind within [`ListLimits::default`].
    pub(super) async fn list(&self, kind: Kind) -> Result<Vec<DynamicObject>, ListError> {
        let listed = list_all(&self.api(kind), &ListParams::default(), &ListLimits::default()).await;
        self.count(Operation::List, listed)
    }

    pub(super) async fn get(&self, id: &ObjectId) -> kube::Result<Option<DynamicObject>> {
        self.count(Operation::Get, self.api(id.kind).get_opt(&id.name).await)
    }

    /// Writes the desired state of an object. Server-side apply reverts edits and removes fields that are no longer
    /// desired; additions of other field managers remain in its response, and a PUT at that resourceVersion removes
    /// them. An object that still differs is changed by its runtime (an older schema, a mutating webhook): writing
    /// again would not help.
    pub(super) async fn apply(&self, desired: &DesiredObject) -> kube::Result<WriteResult> {
        let api = self.api(desired.id.kind);
        let name = &*desired.id.name;
        let apply = PatchParams::apply(field_manager::CATALOG_SYNC).force();
        let applied = api.patch(name, &apply, &Patch::Apply(&desired.body)).await;
        let object = self.count(Operation::Apply, applied)?;
        if diff::is_up_to_date(desired, &object) {
            return Ok(WriteResult { object, writes: 1 });
        }
        let params =
            PostParams { field_manager: Some(field_manager::CATALOG_SYNC.to_owned()), ..PostParams::default() };
        let replaced = api.replace(name, &params, &diff::replacement(desired, object)).await;
        let object = self.count(Operation::Replace, replaced)?;
        if !diff::is_up_to_date(desired, &object) {
            tracing::warn!(object = %desired.id, "Runtime changed a catalog object that was written");
        }
        Ok(WriteResult { object, writes: 2 })
    }

    /// Deletes the object with this uid; success if it is gone already. Returns `false` if another object has taken the
    /// name.
    pub(super) async fn delete(&self, id: &ObjectId, uid: &str) -> kube::Result<bool> {
        let preconditions = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
        let params = DeleteParams::background().preconditions(preconditions);
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

    /// Reads the ConfigMap that stores the inventory.
    pub(super) async fn inventory(&self) -> kube::Result<Option<ConfigMap>> {
        self.count(Operation::GetInventory, self.inventories().get_opt(CATALOG_INVENTORY).await)
    }

    /// Writes the inventory if it still has this resourceVersion, or with `None` if it does not exist. Returns the new
    /// resourceVersion.
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

    /// Deletes the inventory; success if it does not exist.
    pub(super) async fn delete_inventory(&self) -> kube::Result<()> {
        let deleted = self.inventories().delete(CATALOG_INVENTORY, &DeleteParams::background()).await;
        if_exists(deleted, CATALOG_INVENTORY).map(drop)
    }
}
