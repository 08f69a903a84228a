//! The ModuleReleaseMeta: the released versions of a module, and the Kymas that may use them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    parts::Other,
    schema::{self, CHANNEL, COMPONENT, MODULE_NAME, SEMVER, VERSION},
};

/// spec assigns versions of the module to channels, or makes one version mandatory.
#[derive(Clone, Debug, Default, PartialEq, CustomResource, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "operator.kyma-project.io",
    version = "v1beta2",
    kind = "ModuleReleaseMeta",
    plural = "modulereleasemetas",
    shortname = "mrm",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "ModuleReleaseMeta publishes the released versions of a module.",
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "(has(self.mandatory) && !has(self.channels)) || (!has(self.mandatory) && has(self.channels))",
    "message": "exactly one of 'mandatory' or 'channels' must be specified",
}]))]
pub struct ModuleReleaseMetaSpec {
    /// moduleName is the name of the module, equal to the name of this object.
    #[schemars(length(max = 64), regex(pattern = MODULE_NAME))]
    pub module_name: String,
    /// ocmComponentName is the name of the OCM (Open Component Model) component of the module. Optional in the schema,
    /// but required for installation.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 255), regex(pattern = COMPONENT))]
    pub ocm_component_name: Option<String>,
    /// channels is the list of channels of the module with the version that each points to. Each channel occurs at most
    /// once. Mutually exclusive with mandatory.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["channel"]))]
    pub channels: Option<Vec<Channel>>,
    /// mandatory is the version of a mandatory module, which is installed in every runtime. Mutually exclusive with
    /// channels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mandatory: Option<Mandatory>,
    /// versions is a list of versions with additional information, such as their deprecation. Each version occurs at
    /// most once.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["version"]))]
    pub versions: Option<Vec<ModuleVersion>>,
    /// kymaSelector selects the Kymas that may use the module, by their labels. Evaluated only for restricted modules;
    /// an absent or empty selector matches no Kyma, and a selector on any other module hides it from every Kyma.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::label_selector")]
    pub kyma_selector: Option<LabelSelector>,
    /// beta marks the module as Beta in Busola, and has no other effect. The label operator.kyma-project.io/beta limits
    /// its visibility.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = false))]
    pub beta: Option<bool>,
    /// Deprecated: internal has no effect. Use the label operator.kyma-project.io/internal instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = false))]
    pub internal: Option<bool>,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl ModuleReleaseMetaSpec {
    /// The channels; empty if absent.
    pub fn channels(&self) -> &[Channel] {
        self.channels.as_deref().unwrap_or_default()
    }

    /// The version that the channel points to.
    pub fn version_of(&self, channel: &str) -> Option<&str> {
        self.channels().iter().find(|entry| entry.channel == channel).map(|entry| entry.version.as_str())
    }

    /// The versions with additional information; empty if absent.
    pub fn versions(&self) -> &[ModuleVersion] {
        self.versions.as_deref().unwrap_or_default()
    }
}

/// Channel assigns a version of the module to a channel.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Channel {
    /// channel is the name of the channel.
    #[schemars(length(min = 3, max = 32), regex(pattern = CHANNEL))]
    pub channel: String,
    /// version that the channel points to.
    #[schemars(length(max = 32), regex(pattern = VERSION))]
    pub version: String,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// mandatory is the version of a mandatory module.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Mandatory {
    /// version of the mandatory module, in semantic version format.
    #[schemars(length(min = 1), regex(pattern = SEMVER))]
    pub version: String,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// ModuleVersion is additional information about a version of the module.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModuleVersion {
    /// version of the module.
    #[schemars(length(max = 32), regex(pattern = VERSION))]
    pub version: String,
    /// deprecationDate is the date from which the version is deprecated, in the format YYYY-MM-DD.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "date"))]
    pub deprecation_date: Option<String>,
    /// deprecationMessage explains the deprecation and names the replacement.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub deprecation_message: Option<String>,
    /// withdrawal takes the version out of use: it stays where it is installed, and is installed nowhere else.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub withdrawal: Option<Withdrawal>,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// Withdrawal takes a version out of use.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Withdrawal {
    /// date from which the version is withdrawn, in the format YYYY-MM-DD. A version without a date is withdrawn at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "date"))]
    pub date: Option<String>,
    /// replacement is the version to use instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = VERSION))]
    pub replacement: Option<String>,
    /// message explains the withdrawal.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub message: Option<String>,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_channel_points_to_a_version() {
        let spec = json!({"moduleName": "keda", "channels": [{"channel": "fast", "version": "1.2.3"}]});
        let spec: ModuleReleaseMetaSpec = serde_json::from_value(spec).unwrap();
        assert_eq!((spec.version_of("fast"), spec.version_of("regular")), (Some("1.2.3"), None));
        assert!(ModuleReleaseMetaSpec::default().channels().is_empty());
    }
}
