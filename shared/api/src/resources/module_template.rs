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

/// spec is the content of a version of the module.
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
    doc = "ModuleTemplate is one version of a module.",
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ModuleTemplateSpec {
    /// moduleName is the name of the module that the template belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64), regex(pattern = MODULE_NAME))]
    pub module_name: Option<String>,
    /// version of the module.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = VERSION))]
    pub version: Option<String>,
    /// Deprecated: channel is the channel of the module. Channels are defined in the ModuleReleaseMeta.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = "^$|^[a-z]{3,}$"))]
    pub channel: Option<String>,
    /// mandatory indicates whether the module is mandatory: installed in every runtime and not selectable in a Kyma.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mandatory: Option<bool>,
    /// data is the default module CR.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::embedded_object")]
    pub data: Option<Value>,
    /// descriptor is the component descriptor of the module (Open Component Model).
    #[schemars(schema_with = "schema::any_object")]
    pub descriptor: Value,
    /// info is information about the module for its users.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub info: Option<Info>,
    /// resources is a list of additional downloads for the module. Each name occurs at most once.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub resources: Option<Vec<Link>>,
    /// associatedResources is a list of kinds of user objects that the module operates on. Resources of custom kinds block the
    /// removal of the module, unless another module brings the CRD, or the CRD was in the runtime before the module.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub associated_resources: Option<Vec<Gvk>>,
    /// manager references the workload of the module from which the readiness of the module is derived.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manager: Option<Manager>,
    /// requiresDowntime indicates whether an upgrade to this version requires a downtime of the module.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requires_downtime: Option<bool>,
    /// Deprecated: customStateCheck has no effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom_state_check: Option<Vec<CustomStateCheck>>,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl ModuleTemplateSpec {
    /// Fields that may change in the life of a template: they inform users, or have no effect. Of the others all but
    /// [`Self::REPAIRABLE`] decide what runtimes install, and another version needs another template.
    pub const EDITABLE: [&'static str; 4] = ["channel", "customStateCheck", "info", "resources"];

    /// Field whose change repairs an installed version: it names the workload whose readiness decides the module's state. A
    /// change of the field changes no object of the module.
    pub const REPAIRABLE: &'static str = "manager";

    /// True if the module is mandatory; false if absent.
    pub fn is_mandatory(&self) -> bool {
        self.mandatory.unwrap_or_default()
    }

    /// True if an upgrade requires a downtime of the module; false if absent.
    pub fn requires_downtime(&self) -> bool {
        self.requires_downtime.unwrap_or_default()
    }
}

/// info is information about the module for its users.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Info {
    /// repository is the URL of the source repository of the module.
    pub repository: String,
    /// documentation is the URL of the documentation of the module.
    pub documentation: String,
    /// icons is the list of icons of the module. Each name occurs at most once.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub icons: Option<Vec<Icon>>,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// Icon is an icon of the module.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Icon {
    /// name identifies the purpose of the icon.
    pub name: String,
    /// link is the URL of the icon.
    pub link: String,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// Link is an additional download for the module.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Link {
    /// name of the download.
    pub name: String,
    /// link is the URI of the download.
    #[schemars(extend("format" = "uri"))]
    pub link: String,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// CustomStateCheck maps a value in the module CR to a state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CustomStateCheck {
    /// jsonPath is the path of the evaluated field in the module CR.
    pub json_path: String,
    /// value of the field that the state applies to.
    pub value: String,
    /// mappedState is the state of a module CR with this value in the field.
    pub mapped_state: State,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}
