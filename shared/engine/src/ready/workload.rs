//! Readiness of workloads by their own status.

use kube::api::DynamicObject;
use tidewatch_cluster::workload::{condition, condition_with, is_observed, replica_failure};

use super::{Readiness, cause, unobserved};
use crate::inventory::ObjectKey;

/// Update strategy under which a person deletes the pods of an earlier revision.
const ON_DELETE: &str = "OnDelete";

/// Counts of pods or nodes in the status of a workload; an absent count is zero.
struct Counts<'a>(&'a DynamicObject);

impl Counts<'_> {
    fn of(&self, member: &str) -> i64 {
        self.0.data["status"][member].as_i64().unwrap_or(0)
    }

    /// Desired number of pods. The API server's default is one.
    fn wanted(&self) -> i64 {
        self.0.data["spec"]["replicas"].as_i64().unwrap_or(1)
    }

    /// The first of these counts that is below the desired number, or surplus pods, as text.
    fn shortfall(&self, members: &[(&str, &str)]) -> Option<String> {
        let wanted = self.wanted();
        let few = members.iter().find(|(member, _)| self.of(member) < wanted);
        if let Some((member, state)) = few {
            return Some(format!("{} of {wanted} replicas {state}", self.of(member)));
        }
        let existing = self.of("replicas");
        (existing > wanted).then(|| format!("{existing} replicas exist instead of {wanted}"))
    }
}

pub(super) fn deployment(key: &ObjectKey, deployment: &DynamicObject) -> Readiness {
    if !is_observed(deployment) {
        return unobserved(key);
    }
    let counts = Counts(deployment);
    // A pod of an earlier template counts as available, so that the updated ones are compared first.
    let members = [
        ("replicas", "exist"),
        ("updatedReplicas", "are updated"),
        ("availableReplicas", "are available"),
        ("readyReplicas", "are ready"),
    ];
    let shortfall = counts.shortfall(&members);
    if let Some(refusal) = shortfall.as_ref().and_then(|_| refused(key, deployment)) {
        return refusal;
    }
    let is_complete = condition_with(deployment, "Progressing", "True")
        .is_some_and(|progressing| progressing["reason"] == "NewReplicaSetAvailable");
    // Without a deadline, the controller reports no progress.
    let deadline = deployment.data["spec"]["progressDeadlineSeconds"].as_i64().filter(|it| *it < i32::MAX.into());
    let is_paused = deployment.data["spec"]["paused"] == true;
    let missing = match shortfall {
        Some(shortfall) if is_paused => format!("its rollout is paused; {shortfall}"),
        Some(shortfall) => shortfall,
        None if !is_complete && deadline.is_some() && is_paused => "its rollout is paused".to_owned(),
        None if !is_complete && deadline.is_some() => "its rollout is not complete".to_owned(),
        None if condition_with(deployment, "Available", "True").is_none() => "it is not available".to_owned(),
        None => return Readiness::Ready,
    };
    if is_overdue(key, deployment) {
        let seconds = deadline.map(|seconds| format!(" of {seconds} s")).unwrap_or_default();
        return Readiness::failed(key, &format!("no progress within the deadline{seconds}: {missing}"));
    }
    Readiness::progressing(key, &missing)
}

/// Returns whether a Deployment has exceeded its progress deadline. The cause is that of its pods.
pub(super) fn is_overdue(key: &ObjectKey, deployment: &DynamicObject) -> bool {
    let is_deployment = key.group == "apps" && key.kind == "Deployment";
    let progressing = || condition(deployment, "Progressing");
    is_deployment && progressing().is_some_and(|condition| condition["reason"] == "ProgressDeadlineExceeded")
}

/// Failure of a workload of which the API server refuses pods. The names of these pods are random and left out.
fn refused(key: &ObjectKey, workload: &DynamicObject) -> Option<Readiness> {
    let message = replica_failure(workload)?;
    let reason = message.split_once("is forbidden: ").map_or(message, |(_, reason)| reason);
    let quota = reason.strip_prefix("exceeded quota: ").or_else(|| reason.strip_prefix("failed quota: "));
    let text = match quota {
        Some(quota) => format!("a resource quota of the namespace refuses its pods: {quota}"),
        None => format!("the API server refuses its pods: {reason}"),
    };
    Some(Readiness::failed(key, &text))
}

pub(super) fn replica_set(key: &ObjectKey, set: &DynamicObject) -> Readiness {
    if !is_observed(set) {
        return unobserved(key);
    }
    let members =
        [("fullyLabeledReplicas", "exist"), ("availableReplicas", "are available"), ("readyReplicas", "are ready")];
    match Counts(set).shortfall(&members) {
        Some(missing) => refused(key, set).unwrap_or_else(|| Readiness::progressing(key, &missing)),
        None => Readiness::Ready,
    }
}

pub(super) fn stateful_set(key: &ObjectKey, set: &DynamicObject) -> Readiness {
    if !is_observed(set) {
        return unobserved(key);
    }
    let counts = Counts(set);
    if let Some(missing) = counts.shortfall(&[("replicas", "exist"), ("readyReplicas", "are ready")]) {
        return Readiness::progressing(key, &missing);
    }
    let strategy = &set.data["spec"]["updateStrategy"];
    let status = &set.data["status"];
    if strategy["type"] == ON_DELETE {
        return Readiness::Ready;
    }
    // The replicas with an ordinal below the partition keep the earlier revision.
    let partition = strategy["rollingUpdate"]["partition"].as_i64().unwrap_or(0).max(0);
    let wanted = counts.wanted().saturating_sub(partition);
    let updated = counts.of("updatedReplicas");
    let is_rolling = partition == 0 && status["currentRevision"] != status["updateRevision"];
    if updated < wanted {
        return Readiness::progressing(key, &format!("{updated} of {wanted} replicas are updated"));
    }
    if is_rolling { Readiness::progressing(key, "its rollout is not complete") } else { Readiness::Ready }
}

pub(super) fn daemon_set(key: &ObjectKey, set: &DynamicObject) -> Readiness {
    if !is_observed(set) || !set.data["status"]["desiredNumberScheduled"].is_i64() {
        return unobserved(key);
    }
    let counts = Counts(set);
    let wanted = counts.of("desiredNumberScheduled");
    let is_on_delete = set.data["spec"]["updateStrategy"]["type"] == ON_DELETE;
    let members = [
        ("currentNumberScheduled", "have a pod"),
        ("updatedNumberScheduled", "have an updated pod"),
        ("numberAvailable", "have an available pod"),
        ("numberReady", "have a ready pod"),
    ];
    let mut compared = members.iter().filter(|(member, _)| !(is_on_delete && *member == "updatedNumberScheduled"));
    match compared.find(|(member, _)| counts.of(member) < wanted) {
        Some((member, state)) => {
            Readiness::progressing(key, &format!("{} of {wanted} nodes {state}", counts.of(member)))
        }
        None => Readiness::Ready,
    }
}

pub(super) fn job(key: &ObjectKey, job: &DynamicObject) -> Readiness {
    if condition_with(job, "Complete", "True").is_some() {
        return Readiness::Ready;
    }
    if let Some(failed) = condition_with(job, "Failed", "True") {
        return Readiness::failed(key, &format!("it failed: {}", cause(failed)));
    }
    let text = match condition_with(job, "Suspended", "True") {
        Some(_) => "it is suspended",
        None if job.data["status"]["startTime"].is_null() => "it has not started",
        None => "it is not complete",
    };
    Readiness::progressing(key, text)
}
