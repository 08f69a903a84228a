//! The inputs of a reconcile as a hash in an annotation of the KCP Kyma, by which a starting receiver finds the changed
//! Kymas and reconciles them first.
//!
//! The hash has two parts, because a reconcile may end one kind of work and not the other: the Kyma's own fields with
//! plan and CRDs, and the content of its catalog. A change of the first part requires both kinds of work, because the
//! catalog is applied under those CRDs. The first part has the maintenance window of a Kyma with a module that waits for one,
//! and of no other, whose inputs would change with every window.

mod pending;

use std::collections::BTreeMap;

use kube::ResourceExt;
use serde_json::json;
use tidewatch_api::{
    Kyma,
    key::KymaKey,
    names::annotation,
    plan::{Plan, Work},
};
use tidewatch_cluster::leader::reconcile_fence;
use tidewatch_fleet::queue::WorkSet;
use tidewatch_kit::digest::short_digest;
use tidewatch_select::windows::WindowState;

use super::{Context, crd};

pub(super) use pending::Metrics;
pub use pending::PendingInputs;

/// Part of the hash before the first reconcile has ended.
const NEVER: &str = "-";

/// Hash before the first reconcile has ended.
pub(super) const NOTHING: &str = "-.-";

/// The inputs of one Kyma's reconcile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inputs {
    kyma: String,
    catalog: String,
}

/// Returns true for the annotations that a reconcile writes.
pub fn is_own_annotation(key: &str) -> bool {
    [annotation::ACCEPTED_SPEC, annotation::INPUTS, annotation::RESET_MODULES].contains(&key)
}

impl Inputs {
    /// `catalog` is the content hash of the Kyma's catalog.
    pub(crate) fn of(kyma: &Kyma, plan: &Plan, catalog: &str) -> Self {
        Self::with(kyma, plan, crd::fingerprint(), catalog)
    }

    fn with(kyma: &Kyma, plan: &Plan, definitions: &str, catalog: &str) -> Self {
        let annotations: BTreeMap<_, _> =
            kyma.annotations().iter().filter(|(key, _)| !is_own_annotation(key)).collect();
        let decided = json!([kyma.metadata.generation, kyma.labels(), annotations, plan.revision(), definitions]);
        Self { kyma: hash(&decided.to_string()), catalog: hash(catalog) }
    }

    /// The same with the maintenance window that a module of the Kyma waits for, if one does.
    #[must_use]
    pub(crate) fn with_window(self, window: Option<WindowState>) -> Self {
        match window {
            Some(window) => Self { kyma: hash(&format!("{} {window}", self.kyma)), ..self },
            None => self,
        }
    }

    /// The work that no reconcile has ended with exactly these inputs.
    pub(crate) fn unnoted_at(&self, kyma: &Kyma) -> WorkSet {
        let (worked, catalog) = parts(noted(kyma));
        match (worked == self.kyma, catalog == self.catalog) {
            (true, true) => WorkSet::EMPTY,
            (true, false) => WorkSet::of(&[Work::Catalog]),
            (false, _) => WorkSet::RUNTIME,
        }
    }

    /// The annotation that follows on `noted` after this work has ended, if it differs. While a module waits for the registry,
    /// the next start reconciles the Kyma whatever its inputs are.
    pub(crate) fn after(&self, noted: &str, ended: WorkSet, awaits_registry: bool) -> Option<String> {
        let before = parts(noted);
        let worked = match ended.contains(Work::Kyma) {
            _ if awaits_registry => NEVER,
            true => &self.kyma,
            false => before.0,
        };
        let catalog = if ended.contains(Work::Catalog) { &self.catalog } else { before.1 };
        ((worked, catalog) != before).then(|| format!("{worked}.{catalog}"))
    }
}

/// Records the ended work in the annotation, in the background.
pub(super) fn note(ctx: &Context, key: &KymaKey, kyma: &Kyma, inputs: &Inputs, ended: WorkSet, awaits_registry: bool) {
    let (Some(stored), Some(uid)) = (kyma.annotations().get(annotation::INPUTS), &kyma.metadata.uid) else { return };
    ctx.caches
        .inputs
        .update(key, uid, stored, reconcile_fence(), |before| inputs.after(before, ended, awaits_registry));
}

/// The annotation of a Kyma.
fn noted(kyma: &Kyma) -> &str {
    kyma.annotations().get(annotation::INPUTS).map_or(NOTHING, String::as_str)
}

fn parts(noted: &str) -> (&str, &str) {
    noted.split_once('.').unwrap_or((NEVER, NEVER))
}

fn hash(text: &str) -> String {
    short_digest(text.as_bytes(), 8)
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
        let after = inputs(&kyma, "old", "old").after(noted(&kyma), WorkSet::RUNTIME, false).unwrap();
        kyma.annotations_mut().insert(annotation::INPUTS.to_owned(), after);
        assert_eq!(inputs(&kyma, "old", "old").unnoted_at(&kyma), WorkSet::EMPTY);
        assert_eq!(inputs(&kyma, "old", "new").unnoted_at(&kyma), WorkSet::of(&[Work::Catalog]));
        assert_eq!(inputs(&kyma, "new", "new").unnoted_at(&kyma), WorkSet::RUNTIME, "definitions go first");
        let after = inputs(&kyma, "old", "old").after(noted(&kyma), WorkSet::RUNTIME, true).unwrap();
        kyma.annotations_mut().insert(annotation::INPUTS.to_owned(), after);
        assert_eq!(inputs(&kyma, "old", "old").unnoted_at(&kyma), WorkSet::RUNTIME, "a module waits for the registry");
        assert_eq!(inputs(&kyma, crd::fingerprint(), "old"), Inputs::of(&kyma, &plan, "old"));
    }
}
