//! Status of workloads and the faults of their pods, as the controllers of Kubernetes, the scheduler and the kubelet
//! report them. Pure.

use jiff::{SignedDuration, Timestamp};
use kube::api::DynamicObject;
use serde_json::Value;

/// Restarts from which on a container that fails may be in a crash loop between two back-offs.
const CRASH_LOOP_RESTARTS: i64 = 2;
/// Run time after which the kubelet resets the back-off of a container.
const BACKOFF_RESET: SignedDuration = SignedDuration::from_mins(10);

/// Returns whether the status describes the current generation. Without an observed generation it does not.
pub fn is_observed(object: &DynamicObject) -> bool {
    object.data["status"]["observedGeneration"].as_i64() >= object.metadata.generation
}

/// Condition of a type in the status of an object.
pub fn condition<'a>(object: &'a DynamicObject, kind: &str) -> Option<&'a Value> {
    object.data["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == kind)
}

/// Condition of a type in the status of an object, if its status is `status`: `True`, `False` or `Unknown`.
pub fn condition_with<'a>(object: &'a DynamicObject, kind: &str, status: &str) -> Option<&'a Value> {
    condition(object, kind).filter(|condition| condition["status"] == status)
}

/// Message of the API server that refused to create a pod of a Deployment or ReplicaSet.
pub fn replica_failure(workload: &DynamicObject) -> Option<&str> {
    condition_with(workload, "ReplicaFailure", "True")?["message"].as_str()
}

/// Fault of a pod. The order is that of severity: of the faults of several pods, the least one explains most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PodFault<'a> {
    /// The reference of an image is malformed.
    ImageName {
        /// Name of the container.
        container: &'a str,
        /// Reference of the image.
        image: &'a str,
    },
    /// An image cannot be pulled. The kubelet's message is left out: it differs between attempts.
    ImagePull {
        /// Name of the container.
        container: &'a str,
        /// Reference of the image.
        image: &'a str,
    },
    /// A container cannot be created or started.
    Start {
        /// Name of the container.
        container: &'a str,
        /// Message of the kubelet.
        message: &'a str,
    },
    /// A container terminates repeatedly.
    CrashLoop {
        /// Name of the container.
        container: &'a str,
        /// Its last termination.
        last: Termination<'a>,
    },
    /// No node takes the pod.
    Unschedulable {
        /// Message of the scheduler.
        message: &'a str,
        /// Time of the scheduler's first attempt.
        since: Option<Timestamp>,
    },
}

/// Termination of a container. Texts are empty if unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Termination<'a> {
    /// Exit code of the process.
    pub code: Option<i64>,
    /// Reason of the kubelet, such as `Error` or `OOMKilled`.
    pub reason: &'a str,
    /// Termination message of the process.
    pub message: &'a str,
    /// Memory limit of the container.
    pub memory_limit: &'a str,
}

impl<'a> PodFault<'a> {
    /// Fault of a pod of which a container waits, or that is not scheduled.
    pub fn of(pod: &'a DynamicObject) -> Option<Self> {
        containers(pod).find_map(Container::waiting_fault).or_else(|| unschedulable(pod))
    }

    /// Crash loop of a pod between two back-offs of the kubelet: a container runs or has just failed, its runs fail
    /// before the kubelet resets the back-off, and the pod did not become ready in this run.
    pub fn restarting(pod: &'a DynamicObject) -> Option<Self> {
        let ready = condition(pod, "Ready").and_then(|condition| time(&condition["lastTransitionTime"]));
        containers(pod).find_map(|container| container.restarting(ready))
    }
}

/// The containers of a pod, init containers first: a pod starts the others after them.
pub fn containers(pod: &DynamicObject) -> impl Iterator<Item = Container<'_>> {
    let lists = [("initContainerStatuses", "initContainers"), ("containerStatuses", "containers")];
    lists.into_iter().flat_map(|(statuses, specs)| {
        let specs = pod.data["spec"][specs].as_array().map_or(&[][..], Vec::as_slice);
        let statuses = pod.data["status"][statuses].as_array().map_or(&[][..], Vec::as_slice);
        statuses.iter().map(move |status| {
            let spec = specs.iter().find(|spec| spec["name"] == status["name"]).unwrap_or(&Value::Null);
            Container { spec, status }
        })
    })
}

/// A container of a pod with its specification, which is null if the pod has none of that name.
#[derive(Clone, Copy, Debug)]
pub struct Container<'a> {
    /// Its specification; null without one.
    pub spec: &'a Value,
    /// Its status.
    pub status: &'a Value,
}

impl<'a> Container<'a> {
    /// Name of the container.
    pub fn name(&self) -> &'a str {
        text(&self.status["name"])
    }

    fn waiting_fault(self) -> Option<PodFault<'a>> {
        let waiting = &self.status["state"]["waiting"];
        let container = self.name();
        let image = text(&self.spec["image"]);
        let message = text(&waiting["message"]);
        Some(match text(&waiting["reason"]) {
            "InvalidImageName" => PodFault::ImageName { container, image },
            "ErrImagePull"
            | "ImagePullBackOff"
            | "ErrImageNeverPull"
            | "RegistryUnavailable"
            | "SignatureValidationFailed" => PodFault::ImagePull { container, image },
            "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError" => {
                PodFault::Start { container, message }
            }
            "CrashLoopBackOff" => self.crash_loop(&self.status["lastState"]["terminated"]),
            _ => return None,
        })
    }

    fn crash_loop(self, terminated: &'a Value) -> PodFault<'a> {
        let last = Termination {
            code: terminated["exitCode"].as_i64(),
            reason: text(&terminated["reason"]),
            message: text(&terminated["message"]).trim(),
            memory_limit: text(&self.spec["resources"]["limits"]["memory"]),
        };
        PodFault::CrashLoop { container: self.name(), last }
    }

    /// Crash loop of a container that does not wait. `ready` is the last change of the pod's readiness.
    fn restarting(self, ready: Option<Timestamp>) -> Option<PodFault<'a>> {
        let state = &self.status["state"];
        let last = &self.status["lastState"]["terminated"];
        let fails = |run: &Value| run["exitCode"].as_i64().is_some_and(|code| code != 0) && is_short(run);
        let is_looping = self.status["restartCount"].as_i64() >= Some(CRASH_LOOP_RESTARTS) && fails(last);
        if !is_looping || self.status["ready"] == true {
            return None;
        }
        if state["terminated"].is_object() {
            return fails(&state["terminated"]).then(|| self.crash_loop(&state["terminated"]));
        }
        let started = time(&state["running"]["startedAt"])?;
        let was_ready = ready.is_some_and(|ready| ready > started);
        (!was_ready).then(|| self.crash_loop(last))
    }
}

/// Returns whether a run ended before the kubelet resets the back-off, or never began.
fn is_short(run: &Value) -> bool {
    if matches!(text(&run["reason"]), "StartError" | "ContainerCannotRun") {
        return true;
    }
    let times = time(&run["startedAt"]).zip(time(&run["finishedAt"]));
    times.is_some_and(|(started, finished)| finished.duration_since(started) < BACKOFF_RESET)
}

fn unschedulable(pod: &DynamicObject) -> Option<PodFault<'_>> {
    let condition = condition_with(pod, "PodScheduled", "False")?;
    let since = time(&condition["lastTransitionTime"]);
    Some(PodFault::Unschedulable { message: text(&condition["message"]), since })
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn time(value: &Value) -> Option<Timestamp> {
    value.as_str()?.parse().ok()
}

#[cfg(test)]
mod tests;
