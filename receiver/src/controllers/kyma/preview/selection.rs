//! The selection of a Kyma as KCP knows it.

use std::{collections::BTreeSet, sync::Arc};

use kube::ResourceExt as _;
use tidewatch_shared::{
    api::{Kyma, KymaSpec, Manifest, Module},
    names::{annotation, label},
};

use crate::{
    base::labels::is_true,
    controllers::kyma::{
        mandatory::is_mandatory,
        modules::{is_unmanaged, module_of},
        remote::initial_spec,
        validate::{Validated, validate},
    },
};

/// Selection of a Kyma, and its source.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Selection {
    /// The one that the last reconcile accepted; for a new Kyma that of KCP.
    Accepted(KymaSpec),
    /// It was never accepted, or is too large to be recorded: the installed modules, each in its channel or version.
    Installed(KymaSpec),
}

/// Finds the selection of a Kyma with these Manifests.
pub(super) fn selection_of(kyma: &Kyma, manifests: &[Arc<Manifest>]) -> Selection {
    let is_recorded = kyma.annotations().contains_key(annotation::ACCEPTED_SPEC);
    let is_reset = is_true(Some(kyma.labels()), label::RESET_MODULES);
    if is_recorded || is_reset || manifests.is_empty() {
        return Selection::Accepted(initial_spec(kyma, is_reset));
    }
    let selected = manifests.iter().filter(|manifest| !is_mandatory(manifest));
    let modules = selected.filter(|manifest| manifest.metadata.deletion_timestamp.is_none()).filter_map(|manifest| {
        let channel = manifest.labels().get(label::CHANNEL).filter(|channel| !channel.is_empty()).cloned();
        let version = manifest.spec.version.clone().filter(|_| channel.is_none());
        Some(Module {
            name: module_of(manifest)?.to_owned(),
            channel,
            version,
            managed: !is_unmanaged(manifest),
            custom_resource_policy: manifest.spec.custom_resource_policy,
            ..Module::default()
        })
    });
    Selection::Installed(KymaSpec { modules: Some(modules.collect()), ..kyma.spec.clone() })
}

impl Selection {
    /// The valid selection, limited to these modules; `None` if it is invalid.
    pub(super) fn validated(&self, modules: &BTreeSet<String>) -> Option<Validated> {
        let (Self::Accepted(spec) | Self::Installed(spec)) = self;
        let mut validated = validate(spec).ok()?;
        validated.modules.retain(|module| modules.contains(&module.name));
        Some(validated)
    }
}
