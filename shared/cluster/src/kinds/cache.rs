//! Discovered kinds of all runtimes.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use parking_lot::Mutex;
use tidewatch_api::key::KymaKey;

use super::{Kind, Kinds};

/// Kinds per runtime. Modules need some dozens; a runtime that exceeds this is discovered anew.
const MAX_KINDS: usize = 500;
/// Least number of interned kinds between two removals of unused ones.
const MIN_SWEEP: usize = 64;

/// Kinds that the runtimes serve, as discovered. Only those that a reconcile needed are kept, and none that is not
/// served. Runtimes with equal modules share their entries. Clones are the same cache.
#[derive(Clone, Debug, Default)]
pub struct KindCache(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    runtimes: HashMap<KymaKey, Runtime>,
    interned: HashSet<Arc<Kind>>,
    /// Number of interned kinds at which unused ones are removed.
    sweep_at: usize,
}

#[derive(Debug, Default)]
struct Runtime {
    /// Revision of the client that discovered the kinds.
    revision: u64,
    kinds: Vec<Arc<Kind>>,
}

impl KindCache {
    /// Begins a reconcile with what is known of a runtime. Kinds that were discovered with a client of another revision
    /// are not used.
    pub fn of(&self, runtime: &KymaKey, revision: u64) -> Kinds {
        let state = self.0.lock();
        let known = state.runtimes.get(runtime).filter(|known| known.revision == revision);
        Kinds::new(self.clone(), runtime.clone(), revision, known.map(|known| known.kinds.clone()).unwrap_or_default())
    }

    /// Drops the kinds of a runtime.
    pub fn forget(&self, runtime: &KymaKey) {
        self.0.lock().runtimes.remove(runtime);
    }

    /// Keeps served kinds, unless a newer client has been used in the meantime. Returns them as they are kept.
    pub(super) fn keep(&self, runtime: &KymaKey, revision: u64, kinds: Vec<Kind>) -> Vec<Arc<Kind>> {
        let mut state = self.0.lock();
        let kinds: Vec<_> = kinds.into_iter().map(|kind| state.intern(kind)).collect();
        let known = state.runtimes.entry(runtime.clone()).or_default();
        if known.revision < revision {
            *known = Runtime { revision, kinds: Vec::new() };
        }
        if known.revision == revision {
            known.kinds.retain(|old| !kinds.iter().any(|kind| kind.is(&old.group, &old.version, &old.kind)));
            if known.kinds.len() + kinds.len() > MAX_KINDS {
                known.kinds = Vec::new();
            }
            known.kinds.extend(kinds.iter().take(MAX_KINDS).cloned());
        }
        kinds
    }

    /// Drops the kinds of an API group of a runtime.
    pub(super) fn invalidate(&self, runtime: &KymaKey, group: &str) {
        if let Some(known) = self.0.lock().runtimes.get_mut(runtime) {
            known.kinds.retain(|kind| kind.group != group);
        }
    }
}

impl State {
    fn intern(&mut self, kind: Kind) -> Arc<Kind> {
        if let Some(known) = self.interned.get(&kind) {
            return known.clone();
        }
        if self.interned.len() >= self.sweep_at {
            self.interned.retain(|kind| Arc::strong_count(kind) > 1);
            self.sweep_at = (2 * self.interned.len()).max(MIN_SWEEP);
        }
        let kind = Arc::new(kind);
        self.interned.insert(kind.clone());
        kind
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(name: &str) -> Kind {
        let kind = name.to_owned().into();
        Kind { group: "g.io".into(), version: "v1".into(), kind, plural: "plural".into(), namespaced: true }
    }

    fn count(cache: &KindCache, runtime: &KymaKey) -> usize {
        cache.0.lock().runtimes.get(runtime).map_or(0, |known| known.kinds.len())
    }

    #[test]
    fn runtimes_share_equal_kinds_and_unused_ones_are_removed() {
        let cache = KindCache::default();
        let one = KymaKey::new("ns", "one");
        let two = KymaKey::new("ns", "two");
        let first = cache.keep(&one, 1, vec![kind("A")]);
        let second = cache.keep(&two, 1, vec![kind("A")]);
        assert!(Arc::ptr_eq(&first[0], &second[0]));
        for n in 0..10_000 {
            cache.keep(&one, 1, vec![kind(&format!("K{n}"))]);
            assert!(count(&cache, &one) <= MAX_KINDS);
        }
        cache.forget(&one);
        assert!(cache.0.lock().interned.len() <= 2 * MAX_KINDS + MIN_SWEEP);
        assert_eq!((count(&cache, &one), count(&cache, &two)), (0, 1));
    }

    #[test]
    fn kinds_of_an_older_client_are_neither_kept_nor_used() {
        let cache = KindCache::default();
        let runtime = KymaKey::new("ns", "k");
        cache.keep(&runtime, 2, vec![kind("A")]);
        cache.keep(&runtime, 1, vec![kind("Old")]);
        assert!(cache.of(&runtime, 2).served("g.io", "v1", "A").is_some());
        assert!(cache.of(&runtime, 2).served("g.io", "v1", "Old").is_none());
        assert!(cache.of(&runtime, 3).served("g.io", "v1", "A").is_none());
        cache.keep(&runtime, 3, vec![kind("New")]);
        assert!(cache.of(&runtime, 2).served("g.io", "v1", "A").is_none());
        cache.keep(&runtime, 3, vec![kind("New")]);
        assert_eq!(count(&cache, &runtime), 1);
        cache.invalidate(&runtime, "g.io");
        assert_eq!(count(&cache, &runtime), 0);
    }
}
