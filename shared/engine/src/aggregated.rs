//! Aggregated ClusterRoles. A controller of Kubernetes applies their rules whenever one of the roles changes that they
//! select. If such a role changes together with their deletion, it may apply the rules once more: a ClusterRole without
//! labels and usually without rules.

use kube::{ResourceExt as _, api::DynamicObject};

use super::inventory::ObjectKey;

/// Field manager of the controller.
const CONTROLLER: &str = "clusterrole-aggregation-controller";

/// True for a ClusterRole whose rules the controller fills, by its metadata.
pub(super) fn is_aggregated(key: &ObjectKey, found: &DynamicObject) -> bool {
    is_cluster_role(key) && found.managed_fields().iter().any(|entry| entry.manager.as_deref() == Some(CONTROLLER))
}

/// True for a ClusterRole that the controller alone has written, after its deletion.
pub(super) fn is_leftover(key: &ObjectKey, found: &DynamicObject) -> bool {
    is_aggregated(key, found)
        && found.managed_fields().iter().all(|entry| entry.manager.as_deref() == Some(CONTROLLER))
        && found.labels().is_empty()
        && found.annotations().is_empty()
}

pub(super) fn is_cluster_role(key: &ObjectKey) -> bool {
    key.group == "rbac.authorization.k8s.io" && key.kind == "ClusterRole"
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn role(managers: &[&str], labels: Value) -> (ObjectKey, DynamicObject) {
        let managed: Vec<_> =
            managers.iter().map(|manager| json!({"manager": manager, "operation": "Apply"})).collect();
        let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
            "metadata": {"name": "r", "labels": labels, "managedFields": managed}});
        (ObjectKey::of(&role), serde_json::from_value(role).unwrap())
    }

    #[test]
    fn only_a_role_that_nobody_else_has_written_is_a_leftover() {
        let ours = "declarative.kyma-project.io/applier";
        for (managers, labels, aggregated, leftover) in [
            (&[CONTROLLER][..], json!({}), true, true),
            (&[CONTROLLER], json!({"a": "b"}), true, false),
            (&[ours, CONTROLLER], json!({}), true, false),
            (&[ours], json!({}), false, false),
            (&[], json!({}), false, false),
        ] {
            let (key, role) = role(managers, labels);
            assert_eq!((is_aggregated(&key, &role), is_leftover(&key, &role)), (aggregated, leftover), "{managers:?}");
            let other = ObjectKey { kind: "Role".to_owned(), ..key };
            assert!(!is_aggregated(&other, &role) && !is_leftover(&other, &role));
        }
    }
}
