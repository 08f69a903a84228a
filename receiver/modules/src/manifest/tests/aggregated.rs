//! Aggregated ClusterRoles, which a controller of Kubernetes applies again after their deletion.

use super::*;

const ROLE: &str = "clusterroles/aggregated";

fn entry(manager: &str) -> Value {
    json!({"manager": manager, "operation": "Apply", "apiVersion": "rbac.authorization.k8s.io/v1", "fieldsV1": {}})
}

#[tokio::test(start_paused = true)]
async fn removal_looks_again_at_an_aggregated_cluster_role_and_deletes_what_its_controller_left() {
    let mut fixture = Fixture::new();
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": "aggregated"}, "rules": [],
        "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"a": "b"}}]}});
    fixture.set_layer(ModuleObjects::Ready(Arc::new([objects(), vec![role]].concat())));
    fixture.reconcile().await;
    fixture.runtime.edit(ROLE, |role| {
        assert_eq!(role.get("rules"), None, "they are the controller's");
        role["rules"] = json!([{"verbs": ["get"]}]);
        let entries = role["metadata"]["managedFields"].as_array_mut().unwrap();
        entries.push(entry("clusterrole-aggregation-controller"));
    });
    fixture.make_available();
    fixture.reconcile().await;
    fixture.verify().await;
    assert_eq!(fixture.runtime.object(ROLE).unwrap()["rules"], json!([{"verbs": ["get"]}]));

    fixture.delete_manifest();
    let outcome = fixture.reconcile().await;
    assert!(outcome.failed.is_empty() && outcome.requeue_after.is_some(), "{outcome:?}");
    let waiting = "waiting for objects to be deleted: ClusterRole aggregated";
    assert_eq!(fixture.state(), (State::Deleting, waiting.to_owned()));
    assert!(fixture.runtime.object(ROLE).is_none());
    let entries = json!([entry("clusterrole-aggregation-controller")]);
    fixture.runtime.edit(ROLE, |role| *role = json!({"metadata": {"managedFields": entries}, "rules": []}));
    fixture.reconcile().await;
    assert!(fixture.runtime.object(ROLE).is_none() && fixture.manifest().is_some());
    assert_eq!(fixture.reconcile().await, ended());
    assert!(fixture.manifest().is_none());
}

#[tokio::test(start_paused = true)]
async fn aggregated_cluster_roles_are_deleted_before_those_that_they_select() {
    let mut fixture = Fixture::new();
    let role = |name: &str| {
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": name, "labels": {"a": "b"}}, "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]})
    };
    let mut aggregated = role("aggregated");
    aggregated["aggregationRule"] = json!({"clusterRoleSelectors": [{"matchLabels": {"a": "b"}}]});
    fixture.set_layer(ModuleObjects::Ready(Arc::new([objects(), vec![role("a"), aggregated, role("b")]].concat())));
    fixture.reconcile().await;
    fixture.runtime.edit(ROLE, |role| {
        let entries = role["metadata"]["managedFields"].as_array_mut().unwrap();
        entries.push(entry("clusterrole-aggregation-controller"));
    });

    fixture.delete_manifest();
    fixture.runtime.calls();
    fixture.reconcile().await;
    let writes = fixture.runtime.writes();
    let deleted: Vec<_> = writes.iter().filter_map(|call| call.strip_prefix("DELETE clusterroles/")).collect();
    assert_eq!(deleted, ["aggregated", "a", "b"]);
}
