//! What a pass works from, as a hash on the KCP Kyma, so that a process that begins knows whom to look at first.
//!
//! Two parts, since a pass may end one work and not the other: what the Kyma itself decides, with the plan and the definitions that a
//! runtime has of us; and what the catalog holds for it. A change of the first part means both works: what the catalog holds goes in under
//! the definitions that belong to it.

use std::collections::BTreeMap;

use aws_lc_rs::digest;
use kube::{
    Api, ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tidewatch_shared::{
    api::Kyma,
    hex,
    names::{annotation, field_manager},
    plan::{Plan, Work},
};

use super::{Context, crd, fetch};
use crate::fleet::queue::Works;

/// Stands for what no pass has ended yet.
const NEVER: &str = "-";

/// What is noted of a Kyma over which no pass has ended.
pub(super) const NOTHING: &str = "-.-";

/// The inputs of the passes over one Kyma.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Inputs {
    kyma: String,
    catalog: String,
}

/// Whether an annotation is one of those that passes write.
pub(crate) fn is_our_note(key: &str) -> bool {
    key == annotation::ACCEPTED_SPEC || key == annotation::INPUTS
}

impl Inputs {
    /// `catalog` stands for the content of the Kyma's catalog.
    pub(crate) fn of(kyma: &Kyma, plan: &Plan, catalog: &str) -> Self {
        Self::with(kyma, plan, crd::fingerprint(), catalog)
    }

    fn with(kyma: &Kyma, plan: &Plan, definitions: &str, catalog: &str) -> Self {
        let annotations: BTreeMap<_, _> = kyma.annotations().iter().filter(|(key, _)| !is_our_note(key)).collect();
        let decided = json!([kyma.metadata.generation, kyma.labels(), annotations, plan.revision(), definitions]);
        Self { kyma: hash(&decided.to_string()), catalog: hash(catalog) }
    }

    /// The works of a runtime over which no pass from exactly these inputs has ended.
    pub(crate) fn unnoted_at(&self, kyma: &Kyma) -> Works {
        let (worked, catalog) = noted(kyma);
        match (worked == self.kyma, catalog == self.catalog) {
            (true, true) => Works::EMPTY,
            (true, false) => Works::of(&[Work::Catalog]),
            (false, _) => Works::RUNTIME,
        }
    }

    /// The annotation after these works have ended, if it is another one than it was.
    pub(crate) fn after(&self, kyma: &Kyma, ended: Works) -> Option<String> {
        let before = noted(kyma);
        let worked = if ended.contains(Work::Kyma) { &self.kyma } else { before.0 };
        let catalog = if ended.contains(Work::Catalog) { &self.catalog } else { before.1 };
        ((worked, catalog) != before).then(|| format!("{worked}.{catalog}"))
    }
}

/// Notes what a pass has ended. It is only a hint for the next start: what cannot be written is written after the next pass.
pub(super) async fn note(ctx: &Context, kyma: &Kyma, inputs: &Inputs, ended: Works) {
    let Some(noted) = inputs.after(kyma, ended) else { return };
    let api: Api<Kyma> = fetch::in_kcp(ctx, &kyma.namespace().unwrap_or_default());
    let params =
        PatchParams { field_manager: Some(field_manager::LIFECYCLE_OPERATOR.to_owned()), ..PatchParams::default() };
    // With the uid, and without the version: whatever else was written meanwhile, this pass had these inputs.
    let metadata = json!({"uid": kyma.uid(), "annotations": {annotation::INPUTS: noted}});
    let patch = Patch::Merge(json!({"metadata": metadata}));
    if let Err(error) = api.patch_metadata(&kyma.name_any(), &params, &patch).await {
        tracing::debug!(kyma = kyma.name_any(), error = &error as &dyn std::error::Error, "The inputs were not noted");
    }
}

fn noted(kyma: &Kyma) -> (&str, &str) {
    kyma.annotations().get(annotation::INPUTS).and_then(|noted| noted.split_once('.')).unwrap_or((NEVER, NEVER))
}

fn hash(text: &str) -> String {
    hex::encode(&digest::digest(&digest::SHA256, text.as_bytes()).as_ref()[..8])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_definitions_mean_all_works_and_another_catalog_means_its_own() {
        let mut kyma: Kyma =
            serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": "k", "generation": 1}, "spec": {"channel": "regular"}}))
            .unwrap();
        let plan = Plan::new("r".into(), Vec::new()).unwrap();
        let inputs = |kyma: &Kyma, definitions: &str, catalog: &str| Inputs::with(kyma, &plan, definitions, catalog);
        let noted = inputs(&kyma, "old", "old").after(&kyma, Works::RUNTIME).unwrap();
        kyma.annotations_mut().insert(annotation::INPUTS.to_owned(), noted);
        assert_eq!(inputs(&kyma, "old", "old").unnoted_at(&kyma), Works::EMPTY);
        assert_eq!(inputs(&kyma, "old", "new").unnoted_at(&kyma), Works::of(&[Work::Catalog]));
        assert_eq!(inputs(&kyma, "new", "new").unnoted_at(&kyma), Works::RUNTIME, "definitions go first");
        assert_eq!(inputs(&kyma, crd::fingerprint(), "old"), Inputs::of(&kyma, &plan, "old"));
    }
}
