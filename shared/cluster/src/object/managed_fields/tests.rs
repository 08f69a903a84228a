use serde_json::json;

use super::*;

const MANAGER: &str = "m";

fn live(entries: &Value, annotations: &Value) -> DynamicObject {
    serde_json::from_value(json!({"metadata": {"name": "n", "resourceVersion": "7", "managedFields": entries,
        "annotations": annotations}}))
    .unwrap()
}

fn entry(manager: &str, operation: &str, version: &str, set: &Value) -> Value {
    json!({"manager": manager, "operation": operation, "apiVersion": version, "fieldsType": "FieldsV1", "fieldsV1": set})
}

/// Entries after a correction.
fn entries(correction: &Correction) -> Value {
    json!(correction.operations())[0]["value"].clone()
}

#[test]
fn what_a_tool_applied_becomes_ours_and_what_a_user_edited_stays() {
    let desired = json!({"apiVersion": "apps/v1", "kind": "Deployment"});
    let applied = json!({"f:spec": {"f:args": {}}, "f:status": {"f:x": {}}});
    let edited = entry("kubectl-edit", "Update", "apps/v1", &json!({"f:spec": {"f:image": {}}}));
    let controller = json!({"manager": "kube-controller-manager", "operation": "Update", "apiVersion": "apps/v1",
        "fieldsType": "FieldsV1", "fieldsV1": {"f:status": {}}, "subresource": "status"});
    let last_applied = json!({LAST_APPLIED: "{}"});
    for (tool, operation) in TOOLS {
        let tool = entry(tool, operation, "apps/v1", &applied);
        let live = live(&json!([tool, edited, controller]), &last_applied);
        let found = correction(MANAGER, &desired, &live, false).unwrap();
        assert!(found.is_adoption && !found.is_of_versions);
        let ours = entry(MANAGER, "Apply", "apps/v1", &json!({"f:spec": {"f:args": {}}}));
        assert_eq!(entries(&found), json!([edited, controller, ours]), "{tool}");
        let removed =
            json!({"op": "remove", "path": "/metadata/annotations/kubectl.kubernetes.io~1last-applied-configuration"});
        assert_eq!(json!(found.operations())[1], removed);
    }
    let users = live(&json!([edited, controller]), &last_applied);
    assert_eq!(correction(MANAGER, &desired, &users, true), None);
}

#[test]
fn object_of_ours_is_adopted_only_until_the_module_was_applied() {
    let desired = json!({"apiVersion": "v1", "kind": "ConfigMap"});
    let ours = entry(MANAGER, "Apply", "v1", &json!({"f:data": {"f:a": {}}}));
    let tool = entry("kubectl-client-side-apply", "Update", "v1", &json!({"f:data": {"f:b": {}}}));
    let live = live(&json!([ours, tool]), &json!({}));
    assert_eq!(correction(MANAGER, &desired, &live, false), None);
    let found = correction(MANAGER, &desired, &live, true).unwrap();
    let both = entry(MANAGER, "Apply", "v1", &json!({"f:data": {"f:a": {}, "f:b": {}}}));
    assert_eq!((entries(&found), found.operations().len()), (json!([both]), 1));
}

#[test]
fn versions_of_a_crd_and_kinds_with_data_are_not_adopted() {
    let set = json!({"f:spec": {"f:versions": {}, "f:names": {"f:plural": {}}}});
    let tool = entry("kubectl-create", "Update", "apiextensions.k8s.io/v1", &set);
    let desired = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"});
    let found = correction(MANAGER, &desired, &live(&json!([tool]), &json!({})), false).unwrap();
    let left = entry("kubectl-create", "Update", "apiextensions.k8s.io/v1", &json!({"f:spec": {"f:versions": {}}}));
    let names = entry(MANAGER, "Apply", "apiextensions.k8s.io/v1", &json!({"f:spec": {"f:names": {"f:plural": {}}}}));
    assert_eq!(entries(&found), json!([left, names]));
    let adopted = live(&entries(&found), &json!({}));
    assert_eq!(correction(MANAGER, &desired, &adopted, true), None, "nothing is left to adopt");
    for kind in NOT_ADOPTED {
        let tool = entry("kubectl-create", "Update", "v1", &set);
        let desired = json!({"apiVersion": "v1", "kind": kind});
        assert_eq!(correction(MANAGER, &desired, &live(&json!([tool]), &json!({})), false), None);
    }
    // The names of fields of a typed object differ between versions.
    let tool = entry("helm", "Update", "autoscaling/v1", &set);
    let desired = json!({"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler"});
    assert_eq!(correction(MANAGER, &desired, &live(&json!([tool]), &json!({})), false), None);
}

#[test]
fn entries_of_a_custom_resource_follow_our_version() {
    let set = json!({"f:spec": {"f:a": {}}});
    let entries_in = |ours: &str, theirs: &str| {
        json!([entry(MANAGER, "Apply", ours, &set), entry("operator", "Update", theirs, &set)])
    };
    let desired = json!({"apiVersion": "x.test/v2", "kind": "Sample"});
    let found = correction(MANAGER, &desired, &live(&entries_in("x.test/v1", "x.test/v1"), &json!({})), false).unwrap();
    assert!(found.is_of_versions && !found.is_adoption);
    assert_eq!(entries(&found), entries_in("x.test/v2", "x.test/v2"));
    // The operator may write in any version.
    assert_eq!(correction(MANAGER, &desired, &live(&entries_in("x.test/v2", "x.test/v1"), &json!({})), false), None);
    // The API server knows the versions of its own kinds.
    let desired = json!({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget"});
    let entries = entries_in("policy/v1beta1", "policy/v1beta1");
    assert_eq!(correction(MANAGER, &desired, &live(&entries, &json!({})), false), None);
}

#[test]
fn fields_that_an_adoption_removes_are_named_without_defaults() {
    let container = json!({".": {}, "f:name": {}, "f:image": {}, "f:args": {}, "f:imagePullPolicy": {}});
    let set = json!({
        "f:metadata": {"f:annotations": {".": {}, "f:kubectl.kubernetes.io/last-applied-configuration": {}, "f:note": {}},
            "f:labels": {".": {}, "f:app": {}}},
        "f:spec": {"f:progressDeadlineSeconds": {}, "f:paused": {},
            "f:template": {"f:spec": {"f:containers": {
                "k:{\"name\":\"manager\"}": container, "k:{\"name\":\"sidecar\"}": container}}}},
        "f:status": {"f:replicas": {}},
    });
    let desired = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"labels": {"app": "x"}},
        "spec": {"template": {"spec": {"containers": [{"name": "manager", "image": "i"}]}}}});
    let head = live(&json!([entry("kubectl-client-side-apply", "Update", "apps/v1", &set)]), &json!({})).metadata;
    let expected = [
        "metadata.annotations.note",
        "spec.paused",
        "spec.template.spec.containers[manager].args",
        "spec.template.spec.containers[sidecar]",
    ];
    assert_eq!(surplus_of_tools(&desired, &head), (expected.map(str::to_owned).to_vec(), 4));
    let many: Value = (0..9).map(|n| (format!("f:k{n}"), json!({}))).collect::<serde_json::Map<_, _>>().into();
    let head = live(&json!([entry("helm", "Apply", "v1", &json!({"f:data": many}))]), &json!({})).metadata;
    let desired = json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {}});
    let (named, number) = surplus_of_tools(&desired, &head);
    assert_eq!((named.len(), number), (MAX_NAMED, 9));
    let edited =
        live(&json!([entry("kubectl-edit", "Update", "v1", &json!({"f:data": {"f:a": {}}}))]), &json!({})).metadata;
    assert_eq!(surplus_of_tools(&desired, &edited), (vec![], 0));
}
