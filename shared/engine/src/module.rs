//! Facts about the Manifests of one cluster's modules. Pure.

use std::sync::Arc;

use kube::ResourceExt as _;
use tidewatch_api::{
    CustomResourcePolicy, Manifest,
    names::{annotation, label},
};

use super::{
    default_object,
    inventory::{Inventory, ObjectKey},
    step::Goal,
};

/// Returns the goal of a Manifest's reconcile.
pub fn goal_of(manifest: &Manifest) -> Goal {
    if manifest.annotations().get(annotation::UNMANAGED).is_some_and(|value| value == "true") {
        Goal::Release
    } else if manifest.metadata.deletion_timestamp.is_some() {
        Goal::Remove
    } else {
        Goal::Install
    }
}

/// Returns the objects of a module that may exist in its cluster.
pub fn inventory_of(manifest: &Manifest) -> Inventory {
    Inventory::read(manifest.status.as_ref().map(|status| status.synced()).unwrap_or_default())
}

/// Order of the Manifests of one module: the last one is applied, the others write nothing.
pub fn precedence(manifest: &Manifest) -> impl Ord {
    let metadata = &manifest.metadata;
    (succession(manifest), metadata.creation_timestamp.as_ref(), metadata.uid.as_deref())
}

/// Number of a Manifest in the order in which its Kyma selected those of the module; 0 without a valid one.
pub fn succession(manifest: &Manifest) -> u64 {
    let number = manifest.annotations().get(annotation::SUCCESSION);
    number.and_then(|number| number.parse().ok()).unwrap_or_default()
}

/// Returns true if one of the others replaces a Manifest: it takes over the objects.
pub(crate) fn is_superseded(manifest: &Manifest, others: &[Arc<Manifest>]) -> bool {
    let is_newer = |other: &Arc<Manifest>| precedence(other) > precedence(manifest);
    goal_of(manifest) == Goal::Install && of_module(manifest, others).iter().any(is_newer)
}

/// Selects the other Manifests of the same module that are not being deleted: the component of the module was renamed. The
/// newest one that stays is applied, and the default module CR is its own.
pub(crate) fn of_module(manifest: &Manifest, others: &[Arc<Manifest>]) -> Vec<Arc<Manifest>> {
    let module = module_of(manifest);
    let is_of_module = |other: &&Arc<Manifest>| {
        module.is_some() && module_of(other) == module && other.metadata.deletion_timestamp.is_none()
    };
    others.iter().filter(is_of_module).cloned().collect()
}

pub(crate) fn module_of(manifest: &Manifest) -> Option<&str> {
    manifest.labels().get(label::MODULE_NAME).map(String::as_str)
}

/// True if the module has a default CR that is created and deleted with it.
pub(crate) fn manages_default(manifest: &Manifest) -> bool {
    manifest.spec.policy() == CustomResourcePolicy::CreateAndDelete && manifest.spec.resource().is_some()
}

/// True if a Manifest of the same module that stays has this default module CR, or the CRD of its kind.
pub(crate) fn keeps_default(heir: &Manifest, default: &ObjectKey) -> bool {
    let of_heir = [default_object::of(heir), heir.spec.resource().map(ObjectKey::of)];
    of_heir.iter().flatten().any(|it| it == default)
        || inventory_of(heir).keys().any(|key| key.defines_group_of(default))
}
