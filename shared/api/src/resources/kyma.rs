//! The Kyma: the modules selected for a runtime, and their observed state.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    parts::{self, Condition, CustomResourcePolicy, LastOperation, Other, TrackingObject},
    schema::CHANNEL,
    state::State,
};

/// spec is the desired state of the Kyma: the channel and the modules that the user selected.
#[derive(Clone, Debug, Default, PartialEq, CustomResource, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "operator.kyma-project.io",
    version = "v1beta2",
    kind = "Kyma",
    plural = "kymas",
    namespaced,
    status = "KymaStatus",
    derive = "Default",
    derive = "PartialEq",
    doc = "Kyma selects the modules of a runtime and reports their state.",
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct KymaSpec {
    /// channel is the desired channel of the Kyma. It applies to every module without a channel of its own, unless an
    /// annotation pins the version of the module.
    #[schemars(length(min = 3, max = 32), regex(pattern = CHANNEL))]
    pub channel: String,
    /// modules is the list of modules to install. Each name occurs at most once.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub modules: Option<Vec<Module>>,
    /// skipMaintenanceWindows indicates whether module upgrades that require downtime are applied immediately, without
    /// waiting for a maintenance window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skip_maintenance_windows: Option<bool>,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl KymaSpec {
    /// The modules; empty if absent.
    pub fn modules(&self) -> &[Module] {
        self.modules.as_deref().unwrap_or_default()
    }
}

/// Module selects a module to install.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = managed_is_required)]
pub struct Module {
    /// name of the module, equal to the name of its ModuleReleaseMeta.
    pub name: String,
    /// channel selects the channel that the version of the module is resolved from. Defaults to the channel of the
    /// Kyma.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 3, max = 32), regex(pattern = CHANNEL))]
    pub channel: Option<String>,
    /// controller has no effect. Accepted for compatibility.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller: Option<String>,
    /// customResourcePolicy determines whether the default module CR is created and deleted together with the module.
    /// One of CreateAndDelete, Ignore. Defaults to CreateAndDelete.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = "CreateAndDelete"))]
    pub custom_resource_policy: Option<CustomResourcePolicy>,
    /// managed indicates whether the lifecycle of the module is managed. If false, the installed resources are left as
    /// they are and become the responsibility of the user. Defaulted by the API server, hence never absent.
    #[serde(default = "managed")]
    pub managed: bool,
    /// Deprecated: remoteModuleTemplateRef has no effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote_module_template_ref: Option<String>,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl Module {
    /// The policy for the default module CR; [`CustomResourcePolicy::CreateAndDelete`] if absent.
    pub fn policy(&self) -> CustomResourcePolicy {
        self.custom_resource_policy.unwrap_or_default()
    }
}

impl Default for Module {
    fn default() -> Self {
        Self {
            name: String::new(),
            channel: None,
            controller: None,
            custom_resource_policy: None,
            managed: managed(),
            remote_module_template_ref: None,
            other: Other::new(),
        }
    }
}

const fn managed() -> bool {
    true
}

/// Marks `managed` as required: the schema generator treats a member with a default as optional, lifecycle-manager's CRD
/// does not.
fn managed_is_required(schema: &mut schemars::Schema) {
    if let Some(required) = schema.get_mut("required").and_then(serde_json::Value::as_array_mut) {
        required.push("managed".into());
        required.sort_unstable_by(|left, right| left.as_str().cmp(&right.as_str()));
    }
}

/// status is the observed state of the Kyma.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KymaStatus {
    /// state of the Kyma as a whole, aggregated from its modules and conditions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<State>,
    /// conditions of the Kyma, one per type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "parts::conditions")]
    pub conditions: Option<Vec<Condition>>,
    /// modules is the observed state of the modules: of those in spec.modules, and of removed modules until their
    /// removal has completed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modules: Option<Vec<ModuleStatus>>,
    /// activeChannel is the channel of the Kyma when its state was last Ready or Warning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active_channel: Option<String>,
    /// lastOperation is the most recent operation on the Kyma.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_operation: Option<LastOperation>,
    /// Members unknown to this type, preserved on write.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl KymaStatus {
    /// The state; [`State::Unset`] if absent.
    pub fn state(&self) -> State {
        self.state.unwrap_or_default()
    }

    /// The conditions; empty if absent.
    pub fn conditions(&self) -> &[Condition] {
        self.conditions.as_deref().unwrap_or_default()
    }

    /// The condition of this type, if present.
    pub fn condition(&self, type_: &str) -> Option<&Condition> {
        self.conditions().iter().find(|condition| condition.type_ == type_)
    }

    /// The modules; empty if absent.
    pub fn modules(&self) -> &[ModuleStatus] {
        self.modules.as_deref().unwrap_or_default()
    }
}

/// ModuleStatus is the observed state of a module.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModuleStatus {
    /// name of the module.
    pub name: String,
    /// state of the module, one of Processing, Deleting, Ready, Error, Warning, Unmanaged.
    pub state: State,
    /// message is a human-readable explanation of the state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// channel that the version of the module was resolved from. With a pinned version, the channel that the module
    /// would follow without the pin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel: Option<String>,
    /// version of the module that is installed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Deprecated: fqdn is a copy of ocmComponentName. Use ocmComponentName instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fqdn: Option<String>,
    /// ocmComponentName is the name of the OCM (Open Component Model) component of the module.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ocm_component_name: Option<String>,
    /// maintenance indicates whether an upgrade of the module is waiting for a maintenance window.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = false))]
    pub maintenance: Option<bool>,
    /// manifest references the Manifest that installs the module. Set in the control plane only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manifest: Option<Box<TrackingObject>>,
    /// resource references the default module CR. Set only if the customResourcePolicy is CreateAndDelete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource: Option<Box<TrackingObject>>,
    /// template references the ModuleTemplate that the module was resolved to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<Box<TrackingObject>>,
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
    fn absent_members_have_defaults_and_stay_absent() {
        let spec: KymaSpec = serde_json::from_value(json!({"channel": "fast"})).unwrap();
        assert!(spec.modules().is_empty());
        assert_eq!(serde_json::to_value(&spec).unwrap(), json!({"channel": "fast"}));

        let module: Module = serde_json::from_value(json!({"name": "keda"})).unwrap();
        assert_eq!((module.managed, module.policy()), (true, CustomResourcePolicy::CreateAndDelete));
        assert_eq!(module, Module { name: "keda".into(), ..Module::default() });
    }
}
