//! Egress isolation by NetworkPolicies, as far as it applies to a process without a network of its own.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::networking::v1::{NetworkPolicy, NetworkPolicyPort},
    apimachinery::pkg::{apis::meta::v1::LabelSelector, util::intstr::IntOrString},
};

/// Ports of a cluster's API server in policies; on the test bed it has a free port instead.
const API_SERVER: [i32; 2] = [443, 6443];

/// Returns true if a pod with these labels is isolated for egress, and no policy that selects it allows the API server
/// or one of the other ports. Peers (`to`) are ignored: any rule with the port allows it.
pub(super) fn isolated(labels: &BTreeMap<String, String>, policies: &[NetworkPolicy], others: &[u16]) -> bool {
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
        // A named port of the other side, which is not a pod here.
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

    fn isolated_by(policies: Value) -> bool {
        let policies: Vec<NetworkPolicy> = from_value(policies).expect("policies");
        isolated(&[("app".to_owned(), "skr-webhook".to_owned())].into(), &policies, &[8443])
    }

    #[test]
    fn denial_isolates_until_both_ports_are_allowed() {
        let selector = json!({"matchLabels": {"app": "skr-webhook"}});
        let deny = json!({"spec": {"podSelector": selector, "policyTypes": ["Ingress", "Egress"]}});
        let to = |ports: Value| json!({"spec": {"podSelector": selector, "policyTypes": ["Egress"], "egress": [{"ports": ports}]}});
        assert!(!isolated_by(json!([])));
        assert!(isolated_by(json!([deny])));
        assert!(isolated_by(json!([deny, to(json!([{"port": 443}]))])));
        assert!(isolated_by(json!([deny, to(json!([{"port": 8443}]))])));
        assert!(isolated_by(json!([deny, to(json!([{"port": 443}, {"port": 8443, "protocol": "UDP"}]))])));
        assert!(!isolated_by(json!([deny, to(json!([{"port": 6443}, {"port": 8000, "endPort": 9000}]))])));
        assert!(!isolated_by(json!([deny, to(json!([]))])));
        let others = json!({"spec": {"podSelector": {"matchLabels": {"app": "other"}}, "policyTypes": ["Egress"]}});
        assert!(!isolated_by(json!([others])));
        let everyone = json!({"spec": {"podSelector": {}, "policyTypes": ["Egress"]}});
        assert!(isolated_by(json!([everyone])));
        let ingress = json!({"spec": {"podSelector": {}, "policyTypes": ["Ingress"]}});
        assert!(!isolated_by(json!([ingress])));
    }
}
