//! Tracks the last write to each Manifest until the cache shows it, so that no work settles on a stale read.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kube::ResourceExt;
use tidewatch_shared::api::Manifest;

use crate::base::key::KymaKey;

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

fn version(manifest: &Manifest) -> Option<u64> {
    manifest.metadata.resource_version.as_deref()?.parse().ok()
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
    pub(crate) fn is(&self, key: &KymaKey, manifest: &Manifest) {
        self.leave(key, &manifest.name_any(), Left::there(manifest));
    }

    /// Records that a Manifest is deleted.
    pub(super) fn is_gone(&self, key: &KymaKey, name: &str, uid: Option<String>) {
        self.leave(key, name, Left::Gone { uid });
    }

    /// Records a list from KCP: Manifests missing from it are deleted, even if `cached` has them.
    pub(super) fn listed(&self, key: &KymaKey, listed: &[Manifest], cached: &[Arc<Manifest>]) {
        if let Some(left) = self.lock().get_mut(key) {
            for (name, left) in left {
                let there = listed.iter().find(|manifest| manifest.name_any() == *name);
                let stale = cached.iter().find(|manifest| manifest.name_any() == *name);
                *left = there.map_or_else(|| Left::Gone { uid: stale.and_then(|stale| stale.uid()) }, Left::there);
            }
        }
    }

    /// Returns true if the cache shows all writes to the Manifests of a Kyma.
    pub(super) fn is_shown(&self, key: &KymaKey, cached: &[Arc<Manifest>]) -> bool {
        let mut all = self.lock();
        let Some(left) = all.get_mut(key) else { return true };
        left.retain(|name, left| {
            let cached = cached.iter().find(|manifest| manifest.name_any() == *name);
            !left.is_shown(cached.map(Arc::as_ref))
        });
        let is_shown = left.is_empty();
        if is_shown {
            all.remove(key);
        }
        is_shown
    }

    /// Returns true if a Manifest that the watch reports is exactly the result of our last write to it, which the status
    /// of the Kyma shows already, and removes the entry.
    pub(crate) fn is_echo(&self, key: &KymaKey, manifest: &Manifest) -> bool {
        let mut all = self.lock();
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
        self.lock().remove(key);
    }

    fn leave(&self, key: &KymaKey, name: &str, left: Left) {
        self.lock().entry(key.clone()).or_default().insert(name.to_owned(), left);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<KymaKey, BTreeMap<String, Left>>> {
        // Each change is a single step: a panic of another thread leaves no partial state.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
        let (written, key) = (PendingWrites::default(), KymaKey::new("n", "k"));
        let shown = |cached: &[Manifest]| {
            let cached: Vec<_> = cached.iter().cloned().map(Arc::new).collect();
            written.is_shown(&key, &cached)
        };
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

        written.begins(&key, "m");
        written.listed(&key, &[], &[Arc::new(manifest("a", 5))]);
        assert!(!shown(&[manifest("a", 5)]));
        assert!(shown(&[]));

        written.begins(&key, "m");
        written.listed(&key, &[manifest("b", 6)], &[]);
        assert!(!shown(&[]));
        written.forget(&key);
        assert!(shown(&[]));
    }
}
