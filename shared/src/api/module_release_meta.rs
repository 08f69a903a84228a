//! The ModuleReleaseMeta: which versions of a module there are, and for whom.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    parts::Other,
    schema::{self, CHANNEL, COMPONENT, MODULE_NAME, SEMVER, VERSION},
};

/// How a module is released: in channels, or to everyone.
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
    doc = "The releases of a module.",
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "(has(self.mandatory) && !has(self.channels)) || (!has(self.mandatory) && has(self.channels))",
    "message": "exactly one of 'mandatory' or 'channels' must be specified",
}]))]
pub struct ModuleReleaseMetaSpec {
    /// The module; also the name of this object.
    #[schemars(length(max = 64), regex(pattern = MODULE_NAME))]
    pub module_name: String,
    /// Name of the module's OCM component; without it nothing can be installed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 255), regex(pattern = COMPONENT))]
    pub ocm_component_name: Option<String>,
    /// The channels, each once.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["channel"]))]
    pub channels: Option<Vec<Channel>>,
    /// The version that every runtime has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mandatory: Option<Mandatory>,
    /// Versions of which there is something to say, each once.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["version"]))]
    pub versions: Option<Vec<ModuleVersion>>,
    /// The Kymas that may see the module, if it is a restricted one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::label_selector")]
    pub kyma_selector: Option<LabelSelector>,
    /// Has no effect; the label beta has.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = false))]
    pub beta: Option<bool>,
    /// Has no effect; the label internal has.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = false))]
    pub internal: Option<bool>,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl ModuleReleaseMetaSpec {
    /// The channels; absent means none.
    #[must_use]
    pub fn channels(&self) -> &[Channel] {
        self.channels.as_deref().unwrap_or_default()
    }

    /// The version that a channel points to.
    #[must_use]
    pub fn version_of(&self, channel: &str) -> Option<&str> {
        self.channels().iter().find(|entry| entry.channel == channel).map(|entry| entry.version.as_str())
    }

    /// Versions of which there is something to say; absent means none.
    #[must_use]
    pub fn versions(&self) -> &[ModuleVersion] {
        self.versions.as_deref().unwrap_or_default()
    }
}

/// A channel and the version it points to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Channel {
    /// The channel.
    #[schemars(length(min = 3, max = 32), regex(pattern = CHANNEL))]
    pub channel: String,
    /// The version.
    #[schemars(length(max = 32), regex(pattern = VERSION))]
    pub version: String,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// The version that every runtime has.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Mandatory {
    /// The version.
    #[schemars(length(min = 1), regex(pattern = SEMVER))]
    pub version: String,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// What is to be said of a version.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModuleVersion {
    /// The version.
    #[schemars(length(max = 32), regex(pattern = VERSION))]
    pub version: String,
    /// The day from which on the version should not be used, as YYYY-MM-DD.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "date"))]
    pub deprecation_date: Option<String>,
    /// Why, and what to use in its place.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub deprecation_message: Option<String>,
    /// What else is there.
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
