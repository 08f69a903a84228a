//! The Manifest: one module to be installed in one runtime, and what came of it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::{
    parts::{self, Condition, CustomResourcePolicy, LastOperation, Manager, Other},
    schema,
    state::State,
};

/// What shall be installed.
#[derive(Clone, Debug, Default, PartialEq, CustomResource, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "operator.kyma-project.io",
    version = "v1beta2",
    kind = "Manifest",
    plural = "manifests",
    namespaced,
    status = "ManifestStatus",
    derive = "Default",
    derive = "PartialEq",
    doc = "One module in one runtime.",
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ManifestSpec {
    /// Where the module's resources are.
    pub install: Install,
    /// Has no effect; true.
    pub remote: bool,
    /// The module's version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Whether the default module CR comes and goes with the module.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = "CreateAndDelete"))]
    pub custom_resource_policy: Option<CustomResourcePolicy>,
    /// The default module CR.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::nullable_embedded_object")]
    pub resource: Option<Value>,
    /// Images that the runtime pulls from another registry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub localized_images: Option<Vec<String>>,
    /// The workload whose readiness is that of the module.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manager: Option<Manager>,
    /// Of older Manifests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<ImageSpec>,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl ManifestSpec {
    /// What becomes of the default module CR.
    #[must_use]
    pub fn policy(&self) -> CustomResourcePolicy {
        self.custom_resource_policy.unwrap_or_default()
    }

    /// The default module CR; absent and null mean none.
    #[must_use]
    pub fn resource(&self) -> Option<&Value> {
        self.resource.as_ref().filter(|resource| !resource.is_null())
    }
}

/// Keeps null apart from absent: the API server stores both.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// Where a module's resources are.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Install {
    /// Name of the layer.
    pub name: String,
    /// The layer, as repo, name, ref and type.
    #[schemars(schema_with = "schema::any_object")]
    pub source: Value,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// A layer in a registry.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageSpec {
    /// The repository.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
    /// The component.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Digest or tag.
    #[serde(rename = "ref", skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    /// What the layer holds.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<ImageType>,
    /// The Secrets with the registry's credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::label_selector")]
    pub cred_secret_selector: Option<LabelSelector>,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// What a layer holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ImageType {
    /// A Helm chart.
    HelmChart,
    /// YAML.
    OciRef,
    /// A Kustomize base.
    Kustomize,
    /// Nobody said; written as an empty text.
    #[default]
    #[serde(rename = "")]
    Unset,
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ManifestStatus {
    /// The state of the whole.
    pub state: State,
    /// Its aspects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "parts::conditions")]
    pub conditions: Option<Vec<Condition>>,
    /// The objects that were installed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub synced: Option<Vec<Resource>>,
    /// What was last done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_operation: Option<LastOperation>,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl ManifestStatus {
    /// The conditions; absent means none.
    #[must_use]
    pub fn conditions(&self) -> &[Condition] {
        self.conditions.as_deref().unwrap_or_default()
    }

    /// The objects that were installed; absent means none.
    #[must_use]
    pub fn synced(&self) -> &[Resource] {
        self.synced.as_deref().unwrap_or_default()
    }
}

/// An object that was installed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Resource {
    /// API group of its kind.
    pub group: String,
    /// Version of its kind.
    pub version: String,
    /// Its kind.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// Its namespace; empty for kinds without one.
    pub namespace: String,
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
    fn a_null_default_cr_stays_null_and_means_none() {
        let spec = json!({"install": {"name": "raw-manifest", "source": {}}, "remote": true, "resource": null});
        let read: ManifestSpec = serde_json::from_value(spec.clone()).unwrap();
        assert_eq!(read.resource(), None);
        assert_eq!(serde_json::to_value(&read).unwrap(), spec);
    }
}
