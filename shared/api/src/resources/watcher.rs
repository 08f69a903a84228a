//! The Watcher: a resource that agents watch in every runtime, and the manager that is notified of changes.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    parts::{self, Condition, Other},
    schema,
    state::State,
};

/// spec selects the objects to watch in every runtime and the manager to notify of changes.
#[derive(Clone, Debug, Default, PartialEq, CustomResource, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "operator.kyma-project.io",
    version = "v1beta2",
    kind = "Watcher",
    plural = "watchers",
    namespaced,
    status = "WatcherStatus",
    derive = "Default",
    derive = "PartialEq",
    doc = "Watcher configures a watch in every runtime and the manager to notify of changes.",
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct WatcherSpec {
    /// resourceToWatch is the resource to watch.
    pub resource_to_watch: WatchableGvr,
    /// field determines the changes to report, one of spec, status. With spec, changes of the status alone are not
    /// reported; with status, every change is reported.
    pub field: WatchField,
    /// labelsToWatch selects the objects to watch by their labels. If absent or empty, all objects of the resource are
    /// watched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels_to_watch: Option<BTreeMap<String, String>>,
    /// manager is the name of the manager to notify of changes. Defaults to the label
    /// operator.kyma-project.io/managed-by of the Watcher.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manager: Option<String>,
    /// serviceInfo references the Service at which the manager accepts events.
    pub service_info: ServiceInfo,
    /// gateway has no effect, since no Istio gateway is required. Accepted for compatibility.
    pub gateway: Gateway,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// WatchableGvr identifies a resource by API group, version and plural name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WatchableGvr {
    /// group is the API group of the resource. Empty for the core group.
    pub group: String,
    /// version is the API version of the resource, or "*" for the version that the API server of the runtime prefers.
    pub version: String,
    /// resource is the plural name of the resource, or "*" for all resources of a group that CRDs define.
    pub resource: String,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// field determines the changes to report, one of spec, status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WatchField {
    /// Changes of the status alone are not reported.
    #[default]
    Spec,
    /// Every change is reported.
    Status,
}

/// ServiceInfo references a Service in the control plane.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServiceInfo {
    /// name of the Service.
    pub name: String,
    /// namespace of the Service.
    pub namespace: String,
    /// port of the Service, from 1 to 65535. The range is checked by the controller, not by the schema.
    pub port: i64,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// Gateway selects an Istio gateway.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Gateway {
    /// selector selects the gateway by its labels.
    #[schemars(schema_with = "schema::label_selector")]
    pub selector: LabelSelector,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// status is the observed state of the Watcher: whether it is served.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WatcherStatus {
    /// state of the Watcher, one of Processing, Deleting, Ready, Error, Warning, Unmanaged. Empty until it is first
    /// computed.
    pub state: State,
    /// conditions of the Watcher, one per type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "parts::conditions")]
    pub conditions: Option<Vec<Condition>>,
    /// observedGeneration is the metadata.generation of the Watcher that the status was computed from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl WatcherStatus {
    /// The conditions; empty if absent.
    pub fn conditions(&self) -> &[Condition] {
        self.conditions.as_deref().unwrap_or_default()
    }
}
