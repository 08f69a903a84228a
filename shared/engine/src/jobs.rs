//! Jobs of a module. Each content of a Job runs once. Pure.
//!
//! The pod template of a Job cannot change. An existing Job of another content is replaced once it has ended, and one of the
//! same content stays as it is: a label that names the version, a localised image or an image pull secret is no reason to
//! run it again.

use kube::{ResourceExt as _, api::DynamicObject};
use serde_json::{Value, json};
use tidewatch_api::names::{annotation, label};
use tidewatch_cluster::workload::condition_with;
use tidewatch_oci::digest::Digest;

use super::inventory::ObjectKey;

/// Digits of a content's hash: enough for the few contents that one Job ever has.
const DIGITS: usize = 16;
/// Labels of a pod template that name a version, and nothing of what runs.
const VERSION_LABELS: [&str; 3] = [label::VERSION, "helm.sh/chart", "chart"];

/// True for a Job.
pub(super) fn is_job(key: &ObjectKey) -> bool {
    key.group == "batch" && key.kind == "Job"
}

/// Hash of what a Job runs, the same in every version of this program: its pod template, and how often it runs.
pub(super) fn content(job: &Value) -> String {
    let spec = &job["spec"];
    let mut template = spec["template"].clone();
    if let Some(labels) = template.pointer_mut("/metadata/labels").and_then(Value::as_object_mut) {
        labels.retain(|name, _| !VERSION_LABELS.contains(&name.as_str()));
    }
    let runs = json!([template, spec["completions"], spec["completionMode"]]);
    Digest::of(runs.to_string().as_bytes()).hex().chars().take(DIGITS).collect()
}

/// The hash that a rendered Job has as an annotation.
pub(super) fn content_of(body: &Value) -> &str {
    body["metadata"]["annotations"][annotation::JOB].as_str().unwrap_or_default()
}

/// State of an existing Job that an apply cannot change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Existing {
    /// It has the content that is to run.
    Same,
    /// It has another content, and has ended, or is suspended.
    Ended,
    /// It has another content, and runs.
    Running,
    /// It is being deleted.
    Terminating,
}

/// True for a Job that has the content of this body.
pub(super) fn is_same(live: &DynamicObject, body: &Value) -> bool {
    live.annotations().get(annotation::JOB).is_some_and(|content| content == content_of(body))
}

/// Compares an existing Job with the rendered one.
pub(super) fn existing(live: &DynamicObject, body: &Value) -> Existing {
    let is_true = |kind: &str| condition_with(live, kind, "True").is_some();
    if live.metadata.deletion_timestamp.is_some() {
        Existing::Terminating
    } else if is_same(live, body) {
        Existing::Same
    } else if ["Complete", "Failed", "Suspended"].into_iter().any(is_true) {
        Existing::Ended
    } else {
        Existing::Running
    }
}

/// True if Kubernetes deletes a live Job after its end.
pub(super) fn expires(live: &DynamicObject) -> bool {
    live.data["spec"]["ttlSecondsAfterFinished"].is_number()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(change: impl FnOnce(&mut Value)) -> Value {
        let mut job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j", "namespace": "ns",
            "labels": {label::VERSION: "1.0.0"}}, "spec": {"ttlSecondsAfterFinished": 0, "template": {
                "metadata": {"labels": {"app": "j", label::VERSION: "1.0.0", "helm.sh/chart": "c-1.0.0"}},
                "spec": {"containers": [{"name": "c", "image": "i:1"}]}}}});
        change(&mut job);
        job
    }

    /// Recorded in Manifests: a changed value would run all Jobs of a fleet again.
    #[test]
    fn content_is_the_same_in_every_version_of_the_receiver() {
        assert_eq!(content(&job(|_| ())), "e4b41f1e1bd60db8");
    }

    #[test]
    fn only_what_runs_is_the_content_of_a_job() {
        let base = content(&job(|_| ()));
        let labels = |job: &mut Value| {
            job["metadata"]["labels"] = json!({label::VERSION: "2.0.0"});
            let labels = json!({"app": "j", label::VERSION: "2.0.0", "helm.sh/chart": "c-2.0.0"});
            job["spec"]["template"]["metadata"]["labels"] = labels;
        };
        let unchanged: [&dyn Fn(&mut Value); 4] = [
            &labels,
            &|job| job["spec"]["ttlSecondsAfterFinished"] = 60.into(),
            &|job| job["spec"]["activeDeadlineSeconds"] = 60.into(),
            &|job| job["spec"]["suspend"] = true.into(),
        ];
        for change in unchanged {
            assert_eq!(content(&job(change)), base);
        }
        let changed: [&dyn Fn(&mut Value); 3] = [
            &|job| job["spec"]["template"]["spec"]["containers"][0]["image"] = "i:2".into(),
            &|job| job["spec"]["template"]["metadata"]["labels"]["app"] = "other".into(),
            &|job| job["spec"]["completions"] = 2.into(),
        ];
        for change in changed {
            assert_ne!(content(&job(change)), base);
        }
    }

    #[test]
    fn existing_job_of_another_content_is_replaced_once_it_does_not_run() {
        let state = |content: &str, conditions: Value, deleted: Option<&str>| {
            let live = json!({"metadata": {"annotations": {annotation::JOB: content}, "deletionTimestamp": deleted},
                "status": {"conditions": conditions}});
            let wanted = job(|job| job["metadata"]["annotations"] = json!({annotation::JOB: "new"}));
            existing(&serde_json::from_value(live).unwrap(), &wanted)
        };
        let met = |kind: &str| json!([{"type": kind, "status": "True"}]);
        assert_eq!(state("new", met("Complete"), None), Existing::Same);
        for ended in ["Complete", "Failed", "Suspended"] {
            assert_eq!(state("old", met(ended), None), Existing::Ended, "{ended}");
        }
        for running in [json!(null), met("FailureTarget"), json!([{"type": "Complete", "status": "False"}])] {
            assert_eq!(state("old", running, None), Existing::Running);
        }
        assert_eq!(state("new", met("Complete"), Some("2026-01-01T00:00:00Z")), Existing::Terminating);
    }
}
