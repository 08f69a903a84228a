//! Readiness of an object in a runtime cluster, by the rules of kstatus (sigs.k8s.io/cli-utils). Pure.
//!
//! Deviations, each because the object decides on the readiness of a module: a Job is ready once it is complete, a failed
//! pod is not ready, the replicas of a StatefulSet with the update strategy `OnDelete` must be ready, and a refused pod is
//! a failure. `workload` holds the rules of workloads, `pods` explains why one is not ready, `manager` selects the object.

mod manager;
mod pods;
mod workload;

use jiff::Timestamp;
use kube::api::DynamicObject;
use serde_json::Value;
use tidewatch_cluster::workload::{condition, condition_with};
use tidewatch_kit::foreign_text;

pub(super) use manager::{Manager, manager_of};
pub(super) use pods::{MAX_PODS, explain, pod_selector};

use super::inventory::ObjectKey;

/// Maximum length of an explanation in characters.
const MAX_TEXT_CHARS: usize = 512;

/// Readiness of an object. Explanations are one line of at most 512 characters without control characters; they begin
/// with the object and stay the same while its status does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    /// The object is as its specification wants it.
    Ready,
    /// Not yet.
    Progressing(String),
    /// Not without a change by a person or another program.
    Failed(String),
}

impl Readiness {
    fn progressing(key: &ObjectKey, text: &str) -> Self {
        Self::Progressing(line(key, text))
    }

    fn failed(key: &ObjectKey, text: &str) -> Self {
        Self::Failed(line(key, text))
    }

    /// Readiness of an object that the runtime cluster does not have.
    pub(super) fn absent(key: &ObjectKey) -> Self {
        Self::progressing(key, "it does not exist")
    }
}

/// Computes the readiness of a live object. `key` is that under which it was read. `now` is compared with the
/// time since which a pod has had no node.
pub(super) fn readiness(key: &ObjectKey, object: &DynamicObject, now: Timestamp) -> Readiness {
    if object.metadata.deletion_timestamp.is_some() {
        return Readiness::progressing(key, "it is being deleted");
    }
    if is_outdated(object) {
        return unobserved(key);
    }
    if let Some(stalled) = condition_with(object, "Stalled", "True") {
        return Readiness::failed(key, &format!("it is stalled: {}", cause(stalled)));
    }
    if let Some(reconciling) = condition_with(object, "Reconciling", "True") {
        return Readiness::progressing(key, &format!("it is being reconciled: {}", cause(reconciling)));
    }
    match (key.group.as_str(), key.kind.as_str()) {
        ("apps", "Deployment") => workload::deployment(key, object),
        ("apps", "StatefulSet") => workload::stateful_set(key, object),
        ("apps", "DaemonSet") => workload::daemon_set(key, object),
        ("apps", "ReplicaSet") => workload::replica_set(key, object),
        ("batch", "Job") => workload::job(key, object),
        ("", "Pod") => pods::pod(key, object, now),
        ("", "PersistentVolumeClaim") => claim(key, object),
        ("apiextensions.k8s.io", "CustomResourceDefinition") => definition(key, object),
        ("apiregistration.k8s.io", "APIService") => {
            by_condition(key, object, "Available").unwrap_or_else(|| Readiness::progressing(key, "it is not available"))
        }
        _ => by_condition(key, object, "Ready").unwrap_or(Readiness::Ready),
    }
}

fn definition(key: &ObjectKey, definition: &DynamicObject) -> Readiness {
    if let Some(refused) = condition_with(definition, "NamesAccepted", "False") {
        return Readiness::failed(key, &format!("its names are not accepted: {}", cause(refused)));
    }
    match condition(definition, "Established") {
        Some(established) if established["status"] == "True" => Readiness::Ready,
        Some(established) if established["status"] == "False" && established["reason"] != "Installing" => {
            Readiness::failed(key, &format!("it is not established: {}", cause(established)))
        }
        _ => Readiness::progressing(key, "it is not established"),
    }
}

fn claim(key: &ObjectKey, claim: &DynamicObject) -> Readiness {
    match claim.data["status"]["phase"].as_str() {
        Some("Bound") => Readiness::Ready,
        Some("Lost") => Readiness::failed(key, "its volume is lost"),
        _ => Readiness::progressing(key, "it is not bound to a volume"),
    }
}

/// Readiness by one condition; `None` if the object does not have it.
fn by_condition(key: &ObjectKey, object: &DynamicObject, kind: &str) -> Option<Readiness> {
    let condition = condition(object, kind)?;
    let is_met = condition["status"] == "True";
    let text = || format!("its condition {kind} is not met: {}", cause(condition));
    Some(if is_met { Readiness::Ready } else { Readiness::progressing(key, &text()) })
}

/// Returns whether the status describes an earlier generation. A status without an observed generation does not: many
/// kinds have none.
fn is_outdated(object: &DynamicObject) -> bool {
    let observed = object.data["status"]["observedGeneration"].as_i64();
    observed.is_some() && observed < object.metadata.generation
}

fn unobserved(key: &ObjectKey) -> Readiness {
    Readiness::progressing(key, "its controller has not processed the last change")
}

/// Message of a condition, else its reason.
fn cause(condition: &Value) -> &str {
    let text = |member: &str| condition[member].as_str().filter(|text| !text.is_empty());
    text("message").or_else(|| text("reason")).unwrap_or("no reason is given")
}

/// An explanation that begins with the object.
fn line(key: &ObjectKey, text: &str) -> String {
    foreign_text::shortened(&format!("{key}: {text}"), MAX_TEXT_CHARS)
}

#[cfg(test)]
mod tests;
