//! What is told of which change, and what a scraper sees.

use std::time::Duration;

use http_body_util::BodyExt as _;
use kube::{
    client::Body,
    runtime::{reflector::store::Writer, watcher::Event},
};
use serde_json::{Value, json};
use tidewatch_shared::metrics::Registry;

use super::*;

const KEY: (&str, &str) = ("kcp-system", "k");

fn key() -> KymaKey {
    KymaKey::new(KEY.0, KEY.1)
}

fn kyma(status: Value) -> Kyma {
    serde_json::from_value(json!({
        "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
        "metadata": {"name": KEY.1, "namespace": KEY.0, "uid": "u", "annotations": {"skr-domain": "shoot-1.kyma.example"},
                     "labels": {"kyma-project.io/instance-id": "i-1"}},
        "spec": {"channel": "fast"}, "status": status,
    }))
    .unwrap()
}

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"})
}

fn module(name: &str, state: &str, message: Option<&str>) -> Value {
    json!({"name": name, "state": state, "message": message})
}

/// What is told when one status follows another.
fn told(before: &Kyma, now: &Kyma) -> Vec<(bool, &'static str, String)> {
    let news = news::of_kyma(Some(&Facet::of(before)), &Facet::of(now), now);
    news.into_iter().map(|news| (news.warning, news.reason, news.note)).collect()
}

fn one(warning: bool, reason: &'static str, note: &str) -> Vec<(bool, &'static str, String)> {
    vec![(warning, reason, note.to_owned())]
}

#[test]
fn each_transition_is_told_once_and_in_words() {
    let bare = kyma(json!({"state": "Processing"}));
    let conditions = |list: Value| kyma(json!({"state": "Processing", "conditions": list}));
    let path = |status, reason| conditions(json!([condition("EventPath", status, reason, "words")]));
    let state = |state: &str| kyma(json!({"state": state, "lastOperation": {"operation": "why"}}));
    let with = |modules: Value| kyma(json!({"state": "Processing", "modules": modules}));
    for (before, now, expected) in [
        (&bare, path("True", "Proven"), one(false, "EventPathProven", "words")),
        (&path("True", "Proven"), path("False", "NoHeartbeat"), one(true, "EventPathLost", "NoHeartbeat: words")),
        (&path("False", "NoHeartbeat"), path("False", "OldPlan"), one(true, "EventPathLost", "OldPlan: words")),
        (&path("False", "NoHeartbeat"), path("Unknown", "Away"), one(false, "EventPathUnknown", "Away: words")),
        (&path("False", "NoHeartbeat"), path("False", "NoHeartbeat"), vec![]),
        (&bare, state("Error"), one(true, "KymaError", "why")),
        (&state("Error"), state("Ready"), one(false, "KymaReady", "why")),
        (&state("Ready"), state("Processing"), vec![]),
        (&state("Ready"), state("Deleting"), one(false, "KymaDeleting", "why")),
        (
            &bare,
            with(json!([module("keda", "Error", Some("no channel"))])),
            one(true, "ModuleError", "module keda: no channel"),
        ),
        (
            &with(json!([module("keda", "Error", None)])),
            with(json!([module("keda", "Ready", None)])),
            one(false, "ModuleReady", "module keda is in state Ready"),
        ),
        (
            &with(json!([module("keda", "Deleting", None)])),
            bare.clone(),
            one(false, "ModuleRemoved", "module keda is gone"),
        ),
        (
            &bare,
            conditions(json!([condition("Paused", "True", "Paused", "by label")])),
            one(false, "Paused", "Paused: by label"),
        ),
        (
            &conditions(json!([condition("ModuleCatalog", "True", "Ready", "")])),
            conditions(json!([condition("ModuleCatalog", "False", "Ready", "out of sync")])),
            one(true, "CatalogOutOfSync", "out of sync"),
        ),
    ] {
        assert_eq!(told(before, &now), expected);
    }
}

#[test]
fn a_lost_access_is_one_event_and_not_one_for_each_module() {
    let status = |access: &str, state: &str| {
        kyma(
            json!({"state": state, "conditions": [condition("RuntimeAccess", access, "KubeconfigRefused", "no server")],
            "modules": [module("a", state, None), module("b", state, None)]}),
        )
    };
    let (usable, lost) = (status("True", "Ready"), status("False", "Error"));
    let reasons = |news: Vec<(bool, &'static str, String)>| news.into_iter().map(|news| news.1).collect::<Vec<_>>();
    assert_eq!(reasons(told(&usable, &lost)), ["RuntimeAccessLost", "KymaError"]);
    assert_eq!(told(&usable, &lost)[0].2, "KubeconfigRefused: no server");
    assert_eq!(reasons(told(&lost, &usable)), ["RuntimeAccessRestored", "KymaReady"]);
}

#[test]
fn what_stood_there_at_the_start_is_no_news_and_a_kyma_made_anew_is() {
    let record = Record::new(Metrics::default());
    let ready = kyma(json!({"state": "Ready"}));
    record.found_kyma(&key(), &ready);
    record.kyma(&key(), &ready);
    assert_eq!(record.next(), None);

    let mut anew = ready.clone();
    anew.metadata.uid = Some("another".into());
    record.kyma(&key(), &anew);
    assert_eq!(record.next().unwrap().news.reason, "KymaReady");

    record.lost_kyma(&key(), &anew);
    assert_eq!(record.next(), None, "it is only not selected any more");
    anew.metadata.deletion_timestamp = Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
    record.lost_kyma(&key(), &anew);
    assert_eq!(record.next().unwrap().news.reason, "KymaDeleted");

    let mut unlabelled = kyma(json!({}));
    unlabelled.metadata.annotations = None;
    record.kyma(&key(), &unlabelled);
    record.kyma(&key(), &unlabelled);
    assert_eq!(record.next().unwrap().news.reason, "MetricsError");
    assert_eq!(record.next(), None);
}

#[test]
fn a_watcher_that_is_refused_is_told() {
    let watcher = |state: &str| -> Watcher {
        serde_json::from_value(json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Watcher", "metadata": {"name": "w", "namespace": "n"},
            "spec": {"resourceToWatch": {"group": "g", "version": "v1", "resource": "things"}, "field": "spec",
                "manager": "m", "serviceInfo": {"name": "s", "namespace": "n", "port": 1}, "gateway": {"selector": {}}},
            "status": {"state": state, "conditions": [condition("VirtualService", "False", "Ready", "secrets are not watched")]},
        }))
        .unwrap()
    };
    let told = news::of_watcher(State::Unset, &watcher("Error")).unwrap();
    assert_eq!(
        (told.about.kind, told.warning, told.reason, &*told.note),
        ("Watcher", true, "WatcherRefused", "secrets are not watched")
    );
    assert_eq!(news::of_watcher(State::Error, &watcher("Error")), None);
    assert_eq!(news::of_watcher(State::Error, &watcher("Ready")).unwrap().reason, "WatcherServed");
}

#[test]
fn what_cannot_be_read_is_told_and_what_holds_meanwhile() {
    let record = Record::new(Metrics::default());
    for (known, holds) in [(true, "what it said before holds"), (false, "it is as if it were not there")] {
        let object = ("kcp-system".to_owned(), "keda".to_owned(), "u".to_owned());
        record.unreadable("ModuleReleaseMeta", object, known, &"expected a string");
        let News { about, warning, reason, note } = record.next().unwrap().news;
        assert_eq!(
            (about.kind, &*about.name, &*about.uid, warning, reason),
            ("ModuleReleaseMeta", "keda", "u", true, "Unreadable")
        );
        assert_eq!(note, format!("it cannot be read, and {holds}: expected a string"));
    }
}

#[test]
fn the_board_is_bounded_and_joins_what_it_has_told() {
    let (mut board, now) = (Board::default(), Instant::now());
    let after = |seconds| now + Duration::from_secs(seconds);
    let news = |reason| {
        let ready = kyma(json!({"state": "Error"}));
        News { reason, ..news::of_kyma(None, &Facet::of(&ready), &ready).pop().unwrap() }
    };
    let posted = (0..1_001).filter(|_| board.post(news("a"))).count();
    assert_eq!((posted, board.waiting()), (1_000, 1_000));
    assert_eq!(board.next(now).unwrap().again, None);
    board.told(&news("a"), "e".into(), now);
    assert_eq!(board.next(after(1)).unwrap().again, Some(("e".into(), 2)));
    assert_eq!(board.next(after(1_800)).unwrap().again, Some(("e".into(), 3)));
    assert_eq!(board.next(after(3_600)).unwrap().again, None, "half an hour without it");
    board.told(&news("a"), "f".into(), after(3_600));
    board.forget(&news("a"));
    assert_eq!(board.next(after(3_601)).unwrap().again, None);
    assert!(board.post(news("b")));
}

/// Answers one request, and gives back its method, path and body.
async fn answer(
    server: &mut tower_test::mock::Handle<http::Request<Body>, http::Response<Body>>,
    status: u16,
) -> (String, Value) {
    let (request, respond) = server.next_request().await.unwrap();
    let (head, body) = request.into_parts();
    let body: Value = serde_json::from_slice(&body.collect().await.unwrap().to_bytes()).unwrap();
    let said = if status == 404 {
        json!({"kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound"})
    } else {
        body.clone()
    };
    let said = Body::from(serde_json::to_vec(&said).unwrap());
    respond.send_response(http::Response::builder().status(status).body(said).unwrap());
    (format!("{} {}", head.method, head.uri.path()), body)
}

#[tokio::test(start_paused = true)]
async fn an_event_is_made_counted_again_and_made_anew_when_it_is_gone() {
    let (service, mut server) = tower_test::mock::pair();
    let record = Record::new(Metrics::default());
    let writer = tokio::spawn(record.clone().run(Client::new(service, "default")));
    let flip = |record: &Record| {
        record.kyma(&key(), &kyma(json!({"state": "Processing"})));
        record.kyma(&key(), &kyma(json!({"state": "Error", "lastOperation": {"operation": "x".repeat(2_000)}})));
    };
    flip(&record);
    let events = "/apis/events.k8s.io/v1/namespaces/kcp-system/events";
    let (request, event) = answer(&mut server, 201).await;
    assert_eq!(request, format!("POST {events}"));
    assert_eq!((&event["reason"], &event["type"]), (&json!("KymaError"), &json!("Warning")));
    assert_eq!(event["reportingController"], "lifecycle-manager");
    assert_eq!(event["note"].as_str().unwrap().len(), 1_024);
    assert_eq!((&event["regarding"]["uid"], &event["regarding"]["kind"]), (&json!("u"), &json!("Kyma")));
    let name = event["metadata"]["name"].as_str().unwrap().to_owned();

    flip(&record);
    let (request, series) = answer(&mut server, 200).await;
    assert_eq!((request, &series["series"]["count"]), (format!("PATCH {events}/{name}"), &json!(2)));

    flip(&record);
    assert_eq!(answer(&mut server, 404).await.0, format!("PATCH {events}/{name}"));
    let (request, event) = answer(&mut server, 201).await;
    assert_eq!(request, format!("POST {events}"));
    assert_ne!(event["metadata"]["name"], json!(name));
    writer.abort();
}

#[test]
fn states_are_shown_as_the_incumbent_shows_them_and_go_with_the_kyma() {
    let (mut registry, mut writer) = (Registry::default(), Writer::<Kyma>::default());
    register_states(&mut registry, writer.as_reader());
    let told = kyma(json!({"state": "Warning", "modules": [module("keda", "Unmanaged", None)]}));
    let mut unlabelled = told.clone();
    unlabelled.metadata.name = Some("unlabelled".into());
    unlabelled.metadata.labels = None;
    writer.apply_watcher_event(&Event::Apply(told.clone()));
    writer.apply_watcher_event(&Event::Apply(unlabelled));
    let page = registry.encode().unwrap();
    let samples: Vec<_> = page.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(samples.len(), 5 + 6, "{page}");
    for line in [
        r#"lifecycle_mgr_kyma_state{kyma_name="k",state="Warning",shoot="shoot-1",instance_id="i-1"} 1"#,
        r#"lifecycle_mgr_kyma_state{kyma_name="k",state="Ready",shoot="shoot-1",instance_id="i-1"} 0"#,
        r#"lifecycle_mgr_module_state{module_name="keda",kyma_name="k",state="Unmanaged",shoot="shoot-1",instance_id="i-1"} 1"#,
    ] {
        assert!(samples.contains(&line), "{line}\n{page}");
    }
    writer.apply_watcher_event(&Event::Delete(told));
    assert!(!registry.encode().unwrap().contains("kyma_name"));
}
