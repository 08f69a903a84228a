//! Calls of catalog sync to one runtime's API server. The client enforces deadlines and byte limits.

use std::collections::BTreeMap;

use k8s_openapi::{api::core::v1::ConfigMap, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, PostParams},
    core::DynamicObject,
};
use tidewatch_api::{
    key::KymaKey,
    names::{CATALOG_INVENTORY, SKR_NAMESPACE, field_manager, label},
};
use tidewatch_cluster::{
    WriteBudgets,
    object::{self, Component, Converged, Target, WriteError, if_exists},
    runtime_access::{ListError, ListLimits, list_map, retain},
};
use tidewatch_kit::foreign_text::identifier;
use tidewatch_select::catalog::desired::{DesiredObject, Kind, ObjectId};

use super::metrics::{Metrics, Operation};

/// API of one runtime.
#[derive(Clone)]
pub(super) struct Runtime {
    client: Client,
    budgets: Option<(KymaKey, WriteBudgets)>,
    pub(super) metrics: Metrics,
}

impl Runtime {
    pub(super) fn new(client: Client, metrics: Metrics) -> Self {
        Self { client, budgets: None, metrics }
    }

    /// Limits the writes of each object.
    pub(super) fn with_budgets(self, key: &KymaKey, budgets: &WriteBudgets) -> Self {
        Self { budgets: Some((key.clone(), budgets.clone())), ..self }
    }

    fn api(&self, kind: Kind) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), SKR_NAMESPACE, &kind.api_resource())
    }

    fn count<T, E>(&self, operation: Operation, result: Result<T, E>) -> Result<T, E> {
        self.metrics.called(operation, result.is_ok());
        result
    }

    /// Lists all objects of a kind within [`ListLimits::default`], and keeps of each only what `keep` returns.
    pub(super) async fn list<T>(&self, kind: Kind, keep: impl FnMut(DynamicObject) -> T) -> Result<Vec<T>, ListError> {
        let listed = list_map(&self.api(kind), &ListParams::default(), &ListLimits::default(), keep).await;
        self.count(Operation::List, listed)
    }

    pub(super) async fn get(&self, id: &ObjectId) -> kube::Result<Option<DynamicObject>> {
        self.count(Operation::Get, self.api(id.kind).get_opt(&id.name).await)
    }

    /// Writes the desired state of an object, see [`Target::converge`]. An object that still differs is changed by its runtime,
    /// and counts as written.
    pub(super) async fn apply(&self, desired: &DesiredObject) -> Result<DynamicObject, WriteError> {
        let object = desired.id.to_string();
        let budget =
            self.budgets.as_ref().map(|(key, budgets)| budgets.of(key, Component::Catalog, &object, desired.hash));
        let target = Target { budget: budget.as_ref(), ..desired.target() };
        let mut accepted = None;
        let converged = target.converge(&self.api(desired.id.kind), None, &mut accepted).await;
        let (applied, replaced) = match &converged {
            Ok(Converged { replaced, .. }) => (Some(true), replaced.then_some(true)),
            Err(WriteError::Contested) => (None, None),
            Err(WriteError::Replace(_)) => (Some(true), Some(false)),
            Err(_) => (Some(false), None),
        };
        for (operation, is_ok) in [(Operation::Apply, applied), (Operation::Replace, replaced)] {
            is_ok.into_iter().for_each(|is_ok| self.metrics.called(operation, is_ok));
        }
        if accepted.is_some() {
            tracing::warn!(object = %desired.id, "Runtime changed a catalog object that was written");
        }
        converged.map(|Converged { object, .. }| object)
    }

    /// Deletes the object with this uid; success if it is gone already. Returns `false` if another object has taken the
    /// name.
    pub(super) async fn delete(&self, id: &ObjectId, uid: &str) -> kube::Result<bool> {
        let deleted = match retain(object::delete(&self.api(id.kind), &id.name, Some(uid.to_owned()))).await {
            Err(error) if object::is_conflict(&error) => Ok(false),
            deleted => deleted.map(|_| true),
        };
        self.count(Operation::Delete, deleted)
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
        Ok(identifier(written.metadata.resource_version.as_deref()).to_owned())
    }

    /// Deletes the inventory; success if it does not exist.
    pub(super) async fn delete_inventory(&self) -> kube::Result<()> {
        let deleted = self.inventories().delete(CATALOG_INVENTORY, &DeleteParams::background()).await;
        if_exists(deleted, CATALOG_INVENTORY).map(drop)
    }
}
