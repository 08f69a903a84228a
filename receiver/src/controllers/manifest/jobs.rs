//! Jobs of a module. Each content of a Job runs once: Kubernetes may delete a Job after its end, and what is gone counts as
//! finished, with an unknown result. The Manifest records the contents of such Jobs, so that neither a restart nor another
//! replica runs one again.
//!
//! The pod template of a Job cannot change. An existing Job of another content is replaced once it has ended, and one of the
//! same content stays as it is: a label that names the version, a localised image or an image pull secret is no reason to
//! run it again.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use kube::{
    Api, ResourceExt as _,
    api::{DynamicObject, Patch, PatchParams},
};
use serde_json::{Value, json};
use tidewatch_shared::{
    api::Manifest,
    names::{annotation, field_manager, label},
};

use super::{
    apply::{Applied, TYPED, Wanted},
    execute::Execution,
    failure::Failure,
    inventory::ObjectKey,
    render::{RenderedObject, names_pull_secret, without_pull_secret},
    step::Seen,
};
use crate::{
    kube::{
        object::{self, Repair, Shape, WriteError},
        workload::condition_with,
    },
    oci::digest::Digest,
};

/// Jobs that a Manifest records at most: more than any module has, and far from the limit of an object's annotations.
const MAX_RECORDED: usize = 100;
/// Digits of a content's hash: enough for the few contents that one Job ever has.
const DIGITS: usize = 16;
/// Labels of a pod template that name a version, and nothing of what runs.
const VERSION_LABELS: [&str; 3] = [label::VERSION, "helm.sh/chart", "chart"];
/// Text of an API server about a field that does not let change.
const IMMUTABLE: &str = "field is immutable";

/// Rules of the comparison of a Job that keeps its pod template.
const KEPT: Shape = Shape { ignored: &["/spec/template"], ..TYPED };

/// True for a Job.
pub(super) fn is_job(key: &ObjectKey) -> bool {
    key.group == "batch" && key.kind == "Job"
}

/// Hash of what a Job of a layer runs, the same in every version of the receiver: its pod template, and how often it runs.
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
fn content_of(body: &Value) -> &str {
    body["metadata"]["annotations"][annotation::JOB].as_str().unwrap_or_default()
}

/// Contents of the Jobs that Kubernetes deletes after their end, by namespace and name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CreatedJobs {
    /// As the Manifest records them.
    recorded: BTreeMap<String, String>,
    /// As other Manifests of the Kyma record them: the component of a module may be renamed, and modules may share a Job.
    of_others: Vec<BTreeMap<String, String>>,
    /// As this reconcile has found or created them.
    created: BTreeMap<String, String>,
}

impl CreatedJobs {
    /// Reads the annotations of a Manifest and of the others of its Kyma. Of a malformed one nothing is known: its Jobs run
    /// once more.
    pub(super) fn of(manifest: &Manifest, others: &[Arc<Manifest>]) -> Self {
        let read = |manifest: &Manifest| -> Option<BTreeMap<String, String>> {
            serde_json::from_str(manifest.annotations().get(annotation::JOBS)?).ok()
        };
        let of_others = others.iter().filter_map(|other| read(other)).collect();
        Self { recorded: read(manifest).unwrap_or_default(), of_others, created: BTreeMap::new() }
    }

    /// True if this content was created. If the Job is gone, it has run.
    fn was_created(&self, key: &ObjectKey, content: &str) -> bool {
        let known = |jobs: &BTreeMap<String, String>| jobs.get(&name_of(key)).is_some_and(|known| known == content);
        known(&self.recorded) || known(&self.created) || self.of_others.iter().any(known)
    }

    /// True if some content of the Job was created.
    pub(super) fn has(&self, key: &ObjectKey) -> bool {
        is_job(key) && [&self.recorded, &self.created].iter().any(|jobs| jobs.contains_key(&name_of(key)))
    }

    /// Adds a Job that Kubernetes will delete after its end.
    pub(super) fn add(&mut self, object: &RenderedObject) {
        self.created.insert(name_of(&object.key), content_of(&object.body).to_owned());
    }

    /// The annotation that records the new ones, without Jobs that are no longer rendered; `None` if there is no new one.
    pub(super) fn annotation(&self, rendered: &[RenderedObject]) -> Option<String> {
        let is_new = |(name, content): (&String, &String)| self.recorded.get(name) != Some(content);
        if !self.created.iter().any(is_new) {
            return None;
        }
        let mut jobs = BTreeMap::new();
        for object in rendered.iter().filter(|object| is_job(&object.key)).take(MAX_RECORDED) {
            let name = name_of(&object.key);
            if let Some(content) = self.created.get(&name).or_else(|| self.recorded.get(&name)) {
                jobs.insert(name, content);
            }
        }
        let text = json!(jobs).to_string();
        jobs.iter().any(|(name, content)| self.recorded.get(name) != Some(*content)).then_some(text)
    }
}

fn name_of(key: &ObjectKey) -> String {
    format!("{}/{}", key.namespace, key.name)
}

/// State of an existing Job that an apply cannot change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Existing {
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

fn existing(live: &DynamicObject, body: &Value) -> Existing {
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

/// True if the API server refused to change an immutable field.
fn is_immutable(error: &WriteError) -> bool {
    let WriteError::Apply(kube::Error::Api(status)) = error else { return false };
    let causes = status.details.iter().flat_map(|details| &details.causes);
    let mut texts = causes.map(|cause| &cause.message).chain([&status.message]);
    status.code == 422 && texts.any(|text| text.contains(IMMUTABLE))
}

/// True if Kubernetes deletes a live Job after its end.
pub(super) fn expires(live: &DynamicObject) -> bool {
    live.data["spec"]["ttlSecondsAfterFinished"].is_number()
}

impl Execution<'_> {
    /// Applies a Job, given as it was found, unless it has run.
    pub(super) async fn apply_job(
        &self,
        api: &Api<DynamicObject>,
        wanted: &Wanted<'_>,
        found: Option<DynamicObject>,
    ) -> Result<Applied, Failure> {
        let RenderedObject { key, body, .. } = wanted.object;
        let Some(live) = found else {
            if self.jobs.was_created(key, content_of(body)) {
                return Ok(Applied::has_run());
            }
            return match self.converge(api, wanted, None).await {
                // It was not read before.
                Err(error) if is_immutable(&error) => match object::get(api, &key.name).await {
                    Ok(Some(live)) => self.replace_job(api, wanted.object, &live).await,
                    Ok(None) => Err(self.failure(wanted.object, error)),
                    Err(error) => Err(Failure::new(format!("read {key}"), &error)),
                },
                applied => applied.map_err(|error| self.failure(wanted.object, error)),
            };
        };
        if is_same(&live, body) && KEPT.compare(&wanted.body, &live, None) == Repair::None {
            return Ok(self.current(key, live, self.memory.accepted(key)));
        }
        match self.converge(api, wanted, Some(live.clone())).await {
            Err(error) if is_immutable(&error) => self.replace_job(api, wanted.object, &live).await,
            applied => applied.map_err(|error| self.failure(wanted.object, error)),
        }
    }

    /// Deals with an existing Job whose pod template does not let change.
    async fn replace_job(
        &self,
        api: &Api<DynamicObject>,
        object: &RenderedObject,
        live: &DynamicObject,
    ) -> Result<Applied, Failure> {
        let RenderedObject { key, body, .. } = object;
        match existing(live, body) {
            Existing::Terminating => Ok(Applied::seen(Seen::Terminating)),
            Existing::Running => Ok(Applied::seen(Seen::Running)),
            Existing::Same => {
                let marks =
                    json!({"labels": body["metadata"]["labels"], "annotations": body["metadata"]["annotations"]});
                let manager = Some(field_manager::MODULE.to_owned());
                let params = PatchParams { field_manager: manager, ..PatchParams::default() };
                let patched = api.patch(&key.name, &params, &Patch::Merge(json!({"metadata": marks}))).await;
                let patched = patched.map_err(|error| Failure::new(format!("apply {key}"), &error))?;
                Ok(self.current(key, patched, None))
            }
            Existing::Ended => {
                let deleted = object::delete(api, &key.name, live.uid()).await;
                if deleted.map_err(|error| Failure::new(format!("delete {key}"), &error))?.is_some() {
                    return Ok(Applied::seen(Seen::Terminating));
                }
                let applied = self.converge(api, &Wanted::of(object), None).await;
                applied.map_err(|error| self.failure(object, error))
            }
        }
    }

    /// Drops the image pull secret from the body for an existing object whose pods cannot get one any more.
    pub(super) fn fit(&self, wanted: &mut Wanted<'_>, live: &DynamicObject) {
        let key = &wanted.object.key;
        let secret = self.ctx.settings.pull_secret.as_ref().map(|secret| secret.name.as_str());
        if let Some(secret) = secret.filter(|secret| !names_pull_secret(&live.data, key, secret)) {
            wanted.body = Cow::Owned(without_pull_secret(&wanted.body, key, secret));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::manifest::stage::Stage;

    fn job(change: impl FnOnce(&mut Value)) -> Value {
        let mut job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j", "namespace": "ns",
            "labels": {label::VERSION: "1.0.0"}}, "spec": {"ttlSecondsAfterFinished": 0, "template": {
                "metadata": {"labels": {"app": "j", label::VERSION: "1.0.0", "helm.sh/chart": "c-1.0.0"}},
                "spec": {"containers": [{"name": "c", "image": "i:1"}]}}}});
        change(&mut job);
        job
    }

    fn rendered(name: &str, content: &str) -> RenderedObject {
        let body = job(|job| {
            job["metadata"]["name"] = name.into();
            job["metadata"]["annotations"] = json!({annotation::JOB: content});
        });
        let (key, version, stage) = (ObjectKey::of(&body), "v1".to_owned(), Stage::Workloads);
        RenderedObject { key, version, stage, served: true, body }
    }

    fn manifest(text: Option<&str>) -> Manifest {
        let annotations = text.map(|text| json!({annotation::JOBS: text}));
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": "m", "namespace": "ns", "annotations": annotations},
            "spec": {"remote": true, "install": {"name": "i", "source": {}}}}))
        .unwrap()
    }

    /// Recorded in the control plane: a changed value would run all Jobs of a fleet again.
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
    fn created_jobs_are_recorded_once_and_forgotten_with_their_version() {
        let objects = [rendered("a", "1"), rendered("b", "1")];
        let mut jobs = CreatedJobs::of(&manifest(Some(r#"{"ns/a":"1","ns/dropped":"1"}"#)), &[]);
        assert!(jobs.was_created(&objects[0].key, "1") && !jobs.was_created(&objects[0].key, "2"));
        assert!(jobs.has(&objects[0].key) && !jobs.has(&objects[1].key));
        jobs.add(&objects[0]);
        assert_eq!(jobs.annotation(&objects), None, "recorded already");
        jobs.add(&objects[1]);
        let text = jobs.annotation(&objects).unwrap();
        assert_eq!(text, r#"{"ns/a":"1","ns/b":"1"}"#);
        assert!(CreatedJobs::of(&manifest(Some(&text)), &[]).was_created(&objects[1].key, "1"));
        // Another Manifest, as that of a renamed component, records it as well.
        let mut renamed = CreatedJobs::of(&manifest(None), &[Arc::new(manifest(Some(&text)))]);
        assert!(renamed.was_created(&objects[1].key, "1") && !renamed.was_created(&objects[1].key, "2"));
        assert_eq!(renamed.annotation(&objects), None);
        renamed.add(&objects[1]);
        assert_eq!(renamed.annotation(&objects).unwrap(), r#"{"ns/b":"1"}"#);
        for malformed in [None, Some("{"), Some("[1]"), Some(r#"{"ns/a":1}"#)] {
            assert_eq!(CreatedJobs::of(&manifest(malformed), &[]), CreatedJobs::default(), "{malformed:?}");
        }
    }

    #[test]
    fn record_is_bounded() {
        let objects: Vec<_> = (0..MAX_RECORDED + 5).map(|n| rendered(&format!("j{n:03}"), "1")).collect();
        let mut jobs = CreatedJobs::default();
        objects.iter().for_each(|object| jobs.add(object));
        let text = jobs.annotation(&objects).unwrap();
        let mut known = CreatedJobs::of(&manifest(Some(&text)), &[]);
        assert_eq!(known.recorded.len(), MAX_RECORDED);
        objects.iter().for_each(|object| known.add(object));
        assert_eq!(known.annotation(&objects), None, "those beyond the limit cause no writes");
    }

    #[test]
    fn existing_job_of_another_content_is_replaced_once_it_does_not_run() {
        let state = |content: &str, conditions: Value, deleted: Option<&str>| {
            let live = json!({"metadata": {"annotations": {annotation::JOB: content}, "deletionTimestamp": deleted},
                "status": {"conditions": conditions}});
            existing(&serde_json::from_value(live).unwrap(), &rendered("j", "new").body)
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
