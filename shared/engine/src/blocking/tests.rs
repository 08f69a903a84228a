//! Tests of the selection, and of the search against a fake API server.

use std::time::Duration;

use http::StatusCode;
use serde_json::{Value, json};
use tidewatch_api::{Resource, key::KymaKey};
use tidewatch_cluster::{
    kinds::KindCache,
    testing::{self, FakeApiServer},
};
use tokio::time::Instant;

use super::*;

const GROUP: &str = "example.com";
const OWNER: &str = "kcp-system/m";

fn key(kind: &str, namespace: &str, name: &str) -> ObjectKey {
    ObjectKey::new(GROUP, kind, namespace, name)
}

/// Listed objects of one kind; cluster-scoped ones have no namespace.
fn listed(keys: &[ObjectKey]) -> Listed {
    let kind = keys.first().map(|key| (key.group.clone(), key.kind.clone())).unwrap_or_default();
    let is_namespaced = keys.iter().all(|key| !key.namespace.is_empty());
    let objects = keys.iter().map(|key| (key.clone(), Origin::default())).collect();
    Listed { kind, is_namespaced, objects, is_cut: false, associated: None }
}

fn inventory(keys: &[ObjectKey]) -> Inventory {
    let entry = |key: &ObjectKey| Resource {
        group: key.group.clone(),
        version: "v1".to_owned(),
        kind: key.kind.clone(),
        namespace: key.namespace.clone(),
        name: key.name.clone(),
        ..Resource::default()
    };
    Inventory::read(&keys.iter().map(entry).collect::<Vec<_>>())
}

/// The CRD `<kind>s.example.com` in an inventory.
fn definition(kind: &str) -> ObjectKey {
    let name = format!("{}s.{GROUP}", kind.to_lowercase());
    ObjectKey::new("apiextensions.k8s.io", "CustomResourceDefinition", "", &name)
}

fn manifest(policy: &str, resource: Value) -> Manifest {
    serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
        "metadata": {"name": "m", "namespace": "kcp-system"},
        "spec": {"remote": true, "install": {"name": "i", "source": {}}, "customResourcePolicy": policy,
            "resource": resource}}))
    .unwrap()
}

fn default_of(kind: &str) -> Value {
    json!({"apiVersion": "example.com/v1", "kind": kind, "metadata": {"name": "default", "namespace": "kyma-system"}})
}

/// Text of the blockers among listed objects.
fn text(listed: &[Listed], inventory: &Inventory, manifest: &Manifest) -> String {
    sort(listed, &Exempt::of(manifest, inventory)).blockers.to_string()
}

#[test]
fn objects_of_the_inventory_and_the_default_object_do_not_block() {
    let all = [key("Sample", "a", "own"), key("Sample", "b", "own"), key("Sample", "kyma-system", "default")];
    let own = inventory(&all[..1]);
    let listed = [listed(&all)];
    let by = |policy| text(&listed, &own, &manifest(policy, default_of("Sample")));
    assert_eq!(by("CreateAndDelete"), "Sample b/own");
    assert_eq!(by("Ignore"), "Sample b/own, Sample kyma-system/default");
    assert_eq!(text(&listed, &inventory(&all), &manifest("Ignore", default_of("Sample"))), "");
    let other_kind = manifest("CreateAndDelete", default_of("Other"));
    assert_eq!(text(&listed, &own, &other_kind), "Sample b/own, Sample kyma-system/default");
}

#[test]
fn the_namespace_of_a_cluster_scoped_object_has_no_meaning() {
    let listed = [listed(&[key("Sample", "", "default"), key("Sample", "", "own"), key("Sample", "", "users")])];
    let own = inventory(&[key("Sample", "somewhere", "own")]);
    assert_eq!(text(&listed, &own, &manifest("CreateAndDelete", default_of("Sample"))), "Sample users");
}

#[test]
fn the_sentence_is_sorted_and_bounded() {
    let keys: Vec<_> = (0..8).rev().map(|n| key("Sample", "a", &format!("n{n}"))).collect();
    let none = inventory(&[]);
    let manifest = manifest("Ignore", Value::Null);
    let start = "Sample a/n0, Sample a/n1, Sample a/n2, Sample a/n3, Sample a/n4";
    assert_eq!(text(&[listed(&keys)], &none, &manifest), format!("{start} and 3 more"));
    assert_eq!(text(&[listed(&keys[..4]), listed(&keys[4..])], &none, &manifest), format!("{start} and 3 more"));
    assert_eq!(text(&[listed(&keys[3..])], &none, &manifest), start);
    let cut = Listed { is_cut: true, ..listed(&keys) };
    assert_eq!(text(&[cut], &none, &manifest), format!("{start} and many more"));
    assert!(sort(&[listed(&[])], &Exempt::of(&manifest, &none)).blockers.is_empty());
    let of_ours = Listed { is_cut: true, ..listed(&keys[..1]) };
    let blockers = sort(&[of_ours], &Exempt::of(&manifest, &inventory(&keys[..1]))).blockers;
    assert!(!blockers.is_empty(), "those that are not listed may be of users");
    assert_eq!(blockers.to_string(), "more resources than are listed");
}

/// Owner references to these objects.
fn owned_by(owners: &[&ObjectKey]) -> Origin {
    let owners = owners.iter().map(|key| (key.group.clone(), key.kind.clone(), key.name.clone()));
    Origin { owners: owners.collect(), is_default: false }
}

/// Texts of the blockers and of what belongs to the default module CR among these objects of one kind.
fn texts(objects: &[(ObjectKey, Origin)], manifest: &Manifest) -> [String; 2] {
    let keys: Vec<_> = objects.iter().map(|(key, _)| key.clone()).collect();
    let listed = Listed { objects: objects.iter().cloned().collect(), ..listed(&keys) };
    let found = sort(&[listed], &Exempt::of(manifest, &inventory(&[])));
    [found.blockers.to_string(), found.children.to_string()]
}

#[test]
fn objects_that_the_default_object_owns_belong_to_it() {
    let default = key("Sample", "kyma-system", "default");
    let named = |name: &str| key("Sample", "kyma-system", name);
    let child = named("child");
    let grandchild = named("grandchild");
    let users = named("users");
    let elsewhere = key("Sample", "user", "child");
    let unknown = key("Other", "kyma-system", "unknown");
    let objects = [
        (default.clone(), Origin::default()),
        (child.clone(), owned_by(&[&default])),
        (grandchild.clone(), owned_by(&[&child])),
        (named("of-both"), owned_by(&[&default, &users])),
        (named("of-unknown"), owned_by(&[&unknown])),
        (elsewhere, owned_by(&[&default])),
        (users, Origin::default()),
    ];
    let blockers =
        "Sample kyma-system/of-both, Sample kyma-system/of-unknown, Sample kyma-system/users, Sample user/child";
    let children = "Sample kyma-system/child, Sample kyma-system/grandchild";
    let by = |policy: &str| texts(&objects, &manifest(policy, default_of("Sample")));
    assert_eq!(by("CreateAndDelete"), [blockers, children]);
    // They still do once it is gone.
    assert_eq!(texts(&objects[1..], &manifest("CreateAndDelete", default_of("Sample"))), [blockers, children]);
    assert_eq!(by("Ignore")[1], "", "the default module CR stays");
    // One of a cluster-scoped kind owns objects everywhere.
    let cluster = key("Sample", "", "default");
    let own = [(cluster.clone(), Origin::default()), (key("Sample", "", "child"), owned_by(&[&cluster]))];
    assert_eq!(texts(&own, &manifest("CreateAndDelete", default_of("Sample"))), ["", "Sample child"]);
}

#[test]
fn default_object_of_an_associated_kind_may_be_that_of_another_module() {
    let origin = Origin { is_default: true, ..Origin::default() };
    let objects = [(key("Sample", "kyma-system", "other"), origin)].into();
    let associated = Some("samples.example.com".to_owned());
    let listed = Listed { objects, associated, ..listed(&[key("Sample", "kyma-system", "other")]) };
    let none = inventory(&[]);
    let manifest = manifest("CreateAndDelete", Value::Null);
    let found = sort(&[listed], &Exempt::of(&manifest, &none));
    assert_eq!(found.defaults, BTreeSet::new());
    assert_eq!(found.blockers.to_string(), format!("Sample kyma-system/other; {ALLOWS}samples.example.com"));
}

#[test]
fn generations_are_bounded() {
    let name = |n: usize| key("Sample", "kyma-system", &format!("n{n:02}"));
    let mut objects = vec![(name(0), Origin { is_default: true, ..Origin::default() })];
    objects.extend((1..20).map(|n| (name(n), owned_by(&[&name(n - 1)]))));
    let [blockers, children] = texts(&objects, &manifest("CreateAndDelete", Value::Null));
    assert!(blockers.starts_with("Sample kyma-system/n09, "), "{blockers}");
    assert!(children.starts_with("Sample kyma-system/n01, ") && children.ends_with(" and 3 more"), "{children}");
}

#[test]
fn default_objects_are_known_by_the_record_and_by_their_field_manager() {
    let keys = ["created", "named", "other", "users"].map(|name| key("Sample", "kyma-system", name));
    let [created, named, other, _] = &keys;
    let origin = |key: &ObjectKey| Origin { is_default: key == other, ..Origin::default() };
    let objects: Vec<_> = keys.iter().map(|key| (key.clone(), origin(key))).collect();
    let mut default = default_of("Sample");
    default["metadata"]["name"] = json!("named");
    let mut manifest = manifest("CreateAndDelete", default);
    let defaults = |manifest: &Manifest| {
        let all = [Listed { objects: objects.iter().cloned().collect(), ..listed(&keys) }];
        sort(&all, &Exempt::of(manifest, &inventory(&[]))).defaults.into_iter().collect::<Vec<_>>()
    };
    assert_eq!(defaults(&manifest), [named.clone(), other.clone()]);
    let text = json!({"apiVersion": "example.com/v1", "kind": "Sample", "namespace": "kyma-system", "name": "created"});
    manifest.metadata.annotations = Some([(annotation::CREATED_DEFAULT.to_owned(), text.to_string())].into());
    assert_eq!(defaults(&manifest), [created.clone(), other.clone()], "the named one was not created for it");
    assert_eq!(texts(&objects, &manifest)[0], "Sample kyma-system/named, Sample kyma-system/users");
    manifest.spec.custom_resource_policy = Some(CustomResourcePolicy::Ignore);
    assert_eq!(defaults(&manifest), []);
}

/// A runtime with the kind `Sample`.
fn runtime() -> FakeApiServer {
    let server = FakeApiServer::runtime();
    define(&server, "Sample", "Namespaced", OWNER);
    server
}

fn define(server: &FakeApiServer, kind: &str, scope: &str, owner: &str) {
    let key = definition(kind);
    server.edit(&format!("customresourcedefinitions/{}", key.name), |object| {
        *object = json!({"metadata": {"annotations": {annotation::OWNED_BY: owner}}, "spec": {"group": GROUP,
            "scope": scope, "names": {"plural": format!("{}s", kind.to_lowercase()), "kind": kind},
            "versions": [{"name": "v1", "served": true, "storage": true}]}});
    });
}

fn put(server: &FakeApiServer, id: &str, namespace: &str) {
    server.edit(id, |object| *object = json!({"metadata": {"namespace": namespace}}));
}

/// Searches with a new view of the kinds. Returns the text of the blockers, or of the failure.
async fn search(server: &FakeApiServer, manifest: &Manifest, inventory: &Inventory, associated: &[&str]) -> String {
    let mut kinds = KindCache::default().of(&KymaKey::new("ns", "k"), 1);
    let mut manifest = manifest.clone();
    let names: Vec<_> = associated.iter().map(|kind| format!("{kind}.{GROUP}")).collect();
    manifest.annotations_mut().insert(annotation::ASSOCIATED.to_owned(), names.join(","));
    match find(&server.client(), &mut kinds, &manifest, inventory, &BTreeSet::new()).await {
        Ok(found) => found.blockers.to_string(),
        Err(failure) => format!("failed to {}", failure.operation),
    }
}

#[tokio::test]
async fn objects_of_every_managed_kind_block() {
    let server = runtime();
    for kind in ["Default", "Foreign", "Associated"] {
        define(&server, kind, "Namespaced", "kcp-system/other");
    }
    unown(&server, "Associated", |_| ());
    for id in ["samples/a", "defaults/b", "associateds/c", "foreigns/d"] {
        put(&server, id, "user");
    }
    let own = inventory(&[definition("Sample")]);
    let manifest = manifest("CreateAndDelete", default_of("Default"));
    let found = search(&server, &manifest, &own, &["Associated", "Sample", "Default"]).await;
    assert_eq!(found, format!("Associated user/c, Default user/b, Sample user/a; {ALLOWS}associateds.example.com"));
}

const ALLOWS: &str = "the annotation operator.kyma-project.io/allow-removal=true on the CRD lets them stay: ";

/// The CRD as an operator has installed it.
fn unown(server: &FakeApiServer, kind: &str, change: impl FnOnce(&mut Value)) {
    server.edit(&format!("customresourcedefinitions/{}", definition(kind).name), |object| {
        object["metadata"]["annotations"] = json!({});
        change(object);
    });
}

#[tokio::test]
async fn associated_kinds_of_others_do_not_block() {
    let mut manifest = manifest("Ignore", Value::Null);
    manifest.metadata.creation_timestamp = serde_json::from_value(json!("2026-01-01T12:00:00Z")).unwrap();
    let created = |at: &'static str| move |object: &mut Value| object["metadata"]["creationTimestamp"] = json!(at);
    let search =
        async |server: &FakeApiServer| search(server, &manifest, &inventory(&[]), &["Associated", "Missing"]).await;
    let server = FakeApiServer::runtime();
    put(&server, "associateds/c", "user");
    define(&server, "Associated", "Namespaced", "kcp-system/other");
    assert_eq!(search(&server).await, "", "another module defines it");
    let blocks = format!("Associated user/c; {ALLOWS}associateds.example.com");
    for (at, is_older) in [
        ("2026-01-01T11:58:59Z", true),
        // The clocks of the two clusters differ.
        ("2026-01-01T11:59:30Z", false),
        ("2026-01-01T12:00:10Z", false),
    ] {
        unown(&server, "Associated", created(at));
        assert_eq!(search(&server).await, if is_older { "" } else { &*blocks }, "{at}");
    }
    unown(&server, "Associated", |object| {
        object["metadata"]["annotations"] = json!({"operator.kyma-project.io/allow-removal": "true"});
    });
    assert_eq!(search(&server).await, "", "it was confirmed");
    unown(&server, "Associated", |_| ());
    server.refuse("GET customresourcedefinitions/associateds.example.com", 500);
    assert_eq!(search(&server).await, "failed to read the CRD associateds.example.com");
}

#[tokio::test]
async fn only_user_objects_block_until_they_are_gone() {
    let server = runtime();
    put(&server, "samples/own", "kyma-system");
    put(&server, "samples/default", "kyma-system");
    put(&server, "samples/users", "user");
    server.edit("samples/users", |object| {
        object["metadata"]["finalizers"] = json!(["f"]);
        object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    });
    let own = inventory(&[definition("Sample"), key("Sample", "kyma-system", "own")]);
    let manifest = manifest("CreateAndDelete", default_of("Sample"));
    assert_eq!(search(&server, &manifest, &own, &[]).await, "Sample user/users", "terminating");
    assert_eq!(server.calls(), ["GET customresourcedefinitions/samples.example.com", "GET samples"]);
    server.remove("samples/users");
    assert_eq!(search(&server, &manifest, &own, &[]).await, "");
}

#[tokio::test(start_paused = true)]
async fn sixteen_kinds_are_read_and_listed_in_two_round_trips() {
    let round_trip = Duration::from_millis(100);
    let server = FakeApiServer::runtime();
    let mut definitions = Vec::new();
    for kind in (0..16).map(|n| format!("Sample{n}")) {
        define(&server, &kind, "Namespaced", OWNER);
        definitions.push(definition(&kind));
    }
    server.set_round_trip(round_trip);
    let start = Instant::now();
    assert_eq!(search(&server, &manifest("Ignore", Value::Null), &inventory(&definitions), &[]).await, "");
    assert_eq!(start.elapsed(), 2 * round_trip);
}

#[tokio::test(start_paused = true)]
async fn sixteen_associated_kinds_are_found_and_listed_in_four_round_trips() {
    let round_trip = Duration::from_millis(100);
    let server = FakeApiServer::runtime();
    let kinds: Vec<_> = (0..16).map(|n| format!("Sample{n}")).collect();
    for kind in &kinds {
        define(&server, kind, "Namespaced", OWNER);
    }
    put(&server, "sample7s/c", "user");
    let associated: Vec<_> = kinds.iter().map(String::as_str).collect();
    server.set_round_trip(round_trip);
    let start = Instant::now();
    let found = search(&server, &manifest("Ignore", Value::Null), &inventory(&[]), &associated).await;
    assert_eq!(found, format!("Sample7 user/c; {ALLOWS}sample7s.example.com"));
    assert_eq!(start.elapsed(), 4 * round_trip, "versions, kinds, CRDs and resources");
}

#[tokio::test]
async fn a_definition_of_another_module_does_not_count() {
    let server = runtime();
    put(&server, "samples/a", "user");
    let own = inventory(&[definition("Sample")]);
    let manifest = manifest("Ignore", Value::Null);
    assert_eq!(search(&server, &manifest, &own, &[]).await, "Sample user/a");
    define(&server, "Sample", "Namespaced", "kcp-system/other");
    assert_eq!(search(&server, &manifest, &own, &[]).await, "");
    server.edit("customresourcedefinitions/samples.example.com", |object| {
        object["metadata"]["annotations"] = Value::Null;
    });
    assert_eq!(search(&server, &manifest, &own, &[]).await, "Sample user/a", "an owner that was removed");
}

#[tokio::test]
async fn a_kind_that_is_not_served_blocks_nothing() {
    let server = FakeApiServer::runtime();
    let own = inventory(&[definition("Sample")]);
    let found = search(&server, &manifest("Ignore", default_of("Other")), &own, &["Third"]).await;
    assert_eq!(found, "");
}

#[tokio::test]
async fn a_failed_request_is_an_error() {
    let server = runtime();
    define(&server, "Other", "Namespaced", OWNER);
    let own = inventory(&[definition("Sample")]);
    let manifest = manifest("CreateAndDelete", default_of("Other"));
    for (call, status, expected) in [
        ("GET samples", 403, "failed to list the objects of the kind Sample"),
        ("GET samples", 500, "failed to list the objects of the kind Sample"),
        ("GET others", 503, "failed to list the objects of the kind Other"),
        ("GET /apis/example.com", 403, "failed to find the kind Other"),
        ("GET /apis/example.com/v1", 503, "failed to find the kind Other"),
        ("GET customresourcedefinitions/samples.example.com", 403, "failed to read the CRD samples.example.com"),
        ("GET customresourcedefinitions/samples.example.com", 404, "failed to read the CRD samples.example.com"),
        // The CRD exists: it is not known why its kind is not served.
        ("GET samples", 404, "failed to list the objects of the kind Sample"),
        ("GET others", 404, "failed to list the objects of the kind Other"),
    ] {
        server.refuse(call, status);
        assert_eq!(search(&server, &manifest, &own, &[]).await, expected, "{call} {status}");
        server.refuse_nothing();
    }
    assert_eq!(search(&server, &manifest, &own, &[]).await, "");
}

#[tokio::test]
async fn a_definition_that_was_deleted_meanwhile_blocks_nothing() {
    let server = runtime();
    let own = inventory(&[definition("Sample")]);
    let manifest = manifest("Ignore", Value::Null);
    let client = {
        let server = server.clone();
        testing::client("ns", move |parts, body| {
            let response = server.respond(parts, body);
            server.remove("customresourcedefinitions/samples.example.com");
            response
        })
    };
    let mut kinds = KindCache::default().of(&KymaKey::new("ns", "k"), 1);
    assert!(find(&client, &mut kinds, &manifest, &own, &BTreeSet::new()).await.unwrap().blockers.is_empty());
    let read = "GET customresourcedefinitions/samples.example.com";
    assert_eq!(server.calls(), [read, "GET samples", read]);
}

#[tokio::test]
async fn a_kind_that_was_never_served_blocks_nothing() {
    let server = runtime();
    let own = inventory(&[definition("Sample")]);
    let manifest = manifest("Ignore", Value::Null);
    let client = testing::client("ns", move |parts, body| {
        let (status, text) = server.respond(parts, body)?;
        if !parts.uri.path().contains("customresourcedefinitions") {
            return Some((StatusCode::NOT_FOUND, "404 page not found".to_owned()));
        }
        Some((status, text.replace(r#""status":"True""#, r#""status":"False""#)))
    });
    let mut kinds = KindCache::default().of(&KymaKey::new("ns", "k"), 1);
    assert!(find(&client, &mut kinds, &manifest, &own, &BTreeSet::new()).await.unwrap().blockers.is_empty());
}

#[tokio::test]
async fn a_known_version_that_is_no_longer_served_is_replaced() {
    let server = runtime();
    put(&server, "samples/a", "user");
    let cache = KindCache::default();
    let runtime = KymaKey::new("ns", "k");
    let none = inventory(&[]);
    let manifest = manifest("Ignore", default_of("Sample"));
    find(&server.client(), &mut cache.of(&runtime, 1), &manifest, &none, &BTreeSet::new()).await.unwrap();
    server.edit("customresourcedefinitions/samples.example.com", |object| {
        object["spec"]["versions"] = json!([{"name": "v2", "served": true, "storage": true}]);
    });
    let found = find(&server.client(), &mut cache.of(&runtime, 1), &manifest, &none, &BTreeSet::new()).await.unwrap();
    assert_eq!(found.blockers.to_string(), "Sample user/a");
    server.remove("customresourcedefinitions/samples.example.com");
    assert!(
        find(&server.client(), &mut cache.of(&runtime, 1), &manifest, &none, &BTreeSet::new())
            .await
            .unwrap()
            .blockers
            .is_empty()
    );
}

#[tokio::test]
async fn lists_are_paged_and_end_at_a_bound() {
    let server = runtime().with_pages_of(100);
    let mut all = vec![definition("Sample")];
    for n in 0..600 {
        put(&server, &format!("samples/own-{n:04}"), "kyma-system");
        all.push(key("Sample", "kyma-system", &format!("own-{n:04}")));
    }
    let own = inventory(&all);
    let manifest = manifest("Ignore", Value::Null);
    assert_eq!(search(&server, &manifest, &own, &[]).await, "");
    put(&server, "samples/users", "user");
    assert_eq!(search(&server, &manifest, &own, &[]).await, "Sample user/users", "after all of ours");
    server.calls();
    let foreign = inventory(&all[..1]);
    let found = search(&server, &manifest, &foreign, &[]).await;
    assert!(found.ends_with("Sample kyma-system/own-0004 and many more"), "{found}");
    assert_eq!(server.calls().iter().filter(|call| *call == "GET samples").count(), 6);
}

#[tokio::test]
async fn only_metadata_of_all_namespaces_is_listed() {
    let server = runtime();
    let own = inventory(&[definition("Sample")]);
    let client = testing::client("ns", move |parts, body| {
        if parts.uri.path().contains("/samples") && !parts.uri.path().contains("customresourcedefinitions") {
            assert_eq!(parts.uri.path(), "/apis/example.com/v1/samples");
            let accept = parts.headers[http::header::ACCEPT].to_str().unwrap();
            assert!(accept.contains("as=PartialObjectMetadataList"), "{accept}");
        }
        server.respond(parts, body)
    });
    let mut kinds = KindCache::default().of(&KymaKey::new("ns", "k"), 1);
    let manifest = manifest("Ignore", Value::Null);
    assert!(find(&client, &mut kinds, &manifest, &own, &BTreeSet::new()).await.unwrap().blockers.is_empty());
}

#[tokio::test]
async fn many_objects_of_the_default_object_are_listed_to_the_end() {
    let server = runtime().with_pages_of(100);
    put(&server, "samples/default", "kyma-system");
    let owner = json!([{"apiVersion": "example.com/v1", "kind": "Sample", "name": "default", "uid": "u"}]);
    for n in 0..600 {
        server.edit(&format!("samples/child-{n:04}"), |object| {
            *object = json!({"metadata": {"namespace": "kyma-system", "ownerReferences": owner}});
        });
    }
    let own = inventory(&[definition("Sample")]);
    let manifest = manifest("CreateAndDelete", default_of("Sample"));
    assert_eq!(search(&server, &manifest, &own, &[]).await, "");
    put(&server, "samples/users", "user");
    assert_eq!(search(&server, &manifest, &own, &[]).await, "Sample user/users");
}

#[tokio::test]
async fn names_of_a_runtime_are_bounded_and_printable() {
    let server = runtime();
    put(&server, &format!("samples/a\u{1b}[2J\nb{}", "x".repeat(10_000)), "user");
    let own = inventory(&[definition("Sample")]);
    let manifest = manifest("Ignore", Value::Null);
    let found = search(&server, &manifest, &own, &[]).await;
    assert!(found.starts_with("Sample user/a [2J bx") && found.len() < 300, "{found:.400}");
}
