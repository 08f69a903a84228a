//! Tests of the plan, and of its execution against a fake API server.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::ApiResource;

use super::*;
use crate::testing::FakeApiServer;

const ID: &str = "customresourcedefinitions/things.example.com";
const WHOLE: Turn = Turn { objects: usize::MAX, time: Duration::MAX, waits_for_storage: true };

/// A CRD with these versions; the first one is the storage version.
fn crd(scope: &str, versions: &[&str]) -> Value {
    let version = |(n, name): (usize, &&str)| json!({"name": name, "served": true, "storage": n == 0, "schema": name});
    let versions: Vec<_> = versions.iter().enumerate().map(version).collect();
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "things.example.com"}, "spec": {"group": "example.com", "scope": scope,
            "names": {"kind": "Thing", "plural": "things"}, "versions": versions}})
}

fn live(versions: &[&str], stored: &[&str]) -> DynamicObject {
    let mut live = crd("Namespaced", versions);
    live["metadata"]["resourceVersion"] = json!("7");
    live["status"] = json!({"storedVersions": stored});
    serde_json::from_value(live).unwrap()
}

/// Storage version, version of the requests, and the versions to be written, the storage version marked.
fn plan(live: &DynamicObject, desired: &Value) -> Option<(String, String, Option<Vec<String>>)> {
    let migration = Migration::of(live, desired)?;
    let mark = |version: &Value| {
        let mark = if version["storage"] == true { "*" } else { "" };
        format!("{}{mark}", version["name"].as_str().unwrap())
    };
    let versions = migration.versions.map(|versions| versions.iter().map(mark).collect());
    Some((migration.storage, migration.served, versions))
}

fn planned(storage: &str, served: &str, versions: Option<&[&str]>) -> Option<(String, String, Option<Vec<String>>)> {
    let versions = versions.map(|versions| versions.iter().map(|version| (*version).to_owned()).collect());
    Some((storage.to_owned(), served.to_owned(), versions))
}

#[test]
fn only_a_stored_version_that_goes_needs_a_migration() {
    let desired = crd("Namespaced", &["v2"]);
    for (versions, stored, expected) in [
        (&["v2"][..], &["v2"][..], None),
        (&["v2", "v1"], &["v2"], None),
        (&["v2", "v1"], &[], None),
        (&["v2", "v1"], &["v1", "v2"], planned("v2", "v2", None)),
        (&["v1", "v2"], &["v1"], planned("v2", "v2", Some(&["v1", "v2*"]))),
        (&["v1"], &["v1"], planned("v2", "v2", Some(&["v1", "v2*"]))),
        (&["v3", "v2"], &["v3", "v2"], planned("v2", "v2", Some(&["v3", "v2*"]))),
    ] {
        assert_eq!(plan(&live(versions, stored), &desired), expected, "{versions:?} {stored:?}");
    }
    assert_eq!(plan(&live(&["v1"], &["v1"]), &crd("Namespaced", &["v2", "v1"])), None, "the version stays");
    assert_eq!(plan(&live(&["v1"], &["v1"]), &crd("Cluster", &["v2"])), None, "it is refused all the same");
    assert_eq!(plan(&live(&["v1"], &["v1"]), &json!({"kind": "ConfigMap"})), None);
}

#[test]
fn objects_are_written_in_a_served_version() {
    let mut live = live(&["v1", "v2"], &["v1"]);
    live.data["spec"]["versions"][1]["served"] = json!(false);
    let expected = planned("v2", "v1", Some(&["v1", "v2*"]));
    assert_eq!(plan(&live, &crd("Namespaced", &["v2"])), expected);
}

/// Entry of `managedFields` in a version.
fn entry(version: &str) -> Value {
    json!({"manager": version, "operation": "Apply", "apiVersion": format!("example.com/{version}"),
        "fieldsType": "FieldsV1", "fieldsV1": {"f:spec": {"f:a": {}}}})
}

#[test]
fn entries_in_a_version_that_goes_move_to_the_one_that_stays() {
    let patch_of = |migration: &Migration, versions: &[&str]| {
        let entries: Vec<_> = versions.iter().map(|version| entry(version)).collect();
        let head = json!({"name": "n", "resourceVersion": "7", "managedFields": entries});
        match migration.patch_of(&serde_json::from_value(head).unwrap()) {
            Patch::Json(patch) => json!(patch),
            Patch::Merge(patch) => patch,
            patch => panic!("{patch:?}"),
        }
    };
    let migration = |served| {
        let mut live = live(&["v2", "v3", "v1"], &["v2", "v1"]);
        live.data["spec"]["versions"][0]["served"] = json!(served);
        Migration::of(&live, &crd("Namespaced", &["v2", "v3"])).unwrap()
    };
    for versions in [&[][..], &["v2"], &["v2", "v3"]] {
        assert_eq!(patch_of(&migration(true), versions), json!({}), "{versions:?}");
    }
    let in_v2 = |manager: &str| {
        let mut entry = entry(manager);
        entry["apiVersion"] = json!("example.com/v2");
        entry
    };
    for versions in [&["v1"][..], &["v3", "v1"]] {
        let moved: Vec<_> = versions.iter().map(|version| in_v2(version)).collect();
        let expected = json!([{"op": "test", "path": "/metadata/resourceVersion", "value": "7"},
            {"op": "replace", "path": "/metadata/managedFields", "value": moved}]);
        assert_eq!(patch_of(&migration(true), versions), expected, "{versions:?}");
    }
    assert_eq!(patch_of(&migration(false), &["v1"]), json!({}), "no request can be in the version that stays");
}

struct Fixture {
    server: FakeApiServer,
    progress: Progress,
}

impl Fixture {
    /// A runtime with the versions `v1` and `v2`, and this many objects in `v1`.
    fn new(scope: &str, objects: usize) -> Self {
        let server = FakeApiServer::runtime().with_pages_of(PAGE as usize);
        server.edit(ID, |definition| {
            *definition = crd(scope, &["v1", "v2"]);
            definition["status"] = json!({"storedVersions": ["v1"]});
        });
        for n in 0..objects {
            let namespace = (scope == "Namespaced").then_some("user");
            server.edit(&format!("things/n{n:03}"), |thing| *thing = json!({"metadata": {"namespace": namespace}}));
        }
        server.calls();
        Self { server, progress: Progress::default() }
    }

    async fn advance(&mut self, turn: Turn) -> Result<bool, String> {
        let live = serde_json::from_value(self.server.object(ID).unwrap()).unwrap();
        let scope = self.server.object(ID).unwrap()["spec"]["scope"].as_str().unwrap().to_owned();
        let migration = Migration::of(&live, &crd(&scope, &["v2"])).unwrap();
        let client = self.server.client();
        let definitions = Api::all_with(client.clone(), &ApiResource::erase::<CustomResourceDefinition>(&()));
        let advanced = migration.advance(&client, &definitions, "m", &mut self.progress, turn).await;
        advanced.map_err(|error| error.to_string())
    }

    /// Number of written objects, and whether the stored versions were changed.
    fn written(&self) -> (usize, bool) {
        let calls = self.server.calls();
        let objects = calls.iter().filter(|call| call.starts_with("PATCH things/")).count();
        (objects, calls.contains(&format!("PATCH {ID}/status")))
    }
}

#[tokio::test(start_paused = true)]
async fn all_objects_are_written_between_the_two_writes_of_the_definition() {
    for (scope, objects) in [("Namespaced", 120), ("Cluster", 3), ("Namespaced", 0)] {
        let mut fixture = Fixture::new(scope, objects);
        assert_eq!(fixture.advance(WHOLE).await, Ok(true));
        let mut calls = fixture.server.calls();
        calls.retain(|call| !call.starts_with("GET"));
        assert_eq!(calls.len(), objects + 2);
        assert_eq!((&*calls[0], &*calls[objects + 1]), (&*format!("PATCH {ID}"), &*format!("PATCH {ID}/status")));
        let definition = fixture.server.object(ID).unwrap();
        assert_eq!(definition["status"]["storedVersions"], json!(["v2"]));
        assert_eq!(
            (&definition["spec"]["versions"][0]["storage"], &definition["spec"]["versions"][1]["storage"]),
            (&json!(false), &json!(true))
        );
    }
}

#[tokio::test(start_paused = true)]
async fn turns_are_bounded_and_go_on_where_the_last_one_ended() {
    let mut fixture = Fixture::new("Namespaced", 240);
    let turn = Turn { objects: 100, waits_for_storage: false, ..WHOLE };
    // API servers that have not noticed the storage version would store the objects in the former one.
    for _ in 0..2 {
        assert_eq!((fixture.advance(turn).await, fixture.written()), (Ok(false), (0, false)));
        tokio::time::advance(STORAGE_SETTLES / 2).await;
    }
    let mut written = Vec::new();
    for expected in [false, false, true] {
        assert_eq!(fixture.advance(turn).await, Ok(expected));
        written.push(fixture.written());
    }
    assert_eq!(written, [(100, false), (100, false), (40, true)]);
    let mut slow = Fixture::new("Namespaced", 120);
    let turn = Turn { time: Duration::ZERO, ..WHOLE };
    assert_eq!((slow.advance(turn).await, slow.written().0), (Ok(false), 50));
}

#[tokio::test(start_paused = true)]
async fn failure_names_the_object_and_is_overcome() {
    let mut fixture = Fixture::new("Namespaced", 120);
    fixture.server.refuse("WRITE things/n070", 422);
    assert_eq!(fixture.advance(WHOLE).await, Err("store Thing user/n070 in the version v2".to_owned()));
    assert!(!fixture.written().1);
    fixture.server.refuse_nothing();
    assert_eq!((fixture.advance(WHOLE).await, fixture.written()), (Ok(true), (70, true)));
}

#[tokio::test(start_paused = true)]
async fn another_writer_of_the_definition_is_not_overwritten() {
    let mut fixture = Fixture::new("Namespaced", 1);
    fixture.server.meanwhile("PATCH things/n000", ID, |definition| definition["spec"]["x"] = json!(1));
    let refused = "drop the former stored versions of the CRD things.example.com";
    assert_eq!(fixture.advance(WHOLE).await, Err(refused.to_owned()));
    assert_eq!(fixture.advance(WHOLE).await, Ok(true));
}

#[tokio::test(start_paused = true)]
async fn object_that_changes_meanwhile_is_written_as_it_is_then() {
    let id = "things/n000";
    let mut fixture = Fixture::new("Namespaced", 1);
    fixture.server.edit(id, |thing| thing["metadata"]["managedFields"] = json!([entry("v1")]));
    fixture.server.meanwhile("PATCH things/n000", id, |thing| thing["spec"] = json!({"a": 2}));
    let refused = "store Thing user/n000 in the version v2";
    assert_eq!(fixture.advance(WHOLE).await, Err(refused.to_owned()));
    assert_eq!(fixture.advance(WHOLE).await, Ok(true));
    let thing = fixture.server.object(id).unwrap();
    assert_eq!(thing["spec"], json!({"a": 2}));
    assert_eq!(thing["metadata"]["managedFields"][0]["apiVersion"], "example.com/v2");
}
