//! Results of earlier reconciles of each Manifest. A restarted receiver begins without them, and compares.

use std::{
    collections::{BTreeMap, HashMap, hash_map::RandomState},
    hash::{BuildHasher as _, DefaultHasher, Hash, Hasher as _},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tidewatch_shared::{api::Manifest, event::Object};
use tokio::time::Instant;

use super::{
    drift::object_key,
    inventory::{Inventory, ObjectKey},
    pods::{PodSelection, PodSelections},
    written::WrittenManifests,
};
use crate::{
    base::{key::KymaKey, random::Random},
    fleet::manifests::ManifestKey,
};

/// First delay until a Manifest that waits is reconciled again; it doubles while the cause stays the same.
const RECHECK: Duration = Duration::from_secs(1);
/// Longest delay; changes in KCP and of the layer cause a reconcile at once.
const MAX_RECHECK: Duration = Duration::from_secs(60);

/// Memory of one Manifest during a reconcile.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    /// Hash of the desired objects that were applied completely, and are not to be compared again.
    applied: Option<u64>,
    /// Objects of the inventory when the reconcile began: they may exist.
    recorded: Inventory,
    /// Forms in which the runtime's API server stores objects otherwise than desired, by hash of their keys.
    accepted: BTreeMap<u64, u64>,
    /// Versions that the API server returned for our writes, by hash of the keys, until the agent reports them.
    written: BTreeMap<u64, u64>,
    /// Cause of the wait, as a hash, and the number of reconciles that found it.
    waits: (u64, u32),
    /// The manager has not been ready since then.
    unready_since: Option<Instant>,
    /// The inventory has all objects of the Manifest in the runtime.
    is_recovered: bool,
}

impl Memory {
    /// True if all objects were applied before, and are not to be compared.
    pub(super) const fn is_complete(&self) -> bool {
        self.applied.is_some()
    }

    /// True if the object was applied in an earlier reconcile, so that it has to be read.
    pub(super) fn was_applied(&self, key: &ObjectKey) -> bool {
        self.recorded.contains(key)
    }

    pub(super) fn accepted(&self, key: &ObjectKey) -> Option<u64> {
        self.accepted.get(&hash(key)).copied()
    }

    pub(super) fn accept(&mut self, key: &ObjectKey, form: Option<u64>) {
        match form {
            Some(form) => drop(self.accepted.insert(hash(key), form)),
            None => drop(self.accepted.remove(&hash(key))),
        }
    }

    /// Records the version that a write returned.
    pub(super) fn wrote(&mut self, key: &ObjectKey, version: &str) {
        self.written.insert(hash(key), hash(version));
    }

    /// Returns true once if a report is that of our own write, after which no other writer has written.
    pub(super) fn is_echo(&mut self, object: &Object) -> bool {
        let (key, version) = (hash(&object_key(object)), hash(object.resource_version.as_str()));
        let is_echo = self.written.get(&key) == Some(&version);
        self.written.remove(&key);
        is_echo
    }

    /// Records that all desired objects are applied.
    pub(super) const fn complete(&mut self, desired: u64) {
        self.applied = Some(desired);
    }

    /// Records a wait for this cause. Returns the number of earlier reconciles that found the same one.
    pub(super) fn wait(&mut self, cause: &str) -> u32 {
        let cause = hash(cause);
        let times = if self.waits.0 == cause { self.waits.1.saturating_add(1) } else { 0 };
        self.waits = (cause, times);
        times
    }
}

impl Memory {
    /// Records that the inventory has all objects of the Manifest in the runtime.
    pub(super) const fn recovered(&mut self) {
        self.is_recovered = true;
    }

    /// True if the runtime was searched for objects that the inventory lacks.
    pub(super) const fn is_recovered(&self) -> bool {
        self.is_recovered
    }

    /// Time for which the manager was not ready at the last reconcile and since.
    pub(super) fn unready(&self) -> Duration {
        self.unready_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Records whether the manager is ready. Returns the time for which it has not been.
    pub(super) fn unready_for(&mut self, is_unready: bool) -> Duration {
        self.unready_since = is_unready.then(|| self.unready_since.unwrap_or_else(Instant::now));
        self.unready()
    }
}

/// Memory of all Manifests; bounded by their number. Clones share one state.
#[derive(Clone, Debug)]
pub struct Memories {
    state: Arc<Mutex<State>>,
    written: WrittenManifests,
    pods: PodSelections,
}

#[derive(Debug)]
struct State {
    by_manifest: HashMap<ManifestKey, Memory>,
    random: Random,
}

impl Default for Memories {
    fn default() -> Self {
        let random = Random::new(RandomState::new().hash_one(0));
        let state = Arc::new(Mutex::new(State { by_manifest: HashMap::new(), random }));
        Self { state, written: WrittenManifests::default(), pods: PodSelections::default() }
    }
}

impl Memories {
    /// Takes the memory of a Manifest. Objects that were applied for another `desired` are to be compared, and all of
    /// them if `verify` is set. Without [`Self::keep`], the next reconcile compares.
    pub(super) fn take(&self, key: &ManifestKey, desired: Option<u64>, verify: bool, recorded: Inventory) -> Memory {
        let mut memory = self.lock().by_manifest.remove(key).unwrap_or_default();
        if verify || desired.is_none() || memory.applied != desired {
            memory.applied = None;
        }
        if verify {
            memory.written.clear();
        }
        memory.recorded = recorded;
        memory
    }

    pub(super) fn keep(&self, key: &ManifestKey, memory: Memory) {
        let memory = Memory { recorded: Inventory::default(), ..memory };
        self.lock().by_manifest.insert(key.clone(), memory);
    }

    /// Drops the memory of a Manifest that is gone.
    pub(crate) fn forget(&self, key: &ManifestKey) {
        self.lock().by_manifest.remove(key);
        self.written.forget(key);
        self.pods.forget(key);
    }

    /// Pods of a Manifest's manager that the agent is to watch.
    pub(super) fn pods(&self, key: &ManifestKey) -> Option<PodSelection> {
        self.pods.of(key)
    }

    /// Sets the pods that the agent is to watch, or none.
    pub(super) fn set_pods(&self, key: &ManifestKey, kyma: &KymaKey, pods: Option<PodSelection>) {
        self.pods.set(key, kyma, pods);
    }

    /// Waits for the next Kyma with other pods to watch: its runtime needs another plan.
    pub(crate) async fn next_replanned(&self) -> KymaKey {
        self.pods.next_changed().await
    }

    /// Returns a Manifest as our last write returned it, if the cache has not got that far.
    pub(super) fn newest(&self, key: &ManifestKey, cached: Arc<Manifest>) -> Arc<Manifest> {
        self.written.newest(key, cached)
    }

    /// Records our write of a Manifest, which replaced a resource version.
    pub(super) fn wrote(&self, key: &ManifestKey, replaced: Option<String>, written: &Manifest) {
        self.written.wrote(key, replaced, written);
    }

    /// Takes notice of a Manifest that the watch delivered, after the cache has it.
    pub(crate) fn observe(&self, key: &ManifestKey, delivered: &Manifest) {
        self.written.observe(key, delivered);
    }

    /// Delay until a Manifest that waited this often for the same cause is reconciled again, with jitter of one half.
    pub(super) fn recheck(&self, times: u32) -> Duration {
        let bound = RECHECK.saturating_mul(2u32.saturating_pow(times)).min(MAX_RECHECK);
        bound / 2 + self.lock().random.jitter(bound / 2)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No change panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Hash within this process.
pub(super) fn hash(value: &(impl Hash + ?Sized)) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tidewatch_shared::event::Change;

    use super::*;

    fn manifest() -> ManifestKey {
        ManifestKey::new("ns", "m")
    }

    #[test]
    fn objects_are_compared_again_for_another_desired_form_and_for_a_verification() {
        let memories = Memories::default();
        let applied = |desired: Option<u64>, verify: bool| {
            let mut memory = Memory::default();
            memory.complete(1);
            memories.keep(&manifest(), memory);
            memories.take(&manifest(), desired, verify, Inventory::default()).is_complete()
        };
        assert!(applied(Some(1), false));
        for (desired, verify) in [(Some(2), false), (None, false), (Some(1), true)] {
            assert!(!applied(desired, verify), "{desired:?} {verify}");
        }
        // A reconcile that is killed half-way keeps nothing.
        assert!(!memories.take(&manifest(), Some(1), false, Inventory::default()).is_complete());
        let mut memory = Memory::default();
        memory.complete(1);
        memories.keep(&manifest(), memory);
        memories.forget(&manifest());
        assert!(!memories.take(&manifest(), Some(1), false, Inventory::default()).is_complete());
    }

    #[test]
    fn report_of_our_own_version_is_an_echo_once() {
        let report = |version: &str| Object {
            subject: "/v1/configmaps/kyma-system/a".parse().unwrap(),
            kind: "ConfigMap".to_owned(),
            uid: String::new(),
            resource_version: version.to_owned(),
            generation: None,
            change: Change::Spec,
        };
        let map =
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "kyma-system"}});
        let mut memory = Memory::default();
        assert!(!memory.is_echo(&report("7")));
        memory.wrote(&ObjectKey::of(&map), "7");
        assert!(memory.is_echo(&report("7")) && !memory.is_echo(&report("7")));
        memory.wrote(&ObjectKey::of(&map), "7");
        assert!(!memory.is_echo(&report("8")), "another writer came after us");
        assert!(!memory.is_echo(&report("7")), "a later report is none of ours");
    }

    #[test]
    fn rechecks_back_off_while_the_cause_stays_the_same() {
        let memories = Memories::default();
        let mut memory = Memory::default();
        let mut longest = Duration::ZERO;
        for times in 0..10 {
            assert_eq!(memory.wait("waiting for a"), times);
            let bound = RECHECK.saturating_mul(2u32.pow(times)).min(MAX_RECHECK);
            let delay = memories.recheck(times);
            assert!(delay >= bound / 2 && delay <= bound, "{times}: {delay:?}");
            longest = longest.max(bound);
        }
        assert_eq!(longest, MAX_RECHECK);
        assert_eq!(memory.wait("waiting for b"), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn time_of_an_unready_manager_begins_anew_once_it_was_ready() {
        let mut memory = Memory::default();
        assert_eq!(memory.unready_for(true), Duration::ZERO);
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(memory.unready_for(true), Duration::from_secs(5));
        assert_eq!(memory.unready_for(false), Duration::ZERO);
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(memory.unready_for(true), Duration::ZERO);
    }
}
