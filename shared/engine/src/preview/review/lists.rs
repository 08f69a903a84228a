//! Lists of Kubernetes' own kinds whose elements an API server tells apart by some of their members. A create request with two
//! equal ones passes; server-side apply, by which modules are installed, does not.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::inventory::ObjectKey;

/// A list that is a map (`x-kubernetes-list-map-keys`).
struct ListMap {
    /// Members that lead to it.
    path: &'static str,
    /// Members that tell its elements apart, each with the value that an API server fills in.
    keys: &'static [(&'static str, Option<&'static str>)],
    /// Lists in its elements.
    lists: &'static [Self],
}

const fn by(path: &'static str, keys: &'static [(&'static str, Option<&'static str>)]) -> ListMap {
    ListMap { path, keys, lists: &[] }
}

const NAME: &[(&str, Option<&str>)] = &[("name", None)];
const PROTOCOL: (&str, Option<&str>) = ("protocol", Some("TCP"));

const OF_CONTAINER: &[ListMap] = &[
    by("env", NAME),
    by("ports", &[("containerPort", None), PROTOCOL]),
    by("resources.claims", NAME),
    by("volumeDevices", &[("devicePath", None)]),
    by("volumeMounts", &[("mountPath", None)]),
];

const OF_POD: &[ListMap] = &[
    ListMap { path: "containers", keys: NAME, lists: OF_CONTAINER },
    ListMap { path: "initContainers", keys: NAME, lists: OF_CONTAINER },
    by("hostAliases", &[("ip", None)]),
    by("imagePullSecrets", NAME),
    by("resourceClaims", NAME),
    by("schedulingGates", NAME),
    by("topologySpreadConstraints", &[("topologyKey", None), ("whenUnsatisfiable", None)]),
    by("volumes", NAME),
];

const OF_SERVICE: &[ListMap] = &[by("ports", &[("port", None), PROTOCOL])];
const OF_ACCOUNT: &[ListMap] = &[by("secrets", NAME)];
const OF_WEBHOOKS: &[ListMap] = &[ListMap { path: "webhooks", keys: NAME, lists: &[by("matchConditions", NAME)] }];
const OF_POLICY: &[ListMap] = &[by("matchConditions", NAME), by("variables", NAME)];

/// The lists of a kind, and the members that lead to the object that has them.
fn lists_of(key: &ObjectKey) -> (&'static str, &'static [ListMap]) {
    match (key.group.as_str(), key.kind.as_str()) {
        ("apps", "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet")
        | ("batch", "Job")
        | ("", "ReplicationController") => ("spec.template.spec", OF_POD),
        ("batch", "CronJob") => ("spec.jobTemplate.spec.template.spec", OF_POD),
        ("", "Pod") => ("spec", OF_POD),
        ("", "Service") => ("spec", OF_SERVICE),
        ("", "ServiceAccount") => ("", OF_ACCOUNT),
        ("admissionregistration.k8s.io", "ValidatingWebhookConfiguration" | "MutatingWebhookConfiguration") => {
            ("", OF_WEBHOOKS)
        }
        ("admissionregistration.k8s.io", "ValidatingAdmissionPolicy" | "MutatingAdmissionPolicy") => {
            ("spec", OF_POLICY)
        }
        _ => ("", &[]),
    }
}

/// Elements that a list must not have twice, each with both places.
pub(super) fn duplicates(key: &ObjectKey, object: &Value) -> Vec<String> {
    let mut found = Vec::new();
    let (path, lists) = lists_of(key);
    for list in lists {
        compare(member(object, path), path, list, &mut found);
    }
    found
}

fn compare(owner: &Value, path: &str, list: &ListMap, found: &mut Vec<String>) {
    let dot = if path.is_empty() { "" } else { "." };
    let path = format!("{path}{dot}{}", list.path);
    let mut indexes = BTreeMap::new();
    for (index, element) in member(owner, list.path).as_array().into_iter().flatten().enumerate() {
        for inner in list.lists {
            compare(element, &format!("{path}[{index}]"), inner, found);
        }
        // An element without a key is refused by every request.
        let Some(values) = values(element, list.keys) else { continue };
        let text = values.join(" and ");
        if let Some(first) = indexes.get(&text) {
            found.push(format!("{path}[{first}] and [{index}] have the same {text}"));
        } else {
            indexes.insert(text, index);
        }
    }
}

/// Keys of an element with their values, as text.
fn values(element: &Value, keys: &[(&str, Option<&str>)]) -> Option<Vec<String>> {
    let value = |(name, default): &(&str, Option<&str>)| match &element[*name] {
        Value::Null => default.map(|default| format!("{name} {default:?}")),
        value => Some(format!("{name} {value}")),
    };
    keys.iter().map(value).collect()
}

fn member<'a>(value: &'a Value, path: &str) -> &'a Value {
    path.split('.').filter(|name| !name.is_empty()).fold(value, |value, name| &value[name])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn found(object: &Value) -> Vec<String> {
        duplicates(&ObjectKey::of(object), object)
    }

    fn workload(api_version: &str, kind: &str, container: Value) -> Value {
        json!({"apiVersion": api_version, "kind": kind, "spec": {"template": {"spec": {"containers": [container]}}}})
    }

    #[test]
    fn two_elements_with_equal_keys_are_named_with_both_places() {
        let variable = |name: &str| json!({"name": name, "value": "x"});
        let container = json!({"name": "c", "env": [variable("A"), variable("B"), variable("A"), variable("A")],
            "ports": [{"containerPort": 80}, {"containerPort": 80, "protocol": "UDP"}, {"containerPort": 80, "name": "h", "protocol": "TCP"}],
            "volumeMounts": [{"mountPath": "/a", "name": "x"}, {"mountPath": "/a", "name": "y"}]});
        let path = "spec.template.spec.containers[0]";
        let expected = [
            format!(r#"{path}.env[0] and [2] have the same name "A""#),
            format!(r#"{path}.env[0] and [3] have the same name "A""#),
            format!(r#"{path}.ports[0] and [2] have the same containerPort 80 and protocol "TCP""#),
            format!(r#"{path}.volumeMounts[0] and [1] have the same mountPath "/a""#),
        ];
        for (api_version, kind) in [("apps/v1", "Deployment"), ("apps/v1", "DaemonSet"), ("batch/v1", "Job")] {
            assert_eq!(found(&workload(api_version, kind, container.clone())), expected, "{kind}");
        }
        assert_eq!(found(&workload("example.test/v1", "Deployment", container)), [""; 0], "another kind");
    }

    #[test]
    fn lists_of_other_kinds_are_compared() {
        let service = json!({"apiVersion": "v1", "kind": "Service",
            "spec": {"ports": [{"port": 1, "name": "a"}, {"port": 1, "name": "b"}, {"port": 1, "protocol": "UDP"}]}});
        assert_eq!(found(&service), [r#"spec.ports[0] and [1] have the same port 1 and protocol "TCP""#]);
        let webhooks = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
            "webhooks": [{"name": "a", "matchConditions": [{"name": "m"}, {"name": "m"}]}, {"name": "a"}]});
        let expected = [
            r#"webhooks[0].matchConditions[0] and [1] have the same name "m""#,
            r#"webhooks[0] and [1] have the same name "a""#,
        ];
        assert_eq!(found(&webhooks), expected);
        let two = json!({"containers": [{"name": "c"}, {"name": "c"}], "volumes": [{"name": "v"}, {"name": "v"}]});
        let cron = json!({"apiVersion": "batch/v1", "kind": "CronJob",
            "spec": {"jobTemplate": {"spec": {"template": {"spec": two}}}}});
        assert_eq!(found(&cron).len(), 2);
        for malformed in [json!({}), json!({"spec": {"ports": [1, null, {"name": "a"}, {"name": "a"}]}})] {
            let mut service = malformed;
            service["apiVersion"] = "v1".into();
            service["kind"] = "Service".into();
            assert_eq!(found(&service), [""; 0]);
        }
    }
}
