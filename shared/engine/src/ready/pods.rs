//! Pods of a workload that is not ready: which of them explain it, and how.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{ResourceExt as _, api::DynamicObject, core::Selector};
use serde::Deserialize as _;
use serde_json::Value;
use tidewatch_cluster::workload::{PodFault, Termination, condition_with, containers};
use tidewatch_kit::foreign_text;

use super::{MAX_TEXT_CHARS, Readiness, cause, is_outdated, workload};
use crate::inventory::ObjectKey;

/// Number of pods of a workload that are read at most.
pub(crate) const MAX_PODS: u16 = 20;
/// Maximum length of a label selector.
const MAX_SELECTOR_BYTES: usize = 4096;
/// Time for which a pod may have no node: a cluster autoscaler adds one in a few minutes.
const SCHEDULING_GRACE: SignedDuration = SignedDuration::from_mins(5);
/// Label of the pods of a Deployment; its value stands for their template.
const TEMPLATE_HASH: &str = "pod-template-hash";

/// Label selector of the pods of a workload, in the syntax of a list request. `None` if the kind has no pods, or if the
/// selector is empty, malformed or longer than 4,096 bytes.
pub(crate) fn pod_selector(key: &ObjectKey, workload: &DynamicObject) -> Option<String> {
    match (key.group.as_str(), key.kind.as_str()) {
        ("apps", "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet") | ("batch", "Job") => {}
        _ => return None,
    }
    let selector = LabelSelector::deserialize(&workload.data["spec"]["selector"]).ok()?;
    let selector = Selector::try_from(selector).ok()?.to_string();
    (1..=MAX_SELECTOR_BYTES).contains(&selector.len()).then_some(selector)
}

/// Explains by its pods why a workload is not ready. A pod that cannot run makes it fail, except for one without a node
/// for less than five minutes; one that only does not pass its probes does not. `readiness` is that of the workload.
pub(crate) fn explain(
    readiness: Readiness,
    key: &ObjectKey,
    workload: &DynamicObject,
    pods: &[DynamicObject],
    now: Timestamp,
) -> Readiness {
    // The pods of an earlier generation explain nothing.
    if workload.metadata.deletion_timestamp.is_some() || is_outdated(workload) {
        return readiness;
    }
    let known = match &readiness {
        Readiness::Progressing(text) => text,
        Readiness::Failed(text) if workload::is_overdue(key, workload) => text,
        Readiness::Ready | Readiness::Failed(_) => return readiness,
    };
    let is_overdue = matches!(readiness, Readiness::Failed(_));
    let pods = current(pods);
    let fault = pods.iter().filter_map(|pod| PodFault::of(pod).or_else(|| PodFault::restarting(pod))).min();
    if let Some(fault) = fault {
        let is_failure = is_overdue || is_failure(&fault, now);
        let text = describe(&fault);
        return if is_failure { Readiness::failed(key, &text) } else { Readiness::progressing(key, &text) };
    }
    let Some(probe) = pods.iter().filter_map(|pod| unpassed_probe(pod)).min() else { return readiness };
    let text = foreign_text::shortened(&format!("{known}; {probe}"), MAX_TEXT_CHARS);
    if is_overdue { Readiness::Failed(text) } else { Readiness::Progressing(text) }
}

/// Readiness of a pod that belongs to no workload.
pub(super) fn pod(key: &ObjectKey, pod: &DynamicObject, now: Timestamp) -> Readiness {
    let status = &pod.data["status"];
    match status["phase"].as_str() {
        Some("Succeeded") => return Readiness::Ready,
        Some("Failed") => return Readiness::failed(key, &format!("it failed: {}", cause(status))),
        Some("Running") if is_ready(pod) => return Readiness::Ready,
        _ => {}
    }
    match PodFault::of(pod).or_else(|| PodFault::restarting(pod)) {
        Some(fault) if is_failure(&fault, now) => Readiness::failed(key, &describe(&fault)),
        Some(fault) => Readiness::progressing(key, &describe(&fault)),
        None => Readiness::progressing(key, unpassed_probe(pod).as_deref().unwrap_or("it is not ready")),
    }
}

/// Pods that are not ready and not on their way out, and of a Deployment only those of the newest one's template: the
/// others give way to them.
fn current(pods: &[DynamicObject]) -> Vec<&DynamicObject> {
    let is_over = |pod: &DynamicObject| matches!(pod.data["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
    let is_wanted = |pod: &&DynamicObject| pod.metadata.deletion_timestamp.is_none() && !is_over(pod) && !is_ready(pod);
    let mut pods: Vec<_> = pods.iter().filter(is_wanted).collect();
    let newest = pods.iter().max_by_key(|pod| (pod.metadata.creation_timestamp.as_ref(), template(pod)));
    if let Some(newest) = newest.and_then(|pod| template(pod)) {
        pods.retain(|pod| template(pod) == Some(newest));
    }
    pods
}

fn template(pod: &DynamicObject) -> Option<&str> {
    pod.labels().get(TEMPLATE_HASH).map(String::as_str)
}

fn is_ready(pod: &DynamicObject) -> bool {
    condition_with(pod, "Ready", "True").is_some()
}

fn is_failure(fault: &PodFault<'_>, now: Timestamp) -> bool {
    match fault {
        PodFault::Unschedulable { since, .. } => {
            since.is_some_and(|since| now.duration_since(since) >= SCHEDULING_GRACE)
        }
        _ => true,
    }
}

/// A fault in plain words, without the name of the pod, which is random.
fn describe(fault: &PodFault<'_>) -> String {
    match fault {
        PodFault::ImageName { container, image } => {
            format!("the image reference {image} of the container {container} is malformed")
        }
        PodFault::ImagePull { container, image } => {
            format!("the image {image} of the container {container} cannot be pulled")
        }
        PodFault::Start { container, message } => format!("the container {container} cannot be started: {message}"),
        // The kubelet reports a failed start as a termination as well.
        PodFault::CrashLoop { container, last } if matches!(last.reason, "StartError" | "ContainerCannotRun") => {
            format!("the container {container} cannot be started: {}", last.message)
        }
        PodFault::CrashLoop { container, last } => crashed(container, last),
        PodFault::Unschedulable { message, .. } => format!("no node takes a pod: {message}"),
    }
}

/// The termination message is left out: it may be the end of a log, with times.
fn crashed(container: &str, last: &Termination<'_>) -> String {
    let text = format!("the container {container} terminates again and again");
    match (last.reason, last.code) {
        ("OOMKilled", _) if last.memory_limit.is_empty() => {
            format!("{text}: it is killed for want of memory (OOMKilled)")
        }
        ("OOMKilled", _) => format!("{text}: it exceeds its memory limit of {} (OOMKilled)", last.memory_limit),
        ("Error" | "Completed" | "", Some(code)) => format!("{text} with exit code {code}"),
        (reason, Some(code)) => format!("{text} with exit code {code} ({reason})"),
        (_, None) => text,
    }
}

/// Container that runs, and the probe that it does not pass.
fn unpassed_probe(pod: &DynamicObject) -> Option<String> {
    let unready = |status: &Value| status["state"]["running"].is_object() && status["ready"] == false;
    let container = containers(pod).filter(|container| unready(container.status)).min_by_key(|it| it.name())?;
    let has = |probe: &str| container.spec[probe].is_object();
    let probe = match container.status["started"] == true {
        false if has("startupProbe") => "startup",
        _ if has("readinessProbe") => "readiness",
        _ => return None,
    };
    Some(format!("the container {} does not pass its {probe} probe", container.name()))
}

#[cfg(test)]
mod tests;
