//! Rules by which found objects are compared with desired ones.

use tidewatch_api::names::field_manager;
use tidewatch_cluster::object::{Ownership, Shape};

use super::Component;

/// Rules of the comparison of a component. Foreign finalizers and owners are removed from all of them.
pub(super) const fn shape(component: Component) -> Shape {
    let ownership = if component.is_agent_managed() { Ownership::Metadata } else { Ownership::Whole };
    Shape {
        owns_lifecycle: true,
        annotations_of: match component {
            Component::Deployment => Some(field_manager::TIDEWATCH),
            _ => None,
        },
        ignored: ignored(component),
        immutable: immutable(component),
        ..Shape::new(ownership)
    }
}

/// Fields that API servers treat as immutable.
const fn immutable(component: Component) -> &'static [&'static str] {
    match component {
        Component::ClusterRoleBinding | Component::RoleBinding => &["/roleRef"],
        Component::ConfigMap => &["/immutable"],
        Component::PullSecret => &["/type", "/immutable"],
        Component::PriorityClass => &["/value", "/preemptionPolicy"],
        Component::Deployment => &["/spec/selector"],
        // A Secret without our label is lifecycle-manager's: it has another key, and possibly another type.
        Component::Secret => &["/metadata/labels/app.kubernetes.io~1part-of"],
        _ => &[],
    }
}

/// Fields that are not ours: values that an API server allocates, and those that some platforms add to every
/// ServiceAccount.
const fn ignored(component: Component) -> &'static [&'static str] {
    match component {
        Component::MetricsService => {
            &["/spec/clusterIP", "/spec/clusterIPs", "/spec/ipFamilies", "/spec/ipFamilyPolicy"]
        }
        Component::Account => &["/secrets", "/imagePullSecrets"],
        Component::Deployment => &["/spec/template/metadata/creationTimestamp"],
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kube::api::DynamicObject;
    use serde_json::{Value, json};
    use strum::VariantArray as _;
    use tidewatch_api::plan::Plan;
    use tidewatch_cluster::object::Repair;
    use tidewatch_trust::{CA_VALIDITY, Ca};

    use super::*;
    use crate::desired::{DesiredObjects, Params, tests::settings};

    fn desired(component: Component) -> Value {
        let trust = Ca::generate("a", 1_800_000_000, CA_VALIDITY).unwrap().trust_bundle();
        let plan = Arc::new(Plan::new("1".into(), Vec::new()).unwrap());
        let pull_secret = Arc::new(json!({"type": "t", "data": {"k": "v"}}));
        DesiredObjects::new(&settings(), plan, &trust, Some(&pull_secret)).get(component).unwrap().body(&Params {
            runtime: &"r".parse().unwrap(),
            image: "i:1".into(),
            unproven_before: false,
            without_priority: false,
        })
    }

    fn repair_after(component: Component, change: impl FnOnce(&mut Value)) -> Repair {
        let desired = desired(component);
        let mut found = desired.clone();
        change(&mut found);
        shape(component).compare(&desired, &serde_json::from_value(found).unwrap(), None)
    }

    #[test]
    fn server_fields_are_ignored_and_foreign_additions_are_replaced() {
        for component in Component::VARIANTS.iter().copied().filter(|component| *component != Component::Webhooks) {
            assert_eq!(repair_after(component, |_| ()), Repair::None, "{component:?}");
            let nothing = |found: &mut Value| {
                found["metadata"]["annotations"] = json!({"x": "y"});
                found["metadata"]["uid"] = "u".into();
                found["status"] = json!({"x": 1});
                found["nothing"] = json!([]);
            };
            assert_eq!(repair_after(component, nothing), Repair::None, "{component:?}");
            if !component.is_agent_managed() {
                assert_eq!(repair_after(component, |found| found["x"] = json!({})), Repair::Replace, "{component:?}");
                let unmarked = |found: &mut Value| found["metadata"]["labels"] = json!({});
                assert_eq!(repair_after(component, unmarked), Repair::Apply, "{component:?}");
            }
        }
        assert_eq!(
            repair_after(Component::MetricsService, |found| found["spec"]["clusterIP"] = "10.0.0.1".into()),
            Repair::None
        );
        assert_eq!(repair_after(Component::Account, |found| found["secrets"] = json!([{"name": "x"}])), Repair::None);
        assert_eq!(repair_after(Component::DnsPolicy, |found| found["spec"]["ingress"] = json!([{}])), Repair::Replace);
        let env =
            |found: &mut Value| found["spec"]["template"]["spec"]["containers"][0]["env"] = json!([{"name": "A"}]);
        assert_eq!(repair_after(Component::Deployment, env), Repair::Replace);
    }

    #[test]
    fn changed_immutable_field_recreates_the_object() {
        assert_eq!(repair_after(Component::Deployment, |found| found["spec"]["replicas"] = 0.into()), Repair::Apply);
        assert_eq!(
            repair_after(Component::Deployment, |found| found["spec"]["selector"]["matchLabels"]["x"] = "y".into()),
            Repair::Recreate
        );
        assert_eq!(
            repair_after(Component::RoleBinding, |found| found["roleRef"]["name"] = "admin".into()),
            Repair::Recreate
        );
        for component in [Component::ConfigMap, Component::PullSecret] {
            assert_eq!(repair_after(component, |found| found["immutable"] = true.into()), Repair::Recreate);
        }
        assert_eq!(repair_after(Component::PriorityClass, |found| found["value"] = 1.into()), Repair::Recreate);
    }

    #[test]
    fn only_labels_of_agent_managed_objects_are_compared() {
        for component in [Component::Lease, Component::Secret] {
            assert_eq!(
                repair_after(component, |found| found["data"] = json!({"tls.key": "…"})),
                Repair::None,
                "{component:?}"
            );
        }
        let as_lifecycle_manager_left_it = |found: &mut Value| {
            found["metadata"]["labels"] = json!({"operator.kyma-project.io/managed-by": "kyma"});
        };
        assert_eq!(
            (
                repair_after(Component::Secret, as_lifecycle_manager_left_it),
                repair_after(Component::Lease, as_lifecycle_manager_left_it)
            ),
            (Repair::Recreate, Repair::Apply)
        );
    }

    #[test]
    fn foreign_finalizers_and_owners_are_removed() {
        let owner = json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "theirs", "uid": "u"}]);
        let cases = [
            ("finalizers", json!(["example.test/foreign"]), true),
            ("finalizers", json!(["service.kubernetes.io/load-balancer-cleanup", "example.test/foreign"]), true),
            ("finalizers", json!(["service.kubernetes.io/load-balancer-cleanup"]), false),
            ("finalizers", json!(["foregroundDeletion"]), false),
            ("ownerReferences", owner, true),
        ];
        for component in Component::VARIANTS.iter().copied().filter(|component| *component != Component::Webhooks) {
            let repair_of_metadata = if component.is_agent_managed() { Repair::Release } else { Repair::Replace };
            for (member, value, has_foreign_lifecycle) in &cases {
                let repair = repair_after(component, |found| found["metadata"][*member] = value.clone());
                assert_eq!(
                    repair,
                    if *has_foreign_lifecycle { repair_of_metadata } else { Repair::None },
                    "{component:?} {value}"
                );
            }
        }
    }

    #[test]
    fn accepted_form_needs_no_repair_until_the_desired_object_changes() {
        let desired = desired(Component::Deployment);
        let mut found = desired.clone();
        found["spec"]["template"]["spec"]["newField"] = 1.into();
        let found: DynamicObject = serde_json::from_value(found).unwrap();
        let shape = shape(Component::Deployment);
        let accepted = shape.form(&desired, &found);
        assert_eq!(shape.compare(&desired, &found, None), Repair::Replace);
        assert_eq!(shape.compare(&desired, &found, Some(accepted)), Repair::None);
        let mut newer = desired;
        newer["spec"]["template"]["spec"]["containers"][0]["image"] = "i:2".into();
        assert_eq!(shape.compare(&newer, &found, Some(accepted)), Repair::Replace, "an upgrade");
    }
}
