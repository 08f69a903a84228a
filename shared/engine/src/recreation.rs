//! Objects that may be deleted and created again to change an immutable field, by an annotation of the module. Pure.
//!
//! The annotation has no effect on objects whose deletion may lose data: custom resources, CRDs, Namespaces, volumes and
//! their claims, and StatefulSets that take their claims with them.

use kube::{ResourceExt as _, api::DynamicObject};
use serde_json::Value;
use tidewatch_api::names::annotation;
use tidewatch_cluster::kinds::is_built_in;

use super::inventory::{DEFINITIONS, ObjectKey};

/// Kinds of the core group that hold data.
const WITH_DATA: [&str; 3] = ["Namespace", "PersistentVolume", "PersistentVolumeClaim"];

/// Returns true if the module permits the recreation of an object of such a kind.
pub(super) fn permits(key: &ObjectKey, body: &Value) -> bool {
    let has_data = (key.group.is_empty() && WITH_DATA.contains(&&*key.kind)) || key.group == DEFINITIONS;
    let permitted = body["metadata"]["annotations"].get(annotation::RECREATE);
    is_built_in(&key.group) && !has_data && permitted.is_some_and(|value| value == "true")
}

/// Returns true if a live object can be deleted without loss: it belongs to this owner, and takes no claims with it.
pub(super) fn may_delete(live: &DynamicObject, owner: &str) -> bool {
    let retention = &live.data["spec"]["persistentVolumeClaimRetentionPolicy"]["whenDeleted"];
    live.annotations().get(annotation::OWNED_BY).is_some_and(|it| it == owner) && retention != "Delete"
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_annotated_objects_without_data_are_recreated() {
        let permits = |api_version: &str, kind: &str, value: Value| {
            let body = json!({"apiVersion": api_version, "kind": kind,
                "metadata": {"name": "n", "annotations": {annotation::RECREATE: value}}});
            permits(&ObjectKey::of(&body), &body)
        };
        for (api_version, kind, expected) in [
            ("batch/v1", "Job", true),
            ("apps/v1", "Deployment", true),
            ("apps/v1", "StatefulSet", true),
            ("v1", "Service", true),
            ("v1", "ConfigMap", true),
            ("v1", "Namespace", false),
            ("v1", "PersistentVolumeClaim", false),
            ("v1", "PersistentVolume", false),
            ("apiextensions.k8s.io/v1", "CustomResourceDefinition", false),
            ("example.test/v1", "Database", false),
        ] {
            assert_eq!(permits(api_version, kind, json!("true")), expected, "{kind}");
            for other in [json!("false"), json!(""), json!(true)] {
                assert!(!permits(api_version, kind, other), "{kind}");
            }
        }
        assert!(!super::permits(&ObjectKey::of(&json!({})), &json!({})));
    }

    #[test]
    fn object_of_another_owner_and_claims_that_would_go_are_kept() {
        let live = |owner: &str, retention: &str| -> DynamicObject {
            serde_json::from_value(json!({"metadata": {"name": "n", "annotations": {annotation::OWNED_BY: owner}},
                "spec": {"persistentVolumeClaimRetentionPolicy": {"whenDeleted": retention}}}))
            .unwrap()
        };
        assert!(may_delete(&live("ns/m", "Retain"), "ns/m"));
        assert!(!may_delete(&live("ns/other", "Retain"), "ns/m"));
        assert!(!may_delete(&live("ns/m", "Delete"), "ns/m"));
    }
}
