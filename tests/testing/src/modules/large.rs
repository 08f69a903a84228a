//! Modules that are larger than a team writes by hand, made when they are read.

use serde_json::{Value, json};
use tidewatch_api::names::SKR_NAMESPACE;

/// Objects of [`Large::Objects`].
const OBJECTS: usize = 60;
/// CRDs of [`Large::Definitions`], and those of them in one API group.
const DEFINITIONS: usize = 300;
const IN_GROUP: usize = 30;

/// A large module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Large {
    /// Objects of ten each of six kinds of Kubernetes.
    Objects,
    /// CRDs with small schemas.
    Definitions,
}

impl Large {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Objects, Self::Definitions];

    /// Name of the module.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Objects => "large-objects",
            Self::Definitions => "large-definitions",
        }
    }

    /// The objects of the manifest.
    pub fn objects(self) -> Vec<Value> {
        match self {
            Self::Objects => (0..OBJECTS).map(object).collect(),
            Self::Definitions => (0..DEFINITIONS).map(definition).collect(),
        }
    }
}

/// Text of the manifest of a large module; `None` for any other name.
pub(crate) fn manifest(name: &str) -> Option<String> {
    let large = Large::ALL.into_iter().find(|large| large.name() == name)?;
    let texts: Vec<_> = large.objects().iter().map(Value::to_string).collect();
    Some(texts.join("\n---\n"))
}

fn object(number: usize) -> Value {
    const RBAC: &str = "rbac.authorization.k8s.io";
    let index = number / 6;
    let name = format!("{}-{index}", Large::Objects.name());
    let metadata = json!({"name": name, "namespace": SKR_NAMESPACE, "labels": {"app": name}});
    let rbac = format!("{RBAC}/v1");
    let object = |api_version: &str, kind: &str, member: &str, content: Value| json!({"apiVersion": api_version, "kind": kind, "metadata": metadata, member: content});
    match number % 6 {
        0 => object("v1", "ServiceAccount", "automountServiceAccountToken", json!(true)),
        1 => object("v1", "ConfigMap", "data", json!({"settings.yaml": "level: info\nworkers: 4\n".repeat(20)})),
        2 => {
            let ports = json!([{"name": "https", "port": 443, "targetPort": 8443, "protocol": "TCP"}]);
            object("v1", "Service", "spec", json!({"selector": {"app": name}, "ports": ports}))
        }
        3 => {
            let rule = json!({"apiGroups": ["", "apps"], "resources": ["configmaps", "deployments"],
                "verbs": ["get", "list", "watch", "update"]});
            object(&rbac, "Role", "rules", json!([rule]))
        }
        4 => {
            let subject = json!({"kind": "ServiceAccount", "name": name, "namespace": SKR_NAMESPACE});
            let mut binding = object(&rbac, "RoleBinding", "subjects", json!([subject]));
            binding["roleRef"] = json!({"apiGroup": RBAC, "kind": "Role", "name": name});
            binding
        }
        _ => {
            let labels = json!({"app": name});
            let container = json!({"name": "manager", "image": format!("example.test/{name}:1"),
                "args": ["--leader-elect"], "ports": [{"name": "https", "containerPort": 8443, "protocol": "TCP"}],
                "resources": {"limits": {"cpu": "500m", "memory": "128Mi"}, "requests": {"cpu": "10m", "memory": "64Mi"}}});
            let pod = json!({"metadata": {"labels": labels},
                "spec": {"serviceAccountName": name, "containers": [container]}});
            let spec = json!({"replicas": 1, "selector": {"matchLabels": labels}, "template": pod});
            object("apps/v1", "Deployment", "spec", spec)
        }
    }
}

fn definition(number: usize) -> Value {
    let group = format!("group-{}.{}.test", number / IN_GROUP, Large::Definitions.name());
    let kind = format!("Large{number}");
    let singular = kind.to_lowercase();
    let plural = format!("{singular}s");
    let text = json!({"type": "string"});
    let spec = json!({"type": "object", "properties": {"name": text, "size": {"type": "integer"},
        "zones": {"type": "array", "items": text}}});
    let status = json!({"type": "object", "properties": {"state": text}});
    let schema = json!({"type": "object", "properties": {"spec": spec, "status": status}});
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.{group}")},
        "spec": {
            "group": group, "scope": "Namespaced",
            "names": {"kind": kind, "listKind": format!("{kind}List"), "plural": plural, "singular": singular},
            "versions": [{"name": "v1", "served": true, "storage": true, "subresources": {"status": {}},
                          "schema": {"openAPIV3Schema": schema}}],
        },
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn large_modules_have_their_numbers_of_distinct_objects() {
        for (large, number, kinds) in [(Large::Objects, 60, 6), (Large::Definitions, 300, 1)] {
            let objects = large.objects();
            let distinct: BTreeSet<_> = objects.iter().map(|it| format!("{} {}", it["kind"], it["metadata"])).collect();
            let of_kinds: BTreeSet<_> = objects.iter().map(|it| it["kind"].to_string()).collect();
            assert_eq!((objects.len(), distinct.len(), of_kinds.len()), (number, number, kinds));
            let text = manifest(large.name()).expect("a manifest");
            assert_eq!(text.split("\n---\n").count(), number);
        }
        assert_eq!(manifest("sample"), None);
    }
}
