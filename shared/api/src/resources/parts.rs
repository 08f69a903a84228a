//! Types that several kinds share.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use strum::{Display, IntoStaticStr};

use super::schema::{self, CONDITION_REASON, CONDITION_TYPE};
use crate::ConditionStatus;

/// Members unknown to a type, preserved on write.
pub type Other = Map<String, Value>;

/// customResourcePolicy determines whether the default module CR is created and deleted together with the module. One
/// of CreateAndDelete, Ignore.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema, Display, IntoStaticStr,
)]
pub enum CustomResourcePolicy {
    /// The default module CR is created on installation and deleted on removal of the module.
    #[default]
    CreateAndDelete,
    /// The default module CR is neither created nor deleted; module CRs are managed by the user.
    Ignore,
}

/// Condition describes one aspect of the observed state of an object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// type of the condition in CamelCase. Unique within the list of conditions.
    #[serde(rename = "type")]
    #[schemars(length(max = 316), regex(pattern = CONDITION_TYPE))]
    pub type_: String,
    /// status of the condition, one of True, False, Unknown.
    pub status: ConditionStatus,
    /// reason is a machine-readable identifier in CamelCase for the last transition of the condition.
    #[schemars(length(min = 1, max = 1024), regex(pattern = CONDITION_REASON))]
    pub reason: String,
    /// message is a human-readable description of the last transition of the condition. May be empty.
    #[schemars(length(max = 32768))]
    pub message: String,
    /// lastTransitionTime is the last time the condition transitioned from one status to another, in RFC 3339 with a
    /// resolution of one second.
    pub last_transition_time: Time,
    /// observedGeneration is the metadata.generation of the object that the condition was computed from.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub observed_generation: Option<i64>,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl Condition {
    /// The reason of every condition that lifecycle-manager writes.
    pub const READY: &str = "Ready";

    /// Creates a condition with the reason [`Self::READY`] and no observed generation.
    pub fn new(type_: impl Into<String>, status: ConditionStatus, message: impl Into<String>, since: Time) -> Self {
        Self {
            type_: type_.into(),
            status,
            reason: Self::READY.to_owned(),
            message: message.into(),
            last_transition_time: since,
            observed_generation: None,
            other: Other::new(),
        }
    }

    /// True if the status is [`ConditionStatus::True`].
    pub fn is_true(&self) -> bool {
        self.status == ConditionStatus::True
    }
}

/// lastOperation is the most recent operation on the object.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastOperation {
    /// operation is a human-readable description of the operation.
    pub operation: String,
    /// lastUpdateTime is the time of the last change of the operation, in RFC 3339 with a resolution of one second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_update_time: Option<Time>,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// TrackingObject references an object by kind, namespace and name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TrackingObject {
    /// apiVersion is the API group and version of the referenced object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_version: Option<String>,
    /// kind of the referenced object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// metadata identifies the referenced object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<PartialMeta>,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// PartialMeta is the part of an object's metadata that identifies the object.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PartialMeta {
    /// name of the referenced object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// namespace of the referenced object. Absent for cluster-scoped kinds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// generation is the metadata.generation of the referenced object when it was last observed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<i64>,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// GroupVersionKind identifies a kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Gvk {
    /// group is the API group of the kind. Empty for the core group.
    pub group: String,
    /// version is the API version of the kind.
    pub version: String,
    /// kind is the name of the kind, for example Deployment.
    pub kind: String,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// manager references the workload of the module, usually a Deployment, from which the readiness of the module is
/// derived.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Manager {
    /// group is the API group of the workload.
    pub group: String,
    /// version is the API version of the workload.
    pub version: String,
    /// kind of the workload.
    pub kind: String,
    /// namespace of the workload. Defaults to the namespace of the module.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// name of the workload.
    pub name: String,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// The schema of a list of [`Condition`]s: a map with the key `type`.
pub(super) fn conditions(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schema::map_list(generator.subschema_for::<Vec<Condition>>(), "type")
}
