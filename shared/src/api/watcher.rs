//! The Watcher: what is watched in every runtime, and who hears of it.

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

/// What is watched, and who hears of it.
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
    doc = "A watch in every runtime.",
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct WatcherSpec {
    /// The resource that is watched.
    pub resource_to_watch: WatchableGvr,
    /// The part of an object whose change counts.
    pub field: WatchField,
    /// Labels that the watched objects have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels_to_watch: Option<BTreeMap<String, String>>,
    /// Who hears of changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manager: Option<String>,
    /// The service that the manager listens at.
    pub service_info: ServiceInfo,
    /// Has no effect; no gateway is needed.
    pub gateway: Gateway,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// A resource; the version may be "*".
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WatchableGvr {
    /// Its API group; empty for the core group.
    pub group: String,
    /// Its version, or "*" for the one that the runtime prefers.
    pub version: String,
    /// Its plural name.
    pub resource: String,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// The part of an object whose change counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WatchField {
    /// What is wanted.
    #[default]
    Spec,
    /// What came of it.
    Status,
}

/// A service in KCP.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServiceInfo {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its port; the schema admits any number.
    pub port: i64,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// An Istio gateway.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Gateway {
    /// Its labels.
    #[schemars(schema_with = "schema::label_selector")]
    pub selector: LabelSelector,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// Whether it is served.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WatcherStatus {
    /// The state of the whole.
    pub state: State,
    /// Its aspects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "parts::conditions")]
    pub conditions: Option<Vec<Condition>>,
    /// Generation that was looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl WatcherStatus {
    /// The conditions; absent means none.
    #[must_use]
    pub fn conditions(&self) -> &[Condition] {
        self.conditions.as_deref().unwrap_or_default()
    }
}
