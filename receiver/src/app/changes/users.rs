//! Users of a module: Kymas that select it by their last accepted spec, or have a Manifest of it.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use tidewatch_api::{facts::ManifestFacts, key::KymaKey, selection::SelectedVersion};
use tidewatch_fleet::stores::{Stores, kymas::CachedKyma, manifests::CachedManifest};

/// Installed version of a module, according to its Manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Installed {
    /// Channel that the version came from; `None` for a pinned version.
    channel: Option<String>,
    version: Option<String>,
}

/// Source of the version that a Kyma has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Follows<'a> {
    /// The version came from this channel, which the Kyma follows.
    Channel(&'a str),
    /// The Kyma has the version that it pins.
    Version,
    /// The module is not installed from the selected source, for example after a refused switch of the channel: every
    /// change may resolve it.
    Unresolved,
}

/// A Kyma that uses a module.
pub(super) struct User {
    pub(super) kyma: Arc<CachedKyma>,
    selected: Option<SelectedVersion>,
    installed: Option<Installed>,
}

/// The users of one module.
pub(super) struct Users {
    pub(super) module: String,
    pub(super) all: Vec<User>,
}

impl Users {
    /// Finds the users of a module in the caches.
    pub(super) fn of(stores: &Stores, module: &str) -> Self {
        Self::among(&stores.kymas.state(), &stores.manifests.of_module(module), module)
    }

    /// Finds the users of a module among these Kymas; `manifests` are all Manifests of the module.
    pub(super) fn among(kymas: &[Arc<CachedKyma>], manifests: &[Arc<CachedManifest>], module: &str) -> Self {
        let mut installed: HashMap<KymaKey, Installed> = manifests
            .iter()
            .filter(|manifest| !manifest.is_mandatory())
            .filter_map(|manifest| Some((manifest.kyma()?, Installed::of(&manifest.facts()))))
            .collect();
        let users = kymas.iter().filter_map(|kyma| {
            let selected = kyma.facts().selected(module);
            let installed = installed.remove(&kyma.key());
            let uses = selected.is_some() || installed.is_some();
            uses.then(|| User { kyma: kyma.clone(), selected, installed })
        });
        Self { module: module.to_owned(), all: users.collect() }
    }
}

impl Installed {
    fn of(manifest: &ManifestFacts<'_>) -> Self {
        Self { channel: manifest.channel.map(str::to_owned), version: manifest.version.map(str::to_owned) }
    }
}

impl User {
    pub(super) fn key(&self) -> KymaKey {
        self.kyma.key()
    }

    /// Source of the version of the module.
    pub(super) fn follows(&self) -> Follows<'_> {
        let Some(installed) = &self.installed else { return Follows::Unresolved };
        match (&self.selected, installed.channel.as_deref()) {
            (Some(SelectedVersion::Channel(channel)), Some(from)) if channel == from => Follows::Channel(from),
            (Some(SelectedVersion::Version(version)), None) if Some(version) == installed.version.as_ref() => {
                Follows::Version
            }
            (Some(_), _) => Follows::Unresolved,
            // Deselected, or selected by a spec that is not recorded.
            (None, Some(channel)) => Follows::Channel(channel),
            (None, None) => Follows::Version,
        }
    }

    /// Returns true if the module is at this version, selects it, or is unresolved. `target` is the version of a channel.
    pub(super) fn may_use(&self, version: &str, target: impl Fn(&str) -> Option<String>) -> bool {
        let is_installed =
            self.installed.as_ref().is_some_and(|installed| installed.version.as_deref() == Some(version));
        let is_selected = match &self.selected {
            Some(SelectedVersion::Channel(channel)) => target(channel).as_deref() == Some(version),
            Some(SelectedVersion::Version(selected)) => selected == version,
            None => false,
        };
        is_installed || is_selected || self.follows() == Follows::Unresolved
    }
}

/// Kymas with a Manifest of a module that is mandatory, or was.
pub(super) fn of_mandatory(stores: &Stores, module: &str) -> BTreeSet<KymaKey> {
    let manifests = stores.manifests.of_module(module);
    let mandatory = manifests.iter().filter(|manifest| manifest.is_mandatory());
    mandatory.filter_map(|manifest| manifest.kyma()).collect()
}
