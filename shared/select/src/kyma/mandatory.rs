//! Mandatory modules of a Kyma: every runtime has them, whatever its user selects, and they are in no status. Pure.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use kube::ResourceExt as _;
use tidewatch_api::{
    CustomResourcePolicy, Kyma, Manifest, ModuleReleaseMeta,
    labels::is_true,
    names::{finalizer, label},
};

use super::{
    installed::module_of,
    layer::LayerLookup,
    lookup::{LookupError, Resolved, Sources},
    modules::{self, Decisions},
    validate::{Follow, Validated, WantedModule},
};
use crate::catalog::{RolloutSlot, retirement, snapshot::Snapshot, visibility::template_name};

/// The Manifests of a Kyma, by the rules that decide on them.
#[derive(Debug, Default)]
pub struct Owned {
    /// Of modules that users select, or have selected.
    pub selected: Vec<Arc<Manifest>>,
    /// Of mandatory modules, and of those that were.
    pub mandatory: Vec<Arc<Manifest>>,
}

impl Owned {
    /// Divides the Manifests of a Kyma. `selection` is `None` if the user's selection is invalid, and so unknown.
    pub fn divide(manifests: Vec<Arc<Manifest>>, catalog: &Snapshot, selection: Option<&Validated>) -> Self {
        let may_select = |module: &str| {
            selection.is_none_or(|selection| selection.modules.iter().any(|selected| selected.name == module))
        };
        let (mandatory, selected) = manifests.into_iter().partition(|manifest| {
            let module = module_of(manifest);
            let meta = module.and_then(|module| catalog.release_meta(module));
            match meta.map(|(meta, _)| meta.spec.mandatory.is_some()) {
                Some(true) => true,
                // A module that became optional passes to the user who selects it.
                Some(false) => is_mandatory(manifest) && !module.is_some_and(may_select),
                None => is_mandatory(manifest),
            }
        });
        Self { selected, mandatory }
    }
}

/// The modules to decide on: those that are mandatory, and those that were when their Manifest was written.
pub fn wanted(catalog: &Snapshot, owned: &[Arc<Manifest>]) -> Vec<WantedModule> {
    let installed = owned.iter().filter_map(|manifest| module_of(manifest));
    let names: BTreeSet<_> = catalog.mandatory().map(|(module, _)| module).chain(installed).collect();
    let module = |name: &str| WantedModule {
        name: name.to_owned(),
        follows: Ok(Follow::Mandatory),
        managed: true,
        policy: CustomResourcePolicy::CreateAndDelete,
    };
    names.into_iter().map(module).collect()
}

/// Decides on the mandatory modules.
pub fn decide<'a>(
    kyma: &Kyma,
    wanted: &'a [WantedModule],
    owned: &[Arc<Manifest>],
    sources: &Sources<'_>,
    layer: &dyn Fn(&Resolved) -> LayerLookup,
) -> Decisions<'a> {
    let mut decisions = modules::decide(kyma, wanted, owned, sources, layer);
    // The module of a Manifest without the label is unknown, and so whether it is still mandatory.
    decisions.unwanted.retain(|manifest| module_of(manifest).is_some());
    decisions
}

/// Faults of the modules that cannot be installed, for an operator; `None` for one whose current version can. A fault has the
/// same text for every Kyma.
pub fn faults<'a>(decisions: &'a Decisions<'_>) -> impl Iterator<Item = (&'a str, Option<String>)> {
    decisions.wanted.iter().filter_map(|decision| {
        let fault = match &decision.found {
            Ok(found) => {
                let mandatory = found.meta.spec.mandatory.as_ref();
                // The version before, which a Kyma has until its rollout slot, proves nothing, and neither does a withdrawn
                // one that stays where it is.
                let is_current = mandatory.is_some_and(|mandatory| mandatory.version == found.version)
                    && retirement::withdrawn(&found.meta, &found.version, decisions.today).is_none();
                (is_current && !decision.pending).then_some(None)?
            }
            // Reported by the catalog.
            Err(LookupError::NoTemplate(_) | LookupError::LeftOut { .. }) => return None,
            // Passing states.
            Err(LookupError::NotMandatory(_) | LookupError::NoFinalizer(_)) => return None,
            // Whatever other version is installed.
            Err(LookupError::WithdrawnUpdate { notice, .. }) => {
                Some(LookupError::Withdrawn(notice.clone()).to_string())
            }
            Err(error) => Some(error.to_string()),
        };
        Some((decision.module.name.as_str(), fault))
    })
}

/// Time until a Kyma with these Manifests is to be reconciled because of its mandatory modules, zero if it lacks one, has
/// one too many, or is overdue in a roll-out. For a start: changes of a running process are observed.
/// `slot` returns the slot of the Kyma in the roll-out of a module's mandatory version, and `is_held` whether the removal guard
/// holds a module.
pub fn due_after(
    manifests: &[Arc<Manifest>],
    snapshot: &Snapshot,
    slot: impl Fn(&str, &str) -> RolloutSlot,
    is_held: impl Fn(&str) -> bool,
) -> Option<Duration> {
    let of =
        |module: &str| manifests.iter().find(|manifest| is_mandatory(manifest) && module_of(manifest) == Some(module));
    let wanted = snapshot.mandatory().filter_map(|(module, meta)| {
        let version = meta.spec.mandatory.as_ref().filter(|_| is_installable(meta)).map(|it| it.version.as_str())?;
        snapshot.template(&template_name(module, version))?;
        match of(module) {
            None => Some(Duration::ZERO),
            Some(manifest) if manifest.spec.version.as_deref() == Some(version) => None,
            Some(_) => match slot(module, version) {
                RolloutSlot::Now => Some(Duration::ZERO),
                RolloutSlot::After(rest) => Some(rest),
                RolloutSlot::Ring | RolloutSlot::Undecided => None,
            },
        }
    });
    let surplus = manifests.iter().filter(|manifest| {
        let meta = module_of(manifest).and_then(|module| snapshot.release_meta(module));
        is_mandatory(manifest)
            && manifest.metadata.deletion_timestamp.is_none()
            && meta.is_some_and(|(meta, _)| !is_wanted(meta))
            && !module_of(manifest).is_some_and(&is_held)
    });
    wanted.chain(surplus.map(|_| Duration::ZERO)).min()
}

/// Returns true for a Manifest with the label of mandatory modules.
pub fn is_mandatory(manifest: &Manifest) -> bool {
    is_true(Some(manifest.labels()), label::MANDATORY_MODULE)
}

/// Returns true if runtimes are to have the module.
pub fn is_wanted(meta: &ModuleReleaseMeta) -> bool {
    meta.spec.mandatory.is_some() && meta.metadata.deletion_timestamp.is_none()
}

/// Returns true if runtimes get the module: its release meta has the finalizer, and so outlives every installation.
pub fn is_installable(meta: &ModuleReleaseMeta) -> bool {
    is_wanted(meta) && is_protected(meta)
}

/// Returns true if the release meta has the finalizer.
pub fn is_protected(meta: &ModuleReleaseMeta) -> bool {
    meta.finalizers().iter().any(|name| name == finalizer::MANDATORY_MODULE)
}

#[cfg(test)]
mod tests;
