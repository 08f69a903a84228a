//! Modules that Kymas select.

use std::borrow::Cow;

use kube::ResourceExt as _;
use serde::Deserialize;
use tidewatch_shared::{api::Kyma, names::annotation};

/// Source of a module's version in the spec of a Kyma.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SelectedVersion {
    /// The version of this channel.
    Channel(String),
    /// This version.
    Version(String),
}

/// The modules that a Kyma selects: by the last accepted spec of the runtime's Kyma, or by KCP's if none was accepted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModuleSelection(Box<[(Box<str>, SelectedVersion)]>);

impl ModuleSelection {
    /// Selection of a Kyma.
    #[must_use]
    pub fn of(kyma: &Kyma) -> Self {
        let accepted = kyma.annotations().get(annotation::ACCEPTED_SPEC);
        let modules = match accepted.map(|text| serde_json::from_str::<Selection<'_>>(text)) {
            Some(Ok(Selection { channel, modules })) => {
                let selected = |entry: Entry<'_>| (entry.name.as_ref().into(), entry.selected(&channel));
                modules.into_iter().flatten().map(selected).collect()
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
    #[must_use]
    pub fn of_module(&self, module: &str) -> Option<&SelectedVersion> {
        self.0.iter().find(|(name, _)| **name == *module).map(|(_, version)| version)
    }
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

impl Entry<'_> {
    fn selected(&self, default: &str) -> SelectedVersion {
        selected_by(self.channel.as_deref(), self.version.as_deref(), default)
    }
}

/// Version that a Kyma selects of one module, as [`ModuleSelection`] has it. Costs less than the whole selection.
pub(super) fn selected(kyma: &Kyma, module: &str) -> Option<SelectedVersion> {
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
    Some(entry.selected(&channel))
}

/// `default` is the channel of the Kyma.
fn selected_by(channel: Option<&str>, version: Option<&str>, default: &str) -> SelectedVersion {
    match version.filter(|version| !version.is_empty()) {
        Some(version) => SelectedVersion::Version(version.to_owned()),
        None => SelectedVersion::Channel(channel.filter(|channel| !channel.is_empty()).unwrap_or(default).to_owned()),
    }
}
