//! Tests of the fake server: unit tests of the product rely on these rules.

use futures::future::try_join;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
};

use super::*;

const ID: &str = "configmaps/one";

fn maps(server: &FakeApiServer) -> Api<ConfigMap> {
    Api::namespaced(server.client(), "a")
}

fn map(value: Value) -> ConfigMap {
    serde_json::from_value(value).unwrap()
}

fn code(result: kube::Result<impl Sized>) -> Option<u16> {
    match result.err()? {
        kube::Error::Api(status) => Some(status.code),
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn replace_compares_the_resource_version() {
    let server = FakeApiServer::default();
    let maps = maps(&server);
    let created = maps.create(&PostParams::default(), &map(json!({"metadata": {"name": "one"}}))).await.unwrap();
    assert_eq!(code(maps.create(&PostParams::default(), &created).await), Some(409));
    server.edit(ID, |object| object["data"] = json!({"a": "1"}));
    assert_eq!(code(maps.replace("one", &PostParams::default(), &created).await), Some(409));
    let current = maps.get("one").await.unwrap();
    let replaced = maps.replace("one", &PostParams::default(), &current).await.unwrap();
    assert_eq!(replaced.metadata.resource_version, current.metadata.resource_version, "an equal object is not written");
    assert_eq!(server.writes(), ["POST configmaps", "POST configmaps", "PUT configmaps/one", "PUT configmaps/one"]);
}

#[tokio::test]
async fn apply_removes_only_fields_of_its_manager() {
    let server = FakeApiServer::default();
    let maps = maps(&server);
    let apply = async |data: Value| {
        let body = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}, "data": data});
        maps.patch("one", &PatchParams::apply("m").force(), &Patch::Apply(body)).await.unwrap();
        server.object(ID).unwrap()["data"].clone()
    };
    assert_eq!(apply(json!({"a": "1", "b": "2"})).await, json!({"a": "1", "b": "2"}));
    server.edit(ID, |object| object["data"]["c"] = "3".into());
    assert_eq!(apply(json!({"b": "4"})).await, json!({"b": "4", "c": "3"}));
    let merged = maps.patch("one", &PatchParams::default(), &Patch::Merge(json!({"data": {"c": null}}))).await.unwrap();
    assert_eq!(merged.data.unwrap().keys().collect::<Vec<_>>(), ["b"]);
}

#[tokio::test]
async fn managers_share_equal_fields_and_conflict_about_others_unless_forced() {
    let server = FakeApiServer::default();
    let maps = maps(&server);
    let apply = async |manager: &str, is_forced: bool, data: Value| {
        let mut body = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}});
        if !data.is_null() {
            body["data"] = data;
        }
        let params = PatchParams { force: is_forced, ..PatchParams::apply(manager) };
        let applied = maps.patch("one", &params, &Patch::Apply(body)).await;
        (code(applied), server.object(ID).unwrap()["data"].clone())
    };
    apply("m", true, json!({"a": "1", "b": "1"})).await;
    assert_eq!(apply("n", false, json!({"a": "2", "c": "1"})).await, (Some(409), json!({"a": "1", "b": "1"})));
    let all = json!({"a": "1", "b": "1", "c": "1"});
    assert_eq!(apply("n", false, json!({"a": "1", "c": "1"})).await, (None, all));
    assert_eq!(apply("m", true, json!({"b": "1"})).await.1, json!({"a": "1", "b": "1", "c": "1"}), "the other owns it");
    assert_eq!(apply("n", true, json!({"b": "2"})).await.1, json!({"b": "2"}));
    assert_eq!(apply("m", true, Value::Null).await.1, json!({"b": "2"}), "it was taken over");
    apply("n", true, Value::Null).await;
    assert_eq!(server.object(ID).unwrap()["metadata"]["managedFields"], json!([]));
}

#[tokio::test]
async fn json_patch_with_a_failed_test_changes_nothing() {
    let server = FakeApiServer::default();
    server.edit(ID, |object| object["data"] = json!({"a": "1"}));
    let patch = async |before: &str| {
        let operations = json!([
            {"op": "replace", "path": "/data/a", "value": "2"},
            {"op": "test", "path": "/metadata/uid", "value": before},
        ]);
        let patch: json_patch::Patch = serde_json::from_value(operations).unwrap();
        maps(&server).patch("one", &PatchParams::default(), &Patch::Json::<()>(patch)).await
    };
    assert_eq!(code(patch("other").await), Some(422));
    assert_eq!(server.object(ID).unwrap()["data"]["a"], "1");
    assert_eq!(patch("uid-1").await.unwrap().data.unwrap()["a"], "2");
}

#[test]
fn conditions_and_channels_are_maps_and_other_lists_are_atomic() {
    let condition = |kind: &str, status: &str| json!({"type": kind, "status": status});
    let mut live = json!({"conditions": [condition("A", "True"), condition("Other", "True")], "list": [1, 2]});
    let before = json!({"conditions": [condition("A", "True")], "list": [1, 2]});
    apply::apply(&before, &json!({"conditions": [condition("B", "False")], "list": [3]}), &mut live, &[]);
    assert_eq!(live, json!({"conditions": [condition("B", "False"), condition("Other", "True")], "list": [3]}));
}

#[tokio::test]
async fn deletion_compares_the_uid_and_waits_for_finalizers() {
    let server = FakeApiServer::default();
    let maps = maps(&server);
    server.edit(ID, |object| object["metadata"]["finalizers"] = json!(["f"]));
    let by_uid = |uid: &str| DeleteParams {
        preconditions: Some(Preconditions { uid: Some(uid.to_owned()), resource_version: None }),
        ..DeleteParams::default()
    };
    assert_eq!(code(maps.delete("one", &by_uid("other")).await), Some(409));
    maps.delete("one", &by_uid("uid-1")).await.unwrap();
    assert!(!server.object(ID).unwrap()["metadata"]["deletionTimestamp"].is_null());
    server.edit(ID, |object| object["metadata"]["finalizers"] = json!([]));
    assert_eq!(server.object(ID), None);
    assert_eq!(code(maps.delete("one", &DeleteParams::default()).await), Some(404));
}

#[tokio::test]
async fn refused_and_unserved_requests_change_nothing() {
    let server = FakeApiServer::default();
    let maps = maps(&server);
    let new = map(json!({"metadata": {"name": "one"}}));
    server.refuse("WRITE configmaps", 403);
    assert_eq!(code(maps.create(&PostParams::default(), &new).await), Some(403));
    assert_eq!(code(maps.get("one").await), Some(404));
    server.refuse_nothing();
    server.unserve("configmaps", true);
    assert_eq!(code(maps.create(&PostParams::default(), &new).await), Some(404));
    server.unserve("configmaps", false);
    assert!(server.objects().is_empty());
    maps.create(&PostParams::default(), &new).await.unwrap();
    assert!(server.objects().contains_key(ID));
}

#[tokio::test]
async fn a_runtime_discovers_and_serves_the_versions_of_its_definitions() {
    let server = FakeApiServer::runtime();
    let read = async |path: &str| {
        let text = server.client().request_text(http::Request::get(path).body(Vec::new()).unwrap()).await;
        text.map(|text| serde_json::from_str::<Value>(&text).unwrap())
    };
    assert_eq!(code(read("/apis/example.com").await), Some(404));
    assert_eq!(code(read("/apis/example.com/v1/things").await), Some(404));
    let versions = json!([{"name": "v1", "served": true}, {"name": "v2", "served": false}]);
    server.edit("customresourcedefinitions/things.example.com", |definition| {
        definition["spec"] = json!({"group": "example.com", "scope": "Cluster", "versions": versions,
            "names": {"plural": "things", "kind": "Thing"}});
    });
    assert_eq!(read("/apis/example.com").await.unwrap()["versions"], json!([{"version": "v1"}]));
    let resource = &read("/apis/example.com/v1").await.unwrap()["resources"][0];
    assert_eq!((&resource["name"], &resource["namespaced"]), (&json!("things"), &json!(false)));
    assert_eq!(read("/apis/example.com/v1/things").await.unwrap()["items"], json!([]));
    for path in ["/apis/example.com/v2", "/apis/example.com/v2/things", "/apis/other.com/v1"] {
        assert_eq!(code(read(path).await), Some(404), "{path}");
    }
    server.refuse("GET /apis/example.com/v1", 503);
    assert_eq!(code(read("/apis/example.com/v1").await), Some(503));
    server.unserve("things", true);
    assert_eq!(code(read("/apis/example.com").await), Some(404));
    assert_eq!(server.calls().len(), 10);
}

#[tokio::test(start_paused = true)]
async fn requests_in_a_row_take_a_round_trip_each_and_those_together_one() {
    let round_trip = Duration::from_millis(100);
    let server = FakeApiServer::default();
    server.edit(ID, |object| object["data"] = json!({"a": "1"}));
    server.set_round_trip(round_trip);
    let maps = maps(&server);
    let start = Instant::now();
    maps.get("one").await.unwrap();
    try_join(maps.get("one"), maps.get("one")).await.unwrap();
    assert_eq!(start.elapsed(), 2 * round_trip);
    let arrivals: Vec<_> = server.timed_calls().into_iter().map(|(at, _)| at - start).collect();
    assert_eq!(arrivals, [1u32, 3, 3].map(|times| times * round_trip / 2));
}

#[tokio::test]
async fn late_definition_is_established_by_its_first_read() {
    let server = FakeApiServer::runtime();
    server.establish_late();
    let id = "customresourcedefinitions/things.example.com";
    server.edit(id, |definition| definition["spec"] = json!({"group": "example.com"}));
    assert_eq!(server.object(id).unwrap()["status"], Value::Null);
    let path = format!("/apis/apiextensions.k8s.io/v1/{id}");
    let text = server.client().request_text(http::Request::get(path).body(Vec::new()).unwrap()).await.unwrap();
    let read: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(read["status"]["conditions"][0]["type"], "Established");
    assert_eq!(server.object(id).unwrap(), read);
}

#[test]
fn paths_name_objects_by_plural_and_name() {
    for (path, id) in [
        ("/api/v1/namespaces", ("namespaces", false)),
        ("/api/v1/namespaces/a", ("namespaces/a", false)),
        ("/api/v1/namespaces/a/configmaps", ("configmaps", false)),
        ("/api/v1/namespaces/a/configmaps/one", ("configmaps/one", false)),
        ("/apis/operator.kyma-project.io/v1beta2/namespaces/a/kymas/k/status", ("kymas/k", true)),
        ("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/c", ("customresourcedefinitions/c", false)),
    ] {
        assert_eq!(object_id(path), (id.0.to_owned(), id.1), "{path}");
    }
}

#[test]
fn merge_patch_sets_removes_and_leaves() {
    let mut live = json!({"a": {"b": 1, "c": 2}, "d": [1, 2]});
    merge(&json!({"a": {"b": null, "e": {"f": null, "g": 1}}, "d": [3]}), &mut live);
    assert_eq!(live, json!({"a": {"c": 2, "e": {"g": 1}}, "d": [3]}));
}
