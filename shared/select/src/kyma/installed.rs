//! An installed module, as its Manifest shows it. Pure.

use kube::ResourceExt as _;
use tidewatch_api::{
    Manifest,
    names::{annotation, label},
};

use super::lookup::Installed;
use crate::catalog::RolloutMark;

/// Returns true if the user manages the module of a Manifest.
pub fn is_unmanaged(manifest: &Manifest) -> bool {
    manifest.annotations().get(annotation::UNMANAGED).is_some_and(|value| value == "true")
}

/// The installed version; `None` for a Manifest without version.
pub(crate) fn installed_of(manifest: &Manifest) -> Option<Installed> {
    let version = manifest.spec.version.clone().filter(|version| !version.is_empty())?;
    let channel = manifest.labels().get(label::CHANNEL).cloned().unwrap_or_default();
    Some(Installed { channel, version, mark: RolloutMark::parse(manifest.annotations()) })
}

/// Name of a Manifest's module.
pub fn module_of(manifest: &Manifest) -> Option<&str> {
    manifest.labels().get(label::MODULE_NAME).map(String::as_str)
}
