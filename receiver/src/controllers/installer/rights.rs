//! What an agent may do: read exactly what its plan names, and keep two objects of its own.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tidewatch_shared::{
    names::{AGENT_OBJECT, IDENTITY_SECRET, SKR_NAMESPACE},
    plan::{Plan, PlannedWatch},
};

const READ: [&str; 3] = ["get", "list", "watch"];
/// The agent renews its Lease and keeps its identity; both are there before it is.
const KEEP: [&str; 3] = ["list", "watch", "patch"];

/// What is read: group, resource, and the one name, where the watch is of one object.
type Read = (String, String, Option<String>);

/// Rules of the ClusterRole: what the plan watches beyond our namespace.
pub(super) fn of_cluster(plan: &Plan) -> Vec<Value> {
    reads(plan, false).iter().map(rule).collect()
}

/// Rules of the Role in our namespace.
pub(super) fn of_namespace(plan: &Plan) -> Vec<Value> {
    let (everywhere, mut here) = (reads(plan, false), reads(plan, true));
    here.retain(|(group, resource, _)| !everywhere.contains(&(group.clone(), resource.clone(), None)));
    // Its ConfigMap is read even by an agent that has no plan yet.
    here.insert((String::new(), "configmaps".to_owned(), Some(AGENT_OBJECT.to_owned())));
    let own = [
        json!({"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": [AGENT_OBJECT], "verbs": KEEP}),
        json!({"apiGroups": [""], "resources": ["secrets"], "resourceNames": [IDENTITY_SECRET], "verbs": KEEP}),
    ];
    here.iter().map(rule).chain(own).collect()
}

fn reads(plan: &Plan, here: bool) -> BTreeSet<Read> {
    let watches = plan.watches().iter().filter(|watch| (watch.namespace.as_deref() == Some(SKR_NAMESPACE)) == here);
    let all: BTreeSet<Read> =
        watches.map(|watch| (watch.group.clone(), watch.resource.clone(), name(watch).map(str::to_owned))).collect();
    // Who may read all needs no right to read one.
    let wider = |read: &&Read| read.2.is_none() || !all.contains(&(read.0.clone(), read.1.clone(), None));
    all.iter().filter(wider).cloned().collect()
}

/// The name of the only object that a watch selects. RBAC limits lists and watches by name where they select it so.
fn name(watch: &PlannedWatch) -> Option<&str> {
    let name = watch.field_selector.strip_prefix("metadata.name=")?;
    (!name.is_empty() && !name.contains([',', '=', '!'])).then_some(name)
}

fn rule((group, resource, name): &Read) -> Value {
    let mut rule = json!({"apiGroups": [group], "resources": [resource], "verbs": READ});
    if let Some(name) = name {
        rule["resourceNames"] = json!([name]);
    }
    rule
}

/// The rules that a role has until its plan is there: what it shall have, and what the plan before may still need.
pub(super) fn widened(wanted: &[Value], found: &[Value]) -> Vec<Value> {
    let more = found.iter().filter(|rule| !wanted.contains(rule)).cloned();
    wanted.iter().cloned().chain(more).collect()
}

/// Whether every right that is wanted is among those found.
pub(super) fn cover(found: &[Value], wanted: &[Value]) -> bool {
    wanted.iter().all(|rule| found.contains(rule))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::{installer::watches, watcher};

    fn plan(mut more: Vec<Value>) -> Plan {
        for (n, watch) in more.iter_mut().enumerate() {
            watch["name"] = json!(format!("w{n}"));
            watch["manager"] = json!("m");
            watch["field"] = json!("spec");
            watch["work"] = json!(["kyma"]);
        }
        let watches = serde_json::from_value(Value::Array(more)).unwrap();
        Plan::new("1".into(), watches).unwrap()
    }

    #[test]
    fn each_planned_kind_is_read_and_no_other() {
        let plan = plan(vec![
            json!({"group": "apps", "version": "*", "resource": "deployments"}),
            json!({"group": "apps", "version": "v1", "resource": "deployments", "namespace": "kyma-system"}),
            json!({"group": "", "version": "v1", "resource": "services", "namespace": "kyma-system",
                   "fieldSelector": "metadata.name=one"}),
            json!({"group": "", "version": "v1", "resource": "nodes", "fieldSelector": "metadata.name=a,spec.x=b"}),
            json!({"group": "", "version": "v1", "resource": "pods", "namespace": "elsewhere"}),
        ]);
        let read = |group: &str, resource: &str| json!({"apiGroups": [group], "resources": [resource], "verbs": READ});
        assert_eq!(of_cluster(&plan), [read("", "nodes"), read("", "pods"), read("apps", "deployments")]);
        let namespaced = of_namespace(&plan);
        let told: Vec<_> = namespaced.iter().map(|rule| (&rule["resources"][0], &rule["resourceNames"][0])).collect();
        assert_eq!(
            told,
            [
                (&json!("configmaps"), &json!("tidewatch-agent")),
                (&json!("services"), &json!("one")),
                (&json!("leases"), &json!("tidewatch-agent")),
                (&json!("secrets"), &json!("skr-webhook-tls")),
            ]
        );
    }

    #[test]
    fn a_full_plan_gives_no_right_to_secrets_and_none_to_write_but_its_own() {
        let (plan, _) = watcher::plan_with::<std::sync::Arc<tidewatch_shared::api::Watcher>>(watches(), &[]);
        let rules = [of_cluster(&plan), of_namespace(&plan)].concat();
        for rule in &rules {
            let writes = rule["verbs"] != json!(READ);
            let own = ["leases", "secrets"].contains(&rule["resources"][0].as_str().unwrap());
            assert_eq!(writes, own, "{rule}");
            assert!(!own || !rule["resourceNames"].is_null(), "{rule}");
        }
        assert!(of_cluster(&plan).iter().all(|rule| rule["resources"] != json!(["secrets"])));
    }

    #[test]
    fn rights_grow_before_a_plan_and_shrink_after_it() {
        let [a, b, c] = ["a", "b", "c"].map(|resource| json!({"resources": [resource]}));
        let (wanted, found) = ([a.clone(), b.clone()], [b.clone(), c.clone()]);
        assert!(!cover(&found, &wanted));
        assert_eq!(widened(&wanted, &found), [a, b, c]);
        assert!(cover(&widened(&wanted, &found), &wanted));
    }
}
