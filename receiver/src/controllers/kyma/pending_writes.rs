//! What we did last to each Manifest, so that a cache which does not show it yet is noticed: no work is settled on a stale read.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kube::ResourceExt;
use tidewatch_shared::api::Manifest;

use crate::base::key::KymaKey;

/// How one Manifest was left.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Left {
    /// A write was begun, and nobody knows how it ended.
    Unknown,
    /// It is there, at least in this version.
    There { uid: String, version: Option<u64> },
    /// The one with this uid, or whichever there was, is gone.
    Gone { uid: Option<String> },
}

impl Left {
    fn there(manifest: &Manifest) -> Self {
        Self::There { uid: manifest.uid().unwrap_or_default(), version: version(manifest) }
    }

    fn is_shown(&self, cached: Option<&Manifest>) -> bool {
        match (self, cached) {
            (Self::Unknown, _) | (Self::There { .. }, None) => false,
            // Another one of its name came after it; versions that are no numbers prove nothing.
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

/// Of every Kyma the Manifests whose last write the cache has not shown yet; an entry goes as soon as it has.
#[derive(Debug, Default)]
pub(super) struct Written(Mutex<HashMap<KymaKey, BTreeMap<String, Left>>>);

impl Written {
    /// A write of a Manifest begins.
    pub(super) fn begins(&self, key: &KymaKey, name: &str) {
        self.leave(key, name, Left::Unknown);
    }

    /// A write has ended, and this is the Manifest then.
    pub(super) fn is(&self, key: &KymaKey, manifest: &Manifest) {
        self.leave(key, &manifest.name_any(), Left::there(manifest));
    }

    /// A Manifest was deleted and is gone.
    pub(super) fn is_gone(&self, key: &KymaKey, name: &str, uid: Option<String>) {
        self.leave(key, name, Left::Gone { uid });
    }

    /// KCP was asked: what is not among these is gone, whatever `cached` says.
    pub(super) fn listed(&self, key: &KymaKey, listed: &[Manifest], cached: &[Arc<Manifest>]) {
        if let Some(left) = self.lock().get_mut(key) {
            for (name, left) in left {
                let there = listed.iter().find(|manifest| manifest.name_any() == *name);
                let stale = cached.iter().find(|manifest| manifest.name_any() == *name);
                *left = there.map_or_else(|| Left::Gone { uid: stale.and_then(|stale| stale.uid()) }, Left::there);
            }
        }
    }

    /// Whether the cache shows all that was done to the Manifests of a Kyma.
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

    /// Forgets a Kyma.
    pub(super) fn forget(&self, key: &KymaKey) {
        self.lock().remove(key);
    }

    fn leave(&self, key: &KymaKey, name: &str, left: Left) {
        self.lock().entry(key.clone()).or_default().insert(name.to_owned(), left);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<KymaKey, BTreeMap<String, Left>>> {
        // Every change is whole in itself: a panic elsewhere leaves nothing half done.
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
    fn a_cache_is_believed_once_it_shows_what_was_done() {
        let (written, key) = (Written::default(), KymaKey::new("n", "k"));
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
