//! Users of a module: Kymas that select it by their last accepted spec, or have a Manifest of it.

use std::{
    borrow::Cow,
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use kube::{ResourceExt as _, runtime::reflector::ObjectRef};
use serde::Deserialize;
use tidewatch_shared::{api::Kyma, names::annotation};

use crate::base::{
    key::KymaKey,
    manifests::{CachedManifest, ManifestFacts},
    stores::Stores,
};

/// Source of a module's version in the spec of a Kyma.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Selected {
    Channel(String),
    Version(String),
}

/// Installed version of a module, according to its Manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Installed {
    /// Channel that the version came from; `None` for a fixed version.
    channel: Option<String>,
    version: Option<String>,
}

/// Source of the version that a Kyma has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Follows<'a> {
    /// The version came from this channel, which the Kyma follows.
    Channel(&'a str),
    /// The Kyma has the fixed version that it selects.
    Version,
    /// The module is not installed from the selected source, for example after a refused switch of the channel: every
    /// change may resolve it.
    Unresolved,
}

/// A Kyma that uses a module.
pub(super) struct User {
    pub(super) kyma: Arc<Kyma>,
    selected: Option<Selected>,
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
    pub(super) fn among(kymas: &[Arc<Kyma>], manifests: &[Arc<CachedManifest>], module: &str) -> Self {
        let mut installed: HashMap<KymaKey, Installed> = manifests
            .iter()
            .filter(|manifest| !manifest.is_mandatory())
            .filter_map(|manifest| Some((manifest.kyma()?, Installed::of(&manifest.facts()))))
            .collect();
        let users = kymas.iter().filter_map(|kyma| {
            let (selected, installed) = (selected(kyma, module), installed.remove(&KymaKey::of(kyma.as_ref())));
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
        KymaKey::of(self.kyma.as_ref())
    }

    /// Source of the version of the module.
    pub(super) fn follows(&self) -> Follows<'_> {
        let Some(installed) = &self.installed else { return Follows::Unresolved };
        match (&self.selected, installed.channel.as_deref()) {
            (Some(Selected::Channel(channel)), Some(from)) if channel == from => Follows::Channel(from),
            (Some(Selected::Version(version)), None) if Some(version) == installed.version.as_ref() => Follows::Version,
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
            Some(Selected::Channel(channel)) => target(channel).as_deref() == Some(version),
            Some(Selected::Version(selected)) => selected == version,
            None => false,
        };
        is_installed || is_selected || self.follows() == Follows::Unresolved
    }
}

/// Version that a channel of a module names in the cache.
pub(super) fn target(stores: &Stores, namespace: &str, module: &str, channel: &str) -> Option<String> {
    let meta = stores.release_metas.get(&ObjectRef::new(module).within(namespace))?;
    let mut channels = meta.spec.channels.iter().flatten();
    channels.find(|entry| entry.channel == channel).map(|entry| entry.version.clone())
}

/// Kymas with a Manifest of a module that is mandatory, or was.
pub(super) fn of_mandatory(stores: &Stores, module: &str) -> BTreeSet<KymaKey> {
    let manifests = stores.manifests.of_module(module);
    let mandatory = manifests.iter().filter(|manifest| manifest.is_mandatory());
    mandatory.filter_map(|manifest| manifest.kyma()).collect()
}

/// Members of a spec that select modules: a change of the catalog parses them of every user, so nothing else.
#[derive(Deserialize)]
struct Selection<'a> {
    #[serde(borrow)]
    channel: Cow<'a, str>,
    #[serde(borrow)]
    modules: Option<Vec<Entry<'a>>>,
}

#[derive(Deserialize)]
struct Entry<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow)]
    channel: Option<Cow<'a, str>>,
    #[serde(borrow)]
    version: Option<Cow<'a, str>>,
}

/// Source of a module's version by the last accepted spec of the runtime's Kyma, or by KCP's if none was accepted.
fn selected(kyma: &Kyma, module: &str) -> Option<Selected> {
    let accepted = match kyma.annotations().get(annotation::ACCEPTED_SPEC) {
        // Names of modules need no escapes in JSON.
        Some(text) if !text.contains(module) => return None,
        Some(text) => serde_json::from_str::<Selection<'_>>(text).ok(),
        None => None,
    };
    let Some(Selection { channel, modules }) = accepted else {
        let entry = kyma.spec.modules().iter().find(|entry| entry.name == module)?;
        return Some(selected_by(entry.channel.as_deref(), entry.version.as_deref(), &kyma.spec.channel));
    };
    let entry = modules.iter().flatten().find(|entry| entry.name == module)?;
    Some(selected_by(entry.channel.as_deref(), entry.version.as_deref(), &channel))
}

/// `default` is the channel of the Kyma.
fn selected_by(channel: Option<&str>, version: Option<&str>, default: &str) -> Selected {
    match version.filter(|version| !version.is_empty()) {
        Some(version) => Selected::Version(version.to_owned()),
        None => Selected::Channel(channel.filter(|channel| !channel.is_empty()).unwrap_or(default).to_owned()),
    }
}
