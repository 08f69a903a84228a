//! State of the modules, reduced to the facts that decide on visibility and small enough to persist.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde::{Deserialize, Serialize};
use tidewatch_api::{Channel, ModuleReleaseMeta, ModuleTemplate};

use super::held::Part;
use crate::catalog::{
    selector::Selector,
    target::{ChannelTarget, VersionSource, VisibilityLabels},
    visibility::Admission,
};

/// State of each module, by name.
pub type Releases = BTreeMap<String, ModuleState>;

/// Facts that decide on the visibility of a module.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModuleState {
    /// Kymas that its release meta admits.
    #[serde(rename = "whom")]
    pub audience: Audience,
    /// OCM component of the module. With another one every Manifest of the module is replaced. Absent in a state
    /// persisted by a receiver that did not record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub component: Option<String>,
    /// Version that every runtime gets, if the module is mandatory and its release meta is not being deleted. A missing
    /// template is no loss: the installed version stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mandatory: Option<ChannelTarget>,
    /// Channels with an existing template, by name.
    pub channels: BTreeMap<String, ChannelTarget>,
    /// Installable versions: those with a template, whether a channel points to them or not. Empty in a state persisted
    /// by a receiver that recorded channels only.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub versions: BTreeMap<String, VisibilityLabels>,
    /// Identifiers of the contents of all templates, by version; see [`content_id`](crate::catalog::content_id).
    /// Empty in a state persisted by a receiver that did not record them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub contents: BTreeMap<String, String>,
    /// Times since when the templates have their contents, in Unix seconds, by version; absent if no change was observed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub edited: BTreeMap<String, i64>,
}

/// Kymas that a release meta admits.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Audience {
    /// Every Kyma.
    #[serde(rename = "everyone")]
    All,
    /// Kymas with matching labels.
    #[serde(rename = "selected")]
    Selected(LabelSelector),
    /// No Kyma.
    #[default]
    #[serde(rename = "nobody")]
    Excluded,
}

impl ModuleState {
    /// Derives the state from a release meta and the well-formed templates of its module, each with its version and the
    /// identifier of its content.
    pub fn of<'a>(
        meta: &ModuleReleaseMeta,
        admission: &Admission,
        templates: impl Iterator<Item = (&'a str, &'a ModuleTemplate, &'a str)> + Clone,
    ) -> Self {
        let audience = match (admission, &meta.spec.kyma_selector) {
            (Admission::All, _) => Audience::All,
            (Admission::Selected(_), Some(selector)) => Audience::Selected(selector.clone()),
            (Admission::Selected(_), None) | (Admission::Excluded(_), _) => Audience::Excluded,
        };
        let contents =
            templates.clone().map(|(version, _, content)| (version.to_owned(), content.to_owned())).collect();
        let optional = templates.filter(|(_, template, _)| !template.spec.is_mandatory());
        let versions: BTreeMap<_, _> = optional
            .map(|(version, template, _)| (version.to_owned(), VisibilityLabels::of(template.metadata.labels.as_ref())))
            .collect();
        let target = |entry: &Channel| {
            let labels = *versions.get(&entry.version)?;
            Some((
                entry.channel.clone(),
                ChannelTarget { version: entry.version.clone(), labels, since: None, from: None },
            ))
        };
        let channels = meta.spec.channels().iter().filter_map(target).collect();
        let mandatory = meta.spec.mandatory.as_ref().filter(|_| meta.metadata.deletion_timestamp.is_none());
        let mandatory = mandatory.map(|mandatory| ChannelTarget {
            version: mandatory.version.clone(),
            labels: VisibilityLabels::default(),
            since: None,
            from: None,
        });
        let component = meta.spec.ocm_component_name.clone();
        let edited = BTreeMap::new();
        Self { audience, component, mandatory, channels, versions, contents, edited }
    }

    /// Targets of the channels, and that of the mandatory version.
    pub fn targets(&self) -> impl Iterator<Item = (VersionSource<'_>, &ChannelTarget)> {
        let channels = self.channels.iter().map(|(channel, target)| (VersionSource::Channel(channel), target));
        channels.chain(self.mandatory.iter().map(|target| (VersionSource::Mandatory, target)))
    }

    /// Version that a field of the release meta points to.
    pub fn target(&self, source: VersionSource<'_>) -> Option<&ChannelTarget> {
        match source {
            VersionSource::Channel(channel) => self.channels.get(channel),
            VersionSource::Mandatory => self.mandatory.as_ref(),
        }
    }

    /// Channels that an admitted Kyma with these labels sees, and its visible versions, which require a visible
    /// channel.
    pub(crate) fn visible_to(&self, kyma: VisibilityLabels) -> (BTreeSet<&str>, BTreeSet<&str>) {
        let channels = self.channels.iter().filter(|(_, to)| kyma.sees(to.labels));
        let channels: BTreeSet<_> = channels.map(|(channel, _)| channel.as_str()).collect();
        let versions = self.versions.iter().filter(|(_, labels)| !channels.is_empty() && kyma.sees(**labels));
        let versions = versions.map(|(version, _)| version.as_str()).collect();
        (channels, versions)
    }

    /// Carries over the times of unchanged channels and sets that of moved ones to `now`. A channel counts as moved too
    /// if it is new, or had no template or no release meta for a while: its followers still run the version it pointed
    /// to before. A Kyma without an installed version does not wait for its roll-out slot.
    pub(crate) fn carry_over_times(&mut self, before: Option<&Self>, now: i64) {
        let channels = self.channels.iter_mut().map(|(channel, target)| (VersionSource::Channel(channel), target));
        for (source, target) in channels.chain(self.mandatory.iter_mut().map(|to| (VersionSource::Mandatory, to))) {
            let before = before.and_then(|before| before.target(source));
            (target.since, target.from) = match before {
                Some(before) if before.version == target.version => (before.since, before.from.clone()),
                before => (Some(now), before.map(|before| before.version.clone())),
            };
        }
        let since = |version: &String, content: &String| match before {
            Some(before) if before.contents.get(version) == Some(content) => before.edited.get(version).copied(),
            // Not recorded so far.
            Some(before) if before.contents.is_empty() => None,
            Some(_) | None => Some(now),
        };
        let edited = self.contents.iter().filter_map(|(version, id)| Some((version.clone(), since(version, id)?)));
        self.edited = edited.collect();
    }

    /// The state without the times and contents, which are no access to anything.
    pub fn without_times(&self) -> Self {
        let mut state = self.clone();
        state
            .channels
            .values_mut()
            .chain(&mut state.mandatory)
            .for_each(|target| (target.since, target.from) = (None, None));
        (state.contents, state.edited) = Default::default();
        state
    }

    /// Facts that decide which Kymas have the module, without its versions.
    pub fn access(&self) -> impl Serialize {
        let channels: Vec<_> = self.channels.iter().map(|(channel, target)| (channel.clone(), target.labels)).collect();
        (self.audience.clone(), self.mandatory.is_some(), channels)
    }

    /// Restores a part as it was `before`.
    pub fn keep(&mut self, part: &Part, before: &Self) {
        match part {
            Part::Module => *self = before.clone(),
            Part::Component => self.component.clone_from(&before.component),
            Part::Channel(channel) => {
                if let Some(target) = before.channels.get(channel) {
                    let labels = self.keep_version(&target.version, target.labels);
                    self.keep_content(&target.version, before);
                    self.channels.insert(channel.clone(), ChannelTarget { labels, ..target.clone() });
                }
            }
            Part::Version(version) => {
                if let Some(labels) = before.versions.get(version) {
                    self.keep_version(version, *labels);
                    self.keep_content(version, before);
                }
            }
        }
    }

    /// Restores the content of a version without a template.
    fn keep_content(&mut self, version: &str, before: &Self) {
        if let (None, Some(content)) = (self.contents.get(version), before.contents.get(version)) {
            self.contents.insert(version.to_owned(), content.clone());
            self.edited.extend(before.edited.get(version).map(|since| (version.to_owned(), *since)));
        }
    }

    /// Restores a version, unless it is as visible as with these labels. Returns the labels that it has now.
    fn keep_version(&mut self, version: &str, labels: VisibilityLabels) -> VisibilityLabels {
        match self.versions.get(version) {
            Some(now) if !now.hides_from_viewers_of(labels) => *now,
            _ => {
                self.versions.insert(version.to_owned(), labels);
                let targets = self.channels.values_mut().filter(|target| target.version == version);
                targets.for_each(|target| target.labels = labels);
                labels
            }
        }
    }
}

impl Audience {
    /// Returns a predicate on a Kyma's labels; the selector is parsed once.
    pub fn admits(&self) -> impl Fn(&BTreeMap<String, String>) -> bool + use<> {
        let (all, selector) = match self {
            Self::All => (true, None),
            Self::Excluded => (false, None),
            Self::Selected(selector) => (false, Selector::parse(selector).ok()),
        };
        move |labels| all || selector.as_ref().is_some_and(|selector| selector.matches(labels))
    }
}
