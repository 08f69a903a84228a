//! What several kinds have in common.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::schema::{self, CONDITION_REASON, CONDITION_TYPE};

/// Members that a type does not know, kept as they are.
pub type Other = Map<String, Value>;

/// Whether the default module CR is created and deleted with its module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum CustomResourcePolicy {
    /// It is.
    #[default]
    CreateAndDelete,
    /// It is the user's.
    Ignore,
}

impl CustomResourcePolicy {
    /// As the custom resources spell it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::CreateAndDelete => "CreateAndDelete",
            Self::Ignore => "Ignore",
        }
    }
}

impl fmt::Display for CustomResourcePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Whether a condition holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum ConditionStatus {
    /// It holds.
    True,
    /// It does not hold.
    False,
    /// Nobody can tell.
    #[default]
    Unknown,
}

impl ConditionStatus {
    /// As the custom resources spell it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

impl From<bool> for ConditionStatus {
    fn from(holds: bool) -> Self {
        if holds { Self::True } else { Self::False }
    }
}

impl fmt::Display for ConditionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// One aspect of an object's state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Which aspect; each stands in a list at most once.
    #[serde(rename = "type")]
    #[schemars(length(max = 316), regex(pattern = CONDITION_TYPE))]
    pub type_: String,
    /// Whether it holds.
    pub status: ConditionStatus,
    /// Why, in one word for programs.
    #[schemars(length(min = 1, max = 1024), regex(pattern = CONDITION_REASON))]
    pub reason: String,
    /// Why, in words for people; may be empty.
    #[schemars(length(max = 32768))]
    pub message: String,
    /// When the status became what it is, in whole seconds.
    pub last_transition_time: Time,
    /// Generation of the object that was looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub observed_generation: Option<i64>,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl Condition {
    /// The reason that the incumbent gives for every condition.
    pub const READY: &str = "Ready";

    /// A condition with the reason [`Self::READY`].
    #[must_use]
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

    /// Whether it holds.
    #[must_use]
    pub fn is_true(&self) -> bool {
        self.status == ConditionStatus::True
    }
}

/// What was last done to an object.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastOperation {
    /// In words for people.
    pub operation: String,
    /// When, in whole seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_update_time: Option<Time>,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// Names an object whose state counts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TrackingObject {
    /// Its API group and version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_version: Option<String>,
    /// Its kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Which one it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<PartialMeta>,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// As much of an object's metadata as it takes to find it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PartialMeta {
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Its namespace; absent for kinds without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Its generation when it was looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<i64>,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// A kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Gvk {
    /// Its API group; empty for the core group.
    pub group: String,
    /// Its version.
    pub version: String,
    /// Its name.
    pub kind: String,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// The workload whose readiness is that of its module.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Manager {
    /// API group of its kind.
    pub group: String,
    /// Version of its kind.
    pub version: String,
    /// Its kind.
    pub kind: String,
    /// Its namespace; absent if the module's own namespace is meant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Its name.
    pub name: String,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// The schema of a list of [`Condition`]s: one per type.
pub(super) fn conditions(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schema::map_list(generator.subschema_for::<Vec<Condition>>(), "type")
}
