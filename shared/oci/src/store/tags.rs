//! Manifests of known tags. Versions of modules are immutable, so a restart needs no registry for them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// Tags kept.
const MAX_TAGS: usize = 4_096;
/// Largest accepted file, in bytes.
pub(super) const MAX_BYTES: u64 = 8 << 20;

/// Digests of manifests by artefact, that is registry, repository and tag.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tags {
    entries: BTreeMap<String, Tag>,
    uses: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Tag {
    manifest: String,
    /// Number of the write.
    #[serde(default)]
    order: u64,
}

#[derive(Serialize, Deserialize)]
struct Document {
    /// Digest of the entries in their stored form: detects a damaged file.
    checksum: String,
    tags: BTreeMap<String, Tag>,
}

impl Tags {
    /// Parses the file; `None` if it is damaged.
    pub(super) fn parse(json: &[u8]) -> Option<Self> {
        let Document { checksum, tags } = serde_json::from_slice(json).ok()?;
        let sound = checksum == checksum_of(&tags)? && tags.len() <= MAX_TAGS;
        let uses = tags.values().map(|tag| tag.order).max().unwrap_or_default();
        sound.then_some(Self { entries: tags, uses })
    }

    pub(super) fn to_json(&self) -> Option<Vec<u8>> {
        let tags = self.entries.clone();
        serde_json::to_vec(&Document { checksum: checksum_of(&tags)?, tags }).ok()
    }

    pub(super) fn get(&self, artefact: &str) -> Option<Digest> {
        self.entries.get(artefact)?.manifest.parse().ok()
    }

    /// Adds or removes a tag, and returns whether this is a change. The oldest gives way.
    pub(super) fn set(&mut self, artefact: &str, manifest: Option<Digest>) -> bool {
        if self.get(artefact) == manifest {
            return false;
        }
        self.entries.remove(artefact);
        if let Some(manifest) = manifest {
            if self.entries.len() >= MAX_TAGS {
                let oldest = self.entries.iter().min_by_key(|(_, tag)| tag.order).map(|(artefact, _)| artefact.clone());
                oldest.and_then(|oldest| self.entries.remove(&oldest));
            }
            self.uses += 1;
            self.entries.insert(artefact.to_owned(), Tag { manifest: manifest.to_string(), order: self.uses });
        }
        true
    }
}

fn checksum_of(tags: &BTreeMap<String, Tag>) -> Option<String> {
    Some(Digest::of(&serde_json::to_vec(tags).ok()?).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_file_is_discarded() {
        let mut tags = Tags::default();
        assert!(tags.set("a:1", Some(Digest::of(b"1"))) && !tags.set("a:1", Some(Digest::of(b"1"))));
        let json = tags.to_json().unwrap();
        assert_eq!(Tags::parse(&json), Some(tags));
        let swapped = String::from_utf8(json.clone()).unwrap().replace("a:1", "a:2");
        assert_eq!(Tags::parse(swapped.as_bytes()), None);
        assert_eq!(Tags::parse(&json[..json.len() - 1]), None);
    }

    #[test]
    fn oldest_tag_gives_way_at_the_bound() {
        let mut tags = Tags::default();
        for number in 0..=MAX_TAGS {
            tags.set(&format!("{number}"), Some(Digest::of(b"")));
        }
        assert_eq!((tags.get("0"), tags.get("1")), (None, Some(Digest::of(b""))));
        assert!(tags.set("1", None) && !tags.set("1", None));
        assert_eq!(tags.entries.len(), MAX_TAGS - 1);
    }
}
