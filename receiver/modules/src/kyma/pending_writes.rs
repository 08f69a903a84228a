//! Tracks the last write to each Manifest until the cache shows it, so that no work settles on a stale read.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use kube::ResourceExt;
use parking_lot::Mutex;
use tidewatch_api::{Manifest, key::KymaKey};

/// State of a Manifest after the last write.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Left {
    /// The write began and its result is unknown.
    Unknown,
    /// It exists, at this resourceVersion or a later one.
    There { uid: String, version: Option<u64> },
    /// The one with this uid, or any, is deleted.
    Gone { uid: Option<String> },
}

impl Left {
    fn there(manifest: &Manifest) -> Self {
        Self::There { uid: manifest.uid().unwrap_or_default(), version: version(manifest) }
    }

    fn is_shown(&self, cached: Option<&Manifest>) -> bool {
        match (self, cached) {
            (Self::Unknown, _) | (Self::There { .. }, None) => false,
            // A later one of the same name; a version that is not a number proves nothing.
            (Self::There { uid, version: left }, Some(cached)) => {
                cached.uid().as_ref() != Some(uid) || left.is_some_and(|left| version(cached) >= Some(left))
            }
            (Self::Gone { .. }, None) => true,
            (Self::Gone { uid }, Some(cached)) => uid.is_some() && cached.uid() != *uid,
        }
    }
}

fn named<'a>(manifests: &'a [Arc<Manifest>], name: &str) -> Option<&'a Manifest> {
    manifests.iter().map(Arc::as_ref).find(|manifest| manifest.metadata.name.as_deref() == Some(name))
}

fn version(manifest: &Manifest) -> Option<u64> {
    manifest.metadata.resource_version.as_deref()?.parse().ok()
}

/// A write of a Manifest that the cache does not show.
#[derive(Debug)]
pub(super) struct PendingWrite {
    /// Name of the Manifest.
    pub(super) name: String,
    left: Left,
}

/// Manifests per Kyma with writes that the cache does not show yet. An entry is removed once the cache shows it. Clones
/// share the entries.
#[derive(Clone, Debug, Default)]
pub struct PendingWrites(Arc<Mutex<HashMap<KymaKey, BTreeMap<String, Left>>>>);

impl PendingWrites {
    /// Records that a write of a Manifest begins.
    pub(super) fn begins(&self, key: &KymaKey, name: &str) {
        self.leave(key, name, Left::Unknown);
    }

    /// Records the Manifest as stored by a write.
    pub fn is(&self, key: &KymaKey, manifest: &Manifest) {
        self.leave(key, &manifest.name_any(), Left::there(manifest));
    }

    /// Records that a Manifest is deleted.
    pub(super) fn is_gone(&self, key: &KymaKey, name: &str, uid: Option<String>) {
        self.leave(key, name, Left::Gone { uid });
    }

    /// Returns the writes to the Manifests of a Kyma that the cache does not show.
    pub(super) fn not_shown(&self, key: &KymaKey, cached: &[Arc<Manifest>]) -> Vec<PendingWrite> {
        let mut all = self.0.lock();
        let Some(left) = all.get_mut(key) else { return Vec::new() };
        left.retain(|name, left| !left.is_shown(named(cached, name)));
        let pending: Vec<_> =
            left.iter().map(|(name, left)| PendingWrite { name: name.clone(), left: left.clone() }).collect();
        if pending.is_empty() {
            all.remove(key);
        }
        pending
    }

    /// Records the state of a Manifest that was read from KCP after [`Self::not_shown`]; `None` if it does not exist, even
    /// if `cached` has it. A write since then stays pending.
    pub(super) fn read(&self, key: &KymaKey, write: &PendingWrite, found: Option<&Manifest>, cached: &[Arc<Manifest>]) {
        let mut all = self.0.lock();
        let left = all.get_mut(key).and_then(|left| left.get_mut(&write.name)).filter(|left| **left == write.left);
        if let Some(left) = left {
            let gone = || Left::Gone { uid: named(cached, &write.name).and_then(Manifest::uid) };
            *left = found.map_or_else(gone, Left::there);
        }
    }

    /// Returns true if a Manifest that the watch reports is exactly the result of our last write to it, which the status
    /// of the Kyma shows already, and removes the entry.
    pub fn is_echo(&self, key: &KymaKey, manifest: &Manifest) -> bool {
        let mut all = self.0.lock();
        let Some(left) = all.get_mut(key) else { return false };
        let name = manifest.name_any();
        let is_echo = left
            .get(&name)
            .is_some_and(|left| matches!(left, Left::There { version: Some(_), .. }) && *left == Left::there(manifest));
        if is_echo {
            left.remove(&name);
            if left.is_empty() {
                all.remove(key);
            }
        }
        is_echo
    }

    /// Drops the entries of a Kyma.
    pub(super) fn forget(&self, key: &KymaKey) {
        self.0.lock().remove(key);
    }

    fn leave(&self, key: &KymaKey, name: &str, left: Left) {
        self.0.lock().entry(key.clone()).or_default().insert(name.to_owned(), left);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn manifest(uid: &str, version: u64) -> Manifest {
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": "m", "uid": uid, "resourceVersion": version.to_string()}, "spec": {"remote": false, "install": {"name": "n", "source": {}}}}))
        .unwrap()
    }

    #[test]
    fn cache_is_used_once_it_shows_all_writes() {
        let written = PendingWrites::default();
        let key = KymaKey::new("n", "k");
        let not_shown = |cached: &[Manifest]| {
            let cached: Vec<_> = cached.iter().cloned().map(Arc::new).collect();
            written.not_shown(&key, &cached)
        };
        let shown = |cached: &[Manifest]| not_shown(cached).is_empty();
        assert!(shown(&[]), "nothing was done");

        written.begins(&key, "m");
        assert!(!shown(&[]) && !shown(&[manifest("a", 9)]), "how it ended is not known");
        written.is(&key, &manifest("a", 5));
        assert!(!shown(&[]) && !shown(&[manifest("a", 4)]));
        assert!(shown(&[manifest("a", 5)]));
        assert!(shown(&[]), "told once, it is forgotten");

        written.is_gone(&key, "m", Some("a".into()));
        assert!(!shown(&[manifest("a", 7)]));
        assert!(shown(&[manifest("b", 8)]), "a later one of its name");

        let read = |found: Option<&Manifest>, cached: &[Manifest]| {
            let pending = not_shown(cached).pop().unwrap();
            let cached: Vec<_> = cached.iter().cloned().map(Arc::new).collect();
            written.read(&key, &pending, found, &cached);
        };
        written.begins(&key, "m");
        read(None, &[manifest("a", 5)]);
        assert!(!shown(&[manifest("a", 5)]));
        assert!(shown(&[]));

        written.begins(&key, "m");
        read(Some(&manifest("b", 6)), &[]);
        assert!(!shown(&[]));
        written.forget(&key);
        assert!(shown(&[]));
    }

    #[test]
    fn a_read_does_not_replace_a_later_write() {
        let written = PendingWrites::default();
        let key = KymaKey::new("n", "k");
        written.is(&key, &manifest("a", 5));
        let pending = written.not_shown(&key, &[]);
        written.is(&key, &manifest("a", 7));
        written.read(&key, &pending[0], Some(&manifest("a", 5)), &[]);
        let shown = |version| written.not_shown(&key, &[Arc::new(manifest("a", version))]).is_empty();
        assert!(!shown(6), "the cache lacks the write of version 7");
        assert!(shown(7));
    }
}
