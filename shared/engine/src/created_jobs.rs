//! Jobs that were created. Kubernetes may delete a Job after its end, and a Job that is gone counts as finished, with an
//! unknown result. The Manifest records the contents of such Jobs, so that neither a restart nor another replica runs one
//! again. Pure.

use std::{collections::BTreeMap, sync::Arc};

use kube::ResourceExt as _;
use serde_json::json;
use tidewatch_api::{Manifest, names::annotation};

use super::{
    inventory::ObjectKey,
    jobs::{content_of, is_job},
    render::RenderedObject,
};

/// Jobs that a Manifest records at most: more than any module has, and far from the limit of an object's annotations.
const MAX_RECORDED: usize = 100;

/// Contents of the Jobs that Kubernetes deletes after their end, by namespace and name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CreatedJobs {
    /// As the Manifest records them.
    recorded: BTreeMap<String, String>,
    /// As other Manifests of the cluster record them: the component of a module may be renamed, and modules may share a Job.
    of_others: Vec<BTreeMap<String, String>>,
    /// As this reconcile has found or created them.
    created: BTreeMap<String, String>,
}

impl CreatedJobs {
    /// Reads the annotations of a Manifest and of the others of its cluster. Of a malformed one nothing is known: its Jobs run
    /// once more.
    pub(super) fn of(manifest: &Manifest, others: &[Arc<Manifest>]) -> Self {
        let read = |manifest: &Manifest| -> Option<BTreeMap<String, String>> {
            serde_json::from_str(manifest.annotations().get(annotation::JOBS)?).ok()
        };
        let of_others = others.iter().filter_map(|other| read(other)).collect();
        Self { recorded: read(manifest).unwrap_or_default(), of_others, created: BTreeMap::new() }
    }

    /// True if this content was created. If the Job is gone, it has run.
    pub(super) fn was_created(&self, key: &ObjectKey, content: &str) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stage::Stage;

    fn rendered(name: &str, content: &str) -> RenderedObject {
        let metadata = json!({"name": name, "namespace": "ns", "annotations": {annotation::JOB: content}});
        let body = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata});
        let key = ObjectKey::of(&body);
        let version = "v1".to_owned();
        let stage = Stage::Workloads;
        RenderedObject { key, version, stage, served: true, body }
    }

    fn manifest(text: Option<&str>) -> Manifest {
        let annotations = text.map(|text| json!({annotation::JOBS: text}));
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": "m", "namespace": "ns", "annotations": annotations},
            "spec": {"remote": true, "install": {"name": "i", "source": {}}}}))
        .unwrap()
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
}
