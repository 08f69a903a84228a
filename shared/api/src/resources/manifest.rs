//! The Manifest: the installation of one module in one runtime, and its observed state.

use std::sync::Arc;

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
use crate::names::annotation;

/// spec is the desired state of the Manifest.
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
    doc = "Manifest is the installation of a module in a runtime.",
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ManifestSpec {
    /// install specifies the layer that contains the resources of the module.
    pub install: Install,
    /// remote has no effect; always true.
    pub remote: bool,
    /// version of the module.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// customResourcePolicy determines whether the default module CR is created and deleted together with the module.
    /// One of CreateAndDelete, Ignore. Defaults to CreateAndDelete.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = "CreateAndDelete"))]
    pub custom_resource_policy: Option<CustomResourcePolicy>,
    /// resource is the default module CR.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::nullable_embedded_object")]
    pub resource: Option<Arc<Value>>,
    /// localizedImages is the list of image references that replace the original references in the resources of the
    /// module, for runtimes that pull from another registry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub localized_images: Option<Arc<Vec<String>>>,
    /// manager references the workload of the module from which the readiness of the module is derived.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manager: Option<Arc<Manager>>,
    /// Deprecated: config is the layer with the configuration of the module. Present on older Manifests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<Box<ImageSpec>>,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl Manifest {
    /// Returns true if the version that the Manifest names was applied completely.
    pub fn is_synced(&self) -> bool {
        let reference = self.spec.install.source["ref"].as_str();
        let applied = self.metadata.annotations.as_ref().and_then(|all| all.get(annotation::SYNC_OCI_REF));
        reference.is_some() && applied.map(String::as_str) == reference
    }
}

impl ManifestSpec {
    /// The policy for the default module CR; [`CustomResourcePolicy::CreateAndDelete`] if absent.
    pub fn policy(&self) -> CustomResourcePolicy {
        self.custom_resource_policy.unwrap_or_default()
    }

    /// The default module CR; `None` if absent or null.
    pub fn resource(&self) -> Option<&Value> {
        self.resource.as_deref().filter(|resource| !resource.is_null())
    }
}

/// Distinguishes null from absent: the API server stores both.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Arc<Value>>, D::Error> {
    Arc::deserialize(deserializer).map(Some)
}

/// install specifies the layer that contains the resources of the module.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Install {
    /// name of the layer.
    pub name: String,
    /// source is the location of the layer: repo, name, ref and type.
    #[schemars(schema_with = "schema::any_object")]
    pub source: Arc<Value>,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// ImageSpec is the location of a layer in an OCI registry.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageSpec {
    /// repo is the repository that contains the layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
    /// name of the component.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// ref is the digest or the tag of the layer.
    #[serde(rename = "ref", skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    /// type of the content of the layer, one of helm-chart, oci-ref, kustomize, or empty.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<ImageType>,
    /// credSecretSelector selects the Secrets with the credentials of the registry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::label_selector")]
    pub cred_secret_selector: Option<LabelSelector>,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

/// type of the content of the layer, one of helm-chart, oci-ref, kustomize, or empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ImageType {
    /// A Helm chart.
    HelmChart,
    /// Plain YAML manifests.
    OciRef,
    /// A Kustomize base.
    Kustomize,
    /// Not specified; serialized as an empty string.
    #[default]
    #[serde(rename = "")]
    Unset,
}

/// status is the observed state of the Manifest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ManifestStatus {
    /// state of the Manifest, one of Processing, Deleting, Ready, Error, Warning, Unmanaged. Empty until it is first
    /// computed.
    pub state: State,
    /// conditions of the Manifest, one per type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "parts::conditions")]
    pub conditions: Option<Vec<Condition>>,
    /// synced is the list of objects that were applied to the runtime.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub synced: Option<Arc<Vec<Resource>>>,
    /// lastOperation is the most recent operation on the Manifest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_operation: Option<LastOperation>,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl ManifestStatus {
    /// The conditions; empty if absent.
    pub fn conditions(&self) -> &[Condition] {
        self.conditions.as_deref().unwrap_or_default()
    }

    /// The objects that were applied to the runtime; empty if absent.
    pub fn synced(&self) -> &[Resource] {
        self.synced.as_ref().map(|synced| synced.as_slice()).unwrap_or_default()
    }
}

/// Resource identifies an object that was applied to the runtime.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Resource {
    /// group is the API group of the object. Empty for the core group.
    pub group: String,
    /// version is the API version of the object.
    pub version: String,
    /// kind of the object.
    pub kind: String,
    /// name of the object.
    pub name: String,
    /// namespace of the object. Empty for cluster-scoped kinds.
    pub namespace: String,
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
    fn a_null_default_cr_stays_null_and_means_none() {
        let spec = json!({"install": {"name": "raw-manifest", "source": {}}, "remote": true, "resource": null});
        let read: ManifestSpec = serde_json::from_value(spec.clone()).unwrap();
        assert_eq!(read.resource(), None);
        assert_eq!(serde_json::to_value(&read).unwrap(), spec);
    }
}
