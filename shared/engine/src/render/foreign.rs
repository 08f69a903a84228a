//! Fields of a module's objects that an injector or a controller of Kubernetes fills. The version has placeholders there,
//! which would be written over their values again and again.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::Value;

use crate::inventory::{DEFINITIONS, ObjectKey};

/// Begin of a certificate in PEM.
const CERTIFICATE: &[u8] = b"-----BEGIN";

/// Drops the rules of an aggregated ClusterRole, and CA bundles without a certificate.
pub(super) fn drop_fields(body: &mut Value, key: &ObjectKey) {
    match (key.group.as_str(), key.kind.as_str()) {
        // The controller of Kubernetes fills them from the roles that it selects.
        ("rbac.authorization.k8s.io", "ClusterRole") if body["aggregationRule"].is_object() => {
            body.as_object_mut().map(|members| members.remove("rules"));
        }
        ("admissionregistration.k8s.io", "ValidatingWebhookConfiguration" | "MutatingWebhookConfiguration") => {
            let webhooks = body.get_mut("webhooks").and_then(Value::as_array_mut);
            webhooks.into_iter().flatten().for_each(|webhook| drop_placeholder(webhook.get_mut("clientConfig")));
        }
        (DEFINITIONS, "CustomResourceDefinition") => {
            drop_placeholder(body.pointer_mut("/spec/conversion/webhook/clientConfig"));
        }
        ("apiregistration.k8s.io", "APIService") => drop_placeholder(body.get_mut("spec")),
        _ => {}
    }
}

fn drop_placeholder(client: Option<&mut Value>) {
    let Some(members) = client.and_then(Value::as_object_mut) else { return };
    if members.get("caBundle").is_some_and(is_placeholder) {
        members.remove("caBundle");
    }
}

/// True for a bundle without a certificate. What is not base64 is a mistake, which the API server names.
fn is_placeholder(bundle: &Value) -> bool {
    let Some(text) = bundle.as_str() else { return bundle.is_null() };
    let encoded: String = text.chars().filter(|char| !char.is_ascii_whitespace()).collect();
    let has_certificate = |pem: Vec<u8>| pem.windows(CERTIFICATE.len()).any(|part| part == CERTIFICATE);
    BASE64_STANDARD.decode(encoded).is_ok_and(|pem| !has_certificate(pem))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn dropped(mut body: Value) -> Value {
        let key = ObjectKey::of(&body);
        drop_fields(&mut body, &key);
        body
    }

    fn bundles() -> [(Value, bool); 7] {
        let pem = BASE64_STANDARD.encode("-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n");
        let folded = format!("{}\n{}", &pem[..8], &pem[8..]);
        [
            (json!(""), false),
            (json!("Cg=="), false),
            (json!("Y2E="), false),
            (Value::Null, false),
            (json!(pem), true),
            (json!(folded), true),
            (json!("${CA}"), true),
        ]
    }

    #[test]
    fn placeholders_of_ca_bundles_are_dropped() {
        let hooks = "admissionregistration.k8s.io/v1";
        for (bundle, stays) in bundles() {
            let client = json!({"service": {"name": "s"}, "caBundle": bundle});
            let expected = if stays { client.clone() } else { json!({"service": {"name": "s"}}) };
            for kind in ["ValidatingWebhookConfiguration", "MutatingWebhookConfiguration"] {
                let webhook = json!({"apiVersion": hooks, "kind": kind, "webhooks": [{"clientConfig": client}, {}]});
                assert_eq!(dropped(webhook)["webhooks"], json!([{"clientConfig": expected}, {}]), "{bundle}");
            }
            let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
                "spec": {"conversion": {"webhook": {"clientConfig": client}}}});
            let found = dropped(definition)["spec"]["conversion"]["webhook"]["clientConfig"].clone();
            assert_eq!(found, expected, "{bundle}");
            let service =
                json!({"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "spec": client.clone()});
            assert_eq!(dropped(service)["spec"], expected, "{bundle}");
            let other = json!({"apiVersion": "example.test/v1", "kind": "APIService", "spec": client});
            assert_eq!(dropped(other.clone()), other);
        }
        let malformed = json!({"apiVersion": hooks, "kind": "ValidatingWebhookConfiguration", "webhooks": "x"});
        assert_eq!(dropped(malformed.clone()), malformed);
    }

    #[test]
    fn rules_of_an_aggregated_cluster_role_are_dropped() {
        let role = |rule: Value| {
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "r"},
                "aggregationRule": rule, "rules": []})
        };
        let selectors = json!({"clusterRoleSelectors": [{"matchLabels": {"a": "b"}}]});
        for (rule, stays) in [(selectors, false), (json!({}), false), (Value::Null, true)] {
            assert_eq!(dropped(role(rule.clone())).get("rules").is_some(), stays, "{rule}");
        }
    }
}
