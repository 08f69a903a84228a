//! The ModuleTemplate: one version of one module.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    parts::{Gvk, Manager, Other},
    schema::{self, MODULE_NAME, VERSION},
    state::State,
};

/// What a version of a module consists of.
#[derive(Clone, Debug, Default, PartialEq, CustomResource, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "operator.kyma-project.io",
    version = "v1beta2",
    kind = "ModuleTemplate",
    plural = "moduletemplates",
    shortname = "mt",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "One version of a module.",
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ModuleTemplateSpec {
    /// The module.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64), regex(pattern = MODULE_NAME))]
    pub module_name: Option<String>,
    /// The version.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = VERSION))]
    pub version: Option<String>,
    /// Of older templates; channels stand in release metas.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = "^$|^[a-z]{3,}$"))]
    pub channel: Option<String>,
    /// Whether every runtime has it, so that nobody may select it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mandatory: Option<bool>,
    /// The default module CR.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::embedded_object")]
    pub data: Option<Value>,
    /// The component's descriptor (Open Component Model).
    #[schemars(schema_with = "schema::any_object")]
    pub descriptor: Value,
    /// What people may want to know of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub info: Option<Info>,
    /// More that can be fetched, each once.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub resources: Option<Vec<Link>>,
    /// Kinds of the user's objects that the module works on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub associated_resources: Option<Vec<Gvk>>,
    /// The workload whose readiness is that of the module.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manager: Option<Manager>,
    /// Whether an update to this version interrupts the module's work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requires_downtime: Option<bool>,
    /// Has no effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom_state_check: Option<Vec<CustomStateCheck>>,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl ModuleTemplateSpec {
    /// Whether every runtime has it; absent means no.
    #[must_use]
    pub fn is_mandatory(&self) -> bool {
        self.mandatory.unwrap_or_default()
    }

    /// Whether an update interrupts the module's work; absent means no.
    #[must_use]
    pub fn requires_downtime(&self) -> bool {
        self.requires_downtime.unwrap_or_default()
    }
}

/// What people may want to know of a module.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Info {
    /// Where its sources are.
    pub repository: String,
    /// Where its documentation is.
    pub documentation: String,
    /// Its icons, each once.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub icons: Option<Vec<Icon>>,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// An icon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Icon {
    /// What it is for.
    pub name: String,
    /// Where it is.
    pub link: String,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// Something that can be fetched.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Link {
    /// What it is.
    pub name: String,
    /// Its URI.
    #[schemars(extend("format" = "uri"))]
    pub link: String,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// A state that a module CR has when one of its fields has a value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CustomStateCheck {
    /// The field.
    pub json_path: String,
    /// The value.
    pub value: String,
    /// The state.
    pub mapped_state: State,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}
