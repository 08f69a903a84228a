//! Rights of an agent: to read the kinds of its plan, and to update two objects of its own.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tidewatch_api::{
    names::{AGENT_OBJECT, IDENTITY_SECRET, SKR_NAMESPACE},
    plan::{ALL_RESOURCES, Plan, PlannedWatch},
};

const READ_VERBS: [&str; 3] = ["get", "list", "watch"];
/// Verbs on the Lease and the identity Secret, which exist before the agent starts.
const OWN_VERBS: [&str; 3] = ["list", "watch", "patch"];

/// Group, resource, and the name if a watch selects a single object.
type ReadRule = (String, String, Option<String>);

/// Rules of the ClusterRole: watches outside the agent's namespace.
pub(super) fn of_cluster(plan: &Plan) -> Vec<Value> {
    reads(plan, false).iter().map(rule).collect()
}

/// Rules of the Role in the agent's namespace.
pub(super) fn of_namespace(plan: &Plan) -> Vec<Value> {
    let everywhere = reads(plan, false);
    let mut here = reads(plan, true);
    here.retain(|(group, resource, _)| {
        ![resource, ALL_RESOURCES].iter().any(|wide| everywhere.contains(&(group.clone(), (*wide).to_owned(), None)))
    });
    // An agent without a plan reads its ConfigMap too.
    here.insert((String::new(), "configmaps".to_owned(), Some(AGENT_OBJECT.to_owned())));
    let own = [
        json!({"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": [AGENT_OBJECT], "verbs": OWN_VERBS}),
        json!({"apiGroups": [""], "resources": ["secrets"], "resourceNames": [IDENTITY_SECRET], "verbs": OWN_VERBS}),
    ];
    here.iter().map(rule).chain(own).collect()
}

fn reads(plan: &Plan, here: bool) -> BTreeSet<ReadRule> {
    let watches = plan.watches().iter().filter(|watch| (watch.namespace.as_deref() == Some(SKR_NAMESPACE)) == here);
    let all: BTreeSet<ReadRule> =
        watches.map(|watch| (watch.group.clone(), watch.resource.clone(), name(watch).map(str::to_owned))).collect();
    // The right to read all objects includes each one, and that to read a group each of its resources.
    let all_of = |group: &str, resource: &str| all.contains(&(group.to_owned(), resource.to_owned(), None));
    let is_widest = |(group, resource, name): &&ReadRule| {
        let in_group = resource != ALL_RESOURCES && all_of(group, ALL_RESOURCES);
        !in_group && (name.is_none() || !all_of(group, resource))
    };
    all.iter().filter(is_widest).cloned().collect()
}

/// Returns the name of the only object that a watch selects. RBAC restricts list and watch by name with such a field
/// selector.
fn name(watch: &PlannedWatch) -> Option<&str> {
    let name = watch.field_selector.strip_prefix("metadata.name=")?;
    (!name.is_empty() && !name.contains([',', '=', '!'])).then_some(name)
}

fn rule((group, resource, name): &ReadRule) -> Value {
    let mut rule = json!({"apiGroups": [group], "resources": [resource], "verbs": READ_VERBS});
    if let Some(name) = name {
        rule["resourceNames"] = json!([name]);
    }
    rule
}

/// Returns the role until the plan is written, if the found one has rights that are not desired: the previous plan may
/// still need them.
pub(super) fn widened(desired: &Value, found: &Value) -> Option<Value> {
    let rules = |role: &Value| role["rules"].as_array().cloned().unwrap_or_default();
    let wanted = rules(desired);
    let mut current = rules(found);
    if current.iter().all(|rule| wanted.contains(rule)) {
        return None;
    }
    // A role that already covers the desired rules is not written before the plan.
    if !wanted.iter().all(|rule| current.contains(rule)) {
        current.retain(|rule| !wanted.contains(rule));
        current.splice(..0, wanted);
    }
    let mut role = desired.clone();
    role["rules"] = current.into();
    Some(role)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{watcher, watches};

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
    fn rules_grant_read_on_exactly_the_planned_kinds() {
        let plan = plan(vec![
            json!({"group": "apps", "version": "*", "resource": "deployments"}),
            json!({"group": "apps", "version": "v1", "resource": "deployments", "namespace": "kyma-system"}),
            json!({"group": "", "version": "v1", "resource": "services", "namespace": "kyma-system",
                   "fieldSelector": "metadata.name=one"}),
            json!({"group": "", "version": "v1", "resource": "nodes", "fieldSelector": "metadata.name=a,spec.x=b"}),
            json!({"group": "", "version": "v1", "resource": "pods", "namespace": "elsewhere"}),
        ]);
        let read =
            |group: &str, resource: &str| json!({"apiGroups": [group], "resources": [resource], "verbs": READ_VERBS});
        assert_eq!(of_cluster(&plan), [read("", "nodes"), read("", "pods"), read("apps", "deployments")]);
        let namespaced = of_namespace(&plan);
        let named: Vec<_> = namespaced.iter().map(|rule| (&rule["resources"][0], &rule["resourceNames"][0])).collect();
        assert_eq!(
            named,
            [
                (&json!("configmaps"), &json!("tidewatch-agent")),
                (&json!("services"), &json!("one")),
                (&json!("leases"), &json!("tidewatch-agent")),
                (&json!("secrets"), &json!("skr-webhook-tls")),
            ]
        );
    }

    #[test]
    fn watch_on_a_group_is_one_rule_to_read_all_its_resources() {
        let group = |selector: &str| json!({"group": "cloud-resources.kyma-project.io", "version": "*", "resource": "*", "labelSelector": selector});
        let named = |namespace: Option<&str>| {
            let group = "cloud-resources.kyma-project.io";
            let resource = "cloudresources";
            json!({"group": group, "version": "v1", "resource": resource, "namespace": namespace})
        };
        let other = || json!({"group": "other.example", "version": "v1", "resource": "things"});
        let several = plan(vec![group(""), group("a=b"), named(None), named(Some("kyma-system")), other()]);
        let read =
            |group: &str, resource: &str| json!({"apiGroups": [group], "resources": [resource], "verbs": READ_VERBS});
        let all = read("cloud-resources.kyma-project.io", "*");
        assert_eq!(of_cluster(&several), [all.clone(), read("other.example", "things")]);
        assert!(of_namespace(&several).iter().all(|rule| rule["apiGroups"] != all["apiGroups"]));
        let without = plan(vec![named(None), other()]);
        let named = read("cloud-resources.kyma-project.io", "cloudresources");
        assert_eq!(of_cluster(&without), [named, read("other.example", "things")]);
    }

    #[test]
    fn rules_grant_no_secret_reads_and_writes_to_own_objects_only() {
        let (plan, ..) = watcher::plan::<std::sync::Arc<tidewatch_api::Watcher>>(watches(), &[]);
        let rules = [of_cluster(&plan), of_namespace(&plan)].concat();
        for rule in &rules {
            let writes = rule["verbs"] != json!(READ_VERBS);
            let own = ["leases", "secrets"].contains(&rule["resources"][0].as_str().unwrap());
            assert_eq!(writes, own, "{rule}");
            assert!(!own || !rule["resourceNames"].is_null(), "{rule}");
        }
        assert!(of_cluster(&plan).iter().all(|rule| rule["resources"] != json!(["secrets"])));
    }

    #[test]
    fn rules_widen_before_a_plan_and_narrow_after_it() {
        let [a, b, c] = ["a", "b", "c"].map(|resource| json!({"resources": [resource]}));
        let role = |rules: &[&Value]| json!({ "rules": rules });
        let desired = role(&[&a, &b]);
        let found = role(&[&b, &c]);
        assert_eq!(widened(&desired, &found), Some(role(&[&a, &b, &c])));
        let reordered = role(&[&c, &b, &a]);
        assert_eq!(widened(&desired, &reordered), Some(reordered), "a role that covers the desired rules stays");
        assert_eq!((widened(&desired, &role(&[&b])), widened(&desired, &json!({}))), (None, None));
    }
}
