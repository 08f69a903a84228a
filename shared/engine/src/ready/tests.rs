use serde_json::{Value, json};

use super::*;

fn key(group: &str, kind: &str) -> ObjectKey {
    let namespace = if group.ends_with(".k8s.io") { "" } else { "kyma-system" };
    let [group, kind, namespace, name] = [group, kind, namespace, "x"].map(str::to_owned);
    ObjectKey { group, kind, namespace, name }
}

/// Readiness of an object of generation 2.
fn of(group: &str, kind: &str, mut object: Value) -> Readiness {
    if object["metadata"].is_null() {
        object["metadata"] = json!({"name": "x", "generation": 2});
    }
    readiness(&key(group, kind), &serde_json::from_value(object).unwrap(), Timestamp::UNIX_EPOCH)
}

/// Text after the name of the object.
#[derive(Debug, PartialEq)]
enum Expected {
    Ready,
    Progressing(&'static str),
    Failed(&'static str),
}

use Expected::{Failed, Progressing, Ready};

fn check(group: &str, kind: &str, cases: Vec<(Value, Expected)>) {
    let name = if group.ends_with(".k8s.io") { "x" } else { "kyma-system/x" };
    let text = |text| format!("{kind} {name}: {text}");
    for (object, expected) in cases {
        let expected = match expected {
            Ready => Readiness::Ready,
            Progressing(it) => Readiness::Progressing(text(it)),
            Failed(it) => Readiness::Failed(text(it)),
        };
        assert_eq!(of(group, kind, object.clone()), expected, "{object}");
    }
}

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": message})
}

/// A Deployment with two replicas of which these exist, are updated, available and ready.
fn deployment(counts: [i64; 4], more: &[Value]) -> Value {
    let [replicas, updated, available, ready] = counts;
    let mut conditions = more.to_vec();
    conditions.push(condition("Progressing", "True", "NewReplicaSetAvailable", ""));
    conditions.push(condition("Available", "True", "MinimumReplicasAvailable", ""));
    json!({"spec": {"replicas": 2, "progressDeadlineSeconds": 600}, "status": {"observedGeneration": 2,
        "replicas": replicas, "updatedReplicas": updated, "availableReplicas": available, "readyReplicas": ready,
        "conditions": conditions}})
}

fn with(mut object: Value, pointer: &str, value: Value) -> Value {
    let (parent, member) = pointer.rsplit_once('/').unwrap();
    object.pointer_mut(parent).unwrap()[member] = value;
    object
}

#[test]
fn deployment_is_ready_once_all_replicas_of_the_last_change_are_available() {
    let good = || deployment([2, 2, 2, 2], &[]);
    check(
        "apps",
        "Deployment",
        vec![
            (good(), Ready),
            (
                with(good(), "/status/observedGeneration", json!(1)),
                Progressing("its controller has not processed the last change"),
            ),
            (json!({"spec": {}}), Progressing("its controller has not processed the last change")),
            (deployment([0, 0, 0, 0], &[]), Progressing("0 of 2 replicas exist")),
            (deployment([2, 1, 2, 2], &[]), Progressing("1 of 2 replicas are updated")),
            (deployment([2, 2, 1, 1], &[]), Progressing("1 of 2 replicas are available")),
            (deployment([2, 2, 2, 1], &[]), Progressing("1 of 2 replicas are ready")),
            (deployment([3, 2, 3, 3], &[]), Progressing("3 replicas exist instead of 2")),
            (with(good(), "/spec/replicas", json!(0)), Progressing("2 replicas exist instead of 0")),
            (with(deployment([0, 0, 0, 0], &[]), "/spec/replicas", json!(0)), Ready),
            (deployment([2, 2, 2, 2], &[condition("Available", "False", "", "")]), Progressing("it is not available")),
            (
                deployment([2, 2, 2, 2], &[condition("Progressing", "True", "ReplicaSetUpdated", "")]),
                Progressing("its rollout is not complete"),
            ),
            (
                with(
                    deployment([2, 2, 2, 2], &[condition("Progressing", "Unknown", "DeploymentPaused", "")]),
                    "/spec/paused",
                    json!(true),
                ),
                Progressing("its rollout is paused"),
            ),
            (
                with(deployment([2, 0, 2, 2], &[]), "/spec/paused", json!(true)),
                Progressing("its rollout is paused; 0 of 2 replicas are updated"),
            ),
            (
                with(
                    with(good(), "/spec/progressDeadlineSeconds", json!(i32::MAX)),
                    "/status/conditions",
                    json!([condition("Available", "True", "", "")]),
                ),
                Ready,
            ),
        ],
    );
}

#[test]
fn deployment_fails_past_its_deadline_or_if_its_pods_are_refused() {
    let overdue = condition("Progressing", "False", "ProgressDeadlineExceeded", "");
    let failure = |message: &str| condition("ReplicaFailure", "True", "FailedCreate", message);
    let quota =
        failure(r#"pods "x-1a-b2" is forbidden: exceeded quota: q, requested: pods=1, used: pods=5, limited: pods=5"#);
    let failed_quota = failure(r#"pods "x-1a-" is forbidden: failed quota: q: must specify limits.cpu for: manager"#);
    let policy = failure(r#"pods "x-1a-" is forbidden: violates PodSecurity "restricted:latest": y"#);
    let lasting = condition("ReplicaFailure", "False", "", "m");
    check(
        "apps",
        "Deployment",
        vec![
            (
                deployment([2, 2, 1, 1], std::slice::from_ref(&overdue)),
                Failed("no progress within the deadline of 600 s: 1 of 2 replicas are available"),
            ),
            (
                deployment([0, 0, 0, 0], &[quota.clone(), overdue]),
                Failed(
                    "a resource quota of the namespace refuses its pods: q, requested: pods=1, used: pods=5, limited: pods=5",
                ),
            ),
            (
                deployment([0, 0, 0, 0], &[failed_quota]),
                Failed("a resource quota of the namespace refuses its pods: q: must specify limits.cpu for: manager"),
            ),
            (
                deployment([1, 1, 1, 1], &[policy]),
                Failed(r#"the API server refuses its pods: violates PodSecurity "restricted:latest": y"#),
            ),
            (
                deployment([1, 1, 1, 1], &[failure("admission webhook \"w\" denied the request: no")]),
                Failed("the API server refuses its pods: admission webhook \"w\" denied the request: no"),
            ),
            (deployment([2, 2, 2, 2], &[quota]), Ready),
            (deployment([1, 1, 1, 1], &[lasting]), Progressing("1 of 2 replicas exist")),
        ],
    );
}

#[test]
fn stateful_set_is_ready_once_the_wanted_replicas_run_the_wanted_revision() {
    let set = |strategy: Value, updated: i64, revision: &str| {
        json!({"spec": {"replicas": 3, "updateStrategy": strategy}, "status": {"observedGeneration": 2, "replicas": 3,
            "readyReplicas": 3, "updatedReplicas": updated, "currentRevision": revision, "updateRevision": "b"}})
    };
    let rolling = |partition: i64| json!({"type": "RollingUpdate", "rollingUpdate": {"partition": partition}});
    let good = || set(rolling(0), 3, "b");
    check(
        "apps",
        "StatefulSet",
        vec![
            (good(), Ready),
            (
                with(good(), "/status/observedGeneration", json!(1)),
                Progressing("its controller has not processed the last change"),
            ),
            (json!({"spec": {}}), Progressing("its controller has not processed the last change")),
            (with(good(), "/status/replicas", json!(2)), Progressing("2 of 3 replicas exist")),
            (with(good(), "/status/replicas", json!(4)), Progressing("4 replicas exist instead of 3")),
            (with(good(), "/status/readyReplicas", json!(null)), Progressing("0 of 3 replicas are ready")),
            (set(rolling(0), 1, "a"), Progressing("1 of 3 replicas are updated")),
            (set(rolling(0), 3, "a"), Progressing("its rollout is not complete")),
            (set(rolling(2), 1, "a"), Ready),
            (set(rolling(2), 0, "a"), Progressing("0 of 1 replicas are updated")),
            (set(json!({"type": "OnDelete"}), 0, "a"), Ready),
            (
                with(set(json!({"type": "OnDelete"}), 0, "a"), "/status/readyReplicas", json!(2)),
                Progressing("2 of 3 replicas are ready"),
            ),
        ],
    );
}

#[test]
fn daemon_set_is_ready_once_each_node_has_an_updated_pod_that_is_available() {
    let set = |current: i64, updated: i64, available: i64, ready: i64| {
        json!({"spec": {}, "status": {"observedGeneration": 2, "desiredNumberScheduled": 3, "currentNumberScheduled":
            current, "updatedNumberScheduled": updated, "numberAvailable": available, "numberReady": ready}})
    };
    let on_delete = |set: Value| with(set, "/spec/updateStrategy", json!({"type": "OnDelete"}));
    check(
        "apps",
        "DaemonSet",
        vec![
            (set(3, 3, 3, 3), Ready),
            (set(2, 3, 3, 3), Progressing("2 of 3 nodes have a pod")),
            (set(3, 0, 3, 3), Progressing("0 of 3 nodes have an updated pod")),
            (set(3, 3, 1, 3), Progressing("1 of 3 nodes have an available pod")),
            (set(3, 3, 3, 2), Progressing("2 of 3 nodes have a ready pod")),
            (on_delete(set(3, 0, 3, 3)), Ready),
            (on_delete(set(3, 0, 2, 2)), Progressing("2 of 3 nodes have an available pod")),
            (json!({"status": {}}), Progressing("its controller has not processed the last change")),
            (
                json!({"status": {"observedGeneration": 2}}),
                Progressing("its controller has not processed the last change"),
            ),
        ],
    );
}

#[test]
fn replica_set_is_ready_once_its_replicas_are_available() {
    let set = |labelled: i64, available: i64, conditions: Value| {
        json!({"spec": {}, "status": {"observedGeneration": 2, "replicas": labelled, "fullyLabeledReplicas": labelled,
            "availableReplicas": available, "readyReplicas": available, "conditions": conditions}})
    };
    let quota = json!([condition("ReplicaFailure", "True", "", "pods \"x\" is forbidden: exceeded quota: q")]);
    check(
        "apps",
        "ReplicaSet",
        vec![
            (set(1, 1, json!([])), Ready),
            (set(0, 0, json!([])), Progressing("0 of 1 replicas exist")),
            (set(1, 0, json!([])), Progressing("0 of 1 replicas are available")),
            (set(2, 2, json!([])), Progressing("2 replicas exist instead of 1")),
            (set(0, 0, quota), Failed("a resource quota of the namespace refuses its pods: q")),
        ],
    );
}

#[test]
fn job_is_ready_once_it_is_complete() {
    let job = |conditions: &[Value]| json!({"status": {"startTime": "2026-01-01T00:00:00Z", "conditions": conditions}});
    check(
        "batch",
        "Job",
        vec![
            (json!({"status": {}}), Progressing("it has not started")),
            (job(&[]), Progressing("it is not complete")),
            (job(&[condition("Suspended", "True", "", "")]), Progressing("it is suspended")),
            (job(&[condition("Complete", "True", "", "")]), Ready),
            (
                job(&[condition("Failed", "True", "BackoffLimitExceeded", "limit reached")]),
                Failed("it failed: limit reached"),
            ),
            (job(&[condition("Failed", "True", "DeadlineExceeded", "")]), Failed("it failed: DeadlineExceeded")),
        ],
    );
}

#[test]
fn crd_is_ready_once_it_is_established_and_fails_if_its_names_are_taken() {
    let crd = |conditions: &[Value]| json!({"status": {"conditions": conditions}});
    let accepted = condition("NamesAccepted", "True", "NoConflicts", "");
    let established = |status: &str, reason: &str| condition("Established", status, reason, "m");
    check(
        "apiextensions.k8s.io",
        "CustomResourceDefinition",
        vec![
            (crd(&[]), Progressing("it is not established")),
            (crd(&[accepted.clone(), established("True", "InitialNamesAccepted")]), Ready),
            (crd(&[accepted.clone(), established("False", "Installing")]), Progressing("it is not established")),
            (crd(&[accepted, established("False", "NotAccepted")]), Failed("it is not established: m")),
            (
                crd(&[condition("NamesAccepted", "False", "PluralConflict", "taken"), established("True", "")]),
                Failed("its names are not accepted: taken"),
            ),
        ],
    );
}

#[test]
fn claims_and_api_services_are_ready_by_phase_and_condition() {
    let claim = |phase: &str| json!({"status": {"phase": phase}});
    let cases = vec![
        (claim("Bound"), Ready),
        (claim("Pending"), Progressing("it is not bound to a volume")),
        (claim("Lost"), Failed("its volume is lost")),
        (json!({}), Progressing("it is not bound to a volume")),
    ];
    check("", "PersistentVolumeClaim", cases);
    let service = |status: &str| json!({"status": {"conditions": [condition("Available", status, "MissingEndpoints", "no pod")]}});
    let cases = vec![
        (service("True"), Ready),
        (service("False"), Progressing("its condition Available is not met: no pod")),
        (json!({}), Progressing("it is not available")),
    ];
    check("apiregistration.k8s.io", "APIService", cases);
}

#[test]
fn pod_is_ready_by_phase_and_condition() {
    let pod = |phase: &str, conditions: &[Value]| json!({"status": {"phase": phase, "reason": "Evicted", "message": "low on memory", "conditions": conditions}});
    let ready = |status: &str| condition("Ready", status, "", "");
    let since =
        |time: &str| with(condition("PodScheduled", "False", "", "0/3 nodes"), "/lastTransitionTime", json!(time));
    check(
        "",
        "Pod",
        vec![
            (pod("Succeeded", &[]), Ready),
            (pod("Failed", &[ready("False")]), Failed("it failed: low on memory")),
            (pod("Running", &[ready("True")]), Ready),
            (pod("Running", &[ready("False")]), Progressing("it is not ready")),
            (json!({}), Progressing("it is not ready")),
            (pod("Pending", &[since("1969-12-31T23:55:01Z")]), Progressing("no node takes a pod: 0/3 nodes")),
            (pod("Pending", &[since("1969-12-31T23:55:00Z")]), Failed("no node takes a pod: 0/3 nodes")),
        ],
    );
}

#[test]
fn other_kinds_are_ready_unless_their_conditions_deny_it() {
    let object = |conditions: Value| json!({"status": {"conditions": conditions}});
    check(
        "example.com",
        "Widget",
        vec![
            (json!({}), Ready),
            (object(json!([condition("Other", "False", "", "")])), Ready),
            (object(json!([condition("Ready", "True", "", "")])), Ready),
            (object(json!([condition("Ready", "False", "R", "")])), Progressing("its condition Ready is not met: R")),
            (
                object(json!([condition("Ready", "Unknown", "", "")])),
                Progressing("its condition Ready is not met: no reason is given"),
            ),
            (
                object(json!([condition("Ready", "True", "", ""), condition("Reconciling", "True", "", "m")])),
                Progressing("it is being reconciled: m"),
            ),
            (object(json!([condition("Stalled", "True", "", "m")])), Failed("it is stalled: m")),
            (
                json!({"status": {"observedGeneration": 1, "conditions": [condition("Ready", "True", "", "")]}}),
                Progressing("its controller has not processed the last change"),
            ),
        ],
    );
}

#[test]
fn object_that_is_being_deleted_is_not_ready() {
    let mut object = deployment([2, 2, 2, 2], &[]);
    object["metadata"] = json!({"name": "x", "generation": 2, "deletionTimestamp": "2026-01-01T00:00:00Z"});
    check("apps", "Deployment", vec![(object, Progressing("it is being deleted"))]);
}

#[test]
fn explanation_is_one_bounded_line() {
    let message = format!("a\nb\u{7}{}", "ä".repeat(2_000));
    let stalled = json!({"status": {"conditions": [condition("Stalled", "True", "", &message)]}});
    let Readiness::Failed(text) = of("example.com", "Widget", stalled) else { panic!() };
    assert!(text.starts_with("Widget kyma-system/x: it is stalled: a b ää"), "{text}");
    assert_eq!(text.chars().count(), MAX_TEXT_CHARS);
}

#[test]
fn status_of_an_unexpected_form_is_not_ready() {
    for status in [json!(1), json!([]), json!({"observedGeneration": 2, "replicas": "many", "conditions": {"a": 1}})] {
        for kind in ["Deployment", "StatefulSet", "DaemonSet", "ReplicaSet"] {
            let readiness = of("apps", kind, json!({"spec": [], "status": status}));
            assert!(matches!(readiness, Readiness::Progressing(_)), "{kind} {status}: {readiness:?}");
        }
    }
}
