use serde_json::json;

use super::*;

const NOW: &str = "2026-01-01T01:00:00Z";

fn object(value: Value) -> DynamicObject {
    serde_json::from_value(value).unwrap()
}

fn key(kind: &str) -> ObjectKey {
    let [group, kind, namespace, name] = ["apps", kind, "ns", "x"].map(str::to_owned);
    ObjectKey { group, kind, namespace, name }
}

fn deployment() -> DynamicObject {
    object(json!({"metadata": {"generation": 2}, "status": {"observedGeneration": 2}}))
}

fn progressing() -> Readiness {
    Readiness::Progressing("Deployment ns/x: 0 of 1 replicas are available".to_owned())
}

fn explained(pods: &[DynamicObject]) -> Readiness {
    explain(progressing(), &key("Deployment"), &deployment(), pods, NOW.parse().unwrap())
}

fn failed(text: &str) -> Readiness {
    Readiness::Failed(format!("Deployment ns/x: {text}"))
}

/// A pod of a template with one container in this state.
fn pod(template: &str, created: &str, state: Value) -> DynamicObject {
    let mut status = json!({"name": "manager", "ready": false, "started": true});
    status.as_object_mut().unwrap().append(&mut state.as_object().unwrap().clone());
    object(json!({"metadata": {"labels": {"pod-template-hash": template}, "creationTimestamp": created},
        "spec": {"containers": [{"name": "manager", "image": "i:1", "readinessProbe": {}}]},
        "status": {"phase": "Pending", "containerStatuses": [status]}}))
}

fn waiting(reason: &str) -> Value {
    json!({"state": {"waiting": {"reason": reason, "message": "secret \"s\" not found"}}})
}

fn crashed(terminated: Value) -> Value {
    json!({"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": terminated}})
}

fn running() -> Value {
    json!({"state": {"running": {"startedAt": NOW}}})
}

#[test]
fn pod_that_cannot_run_makes_its_workload_fail_with_the_reason() {
    for (state, text) in [
        (waiting("ImagePullBackOff"), "the image i:1 of the container manager cannot be pulled"),
        (waiting("InvalidImageName"), "the image reference i:1 of the container manager is malformed"),
        (waiting("CreateContainerConfigError"), "the container manager cannot be started: secret \"s\" not found"),
        (
            crashed(json!({"exitCode": 1, "reason": "Error", "message": "12:00 x"})),
            "the container manager terminates again and again with exit code 1",
        ),
        (
            crashed(json!({"exitCode": 0, "reason": "Completed"})),
            "the container manager terminates again and again with exit code 0",
        ),
        (
            crashed(json!({"exitCode": 255, "reason": "Unknown"})),
            "the container manager terminates again and again with exit code 255 (Unknown)",
        ),
        (
            crashed(json!({"exitCode": 137, "reason": "OOMKilled"})),
            "the container manager terminates again and again: it is killed for want of memory (OOMKilled)",
        ),
        (
            crashed(json!({"exitCode": 128, "reason": "StartError", "message": "no such file"})),
            "the container manager cannot be started: no such file",
        ),
        (crashed(json!(null)), "the container manager terminates again and again"),
    ] {
        assert_eq!(explained(&[pod("a", NOW, state)]), failed(text));
    }
}

#[test]
fn memory_limit_explains_a_killed_container() {
    let mut pod = pod("a", NOW, crashed(json!({"exitCode": 137, "reason": "OOMKilled"})));
    pod.data["spec"]["containers"][0]["resources"] = json!({"limits": {"memory": "64Mi"}});
    let text = "the container manager terminates again and again: it exceeds its memory limit of 64Mi (OOMKilled)";
    assert_eq!(explained(&[pod]), failed(text));
}

#[test]
fn pod_without_a_node_is_a_failure_after_five_minutes() {
    let pod = |since: &str| {
        object(json!({"metadata": {}, "status": {"conditions": [{"type": "PodScheduled", "status": "False",
            "message": "0/3 nodes are available", "lastTransitionTime": since}]}}))
    };
    let text = "no node takes a pod: 0/3 nodes are available";
    let early = Readiness::Progressing(format!("Deployment ns/x: {text}"));
    assert_eq!(explained(&[pod("2026-01-01T00:55:01Z")]), early);
    assert_eq!(explained(&[pod("2026-01-01T00:55:00Z")]), failed(text));
}

#[test]
fn container_that_does_not_pass_a_probe_is_progress() {
    let ready = pod("a", NOW, running());
    let mut starting = ready.clone();
    starting.data["spec"]["containers"][0]["startupProbe"] = json!({});
    starting.data["status"]["containerStatuses"][0]["started"] = json!(false);
    let mut unprobed = ready.clone();
    unprobed.data["spec"]["containers"][0] = json!({"name": "manager"});
    let known = "Deployment ns/x: 0 of 1 replicas are available";
    for (pod, probe) in [(ready, "readiness"), (starting, "startup")] {
        let text = format!("{known}; the container manager does not pass its {probe} probe");
        assert_eq!(explained(&[pod]), Readiness::Progressing(text));
    }
    for pods in [vec![unprobed], vec![]] {
        assert_eq!(explained(&pods), progressing());
    }
}

#[test]
fn only_pods_of_the_newest_template_explain_a_rollout() {
    let early = "2026-01-01T00:00:00Z";
    let late = "2026-01-01T00:01:00Z";
    let old = pod("old", early, crashed(json!({"exitCode": 1})));
    let starting = pod("new", late, json!({"state": {"waiting": {"reason": "ContainerCreating"}}}));
    let broken = pod("new", late, waiting("ErrImagePull"));
    let pull = failed("the image i:1 of the container manager cannot be pulled");
    assert_eq!(explained(&[old.clone(), starting.clone()]), progressing());
    assert_eq!(explained(&[starting, broken.clone(), old.clone()]), pull);
    let mut deleted = broken.clone();
    deleted.metadata.deletion_timestamp = deleted.metadata.creation_timestamp.clone();
    let mut ended = broken;
    ended.data["status"]["phase"] = json!("Failed");
    let crash = failed("the container manager terminates again and again with exit code 1");
    assert_eq!(explained(&[deleted, ended, old]), crash);
}

#[test]
fn of_several_faults_the_gravest_is_reported_in_any_order_of_pods() {
    let mut pods = [pod("a", NOW, crashed(json!({"exitCode": 1}))), pod("a", NOW, waiting("ImagePullBackOff"))];
    let first = explained(&pods);
    assert_eq!(first, failed("the image i:1 of the container manager cannot be pulled"));
    pods.reverse();
    assert_eq!(explained(&pods), first);
}

#[test]
fn pods_explain_a_missed_deadline_but_no_other_failure() {
    let mut overdue = deployment();
    overdue.data["status"]["conditions"] =
        json!([{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]);
    let pending = object(json!({"metadata": {}, "status": {"conditions": [
        {"type": "PodScheduled", "status": "False", "message": "0/3 nodes", "lastTransitionTime": NOW}]}}));
    let explain = |readiness: Readiness, workload: &DynamicObject, pod: &DynamicObject| {
        explain(readiness, &key("Deployment"), workload, std::slice::from_ref(pod), NOW.parse().unwrap())
    };
    let known = failed("no progress");
    assert_eq!(explain(known.clone(), &overdue, &pending), failed("no node takes a pod: 0/3 nodes"));
    let probed = failed("no progress; the container manager does not pass its readiness probe");
    assert_eq!(explain(known.clone(), &overdue, &pod("a", NOW, running())), probed);
    assert_eq!(explain(known.clone(), &deployment(), &pending), known);
    assert_eq!(explain(Readiness::Ready, &deployment(), &pod("a", NOW, waiting("ErrImagePull"))), Readiness::Ready);
}

#[test]
fn pods_of_an_earlier_generation_explain_nothing() {
    let mut outdated = deployment();
    outdated.data["status"]["observedGeneration"] = json!(1);
    let mut deleted = deployment();
    deleted.metadata.deletion_timestamp = Some(serde_json::from_value(json!(NOW)).unwrap());
    let broken = [pod("a", NOW, waiting("ErrImagePull"))];
    for workload in [outdated, deleted] {
        let found = explain(progressing(), &key("Deployment"), &workload, &broken, NOW.parse().unwrap());
        assert_eq!(found, progressing());
    }
    // A Job has a generation, but its controller observes none.
    let job = ObjectKey { group: "batch".to_owned(), ..key("Job") };
    let live = object(json!({"metadata": {"generation": 1}, "status": {}}));
    let known = Readiness::Progressing("Job ns/x: it is not complete".to_owned());
    let found = explain(known, &job, &live, &broken, NOW.parse().unwrap());
    assert!(matches!(found, Readiness::Failed(_)), "{found:?}");
}

#[test]
fn selector_of_pods_has_the_syntax_of_a_list_request() {
    let workload = |selector: Value| object(json!({"metadata": {}, "spec": {"selector": selector}}));
    let requirement = |operator: &str, values: Value| json!({"key": "k", "operator": operator, "values": values});
    let expressions = [
        requirement("In", json!(["b", "a"])),
        requirement("NotIn", json!(["c"])),
        requirement("Exists", json!(null)),
        requirement("DoesNotExist", json!(null)),
    ];
    let long: serde_json::Map<_, _> = (0..1_000).map(|n| (format!("label-{n}"), json!("v"))).collect();
    for (selector, expected) in [
        (json!({"matchLabels": {"app": "x", "part": "y"}}), Some("app=x,part=y")),
        (
            json!({"matchLabels": {"app": "x"}, "matchExpressions": expressions}),
            Some("app=x,k in (a,b),k notin (c),k,!k"),
        ),
        (json!({"matchExpressions": [requirement("Near", json!(["a"]))]}), None),
        // An empty selector selects every pod of the namespace.
        (json!({}), None),
        (json!(null), None),
        (json!({"app": 1, "matchLabels": []}), None),
        (json!({"matchLabels": long}), None),
    ] {
        assert_eq!(pod_selector(&key("Deployment"), &workload(selector)).as_deref(), expected);
    }
    assert_eq!(pod_selector(&key("Widget"), &workload(json!({"matchLabels": {"a": "b"}}))), None);
}
