use tidewatch_oci::layer::placed_documents;

use super::*;

fn reviewed(text: &str) -> Review {
    review(&placed_documents(text).unwrap())
}

#[test]
fn two_documents_of_one_object_are_named_with_both_places() {
    let text = "\
apiVersion: v1
kind: ConfigMap
metadata: {name: a}
data: {a: first}
---
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: ConfigMap, metadata: {name: b}}
- {apiVersion: v1, kind: ConfigMap, metadata: {name: a, namespace: default}, data: {a: second}}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: r}}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: r, namespace: x}}
";
    let expected = [
        r#"document 2 from line 6 on, item 2, kind "ConfigMap", name "a": it is the same object as document 1 from line 1 on, kind "ConfigMap", name "a"; keep one of them"#,
        r#"document 4 from line 14 on, kind "ClusterRole", name "r": it is the same object as document 3 from line 12 on, kind "ClusterRole", name "r"; keep one of them"#,
    ];
    assert_eq!(reviewed(text), Review { mistakes: expected.map(str::to_owned).into(), warnings: Vec::new() });
}

#[test]
fn mistakes_begin_with_their_place() {
    let text = "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata: {name: a.b}\n---\n\
        apiVersion: v1\nkind: Service\nmetadata: {name: s}\nspec: {ports: [{port: 1}, {port: 1}]}\n";
    let expected = [
        r#"document 1 from line 1 on, kind "CustomResourceDefinition", name "a.b": the CRD has no spec"#,
        r#"document 2 from line 5 on, kind "Service", name "s": spec.ports[0] and [1] have the same port 1 and protocol "TCP""#,
    ];
    assert_eq!(reviewed(text).mistakes, expected);
}

#[test]
fn versions_that_are_not_served_everywhere_are_warnings() {
    for (api_version, kind, warning) in [
        ("policy/v1", "PodDisruptionBudget", None),
        ("example.test/v1beta1", "PodDisruptionBudget", None),
        (
            "policy/v1beta1",
            "PodDisruptionBudget",
            Some("no API server since Kubernetes 1.25 serves PodDisruptionBudget in policy/v1beta1; write policy/v1"),
        ),
        (
            "policy/v1beta1",
            "PodSecurityPolicy",
            Some("no API server since Kubernetes 1.25 serves PodSecurityPolicy in policy/v1beta1; nothing replaces it"),
        ),
        (
            "extensions/v1beta1",
            "Ingress",
            Some(
                "no API server since Kubernetes 1.22 serves Ingress in extensions/v1beta1; write networking.k8s.io/v1",
            ),
        ),
        ("apps/v2", "Deployment", Some("not every API server serves Deployment in apps/v2; write apps/v1")),
        ("v2", "ConfigMap", Some("not every API server serves ConfigMap in v2; write v1")),
        (
            "resource.k8s.io/v1",
            "DeviceClass",
            Some(
                "not every API server serves DeviceClass in resource.k8s.io/v1; without it the module is in state Error",
            ),
        ),
    ] {
        let text = format!("apiVersion: {api_version}\nkind: {kind}\nmetadata: {{name: a}}\n");
        let place = format!("document 1 from line 1 on, kind {kind:?}, name \"a\"");
        let expected: Vec<_> = warning.iter().map(|warning| format!("{place}: {warning}")).collect();
        assert_eq!(reviewed(&text), Review { mistakes: Vec::new(), warnings: expected }, "{api_version}");
    }
}

#[test]
fn hooks_are_warnings() {
    let warning = |hook: &str| {
        let text = format!(
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: a, annotations: {{\"helm.sh/hook\": {hook:?}}}}}\n"
        );
        let review = reviewed(&text);
        assert_eq!(review.mistakes, [""; 0]);
        review.warnings[0].rsplit(": ").next().unwrap().to_owned()
    };
    assert_eq!(
        warning("pre-delete"),
        "it is a hook of Helm for a removal, a rollback or a test, and is never installed"
    );
    let ordinary = "it is a hook of Helm, and is installed like the other objects, neither before nor after them";
    assert_eq!(warning("post-install,post-upgrade"), ordinary);
}
