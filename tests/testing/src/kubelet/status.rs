//! The status of a pod.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{Container, Pod},
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use serde_json::{Value, json};

/// State of the one container of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ContainerState {
    /// Not running, with the reason.
    Waiting { reason: &'static str, message: String },
    /// Running.
    Running { since: Timestamp, ready: bool },
}

/// End of one run of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Termination {
    pub(super) code: i32,
    pub(super) signal: Option<i32>,
    /// The last lines of its log, if the pod requests them.
    pub(super) message: String,
    pub(super) from: Timestamp,
    pub(super) until: Timestamp,
}

/// Value and last transition of each condition.
#[derive(Debug, Default)]
pub(super) struct Conditions(BTreeMap<&'static str, (bool, Timestamp)>);

impl Conditions {
    /// The conditions of a pod whose containers are ready or not.
    fn now(&mut self, ready: bool, now: Timestamp) -> Vec<Value> {
        let all = [("PodScheduled", true), ("Initialized", true), ("ContainersReady", ready), ("Ready", ready)];
        let mut condition = |(kind, holds): (&'static str, bool)| {
            let since = self.0.entry(kind).or_insert((holds, now));
            if since.0 != holds {
                *since = (holds, now);
            }
            let reason = if holds { Value::Null } else { json!("ContainersNotReady") };
            let status = if holds { "True" } else { "False" };
            json!({"type": kind, "status": status, "reason": reason, "lastProbeTime": null, "lastTransitionTime": Time(since.1)})
        };
        all.into_iter().map(&mut condition).collect()
    }
}

/// Restarts and the last end of the one container.
#[derive(Debug, Default, Clone)]
pub(super) struct RestartHistory {
    pub(super) restarts: i32,
    pub(super) last: Option<Termination>,
}

/// The status of a pod with one container.
pub(super) fn status(
    pod: &Pod,
    state_of_container: &ContainerState,
    past: &RestartHistory,
    conditions: &mut Conditions,
    now: Timestamp,
) -> Value {
    let (state, ready, phase) = match state_of_container {
        ContainerState::Waiting { reason, message } => {
            let message = if message.is_empty() { Value::Null } else { json!(message) };
            // After the first run, a pod that restarts its container is no longer pending.
            let phase = if past.last.is_some() { "Running" } else { "Pending" };
            (json!({"waiting": {"reason": reason, "message": message}}), false, phase)
        }
        ContainerState::Running { since, ready } => {
            (json!({"running": {"startedAt": Time(*since)}}), *ready, "Running")
        }
    };
    let runs = matches!(state_of_container, ContainerState::Running { .. });
    let statuses: Vec<_> = containers(pod)
        .map(|container| {
            json!({
                "name": container.name, "image": container.image, "imageID": container.image, "containerID": "",
                "ready": ready, "started": runs, "restartCount": past.restarts, "state": state,
                "lastState": past.last.as_ref().map_or_else(|| json!({}), |ended| json!({"terminated": terminated(ended)})),
            })
        })
        .collect();
    json!({"status": {
        "phase": phase,
        "conditions": conditions.now(ready, now),
        "containerStatuses": statuses,
        "hostIP": "127.0.0.1", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}],
    }})
}

fn terminated(ended: &Termination) -> Value {
    let reason = if ended.code == 0 { "Completed" } else { "Error" };
    json!({
        "exitCode": ended.code, "signal": ended.signal, "reason": reason, "message": ended.message,
        "startedAt": Time(ended.from), "finishedAt": Time(ended.until),
    })
}

/// The containers of a pod.
pub(super) fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| &spec.containers)
}

#[cfg(test)]
mod tests {
    use serde_json::from_value;

    use super::*;

    fn pod() -> Pod {
        from_value(json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "server", "image": "i"}]}}))
            .expect("a pod")
    }

    #[test]
    fn a_condition_keeps_its_time_until_it_changes() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        let pod = pod();
        let past = RestartHistory::default();
        let mut conditions = Conditions::default();
        let mut ready = |ready, second| {
            let state_of_container = ContainerState::Running { since: at(1), ready };
            let status = status(&pod, &state_of_container, &past, &mut conditions, at(second));
            let conditions = status["status"]["conditions"].as_array().expect("a list").clone();
            let of = |kind: &str| {
                let condition = conditions.iter().find(|condition| condition["type"] == kind).expect("there");
                (condition["status"].as_str().map(str::to_owned), condition["lastTransitionTime"].clone())
            };
            (of("Ready"), of("Initialized"))
        };
        let (first, scheduled) = ready(false, 2);
        assert_eq!(first, (Some("False".to_owned()), json!("1970-01-01T00:00:02Z")));
        assert_eq!(ready(false, 3).0, first);
        let (second, still) = ready(true, 4);
        assert_eq!(second, (Some("True".to_owned()), json!("1970-01-01T00:00:04Z")));
        assert_eq!(still, scheduled);
    }

    #[test]
    fn a_pod_that_crashes_is_running_and_not_ready() {
        let at = Timestamp::UNIX_EPOCH;
        let ended = Termination { code: 137, signal: Some(9), message: String::new(), from: at, until: at };
        let past = RestartHistory { restarts: 2, last: Some(ended) };
        let waits = ContainerState::Waiting { reason: "CrashLoopBackOff", message: "back-off".to_owned() };
        let status = status(&pod(), &waits, &past, &mut Conditions::default(), at);
        let container = &status["status"]["containerStatuses"][0];
        assert_eq!((&status["status"]["phase"], &container["ready"]), (&json!("Running"), &json!(false)));
        assert_eq!(container["state"]["waiting"]["reason"], "CrashLoopBackOff");
        assert_eq!(container["lastState"]["terminated"]["exitCode"], 137);
    }
}
