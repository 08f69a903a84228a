//! Stages in which the objects of a module are applied; they are deleted in the reverse order.

use std::collections::BTreeSet;

use serde_json::Value;

use super::inventory::{Inventory, ObjectKey};

/// Type of a Secret that gets the token of a ServiceAccount.
const TOKEN: &str = "kubernetes.io/service-account-token";

/// Stage of an object, in the order of application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::VariantArray)]
pub(super) enum Stage {
    /// Namespaces and CRDs. The workloads wait until the CRDs are established.
    Definitions,
    /// Accounts, RBAC, configuration, Services, and every other kind.
    Configuration,
    /// Workloads, and the Secrets that get the token of a ServiceAccount.
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

    /// Stage of an object with its body. Kubernetes deletes a token Secret whose ServiceAccount does not exist.
    pub(super) fn of_body(key: &ObjectKey, body: &Value, defined: &BTreeSet<(String, String)>) -> Self {
        if key.is_secret() && body["type"] == TOKEN { Self::Workloads } else { Self::of(key, defined) }
    }
}

impl Stage {
    /// Stage of an object of an inventory, without the version: a kind counts as the module's own if a CRD of the
    /// inventory has its group.
    pub(super) fn recorded(key: &ObjectKey, inventory: &Inventory) -> Self {
        let is_own_group = |definition: &ObjectKey| definition.defines_group_of(key);
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

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tidewatch_api::Resource;

    use super::*;

    fn key(group: &str, kind: &str, name: &str) -> ObjectKey {
        ObjectKey::new(group, kind, "", name)
    }

    #[test]
    fn each_object_comes_after_those_that_it_needs() {
        let defined = [("example.test".to_owned(), "Sample".to_owned())].into();
        let stage = |group: &str, kind: &str| Stage::of(&key(group, kind, "n"), &defined);
        for (expected, objects) in [
            (Stage::Definitions, &[("", "Namespace"), ("apiextensions.k8s.io", "CustomResourceDefinition")][..]),
            (Stage::Configuration, &[("", "Secret"), ("rbac.authorization.k8s.io", "Role"), ("other.test", "Sample")]),
            (Stage::Workloads, &[("apps", "Deployment"), ("apps", "StatefulSet"), ("batch", "CronJob"), ("", "Pod")]),
            (
                Stage::Webhooks,
                &[
                    ("admissionregistration.k8s.io", "ValidatingWebhookConfiguration"),
                    ("admissionregistration.k8s.io", "MutatingWebhookConfiguration"),
                    ("apiregistration.k8s.io", "APIService"),
                ],
            ),
            (Stage::CustomResources, &[("example.test", "Sample")]),
        ] {
            for (group, kind) in objects {
                assert_eq!(stage(group, kind), expected, "{group} {kind}");
            }
        }
        let admission = stage("admissionregistration.k8s.io", "ValidatingAdmissionPolicy");
        assert_eq!(admission, Stage::Configuration, "it calls no workload");
        let secret = |kind: &str| Stage::of_body(&key("", "Secret", "n"), &json!({"type": kind}), &defined);
        assert_eq!([secret(TOKEN), secret("Opaque")], [Stage::Workloads, Stage::Configuration]);
    }

    #[test]
    fn recorded_object_is_of_the_stage_of_its_rendering() {
        let entry = |group: &str, kind: &str, name: &str| Resource {
            group: group.into(),
            version: "v1".into(),
            kind: kind.into(),
            name: name.into(),
            ..Resource::default()
        };
        let definition = entry("apiextensions.k8s.io", "CustomResourceDefinition", "samples.example.test");
        let inventory = Inventory::read(&[definition, entry("apps", "Deployment", "d")]);
        let recorded = |group: &str, kind: &str| Stage::recorded(&key(group, kind, "n"), &inventory);
        assert_eq!(recorded("example.test", "Sample"), Stage::CustomResources);
        assert_eq!(recorded("other.test", "Sample"), Stage::Configuration);
        assert_eq!(recorded("apps", "Deployment"), Stage::Workloads);
        assert_eq!(Stage::recorded(&key("example.test", "Sample", "n"), &Inventory::default()), Stage::Configuration);
    }

    #[test]
    fn only_a_crd_defines_a_kind() {
        let crd = |version: &str, kind: &str| {
            json!({"apiVersion": format!("{version}/v1"), "kind": kind,
                   "spec": {"group": "g", "names": {"kind": "K"}}})
        };
        let definition = crd("apiextensions.k8s.io", "CustomResourceDefinition");
        assert_eq!(defined_kind(&definition), Some(("g".into(), "K".into())));
        assert_eq!(defined_kind(&crd("example.test", "CustomResourceDefinition")), None);
        assert_eq!(defined_kind(&crd("apiextensions.k8s.io", "Other")), None);
        let mut nameless = definition;
        nameless["spec"]["names"] = json!(null);
        assert_eq!(defined_kind(&nameless), None);
    }
}
