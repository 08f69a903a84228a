//! Whether NetworkPolicies leave a pod any way out, as far as one process without a network of its own can be held to them.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::networking::v1::{NetworkPolicy, NetworkPolicyPort},
    apimachinery::pkg::{apis::meta::v1::LabelSelector, util::intstr::IntOrString},
};

/// The ports that the API server of a cluster is reached at, as policies name it; on the test bed it has a free port.
const API_SERVER: [i32; 2] = [443, 6443];

/// Whether a pod with these labels is isolated for egress, and no policy that selects it lets it reach the API server, or one of the
/// other ports. Peers (`to`) are not looked at: any rule with the port allows it.
pub(super) fn silenced(labels: &BTreeMap<String, String>, policies: &[NetworkPolicy], others: &[u16]) -> bool {
    let specs = policies.iter().filter_map(|policy| policy.spec.as_ref());
    let selecting: Vec<_> = specs
        .filter(|spec| spec.policy_types.iter().flatten().any(|kind| kind == "Egress"))
        .filter(|spec| spec.pod_selector.as_ref().is_none_or(|selector| selects(selector, labels)))
        .collect();
    let allows = |port: i32| {
        let mut rules = selecting.iter().flat_map(|spec| spec.egress.iter().flatten());
        rules.any(|rule| {
            rule.ports.as_ref().is_none_or(|ports| ports.is_empty() || ports.iter().any(|p| covers(p, port)))
        })
    };
    let free = API_SERVER.into_iter().any(allows) && others.iter().all(|port| allows(i32::from(*port)));
    !selecting.is_empty() && !free
}

fn covers(rule: &NetworkPolicyPort, port: i32) -> bool {
    let tcp = rule.protocol.as_deref().unwrap_or("TCP") == "TCP";
    tcp && match (&rule.port, rule.end_port) {
        (None, _) => true,
        (Some(IntOrString::Int(from)), Some(to)) => (*from..=to).contains(&port),
        (Some(IntOrString::Int(only)), None) => *only == port,
        // The name of a port of the other side, which is not a pod here.
        (Some(IntOrString::String(_)), _) => false,
    }
}

fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let equal = selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let holds = selector.match_expressions.iter().flatten().all(|expression| {
        let value = labels.get(&expression.key);
        let among = value.is_some_and(|value| expression.values.iter().flatten().any(|one| one == value));
        match expression.operator.as_str() {
            "In" => among,
            "NotIn" => !among,
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            _ => false,
        }
    });
    equal && holds
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn silent(policies: Value) -> bool {
        let policies: Vec<NetworkPolicy> = from_value(policies).expect("policies");
        silenced(&[("app".to_owned(), "skr-webhook".to_owned())].into(), &policies, &[8443])
    }

    #[test]
    fn a_denial_silences_until_both_ways_are_allowed() {
        let selector = json!({"matchLabels": {"app": "skr-webhook"}});
        let deny = json!({"spec": {"podSelector": selector, "policyTypes": ["Ingress", "Egress"]}});
        let to = |ports: Value| json!({"spec": {"podSelector": selector, "policyTypes": ["Egress"], "egress": [{"ports": ports}]}});
        assert!(!silent(json!([])));
        assert!(silent(json!([deny])));
        assert!(silent(json!([deny, to(json!([{"port": 443}]))])));
        assert!(silent(json!([deny, to(json!([{"port": 8443}]))])));
        assert!(silent(json!([deny, to(json!([{"port": 443}, {"port": 8443, "protocol": "UDP"}]))])));
        assert!(!silent(json!([deny, to(json!([{"port": 6443}, {"port": 8000, "endPort": 9000}]))])));
        assert!(!silent(json!([deny, to(json!([]))])));
        let others = json!({"spec": {"podSelector": {"matchLabels": {"app": "other"}}, "policyTypes": ["Egress"]}});
        assert!(!silent(json!([others])));
        let everyone = json!({"spec": {"podSelector": {}, "policyTypes": ["Egress"]}});
        assert!(silent(json!([everyone])));
        let ingress = json!({"spec": {"podSelector": {}, "policyTypes": ["Ingress"]}});
        assert!(!silent(json!([ingress])));
    }
}
