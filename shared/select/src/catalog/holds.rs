//! Effect of held removals on the catalog: what is held stays as it was accepted, all else follows KCP. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use kube::ResourceExt as _;
use tidewatch_api::{Channel, ModuleReleaseMeta, ModuleTemplate, names::label};

use super::{
    desired::{HeldObjects, Kind, ObjectId},
    removal_guard::{HeldRemovals, Part, Releases},
    target::VisibilityLabels,
    visibility::template_name,
};

/// Removals of the catalog that are held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holds {
    /// Every removal: it is not known what was accepted before.
    everything: bool,
    /// Modules that stay as a whole.
    modules: BTreeSet<String>,
    /// Parts that stay of other modules.
    parts: BTreeMap<String, HeldParts>,
}

/// Parts of a module that stay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct HeldParts {
    /// Channels, with the version of each.
    channels: BTreeMap<String, String>,
    /// Versions, those of the channels included, with their accepted labels.
    versions: BTreeMap<String, VisibilityLabels>,
}

impl From<BTreeSet<String>> for Holds {
    fn from(modules: BTreeSet<String>) -> Self {
        Self { modules, ..Self::default() }
    }
}

impl Holds {
    /// Holds every removal.
    pub fn everything() -> Self {
        Self { everything: true, ..Self::default() }
    }

    /// Holds these removals; `accepted` is the state with the held parts.
    pub fn of(held: &HeldRemovals, accepted: &Releases) -> Self {
        let mut holds = Self::default();
        for removal in &held.removals {
            let Some(state) = accepted.get(&removal.module) else { continue };
            let mut hold = |channel: Option<&String>, version: &String| {
                let parts = holds.parts.entry(removal.module.clone()).or_default();
                let labels = state.versions.get(version).copied().unwrap_or_default();
                parts.versions.insert(version.clone(), labels);
                parts.channels.extend(channel.map(|channel| (channel.clone(), version.clone())));
            };
            match &removal.part {
                Part::Module | Part::Component => drop(holds.modules.insert(removal.module.clone())),
                Part::Channel(channel) => {
                    state.channels.get(channel).into_iter().for_each(|target| hold(Some(channel), &target.version));
                }
                Part::Version(version) => hold(None, version),
            }
        }
        holds
    }

    /// The template as it was accepted: a held version has its accepted visibility labels.
    pub fn template(&self, template: Arc<ModuleTemplate>) -> Arc<ModuleTemplate> {
        let parts = template.spec.module_name.as_ref().and_then(|module| self.parts.get(module));
        let version = template.spec.version.as_ref();
        let held = parts.zip(version).and_then(|(parts, version)| parts.versions.get(version)).copied();
        let now = VisibilityLabels::of(template.metadata.labels.as_ref());
        let Some(accepted) = held.filter(|accepted| now.hides_from_viewers_of(*accepted)) else { return template };
        let mut template = Arc::unwrap_or_clone(template);
        for (key, set) in [(label::BETA, accepted.beta), (label::INTERNAL, accepted.internal)] {
            let labels = template.labels_mut();
            match set {
                true => drop(labels.insert(key.to_owned(), "true".to_owned())),
                false => drop(labels.remove(key)),
            }
        }
        Arc::new(template)
    }

    /// The release meta as it was accepted: held channels point to their accepted versions, if these are selectable.
    pub fn release_meta<'a>(
        &self,
        meta: Arc<ModuleReleaseMeta>,
        template: impl Fn(&str) -> Option<&'a ModuleTemplate>,
    ) -> Arc<ModuleReleaseMeta> {
        let module = meta.spec.module_name.clone();
        let held = self.parts.get(&module).filter(|_| meta.spec.mandatory.is_none());
        let held = held.into_iter().flat_map(|parts| &parts.channels);
        let held: Vec<_> =
            held.filter(|(_, version)| is_selectable(template(&template_name(&module, version)))).collect();
        if held.is_empty() {
            return meta;
        }
        let mut meta = Arc::unwrap_or_clone(meta);
        let channels = meta.spec.channels.get_or_insert_default();
        for (channel, version) in held {
            match channels.iter_mut().find(|entry| entry.channel == *channel) {
                Some(entry) => entry.version.clone_from(version),
                None => {
                    channels.push(Channel { channel: channel.clone(), version: version.clone(), ..Channel::default() })
                }
            }
        }
        Arc::new(meta)
    }

    /// Objects that stay as they are in the runtimes that have them. A module stays as a whole if KCP has no selectable
    /// template of a held channel any more: a runtime without it would get a channel that points to nothing.
    pub fn objects<'a>(&self, template: impl Fn(&str) -> Option<&'a ModuleTemplate>) -> HeldObjects {
        let mut held =
            HeldObjects { everything: self.everything, modules: self.modules.clone(), ..HeldObjects::default() };
        for (module, parts) in &self.parts {
            let is_gone = |version: &String| !is_selectable(template(&template_name(module, version)));
            if parts.channels.values().any(is_gone) {
                held.modules.insert(module.clone());
            }
            let gone = parts.versions.keys().filter(|version| is_gone(version));
            held.objects.extend(gone.map(|version| ObjectId::new(Kind::Template, &template_name(module, version))));
        }
        held
    }
}

/// Returns whether users can select a version with this template.
fn is_selectable(template: Option<&ModuleTemplate>) -> bool {
    template.is_some_and(|template| !template.spec.is_mandatory())
}
