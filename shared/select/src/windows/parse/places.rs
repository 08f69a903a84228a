//! Places of a policy: objects, lists and texts by their path, and the mistakes that are found in them.

use std::fmt;

use serde_json::Value;

/// Maximum number of mistakes of a file that are named; further ones are counted.
const MAX_NAMED: usize = 20;
/// Maximum length in characters of the file's text in a mistake.
const MAX_QUOTED: usize = 64;

/// Parts of a policy in use that have no effect, or another one than their text says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mistakes {
    named: Vec<String>,
    count: usize,
}

impl Mistakes {
    /// Number of mistakes, including those that are not named.
    pub const fn count(&self) -> usize {
        self.count
    }

    /// Returns true if the whole policy was understood.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn add(&mut self, mistake: String) {
        self.count += 1;
        if self.named.len() < MAX_NAMED {
            self.named.push(mistake);
        }
    }
}

/// The first mistakes with their places, and the number of further ones.
impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.named.join("; "))?;
        match self.count - self.named.len() {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

/// Entries of a list of at most `most`; otherwise `None` and a mistake.
pub(super) fn list<'a>(value: &'a Value, place: &str, most: usize, mistakes: &mut Mistakes) -> Option<&'a [Value]> {
    let Some(entries) = value.as_array() else {
        mistakes.add(format!("{place} is not a list"));
        return None;
    };
    if entries.len() > most {
        mistakes.add(format!("{place} has more than {most} entries"));
        return None;
    }
    Some(entries)
}

pub(super) fn string<'a>(value: &'a Value, place: &str, mistakes: &mut Mistakes) -> Option<&'a str> {
    let text = value.as_str();
    if text.is_none() {
        mistakes.add(format!("{place} is not a string"));
    }
    text
}

/// A text of the file for a message, shortened.
pub(super) fn quoted(text: &str) -> String {
    let shown: String = text.chars().take(MAX_QUOTED).collect();
    let rest = if shown.len() < text.len() { "..." } else { "" };
    format!("{shown:?}{rest}")
}

/// Members of an object by the format's names. As for lifecycle-manager, case does not matter, and `null` means absence.
pub(super) struct Members<'a> {
    known: Vec<(&'static str, &'a Value)>,
    /// The object has a member that the format does not have.
    pub(super) has_unknown: bool,
}

impl<'a> Members<'a> {
    /// Reads the members of an object. An unknown member is a mistake without effect. `None` if the value is not an object,
    /// or has a member twice in different case: which one applies is then not clear.
    pub(super) fn of(value: &'a Value, place: &str, names: &[&'static str], mistakes: &mut Mistakes) -> Option<Self> {
        let Some(members) = value.as_object() else {
            mistakes.add(format!("{place} is not an object"));
            return None;
        };
        let mut known: Vec<(&'static str, &Value)> = Vec::new();
        let mut has_unknown = false;
        for (member, value) in members {
            let Some(name) = names.iter().find(|name| name.eq_ignore_ascii_case(member)) else {
                mistakes.add(format!("{place} has the unknown member {}", quoted(member)));
                has_unknown = true;
                continue;
            };
            if known.iter().any(|(other, _)| other == name) {
                mistakes.add(format!("{place} has the member {name:?} twice"));
                return None;
            }
            known.push((*name, value));
        }
        known.retain(|(_, value)| !value.is_null());
        Some(Self { known, has_unknown })
    }

    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.known.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    /// Returns true if the object has no member with a value.
    pub(super) fn is_empty(&self) -> bool {
        self.known.is_empty() && !self.has_unknown
    }
}
