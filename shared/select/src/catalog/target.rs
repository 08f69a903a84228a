//! Versions that the fields of release metas point to, and the labels that limit their visibility.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tidewatch_api::{labels::is_true, names::label};

/// Field of a release meta that points to a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionSource<'a> {
    /// Channel of this name.
    Channel(&'a str),
    /// Version of a mandatory module.
    Mandatory,
}

impl VersionSource<'_> {
    /// Name of the channel, or of the field.
    pub const fn as_str(&self) -> &str {
        match self {
            Self::Channel(channel) => channel,
            Self::Mandatory => "mandatory",
        }
    }
}

/// Labels that limit the visibility of a version, or the ones of a Kyma that lift this limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VisibilityLabels {
    /// Visible to beta Kymas only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub beta: bool,
    /// Visible to internal Kymas only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub internal: bool,
}

/// Version that a channel or the field `mandatory` points to, and its visibility.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelTarget {
    /// Target version.
    pub version: String,
    /// Labels that limit its visibility.
    #[serde(flatten)]
    pub labels: VisibilityLabels,
    /// Time of the move to this version, in Unix seconds; absent if no move was observed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<i64>,
    /// Version before that move; absent if there was none, or it was not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
}

impl VisibilityLabels {
    /// Labels of a version's template that limit its visibility.
    pub fn of(labels: Option<&BTreeMap<String, String>>) -> Self {
        Self { beta: is_true(labels, label::BETA), internal: is_true(labels, label::INTERNAL) }
    }

    /// Returns whether some Kyma sees an object with the labels `before`, and none with these.
    pub(crate) const fn hides_from_viewers_of(self, before: Self) -> bool {
        (self.beta && !before.beta) || (self.internal && !before.internal)
    }

    /// Returns whether a Kyma with these labels sees an object with those.
    pub const fn sees(self, object: Self) -> bool {
        (self.beta || !object.beta) && (self.internal || !object.internal)
    }
}
