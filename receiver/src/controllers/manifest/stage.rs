//! Stages in which the objects of a module are applied; they are deleted in the reverse order.

use std::collections::BTreeSet;

use serde_json::Value;

use super::inventory::{Inventory, ObjectKey};

/// Stage of an object, in the order of application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub(super) enum Stage {
    /// Namespaces and CRDs. The next stage waits until the CRDs are established.
    Definitions,
    /// Accounts, RBAC, configuration, Services, and every other kind.
    Configuration,
    /// Workloads.
    Workloads,
    /// Webhook configurations and APIServices, which need a running workload.
    Webhooks,
    /// Custom resources of the kinds that the module defines itself.
    CustomResources,
}

impl Stage {
    /// Stage of an object. `defined` are the group and kind of each CRD of the module.
    pub(super) fn of(key: &ObjectKey, defined: &BTreeSet<(String, String)>) -> Self {
        match (key.group.as_str(), key.kind.as_str()) {
            ("", "Namespace") | ("apiextensions.k8s.io", "CustomResourceDefinition") => Self::Definitions,
            ("apps", "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet")
            | ("batch", "Job" | "CronJob")
            | ("", "Pod" | "ReplicationController") => Self::Workloads,
            ("admissionregistration.k8s.io", "ValidatingWebhookConfiguration" | "MutatingWebhookConfiguration")
            | ("apiregistration.k8s.io", "APIService") => Self::Webhooks,
            (group, kind) if defined.contains(&(group.to_owned(), kind.to_owned())) => Self::CustomResources,
            _ => Self::Configuration,
        }
    }
}

impl Stage {
    /// Stage of an object of an inventory, without the layer: a kind counts as the module's own if a CRD of the
    /// inventory has its group (the name of a CRD is `<plural>.<group>`).
    pub(super) fn recorded(key: &ObjectKey, inventory: &Inventory) -> Self {
        let is_own_group = |definition: &ObjectKey| {
            definition.is_definition() && definition.name.split_once('.').is_some_and(|(_, group)| group == key.group)
        };
        match Self::of(key, &BTreeSet::new()) {
            Self::Configuration if inventory.keys().any(is_own_group) => Self::CustomResources,
            stage => stage,
        }
    }
}

/// Group and kind that a CRD defines; `None` for any other object.
pub(super) fn defined_kind(object: &Value) -> Option<(String, String)> {
    let is_crd = object["kind"] == "CustomResourceDefinition"
        && object["apiVersion"].as_str().is_some_and(|version| version.starts_with("apiextensions.k8s.io/"));
    let text = |value: &Value| value.as_str().map(str::to_owned);
    is_crd.then(|| Some((text(&object["spec"]["group"])?, text(&object["spec"]["names"]["kind"])?)))?
}
