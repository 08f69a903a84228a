//! Compares found objects with desired ones and selects the repair.

use kube::{
    ResourceExt,
    api::{DynamicObject, ObjectMeta},
};
use serde_json::{Value, json};
use tidewatch_shared::names::label;

use super::{Component, desired::hash};
use crate::base::stored_form::canonical;

/// Repair of an object that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Repair {
    /// The object is as desired.
    None,
    /// A field is missing or different: server-side apply repairs it.
    Apply,
    /// Another manager added a field, which an apply would keep: a PUT removes it.
    Replace,
    /// An object with content of the agent has a foreign finalizer or owner, which is removed.
    Release,
    /// An immutable field differs: the object is deleted and created again.
    Recreate,
}

/// Selects the repair of an object. `accepted` is the hash of the form in which this API server stored our object
/// before, where it adds fields of its own.
pub(super) fn compare(component: Component, desired: &Value, found: &DynamicObject, accepted: Option<u64>) -> Repair {
    let is_labelled = has_labels(desired, found);
    if component.is_agent_managed() {
        // A Secret without our label is the incumbent's: it has another key, and possibly another type.
        let foreign = component == Component::Secret
            && found.labels().get(label::PART_OF).is_none_or(|of| of != label::PART_OF_TIDEWATCH);
        return match (foreign, is_labelled) {
            (true, _) => Repair::Recreate,
            (false, _) if has_foreign_lifecycle(&found.metadata) => Repair::Release,
            (false, false) => Repair::Apply,
            (false, true) => Repair::None,
        };
    }
    let (desired, actual) = (comparable(component, desired), comparable_found(component, found));
    if desired == actual || accepted.is_some_and(|hash| hash == form_hash(&desired, &actual)) {
        return if is_labelled { Repair::None } else { Repair::Apply };
    }
    if IMMUTABLE_FIELDS.iter().any(|(of, member)| *of == component && desired.pointer(member) != actual.pointer(member))
    {
        return Repair::Recreate;
    }
    if has_extra(&desired, &actual) { Repair::Replace } else { Repair::Apply }
}

/// Returns the value of `accepted` with which [`compare`] treats this form as equal to the desired object.
pub(super) fn accepted_form(component: Component, desired: &Value, found: &DynamicObject) -> u64 {
    form_hash(&comparable(component, desired), &comparable_found(component, found))
}

/// Hashes both forms, so that a form accepted for one desired object is not accepted for the next one.
fn form_hash(desired: &Value, actual: &Value) -> u64 {
    hash(&(desired.to_string(), actual.to_string()))
}

/// Fields that API servers treat as immutable.
const IMMUTABLE_FIELDS: [(Component, &str); 7] = [
    (Component::ClusterRoleBinding, "/roleRef"),
    (Component::RoleBinding, "/roleRef"),
    (Component::ConfigMap, "/immutable"),
    (Component::PullSecret, "/type"),
    (Component::PriorityClass, "/value"),
    (Component::PriorityClass, "/preemptionPolicy"),
    (Component::Deployment, "/spec/selector"),
];

/// Fields that are not ours: values that an API server allocates, and those that some platforms add to every
/// ServiceAccount.
pub(super) const IGNORED_FIELDS: [(Component, &str, &str); 7] = [
    (Component::MetricsService, "/spec", "clusterIP"),
    (Component::MetricsService, "/spec", "clusterIPs"),
    (Component::MetricsService, "/spec", "ipFamilies"),
    (Component::MetricsService, "/spec", "ipFamilyPolicy"),
    (Component::Account, "", "secrets"),
    (Component::Account, "", "imagePullSecrets"),
    (Component::Deployment, "/spec/template/metadata", "creationTimestamp"),
];

/// Returns the compared part of an object: everything except type, metadata, status and [`IGNORED_FIELDS`].
fn comparable(component: Component, object: &Value) -> Value {
    let mut form = canonical(object);
    if let Some(members) = form.as_object_mut() {
        for head in ["apiVersion", "kind", "metadata", "status"] {
            members.remove(head);
        }
    }
    for (_, place, member) in IGNORED_FIELDS.iter().filter(|(of, ..)| *of == component) {
        if let Some(members) = form.pointer_mut(place).and_then(Value::as_object_mut) {
            members.remove(*member);
        }
    }
    form
}

/// Returns the compared part of an object that was read, including foreign finalizers and owners.
fn comparable_found(component: Component, found: &DynamicObject) -> Value {
    let mut form = comparable(component, &found.data);
    if has_foreign_lifecycle(&found.metadata) {
        let others: Vec<_> = found.finalizers().iter().filter(|name| !is_kubernetes_finalizer(name)).collect();
        form["metadata"] = json!({"finalizers": others, "ownerReferences": found.owner_references()});
    }
    form
}

/// Returns whether another manager controls the deletion of an object: by a finalizer, or by an owner with which the
/// garbage collector deletes it. Our objects have neither.
pub(super) fn has_foreign_lifecycle(head: &ObjectMeta) -> bool {
    let mut finalizers = head.finalizers.iter().flatten();
    finalizers.any(|name| !is_kubernetes_finalizer(name)) || head.owner_references.iter().flatten().next().is_some()
}

/// Returns the metadata without foreign finalizers and owner references.
pub(super) fn without_foreign_lifecycle(head: &ObjectMeta) -> ObjectMeta {
    let mut head = head.clone();
    head.owner_references = None;
    head.finalizers.iter_mut().for_each(|finalizers| finalizers.retain(|name| is_kubernetes_finalizer(name)));
    head.finalizers = head.finalizers.filter(|finalizers| !finalizers.is_empty());
    head
}

/// Returns whether Kubernetes sets a finalizer and removes it by itself, as for foreground deletion or a load balancer.
fn is_kubernetes_finalizer(finalizer: &str) -> bool {
    let is_own = |domain: &str| domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
    finalizer.split_once('/').is_none_or(|(domain, _)| is_own(domain))
}

fn has_labels(desired: &Value, found: &DynamicObject) -> bool {
    let mut labels = desired["metadata"]["labels"].as_object().into_iter().flatten();
    labels.all(|(key, value)| found.labels().get(key).map(String::as_str) == value.as_str())
}

/// Returns whether the found value has a member that the desired one lacks.
fn has_extra(desired: &Value, actual: &Value) -> bool {
    match (desired, actual) {
        (Value::Object(desired), Value::Object(actual)) => {
            actual.iter().any(|(key, actual)| desired.get(key).is_none_or(|desired| has_extra(desired, actual)))
        }
        (Value::Array(desired), Value::Array(actual)) => {
            actual.len() > desired.len()
                || desired.iter().zip(actual).any(|(desired, actual)| has_extra(desired, actual))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use strum::VariantArray as _;
    use tidewatch_shared::plan::Plan;

    use super::*;
    use crate::{
        controllers::installer::desired::{DesiredObjects, Params, tests::settings},
        pki::{CA_VALIDITY, Ca},
    };

    fn desired(component: Component) -> Value {
        let trust = Ca::generate("a", 1_800_000_000, CA_VALIDITY).unwrap().trust_bundle();
        let plan = Arc::new(Plan::new("1".into(), Vec::new()).unwrap());
        let pull_secret = Arc::new(json!({"type": "t", "data": {"k": "v"}}));
        DesiredObjects::new(&settings(), plan, &trust, Some(&pull_secret))
            .get(component)
            .unwrap()
            .body(Params { runtime: &"r".parse().unwrap(), image: "i:1" })
    }

    fn repair_after(component: Component, change: impl FnOnce(&mut Value)) -> Repair {
        let desired = desired(component);
        let mut found = desired.clone();
        change(&mut found);
        compare(component, &desired, &serde_json::from_value(found).unwrap(), None)
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
        assert_eq!(repair_after(Component::DenyAll, |found| found["spec"]["ingress"] = json!([{}])), Repair::Replace);
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
        assert_eq!(repair_after(Component::ConfigMap, |found| found["immutable"] = true.into()), Repair::Recreate);
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
        let incumbents = |found: &mut Value| {
            found["metadata"]["labels"] = json!({"operator.kyma-project.io/managed-by": "kyma"});
        };
        assert_eq!(
            (repair_after(Component::Secret, incumbents), repair_after(Component::Lease, incumbents)),
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
        let head = json!({"finalizers": cases[1].1, "ownerReferences": cases[4].1, "name": "n"});
        let released = without_foreign_lifecycle(&serde_json::from_value(head).unwrap());
        assert_eq!(released.finalizers, Some(vec!["service.kubernetes.io/load-balancer-cleanup".to_owned()]));
        assert_eq!((released.owner_references, released.name.as_deref()), (None, Some("n")));
    }

    #[test]
    fn accepted_form_needs_no_repair_until_the_desired_object_changes() {
        let desired = desired(Component::Deployment);
        let mut found = desired.clone();
        found["spec"]["template"]["spec"]["newField"] = 1.into();
        let found: DynamicObject = serde_json::from_value(found).unwrap();
        let accepted = accepted_form(Component::Deployment, &desired, &found);
        assert_eq!(compare(Component::Deployment, &desired, &found, None), Repair::Replace);
        assert_eq!(compare(Component::Deployment, &desired, &found, Some(accepted)), Repair::None);
        let mut newer = desired;
        newer["spec"]["template"]["spec"]["containers"][0]["image"] = "i:2".into();
        assert_eq!(compare(Component::Deployment, &newer, &found, Some(accepted)), Repair::Replace, "an upgrade");
    }
}
