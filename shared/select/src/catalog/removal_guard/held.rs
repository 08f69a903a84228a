//! Removals that wait for a confirmation, one by one: of a module, of its component, of a channel, of a version.

use std::{collections::BTreeSet, fmt};

use serde::{Deserialize, Serialize};
use tidewatch_api::names::{RELEASES, annotation};

/// Maximum number of removals that one text names.
const MAX_NAMED: usize = 5;

/// Part of a module that a change takes from runtimes: the unit of a decision and of its confirmation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Part {
    /// The whole module: no channel of it is visible any more, or it is no longer mandatory.
    Module,
    /// Its OCM component, which another one replaces.
    Component,
    /// The channel of this name; other channels stay.
    Channel(String),
    /// This version, which users can select although no lost channel pointed to it.
    Version(String),
}

impl Part {
    /// Returns true if the module stays as a whole while the removal is held.
    pub const fn is_whole(&self) -> bool {
        matches!(self, Self::Module | Self::Component)
    }
}

/// Removal that waits for a confirmation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldRemoval {
    /// Identifier of the removal, derived from its content; a confirmation names it. Changes of other parts do not affect
    /// it.
    pub change: String,
    /// Name of the module.
    pub module: String,
    /// Part of the module that would be removed.
    pub part: Part,
    /// Number of runtimes that would lose it.
    pub runtimes: usize,
    /// Number of all runtimes.
    pub of: usize,
}

impl fmt::Display for HeldRemoval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { change, module, part, runtimes, of } = self;
        match part {
            Part::Module => write!(f, "a removal of {module}")?,
            Part::Component => write!(f, "a removal of the component of {module}")?,
            Part::Channel(channel) => write!(f, "a removal of the channel {channel} of {module}")?,
            Part::Version(version) => write!(f, "a removal of the version {version} of {module}")?,
        }
        write!(
            f,
            " from {runtimes} of {of} runtimes waits until the annotation {} of the ConfigMap {RELEASES} names {change}",
            annotation::CONFIRM
        )
    }
}

/// All removals that wait for a confirmation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HeldRemovals {
    /// Modules concerned.
    pub modules: BTreeSet<String>,
    /// The removals, by module and part.
    pub removals: Vec<HeldRemoval>,
    /// Number of runtimes that would lose something.
    pub runtimes: usize,
    /// Number of all runtimes.
    pub of: usize,
}

impl HeldRemovals {
    /// Returns true if no removal is held.
    pub const fn is_empty(&self) -> bool {
        self.removals.is_empty()
    }

    /// Returns true if the module stays as a whole.
    pub fn holds(&self, module: &str) -> bool {
        self.removals.iter().any(|held| held.module == module && held.part.is_whole())
    }
}

impl fmt::Display for HeldRemovals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, held) in self.removals.iter().take(MAX_NAMED).enumerate() {
            write!(f, "{}{held}", if at > 0 { "; " } else { "" })?;
        }
        match self.removals.len().saturating_sub(MAX_NAMED) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn held(module: &str, part: Part) -> HeldRemoval {
        HeldRemoval { change: "c0ffee".to_owned(), module: module.to_owned(), part, runtimes: 4, of: 9 }
    }

    #[test]
    fn each_part_has_its_text_and_its_json() {
        for (part, text, form) in [
            (Part::Module, "a removal of keda from", json!("module")),
            (Part::Component, "a removal of the component of keda from", json!("component")),
            (Part::Channel("fast".into()), "a removal of the channel fast of keda from", json!({"channel": "fast"})),
            (Part::Version("1.0.0".into()), "a removal of the version 1.0.0 of keda", json!({"version": "1.0.0"})),
        ] {
            let held = held("keda", part);
            let found = held.to_string();
            assert!(
                found.starts_with(text) && found.contains("4 of 9 runtimes") && found.ends_with("names c0ffee"),
                "{found}"
            );
            let value = serde_json::to_value(&held).unwrap();
            assert_eq!(value["part"], form);
            assert_eq!(serde_json::from_value::<HeldRemoval>(value).unwrap(), held);
        }
    }

    #[test]
    fn text_of_many_removals_is_bounded() {
        let removals = (0..100).map(|n| held(&format!("m-{n}"), Part::Module)).collect();
        let text = HeldRemovals { removals, ..HeldRemovals::default() }.to_string();
        assert!(text.contains("; a removal of m-4 from") && text.ends_with("; and 95 more"), "{text}");
    }
}
