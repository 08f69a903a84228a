//! The Kyma: which modules a runtime shall have, and how far they are.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    parts::{self, Condition, CustomResourcePolicy, LastOperation, Other, TrackingObject},
    schema::{CHANNEL, VERSION},
    state::State,
};

/// What the user wants.
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
    doc = "The modules of one runtime.",
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct KymaSpec {
    /// The channel that modules follow which name none themselves.
    #[schemars(length(min = 3, max = 32), regex(pattern = CHANNEL))]
    pub channel: String,
    /// The modules to install, each once.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub modules: Option<Vec<Module>>,
    /// Whether updates with a downtime need not wait for a maintenance window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skip_maintenance_windows: Option<bool>,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl KymaSpec {
    /// The modules; absent means none.
    #[must_use]
    pub fn modules(&self) -> &[Module] {
        self.modules.as_deref().unwrap_or_default()
    }
}

/// A module that the user wants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = managed_is_required)]
pub struct Module {
    /// Its name, which is also that of its release meta.
    pub name: String,
    /// The channel it follows, if not the Kyma's own; excludes version.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 3, max = 32), regex(pattern = CHANNEL))]
    pub channel: Option<String>,
    /// The version it stays at; excludes channel.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = VERSION))]
    pub version: Option<String>,
    /// Has no effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller: Option<String>,
    /// Whether the default module CR comes and goes with the module.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = "CreateAndDelete"))]
    pub custom_resource_policy: Option<CustomResourcePolicy>,
    /// Whether the module is looked after. The API server sees to it that this is never absent.
    #[serde(default = "managed")]
    pub managed: bool,
    /// Has no effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote_module_template_ref: Option<String>,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl Module {
    /// What becomes of the default module CR.
    #[must_use]
    pub fn policy(&self) -> CustomResourcePolicy {
        self.custom_resource_policy.unwrap_or_default()
    }
}

impl Default for Module {
    fn default() -> Self {
        Self {
            name: String::new(),
            channel: None,
            version: None,
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

/// The generator takes a member with a default for an optional one.
fn managed_is_required(schema: &mut schemars::Schema) {
    if let Some(required) = schema.get_mut("required").and_then(serde_json::Value::as_array_mut) {
        required.push("managed".into());
        required.sort_unstable_by(|left, right| left.as_str().cmp(&right.as_str()));
    }
}

/// How far the runtime is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KymaStatus {
    /// The state of the whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<State>,
    /// Its aspects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "parts::conditions")]
    pub conditions: Option<Vec<Condition>>,
    /// The modules, wanted or not yet gone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modules: Option<Vec<ModuleStatus>>,
    /// The channel that all modules were last ready with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active_channel: Option<String>,
    /// What was last done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_operation: Option<LastOperation>,
    /// What else is there.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: Other,
}

impl KymaStatus {
    /// The state; absent means [`State::Unset`].
    #[must_use]
    pub fn state(&self) -> State {
        self.state.unwrap_or_default()
    }

    /// The conditions; absent means none.
    #[must_use]
    pub fn conditions(&self) -> &[Condition] {
        self.conditions.as_deref().unwrap_or_default()
    }

    /// The condition of this type.
    #[must_use]
    pub fn condition(&self, type_: &str) -> Option<&Condition> {
        self.conditions().iter().find(|condition| condition.type_ == type_)
    }

    /// The modules; absent means none.
    #[must_use]
    pub fn modules(&self) -> &[ModuleStatus] {
        self.modules.as_deref().unwrap_or_default()
    }
}

/// How far a module is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModuleStatus {
    /// Its name.
    pub name: String,
    /// Its state.
    pub state: State,
    /// Why, in words for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The channel it follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel: Option<String>,
    /// The version that is installed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Copy of ocmComponentName for older readers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fqdn: Option<String>,
    /// Name of its OCM component.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ocm_component_name: Option<String>,
    /// Whether an update waits for a maintenance window.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = false))]
    pub maintenance: Option<bool>,
    /// The Manifest that installs it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manifest: Option<TrackingObject>,
    /// Its default module CR.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource: Option<TrackingObject>,
    /// The template it comes from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<TrackingObject>,
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
    fn what_is_absent_has_a_meaning_and_stays_absent() {
        let spec: KymaSpec = serde_json::from_value(json!({"channel": "fast"})).unwrap();
        assert!(spec.modules().is_empty());
        assert_eq!(serde_json::to_value(&spec).unwrap(), json!({"channel": "fast"}));

        let module: Module = serde_json::from_value(json!({"name": "keda"})).unwrap();
        assert_eq!((module.managed, module.policy()), (true, CustomResourcePolicy::CreateAndDelete));
        assert_eq!(module, Module { name: "keda".into(), ..Module::default() });
    }
}
