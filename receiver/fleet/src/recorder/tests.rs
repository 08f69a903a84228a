//! Events of changes, and the gauges of a scrape.

use std::time::Duration;

use kube::runtime::{
    reflector::{self, store::Writer},
    watcher::Event,
};
use serde_json::{Value, json};
use tidewatch_api::{Manifest, ModuleReleaseMeta, names::label};
use tidewatch_cluster::testing::FakeApiServer;
use tidewatch_kit::metrics::Registry;
use tokio::time::sleep;

use super::{event_queue::DropReason, *};
use crate::stores::{Stores, kymas::CachedKyma, manifests::CachedManifest};

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

/// Events of a change of the status.
fn events(before: &Kyma, now: &Kyma) -> Vec<(bool, &'static str, String)> {
    let events = event_diff::of_kyma(Some(&KymaSnapshot::of(before)), &KymaSnapshot::of(now), now);
    events.into_iter().map(|event| (event.warning, event.reason, event.note)).collect()
}

fn one(warning: bool, reason: &'static str, note: &str) -> Vec<(bool, &'static str, String)> {
    vec![(warning, reason, note.to_owned())]
}

#[test]
fn each_transition_causes_one_event() {
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
        assert_eq!(events(before, &now), expected);
    }
}

#[test]
fn lost_access_causes_one_event_and_none_per_module() {
    let status = |access: &str, state: &str| {
        kyma(
            json!({"state": state, "conditions": [condition("RuntimeAccess", access, "KubeconfigRefused", "no server")],
            "modules": [module("a", state, None), module("b", state, None)]}),
        )
    };
    let usable = status("True", "Ready");
    let lost = status("False", "Error");
    let reasons =
        |events: Vec<(bool, &'static str, String)>| events.into_iter().map(|event| event.1).collect::<Vec<_>>();
    assert_eq!(reasons(events(&usable, &lost)), ["RuntimeAccessLost", "KymaError"]);
    assert_eq!(events(&usable, &lost)[0].2, "KubeconfigRefused: no server");
    assert_eq!(reasons(events(&lost, &usable)), ["RuntimeAccessRestored", "KymaReady"]);
}

#[test]
fn initial_kymas_cause_no_event_and_recreated_ones_do() {
    let recorder = EventRecorder::new(Metrics::default());
    let ready = kyma(json!({"state": "Ready"}));
    recorder.initial_kyma(&key(), &ready);
    recorder.kyma(&key(), &ready);
    assert_eq!(recorder.next(), None);

    let mut anew = ready.clone();
    anew.metadata.uid = Some("another".into());
    recorder.kyma(&key(), &anew);
    assert_eq!(recorder.next().unwrap().event.reason, "KymaReady");

    recorder.deleted_kyma(&key(), &anew, true);
    assert_eq!(recorder.next(), None, "it is no longer selected, and not deleted");
    anew.metadata.deletion_timestamp = Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
    recorder.deleted_kyma(&key(), &anew, false);
    assert_eq!(recorder.next(), None, "another replica posts it");
    recorder.deleted_kyma(&key(), &anew, true);
    assert_eq!(recorder.next().unwrap().event.reason, "KymaDeleted");

    let mut unlabelled = kyma(json!({}));
    unlabelled.metadata.annotations = None;
    recorder.kyma(&key(), &unlabelled);
    recorder.kyma(&key(), &unlabelled);
    assert_eq!(recorder.next().unwrap().event.reason, "MetricsError");
    assert_eq!(recorder.next(), None);
}

#[test]
fn rejected_watcher_causes_a_warning() {
    let watcher = |state: &str| -> Watcher {
        serde_json::from_value(json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Watcher", "metadata": {"name": "w", "namespace": "n"},
            "spec": {"resourceToWatch": {"group": "g", "version": "v1", "resource": "things"}, "field": "spec",
                "manager": "m", "serviceInfo": {"name": "s", "namespace": "n", "port": 1}, "gateway": {"selector": {}}},
            "status": {"state": state, "conditions": [condition("VirtualService", "False", "Ready", "secrets are not watched")]},
        }))
        .unwrap()
    };
    let event = event_diff::of_watcher(State::Unset, &watcher("Error")).unwrap();
    assert_eq!(
        (event.regarding.kind, event.warning, event.reason, &*event.note),
        ("Watcher", true, "WatcherRefused", "secrets are not watched")
    );
    assert_eq!(event_diff::of_watcher(State::Error, &watcher("Error")), None);
    assert_eq!(event_diff::of_watcher(State::Error, &watcher("Ready")).unwrap().reason, "WatcherServed");
}

#[test]
fn invalid_object_causes_a_warning_that_states_the_effect() {
    let recorder = EventRecorder::new(Metrics::default());
    for (known, effect) in [(true, "its last valid state stays in effect"), (false, "it is ignored")] {
        let [namespace, name, uid] = ["kcp-system", "keda", "u"].map(str::to_owned);
        let object = Regarding { kind: "ModuleReleaseMeta", namespace, name, uid };
        recorder.report_invalid(object, known, &"expected a string");
        let PendingEvent { regarding, warning, reason, note } = recorder.next().unwrap().event;
        assert_eq!(
            (regarding.kind, &*regarding.name, &*regarding.uid, warning, reason),
            ("ModuleReleaseMeta", "keda", "u", true, "Unreadable")
        );
        assert_eq!(note, format!("the object is invalid, and {effect}: expected a string"));
    }
}

#[test]
fn queue_is_bounded_and_joins_equal_events_into_a_series() {
    let mut queue = EventQueue::default();
    let now = Instant::now();
    let after = |seconds| now + Duration::from_secs(seconds);
    let pending = |reason| {
        let ready = kyma(json!({"state": "Error"}));
        PendingEvent { reason, ..event_diff::of_kyma(None, &KymaSnapshot::of(&ready), &ready).pop().unwrap() }
    };
    let about = |number: u32| {
        let mut event = pending("a");
        event.regarding.name = format!("k-{number}");
        event
    };
    let full: Vec<_> = (0..2_001).filter_map(|number| queue.post(about(number), now).err()).collect();
    assert_eq!((full, queue.pending.len()), (vec![DropReason::Full], 2_000));
    queue.pending.clear();
    (0..5).for_each(|_| queue.post(pending("a"), now).unwrap());
    assert_eq!(queue.next(now).unwrap().series, None);
    queue.published(&pending("a"), "e".into(), now);
    assert_eq!(queue.next(after(1)).unwrap().series, Some(("e".into(), 2)));
    assert_eq!(queue.next(after(1_800)).unwrap().series, Some(("e".into(), 3)));
    assert_eq!(queue.next(after(3_600)).unwrap().series, None, "half an hour without it");
    queue.published(&pending("a"), "f".into(), after(3_600));
    queue.forget(&pending("a"));
    assert_eq!(queue.next(after(3_601)).unwrap().series, None);
    assert_eq!(queue.post(pending("b"), after(3_601)), Ok(()));
}

/// Thirty users toggle 430 modules, and each module in error is an Event; those of a hundred other Kymas are kept.
#[test]
fn objects_with_many_events_leave_room_for_those_of_others() {
    let mut queue = EventQueue::default();
    let start = Instant::now();
    let event = |name: String, note: u32| {
        let error = kyma(json!({"state": "Error"}));
        let mut event = event_diff::of_kyma(None, &KymaSnapshot::of(&error), &error).pop().unwrap();
        (event.regarding.name, event.note) = (name, note.to_string());
        event
    };
    for second in 0..60 {
        let now = start + Duration::from_secs(second);
        for hostile in 0..30 {
            (0..430).for_each(|note| _ = queue.post(event(format!("hostile-{hostile}"), note), now));
        }
        for other in (0..100).filter(|other| other % 10 == second % 10) {
            assert_eq!(queue.post(event(format!("other-{other}"), 0), now), Ok(()), "second {second}");
        }
        // The rate at which Events are written.
        (0..20).for_each(|_| _ = queue.next(now));
    }
}

/// Waits for a write to end, and returns the requests for Events since the last one, and the Event.
async fn written(kcp: &FakeApiServer) -> (Vec<String>, Value) {
    loop {
        sleep(Duration::from_secs(1)).await;
        let calls = kcp.calls();
        if let Some(name) = calls.first() {
            let event = kcp.all("events").pop().unwrap_or_else(|| panic!("{name} and no Event"));
            return (calls, event);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn event_is_created_counted_and_recreated_after_its_deletion() {
    let kcp = FakeApiServer::default();
    let recorder = EventRecorder::new(Metrics::default());
    let writer = tokio::spawn(recorder.clone().run(kcp.client()));
    let flip = |recorder: &EventRecorder| {
        recorder.kyma(&key(), &kyma(json!({"state": "Processing"})));
        recorder.kyma(&key(), &kyma(json!({"state": "Error", "lastOperation": {"operation": "x".repeat(2_000)}})));
    };
    flip(&recorder);
    let (calls, event) = written(&kcp).await;
    assert_eq!(calls, ["POST events"]);
    assert_eq!(event["metadata"]["namespace"], "kcp-system");
    assert_eq!((&event["reason"], &event["type"]), (&json!("KymaError"), &json!("Warning")));
    assert_eq!(event["reportingController"], "lifecycle-manager");
    assert_eq!(event["note"].as_str().unwrap().len(), 1_024);
    assert_eq!((&event["regarding"]["uid"], &event["regarding"]["kind"]), (&json!("u"), &json!("Kyma")));
    let name = event["metadata"]["name"].as_str().unwrap().to_owned();

    flip(&recorder);
    let (calls, series) = written(&kcp).await;
    assert_eq!((calls, &series["series"]["count"]), (vec![format!("PATCH events/{name}")], &json!(2)));

    kcp.remove(&format!("events/{name}")).unwrap();
    flip(&recorder);
    let (calls, event) = written(&kcp).await;
    assert_eq!(calls, [format!("PATCH events/{name}"), "POST events".to_owned()]);
    assert_ne!(event["metadata"]["name"], json!(name));
    writer.abort();
}

#[test]
fn states_match_lifecycle_managers_metrics_and_vanish_with_the_kyma() {
    let mut registry = Registry::default();
    let mut writer = Writer::<CachedKyma>::default();
    let served = ServedKymas::default();
    register_states(&mut registry, Stores { kymas: writer.as_reader(), ..stores() }, served.clone());
    let labelled = kyma(json!({"state": "Warning", "modules": [module("keda", "Unmanaged", None)]}));
    let mut unlabelled = labelled.clone();
    unlabelled.metadata.name = Some("unlabelled".into());
    unlabelled.metadata.labels = None;
    writer.apply_watcher_event(&Event::Apply(labelled.clone().into()));
    writer.apply_watcher_event(&Event::Apply(unlabelled.into()));
    let page = registry.encode().unwrap();
    let samples: Vec<_> = page.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(samples.len(), 5 + 6 + 1, "{page}");
    for line in [
        r#"lifecycle_mgr_kyma_state{instance_id="i-1",kyma_name="k",shoot="shoot-1",state="Warning"} 1"#,
        r#"lifecycle_mgr_kyma_state{instance_id="i-1",kyma_name="k",shoot="shoot-1",state="Ready"} 0"#,
        r#"lifecycle_mgr_module_state{instance_id="i-1",kyma_name="k",module_name="keda",shoot="shoot-1",state="Unmanaged"} 1"#,
    ] {
        assert!(samples.contains(&line), "{line}\n{page}");
    }
    // Another replica serves its runtime.
    served.limit_to(|key| key.name != "k");
    assert!(!registry.encode().unwrap().contains("kyma_name"));
    writer.apply_watcher_event(&Event::Delete(labelled.into()));
    assert!(!registry.encode().unwrap().contains("kyma_name"));
}

/// Empty caches.
fn stores() -> Stores {
    Stores {
        kymas: reflector::store().0,
        templates: reflector::store().0,
        release_metas: reflector::store().0,
        manifests: reflector::store().0.into(),
        watchers: reflector::store().0,
    }
}

#[test]
fn mandatory_modules_have_lifecycle_managers_metrics_and_they_vanish_with_their_objects() {
    let mut registry = Registry::default();
    let mut metas = Writer::<ModuleReleaseMeta>::default();
    let mut manifests = Writer::<CachedManifest>::default();
    let release_metas = metas.as_reader();
    let cache = manifests.as_reader().into();
    register_states(&mut registry, Stores { release_metas, manifests: cache, ..stores() }, ServedKymas::default());
    let object = |kind: &str, name: &str, spec: Value| {
        json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": kind,
            "metadata": {"name": name, "namespace": "kcp-system"}, "spec": spec})
    };
    let meta = |name: &str, change: &dyn Fn(&mut Value)| -> ModuleReleaseMeta {
        let spec = json!({"moduleName": name, "mandatory": {"version": "1.0.0"}});
        let mut meta = object("ModuleReleaseMeta", name, spec);
        change(&mut meta);
        serde_json::from_value(meta).unwrap()
    };
    let manifest = |kyma: &str, state: &str, mandatory: &str| -> Manifest {
        let spec = json!({"remote": true, "install": {"name": "raw-manifest", "source": {}}});
        let mut manifest = object("Manifest", &format!("{kyma}-{mandatory}"), spec);
        manifest["metadata"]["labels"] = json!({
            label::KYMA_NAME: kyma, label::MODULE_NAME: "warden", label::MANDATORY_MODULE: mandatory
        });
        manifest["status"] = json!({"state": state});
        serde_json::from_value(manifest).unwrap()
    };
    let deleting = meta("leaving", &|meta| meta["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
    let optional = meta("keda", &|meta| meta["spec"] = json!({"moduleName": "keda", "channels": []}));
    let warden = meta("warden", &|_| ());
    for meta in [warden.clone(), deleting, optional] {
        metas.apply_watcher_event(&Event::Apply(meta));
    }
    let ready = manifest("k", "Ready", "true");
    for manifest in [ready.clone(), manifest("selected", "Ready", "false"), manifest("new", "", "true")] {
        manifests.apply_watcher_event(&Event::Apply(manifest.into()));
    }
    let page = registry.encode().unwrap();
    let samples: Vec<_> = page.lines().filter(|line| line.contains("_mandatory_") && !line.starts_with('#')).collect();
    let state = |state: &str, value: u8| {
        format!(r#"lifecycle_mgr_mandatory_module_state{{kyma_name="k",module_name="warden",state="{state}"}} {value}"#)
    };
    let expected = [
        "lifecycle_mgr_mandatory_modules 1".to_owned(),
        state("Ready", 1),
        state("Processing", 0),
        state("Error", 0),
        state("Deleting", 0),
        state("Warning", 0),
    ];
    assert_eq!(samples, expected);
    metas.apply_watcher_event(&Event::Delete(warden));
    manifests.apply_watcher_event(&Event::Delete(ready.into()));
    let page = registry.encode().unwrap();
    let samples: Vec<_> = page.lines().filter(|line| line.contains("_mandatory_") && !line.starts_with('#')).collect();
    assert_eq!(samples, ["lifecycle_mgr_mandatory_modules 0"]);
}
