//! Modules that Kymas select: in their spec, by the annotation with the accepted spec, and by pins.

pub mod pins;
mod user;

use std::{borrow::Cow, collections::BTreeMap};

use kube::ResourceExt as _;
use serde::Deserialize;

pub use self::{pins::Pins, user::UserSelection};

use self::pins::pinned;
use crate::{Kyma, names::annotation};

/// Source of a module's version in a Kyma.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SelectedVersion {
    /// The version of this channel.
    Channel(String),
    /// This version, which a pin fixes. It may be invalid.
    Version(String),
}

/// The modules that a Kyma selects: by the last accepted spec of the runtime's Kyma, or by KCP's if none was accepted. A pin
/// of the runtime's Kyma wins over one of KCP's, and both over channels.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModuleSelection(Box<[(Box<str>, SelectedVersion)]>);

impl ModuleSelection {
    /// Selection of a Kyma.
    pub fn of(kyma: &Kyma) -> Self {
        let accepted = kyma.annotations().get(annotation::ACCEPTED_SPEC);
        let modules = match accepted.map(|text| serde_json::from_str::<Selection<'_>>(text)) {
            Some(Ok(selection)) => {
                let selected = |entry: &Entry<'_>| (entry.name.as_ref().into(), selection.version_of(kyma, entry));
                selection.modules.iter().flatten().map(selected).collect()
            }
            // As for one module.
            Some(Err(_)) | None => {
                let names = kyma.spec.modules().iter().map(|entry| entry.name.as_str());
                names.filter_map(|name| Some((name.into(), selected(kyma, name)?))).collect()
            }
        };
        Self(modules)
    }

    /// Version that is selected of a module, by its first entry.
    pub fn of_module(&self, module: &str) -> Option<&SelectedVersion> {
        self.0.iter().find(|(name, _)| **name == *module).map(|(_, version)| version)
    }

    /// Selected modules whose version is pinned, with that version.
    pub fn pinned(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().filter_map(|(module, version)| match version {
            SelectedVersion::Version(version) => Some((&**module, version.as_str())),
            SelectedVersion::Channel(_) => None,
        })
    }
}

/// Members of the accepted spec that select modules: a change of the catalog parses them of every user, so nothing else.
#[derive(Deserialize)]
struct Selection<'a> {
    #[serde(borrow)]
    channel: Cow<'a, str>,
    #[serde(borrow)]
    modules: Option<Vec<Entry<'a>>>,
    /// Pinned versions by module.
    pins: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct Entry<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow)]
    channel: Option<Cow<'a, str>>,
}

impl Selection<'_> {
    fn version_of(&self, kyma: &Kyma, entry: &Entry<'_>) -> SelectedVersion {
        let own = self.pins.as_ref().and_then(|pins| pins.get(&*entry.name));
        let pin = own.map(String::as_str).or_else(|| pinned(kyma.annotations(), &entry.name));
        selected_by(pin, entry.channel.as_deref(), &self.channel)
    }
}

/// Version that a Kyma selects of one module, as [`ModuleSelection`] has it. Costs less than the whole selection.
pub fn selected(kyma: &Kyma, module: &str) -> Option<SelectedVersion> {
    let accepted = match kyma.annotations().get(annotation::ACCEPTED_SPEC) {
        // Names of modules need no escapes in JSON.
        Some(text) if !text.contains(module) => return None,
        Some(text) => serde_json::from_str::<Selection<'_>>(text).ok(),
        None => None,
    };
    let Some(selection) = accepted else {
        let entry = kyma.spec.modules().iter().find(|entry| entry.name == module)?;
        let pin = pinned(kyma.annotations(), module);
        return Some(selected_by(pin, entry.channel.as_deref(), &kyma.spec.channel));
    };
    let entry = selection.modules.iter().flatten().find(|entry| entry.name == module)?;
    Some(selection.version_of(kyma, entry))
}

/// `default` is the channel of the Kyma.
fn selected_by(pin: Option<&str>, channel: Option<&str>, default: &str) -> SelectedVersion {
    match pin {
        Some(version) => SelectedVersion::Version(version.to_owned()),
        None => SelectedVersion::Channel(channel.filter(|channel| !channel.is_empty()).unwrap_or(default).to_owned()),
    }
}
