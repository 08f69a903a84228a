//! Whether an object is as it shall be, and if not, what has to be done about it.

use kube::{
    ResourceExt,
    api::{DynamicObject, ObjectMeta},
};
use serde_json::{Value, json};
use tidewatch_shared::names::label;

use super::{Part, kit::hash};
use crate::base::stored_form::without_nothing;

/// What to do about an object that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing.
    Same,
    /// Something is missing or different: an apply mends it.
    Changed,
    /// Somebody added something, which an apply would leave.
    Added,
    /// Of what is the agent's, somebody holds it, or another object that goes would take it along.
    Held,
    /// What differs cannot be changed: it is deleted and made again.
    Anew,
}

/// Judges an object. `known` is the form that this API server gave to ours before, where it adds something of its own.
pub(super) fn judge(part: Part, wanted: &Value, found: &DynamicObject, known: Option<u64>) -> Verdict {
    let is_marked = marked(wanted, found);
    if part.is_agents() {
        // A Secret that is not ours is the incumbent's: with its key, and perhaps of another type.
        let foreign =
            part == Part::Secret && found.labels().get(label::PART_OF).is_none_or(|of| of != label::PART_OF_TIDEWATCH);
        return match (foreign, is_marked) {
            (true, _) => Verdict::Anew,
            (false, _) if is_held(&found.metadata) => Verdict::Held,
            (false, false) => Verdict::Changed,
            (false, true) => Verdict::Same,
        };
    }
    let (shall, is) = (form(part, wanted), form_of(part, found));
    if shall == is || known.is_some_and(|known| known == pair(&shall, &is)) {
        return if is_marked { Verdict::Same } else { Verdict::Changed };
    }
    if FIXED.iter().any(|(of, member)| *of == part && shall.pointer(member) != is.pointer(member)) {
        return Verdict::Anew;
    }
    if has_more(&shall, &is) { Verdict::Added } else { Verdict::Changed }
}

/// What [`judge`] takes for what this API server makes of ours.
pub(super) fn known(part: Part, wanted: &Value, found: &DynamicObject) -> u64 {
    pair(&form(part, wanted), &form_of(part, found))
}

/// Of both forms, so that what was learned of one says nothing of the next that is wanted.
fn pair(shall: &Value, is: &Value) -> u64 {
    hash(&(shall.to_string(), is.to_string()))
}

/// Members that API servers let nobody change.
const FIXED: [(Part, &str); 7] = [
    (Part::ClusterRoleBinding, "/roleRef"),
    (Part::RoleBinding, "/roleRef"),
    (Part::ConfigMap, "/immutable"),
    (Part::PullSecret, "/type"),
    (Part::PriorityClass, "/value"),
    (Part::PriorityClass, "/preemptionPolicy"),
    (Part::Deployment, "/spec/selector"),
];

/// Members that are not ours: what an API server allocates, and what some platforms put on every account.
pub(super) const LEFT: [(Part, &str, &str); 7] = [
    (Part::MetricsService, "/spec", "clusterIP"),
    (Part::MetricsService, "/spec", "clusterIPs"),
    (Part::MetricsService, "/spec", "ipFamilies"),
    (Part::MetricsService, "/spec", "ipFamilyPolicy"),
    (Part::Account, "", "secrets"),
    (Part::Account, "", "imagePullSecrets"),
    (Part::Deployment, "/spec/template/metadata", "creationTimestamp"),
];

/// What of an object is compared: all but its head, its status and what is not ours.
fn form(part: Part, object: &Value) -> Value {
    let mut form = without_nothing(object);
    if let Some(members) = form.as_object_mut() {
        for head in ["apiVersion", "kind", "metadata", "status"] {
            members.remove(head);
        }
    }
    for (_, place, member) in LEFT.iter().filter(|(of, ..)| *of == part) {
        if let Some(members) = form.pointer_mut(place).and_then(Value::as_object_mut) {
            members.remove(*member);
        }
    }
    form
}

/// The same of an object that was read. Of its head, what decides when it goes counts too.
fn form_of(part: Part, found: &DynamicObject) -> Value {
    let mut form = form(part, &found.data);
    if is_held(&found.metadata) {
        let others: Vec<_> = found.finalizers().iter().filter(|name| !is_kubernetes_own(name)).collect();
        form["metadata"] = json!({"finalizers": others, "ownerReferences": found.owner_references()});
    }
    form
}

/// Whether somebody else decides when an object goes: by a finalizer, or by an owner, with whom a garbage collector takes it. Ours have
/// neither.
pub(super) fn is_held(head: &ObjectMeta) -> bool {
    let mut finalizers = head.finalizers.iter().flatten();
    finalizers.any(|name| !is_kubernetes_own(name)) || head.owner_references.iter().flatten().next().is_some()
}

/// The head of an object that is not held any more.
pub(super) fn released(head: &ObjectMeta) -> ObjectMeta {
    let mut head = head.clone();
    head.owner_references = None;
    head.finalizers.iter_mut().for_each(|finalizers| finalizers.retain(|name| is_kubernetes_own(name)));
    head.finalizers = head.finalizers.filter(|finalizers| !finalizers.is_empty());
    head
}

/// Whether Kubernetes put a finalizer there, for a deletion in the foreground or a load balancer, and takes it off by itself.
fn is_kubernetes_own(finalizer: &str) -> bool {
    let is_own = |domain: &str| domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
    finalizer.split_once('/').is_none_or(|(domain, _)| is_own(domain))
}

fn marked(wanted: &Value, found: &DynamicObject) -> bool {
    let labels = wanted["metadata"]["labels"].as_object().into_iter().flatten();
    labels.into_iter().all(|(key, value)| found.labels().get(key).map(String::as_str) == value.as_str())
}

/// Whether something is there that shall not be.
fn has_more(shall: &Value, is: &Value) -> bool {
    match (shall, is) {
        (Value::Object(shall), Value::Object(is)) => {
            is.iter().any(|(key, is)| shall.get(key).is_none_or(|shall| has_more(shall, is)))
        }
        (Value::Array(shall), Value::Array(is)) => {
            is.len() > shall.len() || shall.iter().zip(is).any(|(shall, is)| has_more(shall, is))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tidewatch_shared::plan::Plan;

    use super::*;
    use crate::{
        controllers::installer::kit::{Kit, Whose, tests::settings},
        pki::{CA_VALIDITY, Ca},
    };

    fn wanted(part: Part) -> Value {
        let trust = Ca::generate("a", 1_800_000_000, CA_VALIDITY).unwrap().trust_bundle();
        let plan = Arc::new(Plan::new("1".into(), Vec::new()).unwrap());
        let pulled = Arc::new(json!({"type": "t", "data": {"k": "v"}}));
        Kit::new(&settings(), plan, &trust, Some(&pulled))
            .of(part)
            .unwrap()
            .body(Whose { runtime: &"r".parse().unwrap(), image: "i:1" })
    }

    fn judged(part: Part, change: impl FnOnce(&mut Value)) -> Verdict {
        let wanted = wanted(part);
        let mut found = wanted.clone();
        change(&mut found);
        judge(part, &wanted, &serde_json::from_value(found).unwrap(), None)
    }

    #[test]
    fn what_api_servers_add_is_no_difference_and_what_people_add_is() {
        for part in Part::ALL.into_iter().filter(|part| *part != Part::Webhooks) {
            assert_eq!(judged(part, |_| ()), Verdict::Same, "{part:?}");
            let nothing = |found: &mut Value| {
                found["metadata"]["annotations"] = json!({"x": "y"});
                found["metadata"]["uid"] = "u".into();
                found["status"] = json!({"x": 1});
                found["nothing"] = json!([]);
            };
            assert_eq!(judged(part, nothing), Verdict::Same, "{part:?}");
            if !part.is_agents() {
                assert_eq!(judged(part, |found| found["x"] = json!({})), Verdict::Added, "{part:?}");
                let unmarked = |found: &mut Value| found["metadata"]["labels"] = json!({});
                assert_eq!(judged(part, unmarked), Verdict::Changed, "{part:?}");
            }
        }
        assert_eq!(judged(Part::MetricsService, |found| found["spec"]["clusterIP"] = "10.0.0.1".into()), Verdict::Same);
        assert_eq!(judged(Part::Account, |found| found["secrets"] = json!([{"name": "x"}])), Verdict::Same);
        assert_eq!(judged(Part::DenyAll, |found| found["spec"]["ingress"] = json!([{}])), Verdict::Added);
        let env =
            |found: &mut Value| found["spec"]["template"]["spec"]["containers"][0]["env"] = json!([{"name": "A"}]);
        assert_eq!(judged(Part::Deployment, env), Verdict::Added);
    }

    #[test]
    fn what_cannot_be_changed_is_made_anew() {
        assert_eq!(judged(Part::Deployment, |found| found["spec"]["replicas"] = 0.into()), Verdict::Changed);
        assert_eq!(
            judged(Part::Deployment, |found| found["spec"]["selector"]["matchLabels"]["x"] = "y".into()),
            Verdict::Anew
        );
        assert_eq!(judged(Part::RoleBinding, |found| found["roleRef"]["name"] = "admin".into()), Verdict::Anew);
        assert_eq!(judged(Part::ConfigMap, |found| found["immutable"] = true.into()), Verdict::Anew);
        assert_eq!(judged(Part::PriorityClass, |found| found["value"] = 1.into()), Verdict::Anew);
    }

    #[test]
    fn of_the_agents_own_objects_only_the_marks_are_judged() {
        for part in [Part::Lease, Part::Secret] {
            assert_eq!(judged(part, |found| found["data"] = json!({"tls.key": "…"})), Verdict::Same, "{part:?}");
        }
        let incumbents = |found: &mut Value| {
            found["metadata"]["labels"] = json!({"operator.kyma-project.io/managed-by": "kyma"});
        };
        assert_eq!(
            (judged(Part::Secret, incumbents), judged(Part::Lease, incumbents)),
            (Verdict::Anew, Verdict::Changed)
        );
    }

    #[test]
    fn nobody_else_decides_when_an_object_goes() {
        let owner = json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "theirs", "uid": "u"}]);
        let cases = [
            ("finalizers", json!(["example.test/held"]), true),
            ("finalizers", json!(["service.kubernetes.io/load-balancer-cleanup", "example.test/held"]), true),
            ("finalizers", json!(["service.kubernetes.io/load-balancer-cleanup"]), false),
            ("finalizers", json!(["foregroundDeletion"]), false),
            ("ownerReferences", owner, true),
        ];
        for part in Part::ALL.into_iter().filter(|part| *part != Part::Webhooks) {
            let held = if part.is_agents() { Verdict::Held } else { Verdict::Added };
            for (member, value, is_held) in &cases {
                let verdict = judged(part, |found| found["metadata"][*member] = value.clone());
                assert_eq!(verdict, if *is_held { held } else { Verdict::Same }, "{part:?} {value}");
            }
        }
        let head = json!({"finalizers": cases[1].1, "ownerReferences": cases[4].1, "name": "n"});
        let released = released(&serde_json::from_value(head).unwrap());
        assert_eq!(released.finalizers, Some(vec!["service.kubernetes.io/load-balancer-cleanup".to_owned()]));
        assert_eq!((released.owner_references, released.name.as_deref()), (None, Some("n")));
    }

    #[test]
    fn a_form_that_was_learned_is_taken() {
        let wanted = wanted(Part::Deployment);
        let mut found = wanted.clone();
        found["spec"]["template"]["spec"]["newField"] = 1.into();
        let found: DynamicObject = serde_json::from_value(found).unwrap();
        let learned = known(Part::Deployment, &wanted, &found);
        assert_eq!(judge(Part::Deployment, &wanted, &found, None), Verdict::Added);
        assert_eq!(judge(Part::Deployment, &wanted, &found, Some(learned)), Verdict::Same);
        let mut newer = wanted;
        newer["spec"]["template"]["spec"]["containers"][0]["image"] = "i:2".into();
        assert_eq!(judge(Part::Deployment, &newer, &found, Some(learned)), Verdict::Added, "an upgrade");
    }
}
