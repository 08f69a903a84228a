use serde_json::json;

use super::*;

fn object(value: Value) -> DynamicObject {
    serde_json::from_value(value).unwrap()
}

/// A pod whose container `manager` has this status.
fn pod(mut status: Value, ready_since: &str) -> DynamicObject {
    status["name"] = json!("manager");
    object(json!({"metadata": {},
        "spec": {"containers": [{"name": "sidecar", "image": "s:1"},
            {"name": "manager", "image": "i:1", "resources": {"limits": {"memory": "64Mi"}}}]},
        "status": {"containerStatuses": [{"name": "sidecar", "ready": true, "state": {"running": {}}}, status],
            "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": ready_since}]}}))
}

fn run(started: &str, finished: &str, code: i64) -> Value {
    json!({"startedAt": started, "finishedAt": finished, "exitCode": code, "reason": "Error", "message": " m\n"})
}

#[test]
fn waiting_container_gives_the_fault_with_its_image_message_or_last_termination() {
    let waiting = |reason: &str| {
        json!({"state": {"waiting": {"reason": reason, "message": "m"}},
        "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}})
    };
    let last = Termination { code: Some(137), reason: "OOMKilled", message: "", memory_limit: "64Mi" };
    let container = "manager";
    let image = "i:1";
    let pull = PodFault::ImagePull { container, image };
    let start = PodFault::Start { container, message: "m" };
    for (reason, expected) in [
        ("InvalidImageName", Some(PodFault::ImageName { container, image })),
        ("ErrImagePull", Some(pull)),
        ("ImagePullBackOff", Some(pull)),
        ("ErrImageNeverPull", Some(pull)),
        ("CreateContainerConfigError", Some(start)),
        ("CreateContainerError", Some(start)),
        ("RunContainerError", Some(start)),
        ("CrashLoopBackOff", Some(PodFault::CrashLoop { container, last })),
        ("ContainerCreating", None),
        ("PodInitializing", None),
    ] {
        assert_eq!(PodFault::of(&pod(waiting(reason), "")), expected, "{reason}");
    }
}

#[test]
fn init_container_explains_the_pod_before_the_containers_that_wait_for_it() {
    let pod =
        object(json!({"metadata": {}, "spec": {"initContainers": [{"name": "a", "image": "init:1"}]}, "status": {
        "containerStatuses": [{"name": "b", "state": {"waiting": {"reason": "PodInitializing"}}}],
        "initContainerStatuses": [{"name": "a", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]}}));
    assert_eq!(PodFault::of(&pod), Some(PodFault::ImagePull { container: "a", image: "init:1" }));
}

#[test]
fn scheduler_explains_a_pod_without_a_node() {
    let pod = |status: &str| {
        object(json!({"metadata": {}, "status": {"conditions": [{"type": "PodScheduled", "status": status,
            "lastTransitionTime": "2026-01-01T00:00:00Z", "message": "0/3 nodes"}]}}))
    };
    let since = Some("2026-01-01T00:00:00Z".parse().unwrap());
    assert_eq!(PodFault::of(&pod("False")), Some(PodFault::Unschedulable { message: "0/3 nodes", since }));
    assert_eq!(PodFault::of(&pod("True")), None);
}

#[test]
fn crash_loop_is_recognised_between_two_back_offs() {
    let crashed = run("2026-01-01T00:00:00Z", "2026-01-01T00:00:05Z", 1);
    let running = |restarts: i64, last: &Value| {
        json!({"ready": false, "restartCount": restarts, "lastState": {"terminated": last},
            "state": {"running": {"startedAt": "2026-01-01T00:00:30Z"}}})
    };
    let before = "2026-01-01T00:00:05Z";
    let within = "2026-01-01T00:01:00Z";
    let long = run("2026-01-01T00:00:00Z", "2026-01-01T00:10:00Z", 1);
    let completed = run("2026-01-01T00:00:00Z", "2026-01-01T00:00:05Z", 0);
    let mut unstarted = run("1970-01-01T00:00:00Z", "2026-01-01T00:00:05Z", 128);
    unstarted["reason"] = json!("StartError");
    let mut ready = running(3, &crashed);
    ready["ready"] = json!(true);
    let mut ended = running(2, &crashed);
    ended["state"] = json!({"terminated": run("2026-01-01T00:00:30Z", "2026-01-01T00:00:31Z", 7)});
    for (case, status, ready_since, code) in [
        ("runs again", running(2, &crashed), before, Some(1)),
        ("has just failed again", ended, before, Some(7)),
        ("could not be started", running(2, &unstarted), before, Some(128)),
        ("restarted once", running(1, &crashed), before, None),
        ("ran long before", running(5, &long), before, None),
        ("completed", running(5, &completed), before, None),
        ("became ready in this run", running(5, &crashed), within, None),
        ("is ready", ready, before, None),
    ] {
        let pod = pod(status, ready_since);
        let fault = PodFault::restarting(&pod).map(|fault| match fault {
            PodFault::CrashLoop { container: "manager", last } => last.code,
            other => panic!("{other:?}"),
        });
        assert_eq!(fault, code.map(Some), "{case}");
        assert_eq!(PodFault::of(&pod), None, "{case}");
    }
}

#[test]
fn replica_failure_is_read_while_it_lasts() {
    let workload = |status: &str| {
        object(json!({"metadata": {}, "status": {"conditions": [
            {"type": "Available", "status": "True"}, {"type": "ReplicaFailure", "status": status, "message": "m"}]}}))
    };
    assert_eq!(replica_failure(&workload("True")), Some("m"));
    assert_eq!(replica_failure(&workload("False")), None);
}

#[test]
fn generation_is_observed_once_the_status_describes_it() {
    let observed = |status: Value| is_observed(&object(json!({"metadata": {"generation": 2}, "status": status})));
    assert!(observed(json!({"observedGeneration": 2})));
    assert!(!observed(json!({"observedGeneration": 1})));
    assert!(!observed(json!({})));
}

#[test]
fn status_of_an_unexpected_form_has_no_fault() {
    for data in
        [json!({"status": 1}), json!({"status": {"containerStatuses": [1, null, {"state": []}], "conditions": {}}})]
    {
        let mut pod = object(json!({"metadata": {}}));
        pod.data = data;
        assert_eq!(PodFault::of(&pod).or_else(|| PodFault::restarting(&pod)), None);
        assert_eq!(replica_failure(&pod), None);
    }
}
