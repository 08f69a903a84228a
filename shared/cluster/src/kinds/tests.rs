//! Tests of the discovery against a fake API server.

use std::time::Duration;

use http::StatusCode;
use serde_json::json;
use tokio::time::Instant;

use super::*;
use crate::testing::{self, FakeApiServer};

const GROUP: &str = "example.com";

fn kinds(cache: &KindCache) -> Kinds {
    cache.of(&KymaKey::new("ns", "k"), 1)
}

/// The body of a definition.
fn definition(group: &str, kind: &str, scope: &str, versions: &[(&str, bool)]) -> Value {
    let plural = format!("{}s", kind.to_lowercase());
    let versions: Vec<_> = versions
        .iter()
        .enumerate()
        .map(|(n, (name, served))| json!({"name": name, "served": served, "storage": n == 0}))
        .collect();
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.{group}")},
        "spec": {"group": group, "scope": scope, "versions": versions, "names": {"plural": plural, "kind": kind}}})
}

fn serve(server: &FakeApiServer, definition: Value) {
    let id = format!("customresourcedefinitions/{}", definition["metadata"]["name"].as_str().unwrap());
    server.edit(&id, |object| *object = definition);
}

fn server() -> FakeApiServer {
    let server = FakeApiServer::runtime();
    serve(&server, definition(GROUP, "Thing", "Namespaced", &[("v1", true)]));
    serve(&server, definition(GROUP, "Place", "Cluster", &[("v1", true), ("v2", true)]));
    server
}

/// The recorded requests, sorted: concurrent ones arrive in any order.
fn calls(server: &FakeApiServer) -> Vec<String> {
    let mut calls = server.calls();
    calls.sort_unstable();
    calls
}

/// Client of a server that answers every discovery request with this document.
fn client_of(document: Value) -> Client {
    testing::client("ns", move |_, _| Some((StatusCode::OK, document.to_string())))
}

fn resource(name: &str) -> Value {
    json!({"name": name, "kind": "Thing", "namespaced": true})
}

#[tokio::test]
async fn built_in_kinds_need_no_request() {
    let server = server();
    let mut kinds = kinds(&KindCache::default());
    kinds.discover(&server.client(), [("apps", "v1", "Deployment"), ("", "v1", "Namespace")]).await.unwrap();
    let scaler = kinds.locate(&server.client(), "autoscaling", "HorizontalPodAutoscaler").await.unwrap().unwrap();
    assert_eq!(scaler.version, "v2");
    assert!(kinds.served("apps", "v1", "Deployment").unwrap().namespaced);
    assert!(!kinds.served("", "v1", "Namespace").unwrap().namespaced);
    assert!(server.calls().is_empty());
}

#[tokio::test]
async fn each_group_and_version_is_requested_once_and_served_kinds_are_cached() {
    let server = server();
    let cache = KindCache::default();
    let wanted = [(GROUP, "v1", "Thing"), (GROUP, "v1", "Place"), (GROUP, "v1", "Thing"), (GROUP, "v2", "Place")];
    let mut first = kinds(&cache);
    first.discover(&server.client(), wanted).await.unwrap();
    assert_eq!(calls(&server), ["GET /apis/example.com/v1", "GET /apis/example.com/v2"]);
    let thing = first.served(GROUP, "v1", "Thing").unwrap();
    assert_eq!((&*thing.plural, thing.namespaced), ("things", true));
    assert!(!first.served(GROUP, "v2", "Place").unwrap().namespaced);
    let mut second = kinds(&cache);
    second.discover(&server.client(), wanted).await.unwrap();
    assert_eq!(second.served(GROUP, "v1", "Thing"), first.served(GROUP, "v1", "Thing"));
    assert!(server.calls().is_empty());
    let mut changed = cache.of(&KymaKey::new("ns", "k"), 2);
    changed.discover(&server.client(), wanted).await.unwrap();
    assert_eq!(server.calls().len(), 2, "another client may reach another server");
    cache.forget(&KymaKey::new("ns", "k"));
    let mut forgotten = cache.of(&KymaKey::new("ns", "k"), 2);
    forgotten.discover(&server.client(), wanted).await.unwrap();
    assert_eq!(server.calls().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn sixteen_groups_are_requested_in_one_round_trip() {
    let round_trip = Duration::from_millis(100);
    let server = server();
    server.set_round_trip(round_trip);
    let groups: Vec<_> = (0..16).map(|n| format!("g{n}.io")).collect();
    let start = Instant::now();
    let wanted = groups.iter().map(|group| (group.as_str(), "v1", "Thing"));
    kinds(&KindCache::default()).discover(&server.client(), wanted).await.unwrap();
    assert_eq!(start.elapsed(), round_trip);
}

#[tokio::test]
async fn a_kind_that_is_not_served_is_asked_for_once_per_reconcile() {
    let server = server();
    let cache = KindCache::default();
    let wanted = [(GROUP, "v1", "Late"), ("absent.io", "v1", "Late")];
    let mut first = kinds(&cache);
    for _ in 0..2 {
        first.discover(&server.client(), wanted).await.unwrap();
        assert_eq!((first.served(GROUP, "v1", "Late"), first.served("absent.io", "v1", "Late")), (None, None));
    }
    assert_eq!(calls(&server), ["GET /apis/absent.io/v1", "GET /apis/example.com/v1"]);
    serve(&server, definition(GROUP, "Late", "Namespaced", &[("v1", true)]));
    server.calls();
    let mut second = kinds(&cache);
    second.discover(&server.client(), wanted).await.unwrap();
    assert!(second.served(GROUP, "v1", "Late").is_some());
}

#[tokio::test]
async fn an_error_is_not_an_answer_and_concerns_only_its_group() {
    let server = server();
    let cache = KindCache::default();
    serve(&server, definition("other.io", "Other", "Cluster", &[("v1", true)]));
    server.refuse("GET /apis/example.com/v1", 503);
    let wanted = [(GROUP, "v1", "Thing"), ("other.io", "v1", "Other")];
    let mut kinds = kinds(&cache);
    let error = kinds.discover(&server.client(), wanted).await.unwrap_err();
    assert!(matches!(error, kube::Error::Api(status) if status.code == 503));
    assert!(kinds.served("other.io", "v1", "Other").is_some());
    server.refuse_nothing();
    server.calls();
    kinds.discover(&server.client(), wanted).await.unwrap();
    assert!(kinds.served(GROUP, "v1", "Thing").is_some());
    assert_eq!(server.calls(), ["GET /apis/example.com/v1"]);
}

/// Version in which a kind is located, with its scope if that is the cluster.
async fn locate(view: &mut Kinds, server: &FakeApiServer, kind: &str) -> String {
    let found = view.locate(&server.client(), GROUP, kind).await.unwrap().unwrap();
    let scope = if found.namespaced { "" } else { " Cluster" };
    format!("{}{scope}", found.version)
}

/// The API server may refuse the CRD.
#[tokio::test]
async fn a_kind_is_located_as_it_is_served_and_not_as_a_definition_to_be_applied_has_it() {
    let server = FakeApiServer::runtime();
    serve(&server, definition(GROUP, "Thing", "Namespaced", &[("v1", true)]));
    serve(&server, definition(GROUP, "Place", "Namespaced", &[("v2", true)]));
    for versions in [&[("v2", true)][..], &[("v1", true), ("v2", true)]] {
        let mut view = kinds(&KindCache::default());
        view.define(&definition(GROUP, "Thing", "Cluster", versions));
        assert_eq!(view.served(GROUP, "v2", "Thing").map(|thing| thing.namespaced), Some(false), "to be applied");
        assert_eq!(locate(&mut view, &server, "Thing").await, "v1");
        view.invalidate(GROUP);
        assert_eq!(locate(&mut view, &server, "Thing").await, "v1");
    }
}

#[tokio::test]
async fn a_kind_is_located_in_any_served_version() {
    let server = FakeApiServer::runtime();
    serve(&server, definition(GROUP, "Thing", "Namespaced", &[("v1alpha1", false), ("v2", true)]));
    serve(&server, definition(GROUP, "Place", "Cluster", &[("v1", true)]));
    let mut view = kinds(&KindCache::default());
    assert_eq!(locate(&mut view, &server, "Thing").await, "v2");
    assert_eq!(view.locate(&server.client(), GROUP, "Absent").await.unwrap(), None);
    assert_eq!(view.locate(&server.client(), "absent.io", "Absent").await.unwrap(), None);
    server.calls();
    assert_eq!(locate(&mut view, &server, "Thing").await, "v2");
    assert!(server.calls().is_empty(), "known");
    server.refuse("GET /apis/example.com", 403);
    assert!(kinds(&KindCache::default()).locate(&server.client(), GROUP, "Thing").await.is_err());
}

#[tokio::test(start_paused = true)]
async fn kinds_of_several_groups_are_located_in_two_round_trips() {
    let round_trip = Duration::from_millis(100);
    let server = FakeApiServer::runtime();
    let groups: Vec<_> = (0..16).map(|n| format!("g{n}.io")).collect();
    for group in &groups {
        serve(&server, definition(group, "Thing", "Namespaced", &[("v1", true)]));
    }
    let wanted = || groups.iter().map(|group| (group.as_str(), "Thing"));
    server.set_round_trip(round_trip);
    let start = Instant::now();
    let mut view = kinds(&KindCache::default());
    view.prefetch(&server.client(), wanted()).await.unwrap();
    for group in &groups {
        assert!(view.locate(&server.client(), group, "Thing").await.unwrap().is_some());
    }
    assert_eq!(start.elapsed(), 2 * round_trip);

    server.refuse("GET /apis/g0.io", 503);
    let mut view = kinds(&KindCache::default());
    view.prefetch(&server.client(), wanted()).await.unwrap();
    server.calls();
    assert!(view.locate(&server.client(), "g0.io", "Thing").await.is_err());
    assert!(view.locate(&server.client(), "g1.io", "Thing").await.unwrap().is_some());
    assert_eq!(server.calls(), ["GET /apis/g0.io"], "the failure concerns one group");
}

#[tokio::test]
async fn prefetched_kind_is_located_in_its_preferred_version_and_an_absent_one_without_a_request() {
    let server = FakeApiServer::runtime();
    serve(&server, definition(GROUP, "Thing", "Namespaced", &[("v1alpha1", true), ("v1", true)]));
    let mut view = kinds(&KindCache::default());
    let wanted = [(GROUP, "Thing"), ("absent.io", "Absent")];
    view.prefetch(&server.client(), wanted).await.unwrap();
    server.calls();
    let [thing, absent] = wanted;
    let located = view.locate(&server.client(), thing.0, thing.1).await.unwrap().unwrap();
    assert_eq!(view.locate(&server.client(), absent.0, absent.1).await.unwrap(), None);
    assert!(server.calls().is_empty());
    let preferred = kinds(&KindCache::default()).locate(&server.client(), thing.0, thing.1).await.unwrap().unwrap();
    assert_eq!(located.version, preferred.version);
}

#[tokio::test]
async fn search_ends_when_nothing_answers() {
    let lost = tower::service_fn(|_: http::Request<kube::client::Body>| {
        let lost = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        std::future::ready(Err::<http::Response<kube::client::Body>, _>(lost))
    });
    let client = Client::new(lost, "default");
    let mut view = kinds(&KindCache::default());
    assert!(view.prefetch(&client, [(GROUP, "Thing"), ("other.io", "Other")]).await.is_err());
}

#[tokio::test]
async fn invalidated_kinds_are_asked_for_again() {
    let server = server();
    let cache = KindCache::default();
    let mut view = kinds(&cache);
    view.discover(&server.client(), [(GROUP, "v1", "Thing")]).await.unwrap();
    let things = view.api(&server.client(), GROUP, "v1", "Thing", "a").unwrap();
    server.remove("customresourcedefinitions/things.example.com");
    let error = things.get("x").await.unwrap_err();
    assert!(is_unserved(&error), "{error}");
    view.invalidate(GROUP);
    view.discover(&server.client(), [(GROUP, "v1", "Thing")]).await.unwrap();
    assert_eq!(view.served(GROUP, "v1", "Thing"), None);
    assert_eq!(kinds(&cache).served(GROUP, "v1", "Thing"), None);
}

#[tokio::test]
async fn an_absent_object_is_not_an_unserved_kind() {
    let server = server();
    let mut view = kinds(&KindCache::default());
    view.discover(&server.client(), [(GROUP, "v1", "Thing")]).await.unwrap();
    let things = view.api(&server.client(), GROUP, "v1", "Thing", "a").unwrap();
    assert!(!is_unserved(&things.get("x").await.unwrap_err()));
    server.refuse("GET things", 403);
    assert!(!is_unserved(&things.list(&kube::api::ListParams::default()).await.unwrap_err()));
}

#[tokio::test]
async fn clients_address_the_namespace_of_namespaced_kinds_only() {
    let server = server();
    let mut view = kinds(&KindCache::default());
    view.discover(&server.client(), [(GROUP, "v1", "Thing"), (GROUP, "v2", "Place")]).await.unwrap();
    let path = |version: &str, kind: &str, namespace: &str| {
        view.api(&server.client(), GROUP, version, kind, namespace).unwrap().resource_url().to_owned()
    };
    assert_eq!(path("v1", "Thing", "a"), "/apis/example.com/v1/namespaces/a/things");
    assert_eq!(path("v1", "Thing", ""), "/apis/example.com/v1/things");
    assert_eq!(path("v2", "Place", "a"), "/apis/example.com/v2/places");
    assert!(view.api(&server.client(), GROUP, "v1", "Unknown", "a").is_none());
}

#[tokio::test]
async fn kinds_of_applied_definitions_need_no_request_and_are_not_cached() {
    let server = FakeApiServer::runtime();
    let cache = KindCache::default();
    let mut view = kinds(&cache);
    view.define(&definition(GROUP, "Thing", "Cluster", &[("v1", true), ("v0", false)]));
    view.define(&json!({"apiVersion": "v1", "kind": "ConfigMap"}));
    view.define(&definition("../x", "Bad", "Cluster", &[("v1", true)]));
    view.discover(&server.client(), [(GROUP, "v1", "Thing")]).await.unwrap();
    assert!(server.calls().is_empty());
    assert!(!view.served(GROUP, "v1", "Thing").unwrap().namespaced);
    assert_eq!((view.served(GROUP, "v0", "Thing"), view.served("../x", "v1", "Bad")), (None, None));
    assert_eq!(kinds(&cache).served(GROUP, "v1", "Thing"), None);
}

#[tokio::test]
async fn names_that_would_change_the_path_are_not_requested() {
    let server = server();
    let mut view = kinds(&KindCache::default());
    let wanted = [("../api", "v1", "X"), (GROUP, "v1/things", "X"), (GROUP, "", "X"), ("a..b", "v1", "X")];
    view.discover(&server.client(), wanted).await.unwrap();
    assert_eq!(view.locate(&server.client(), "a/b", "X").await.unwrap(), None);
    assert!(server.calls().is_empty());
    assert!(wanted.iter().all(|(group, version, kind)| view.served(group, version, kind).is_none()));
}

#[tokio::test]
async fn subresources_are_skipped_and_malformed_documents_are_errors() {
    let ask = async |document: Value| {
        let mut view = kinds(&KindCache::default());
        let client = client_of(document);
        view.discover(&client, [(GROUP, "v1", "Thing")]).await.map(|()| view.served(GROUP, "v1", "Thing").is_some())
    };
    assert!(ask(json!({"resources": [resource("things/status"), resource("things")]})).await.unwrap());
    assert!(!ask(json!({"resources": [resource("things/status")]})).await.unwrap());
    assert!(!ask(json!({"resources": null})).await.unwrap());
    for document in [
        json!({"resources": vec![resource("things"); 1_001]}),
        json!({"resources": [resource("..")]}),
        json!({"resources": [resource(&"x".repeat(64))]}),
        json!({"resources": "none"}),
        json!([]),
    ] {
        let error = ask(document.clone()).await.unwrap_err();
        assert!(matches!(error, kube::Error::SerdeError(_)), "{document}");
    }
    let versions = json!({"versions": vec![json!({"version": "v1"}); 51]});
    assert!(kinds(&KindCache::default()).locate(&client_of(versions), GROUP, "Thing").await.is_err());
}

#[tokio::test]
async fn the_requests_of_a_reconcile_are_bounded() {
    let server = server();
    let groups: Vec<_> = (0..=MAX_REQUESTS).map(|n| format!("g{n}.io")).collect();
    let mut view = kinds(&KindCache::default());
    view.discover(&server.client(), groups.iter().skip(1).map(|group| (group.as_str(), "v1", "X"))).await.unwrap();
    assert!(view.discover(&server.client(), [(groups[0].as_str(), "v1", "X")]).await.is_err());
    assert_eq!(server.calls().len(), MAX_REQUESTS);
}

#[tokio::test]
async fn a_definition_is_read_without_trust_in_its_names() {
    let server = server();
    let read = async |name: &str| Definition::read(&server.client(), name).await;
    let things = read("things.example.com").await.unwrap().unwrap();
    assert!(things.is_established());
    assert_eq!(things.preferred().unwrap().plural, "things");
    assert!(read("absent.example.com").await.unwrap().is_none());
    server.edit("customresourcedefinitions/other.example.com", |object| {
        *object = definition(GROUP, "Thing", "Namespaced", &[("v1", true)]);
    });
    assert!(matches!(read("other.example.com").await, Err(kube::Error::SerdeError(_))));
    server.refuse("GET customresourcedefinitions/things.example.com", 404);
    assert!(read("things.example.com").await.is_err(), "a 404 that names no object proves nothing");
}

#[test]
fn lists_use_the_storage_version_unless_it_is_not_served() {
    let preferred = |versions: &[(&str, bool)]| {
        let definition = Definition::of(&definition(GROUP, "Thing", "Cluster", versions)).unwrap();
        definition.preferred().map(|kind| kind.version)
    };
    assert_eq!(preferred(&[("v1", true), ("v2", true)]).as_deref(), Some("v1"));
    assert_eq!(preferred(&[("v1", false), ("v2", true)]).as_deref(), Some("v2"));
    assert_eq!(preferred(&[("v1", false)]).as_deref(), Some("v1"));
    assert_eq!(preferred(&[]), None);
}
