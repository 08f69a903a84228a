//! Results of earlier reconciles of each Manifest. A new process begins without them, and compares.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tidewatch_api::key::{KymaKey, ManifestKey};
use tidewatch_cluster::stored_versions::Progress;
use tidewatch_kit::{hash::hash, random::Random};
use tokio::time::Instant;

use super::{
    failure::Failure,
    inventory::{Inventory, ObjectKey},
    own_writes::OwnWrites,
    pods::{PodSelection, PodSelections},
    refusals::Refusals,
    render::RenderedObject,
    turns::Turns,
    yields::Yields,
};

/// First delay until a Manifest that waits is reconciled again; it doubles while the cause stays the same.
const RECHECK: Duration = Duration::from_secs(1);
/// Longest delay; the caller reconciles at once after a change of the Manifest or of its content.
pub(super) const MAX_RECHECK: Duration = Duration::from_secs(60);
/// Longest delay of a Manifest that waits for somebody's decision on an object: it may wait for ever.
pub(super) const MAX_DECISION_RECHECK: Duration = Duration::from_secs(600);

/// Desired objects of a Manifest, as hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Desired {
    /// Identity of the Manifest and of the client of the runtime.
    pub(super) target: u64,
    /// Inputs of the rendering.
    pub(super) objects: u64,
}

/// Objects that were applied completely, and are not to be compared again.
#[derive(Clone, Debug)]
struct Applied {
    target: u64,
    /// The desired objects; `None` once others are desired, which are not applied completely.
    desired: Option<u64>,
    /// Hashes of the objects with their bodies, ascending.
    objects: Box<[u64]>,
}

/// A migration over several reconciles. A new process begins anew: objects that are migrated stay as they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Migrating {
    pub(super) definition: ObjectKey,
    pub(super) progress: Progress,
}

/// Memory of one Manifest during a reconcile.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    applied: Option<Applied>,
    /// Target of the last reconcile.
    target: Option<u64>,
    /// Objects of the inventory when the reconcile began: they may exist.
    recorded: Inventory,
    /// Forms in which the runtime's API server stores objects otherwise than desired, by hash of their keys.
    accepted: BTreeMap<u64, u64>,
    /// Objects that the API server refused.
    refusals: Refusals,
    /// Objects that were reported as changed and have not been compared since, as hashes of their keys.
    doubted: BTreeSet<u64>,
    /// Cause of the wait, as a hash, and the number of reconciles that found it.
    waits: (u64, u32),
    /// The manager has not been ready since then.
    unready_since: Option<Instant>,
    /// The runtime was searched for objects of the Manifest that the inventory lacks: it has all of them.
    pub(super) is_recovered: bool,
    /// The CRD whose stored resources are being written in another version.
    pub(super) migrating: Option<Migrating>,
}

impl Memory {
    /// Returns the keys of the objects that an earlier reconcile applied exactly so, and that are not to be compared again:
    /// all of them if nothing else is desired now, otherwise those that the change leaves as they are. All others are
    /// forgotten. Doubted objects are to be compared in any case.
    pub(super) fn retain<'a>(&mut self, rendered: &'a [RenderedObject]) -> Vec<&'a ObjectKey> {
        let Self { applied: Some(applied), doubted, .. } = self else { return Vec::new() };
        let is_trusted = |key: &&ObjectKey| !doubted.contains(&hash(*key));
        if applied.desired.is_some() {
            return rendered.iter().map(|object| &object.key).filter(is_trusted).collect();
        }
        let is_known = |object: &u64| applied.objects.binary_search(object).is_ok();
        let (mut keys, mut objects): (Vec<&ObjectKey>, Vec<_>) = rendered
            .iter()
            .map(|object| (&object.key, object_hash(object)))
            .filter(|(_, object)| is_known(object))
            .unzip();
        objects.sort_unstable();
        applied.objects = objects.into();
        keys.retain(is_trusted);
        keys
    }

    /// Records that an object was reported as changed: until it was compared, the next reconciles compare it too.
    pub(super) fn doubt(&mut self, key: &ObjectKey) {
        self.doubted.insert(hash(key));
    }

    /// As [`Self::doubt`], for several objects.
    pub(super) fn doubt_all(&mut self, keys: impl IntoIterator<Item = ObjectKey>) {
        self.doubted.extend(keys.into_iter().map(|key| hash(&key)));
    }

    /// True if the object was applied in an earlier reconcile, so that it has to be read.
    pub(super) fn was_applied(&self, key: &ObjectKey) -> bool {
        self.recorded.contains(key)
    }

    pub(super) fn accepted(&self, key: &ObjectKey) -> Option<u64> {
        self.accepted.get(&hash(key)).copied()
    }

    /// Records that an object is as desired, with the form in which the API server stores it if that differs.
    pub(super) fn accept(&mut self, key: &ObjectKey, form: Option<u64>) {
        let key = hash(key);
        self.doubted.remove(&key);
        self.refusals.accept(key);
        match form {
            Some(form) => drop(self.accepted.insert(key, form)),
            None => drop(self.accepted.remove(&key)),
        }
    }

    /// Returns the failure of an object that would be refused again.
    pub(super) fn repeated(&self, key: &ObjectKey, content: u64) -> Option<Failure> {
        self.refusals.repeated(hash(key), content, Instant::now())
    }

    /// Records the failure of an object with this content.
    pub(super) fn refuse(&mut self, key: &ObjectKey, content: u64, failure: &Failure, memories: &Memories) {
        let jitter = |half| memories.state.lock().random.jitter(half);
        self.refusals.refuse(hash(key), content, failure, Instant::now(), jitter);
    }

    /// Time until the next refused object is to be sent again.
    pub(super) fn next_attempt(&self) -> Option<Duration> {
        self.refusals.next(Instant::now())
    }

    /// Records that all desired objects are applied.
    pub(super) fn complete(&mut self, desired: Desired, rendered: &[RenderedObject]) {
        self.doubted.clear();
        // Another version may lack an object that was refused.
        self.refusals = Refusals::default();
        if self.applied.as_ref().is_some_and(|applied| applied.desired == Some(desired.objects)) {
            return;
        }
        let mut objects: Vec<_> = rendered.iter().map(object_hash).collect();
        objects.sort_unstable();
        let Desired { target, objects: desired } = desired;
        self.applied = Some(Applied { target, desired: Some(desired), objects: objects.into() });
    }

    /// Records a wait for this cause. Returns the number of earlier reconciles that found the same one.
    pub(super) fn wait(&mut self, cause: &str) -> u32 {
        let cause = hash(cause);
        let times = if self.waits.0 == cause { self.waits.1.saturating_add(1) } else { 0 };
        self.waits = (cause, times);
        times
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
#[derive(Clone, Debug, Default)]
pub struct Memories {
    state: Arc<Mutex<State>>,
    pub(super) own_writes: OwnWrites,
    /// Pods of the managers that the caller is to watch.
    pub(super) pods: PodSelections,
    /// Fields that are left to other writers.
    pub(super) yields: Yields,
    /// Turns of the Manifests of a cluster to let shared objects leave.
    pub(super) turns: Turns,
}

#[derive(Debug, Default)]
struct State {
    by_manifest: HashMap<ManifestKey, Memory>,
    random: Random,
}

impl Memories {
    /// Takes the memory of a Manifest. Objects that were applied for other `desired` ones are to be compared unless they
    /// stay the same, and all of them for another target or if `verify` is set. Without [`Self::keep`], the next reconcile
    /// compares.
    pub(super) fn take(
        &self,
        key: &ManifestKey,
        desired: Option<Desired>,
        verify: bool,
        recorded: Inventory,
    ) -> Memory {
        let mut memory = self.state.lock().by_manifest.remove(key).unwrap_or_default();
        let target = desired.filter(|_| !verify).map(|desired| desired.target);
        memory.applied = memory.applied.filter(|applied| Some(applied.target) == target);
        if let (Some(applied), Some(desired)) = (&mut memory.applied, desired) {
            applied.desired = applied.desired.filter(|applied| *applied == desired.objects);
        }
        let target = desired.map(|desired| desired.target);
        // Another access may have rights that the former one lacked.
        if verify || memory.target != target {
            memory.refusals = Refusals::default();
        }
        memory.target = target;
        if verify {
            self.own_writes.forget(key);
        }
        memory.recorded = recorded;
        memory
    }

    pub(super) fn keep(&self, key: &ManifestKey, memory: Memory) {
        let memory = Memory { recorded: Inventory::default(), ..memory };
        self.state.lock().by_manifest.insert(key.clone(), memory);
    }

    /// Records that another Manifest may write the objects of this one: the next reconcile compares all of them.
    pub(super) fn distrust(&self, key: &ManifestKey) {
        if let Some(memory) = self.state.lock().by_manifest.get_mut(key) {
            memory.applied = None;
        }
        self.own_writes.forget(key);
    }

    /// Drops the memory of a Manifest that is gone.
    pub fn forget(&self, key: &ManifestKey) {
        self.state.lock().by_manifest.remove(key);
        self.own_writes.forget(key);
        self.pods.forget(key);
        self.yields.forget(key);
    }

    /// Pods of a Manifest's manager that the caller is to watch.
    pub fn pods(&self, key: &ManifestKey) -> Option<PodSelection> {
        self.pods.of(key)
    }

    /// Waits for the next cluster with other pods to watch.
    pub async fn next_replanned(&self) -> KymaKey {
        self.pods.next_changed().await
    }

    /// Returns true once if a reported version of an object is that of our own write, after which no other writer has written.
    pub fn is_echo(&self, key: &ManifestKey, object: &ObjectKey, version: &str) -> bool {
        self.own_writes.is_echo(key, object, version)
    }

    /// Delay until a Manifest that waited this often for the same cause is reconciled again, at most `longest`, with jitter of
    /// one half.
    pub(super) fn recheck(&self, times: u32, longest: Duration) -> Duration {
        let bound = RECHECK.saturating_mul(2u32.saturating_pow(times)).min(longest);
        bound / 2 + self.state.lock().random.jitter(bound / 2)
    }
}

fn object_hash(object: &RenderedObject) -> u64 {
    hash(&(&object.key, &object.version, object.body.to_string()))
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use serde_json::json;

    use super::*;
    use crate::stage::Stage;

    fn manifest() -> ManifestKey {
        ManifestKey::new("ns", "m")
    }

    fn rendered(name: &str, data: &str) -> RenderedObject {
        let body = json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"k": data},
            "metadata": {"name": name, "namespace": "kyma-system"}});
        RenderedObject {
            key: ObjectKey::of(&body),
            version: "v1".to_owned(),
            stage: Stage::Configuration,
            served: true,
            body,
        }
    }

    fn desired(target: u64, objects: u64) -> Desired {
        Desired { target, objects }
    }

    /// Names of the objects that are not compared after [`desired`] `(1, 1)` was applied with these objects.
    fn retained(
        before: &[RenderedObject],
        now: Option<Desired>,
        verify: bool,
        after: &[RenderedObject],
    ) -> Vec<String> {
        let memories = Memories::default();
        let mut memory = Memory::default();
        memory.complete(desired(1, 1), before);
        memories.keep(&manifest(), memory);
        let mut memory = memories.take(&manifest(), now, verify, Inventory::default());
        memory.retain(after).into_iter().map(|key| key.name.clone()).collect()
    }

    #[test]
    fn objects_are_compared_again_for_another_target_and_for_a_verification() {
        let objects = [rendered("a", "1"), rendered("b", "1")];
        assert_eq!(retained(&objects, Some(desired(1, 1)), false, &objects), ["a", "b"]);
        for (now, verify) in [(Some(desired(2, 1)), false), (None, false), (Some(desired(1, 1)), true)] {
            assert_eq!(retained(&objects, now, verify, &objects), Vec::<String>::new(), "{now:?} {verify}");
        }
        let memories = Memories::default();
        // A reconcile that is killed half-way keeps nothing, and a Manifest that is gone leaves nothing.
        for is_kept in [false, true] {
            let mut memory = memories.take(&manifest(), Some(desired(1, 1)), false, Inventory::default());
            assert_eq!(memory.retain(&objects), Vec::<&ObjectKey>::new(), "{is_kept}");
            memory.complete(desired(1, 1), &objects);
            if is_kept {
                memories.keep(&manifest(), memory);
                memories.forget(&manifest());
            }
        }
        let mut memory = memories.take(&manifest(), Some(desired(1, 1)), false, Inventory::default());
        assert_eq!(memory.retain(&objects), Vec::<&ObjectKey>::new());
    }

    #[test]
    fn change_of_the_desired_objects_retains_those_that_stay_the_same() {
        let before = [rendered("a", "1"), rendered("b", "1"), rendered("dropped", "1")];
        let after = [rendered("a", "1"), rendered("b", "2"), rendered("new", "1")];
        assert_eq!(retained(&before, Some(desired(1, 2)), false, &after), ["a"]);
    }

    #[test]
    fn refused_object_is_sent_again_to_another_target_and_by_a_verification() {
        let denial = Status::failure("configmaps is forbidden", "Forbidden").with_code(403);
        let failure = Failure::new("apply a".to_owned(), &kube::Error::Api(denial.boxed()));
        let key = rendered("a", "1").key;
        for (now, verify, is_repeated) in [
            (desired(1, 1), false, true),
            (desired(1, 2), false, true),
            (desired(2, 1), false, false),
            (desired(1, 1), true, false),
        ] {
            let memories = Memories::default();
            let mut memory = memories.take(&manifest(), Some(desired(1, 1)), false, Inventory::default());
            memory.refuse(&key, 7, &failure, &memories);
            memories.keep(&manifest(), memory);
            let memory = memories.take(&manifest(), Some(now), verify, Inventory::default());
            assert_eq!(memory.repeated(&key, 7).is_some(), is_repeated, "{now:?} {verify}");
        }
    }

    #[test]
    fn change_that_was_not_completed_is_not_forgotten_by_its_reversal() {
        let before = [rendered("a", "1"), rendered("b", "1")];
        let after = [rendered("a", "1"), rendered("b", "2")];
        let memories = Memories::default();
        let mut memory = Memory::default();
        memory.complete(desired(1, 1), &before);
        memories.keep(&manifest(), memory);
        let mut memory = memories.take(&manifest(), Some(desired(1, 2)), false, Inventory::default());
        memory.retain(&after);
        // It failed after the write of `b`.
        memories.keep(&manifest(), memory);
        let mut memory = memories.take(&manifest(), Some(desired(1, 1)), false, Inventory::default());
        let names: Vec<_> = memory.retain(&before).into_iter().map(|key| key.name.as_str()).collect();
        assert_eq!(names, ["a"]);
        memory.complete(desired(1, 1), &before);
        memories.keep(&manifest(), memory);
        let mut memory = memories.take(&manifest(), Some(desired(1, 1)), false, Inventory::default());
        assert_eq!(memory.retain(&before).len(), 2);
    }

    #[test]
    fn doubted_object_is_compared_by_each_reconcile_until_one_has_got_so_far() {
        let before = [rendered("a", "1"), rendered("b", "1"), rendered("c", "1")];
        let after = [rendered("a", "1"), rendered("b", "1"), rendered("c", "2")];
        let names = |memory: &mut Memory| -> Vec<String> {
            memory.retain(&after).into_iter().map(|key| key.name.clone()).collect()
        };
        let memories = Memories::default();
        let take = || memories.take(&manifest(), Some(desired(1, 2)), false, Inventory::default());
        let mut memory = Memory::default();
        memory.complete(desired(1, 1), &before);
        memories.keep(&manifest(), memory);
        let mut memory = take();
        assert_eq!(names(&mut memory), ["a", "b"]);
        memory.doubt(&after[1].key);
        // It ended before `b`, because an object of an earlier stage was not ready.
        for _ in 0..2 {
            memories.keep(&manifest(), memory);
            memory = take();
            assert_eq!(names(&mut memory), ["a"]);
        }
        // It ended after `b`.
        memory.accept(&after[1].key, None);
        memories.keep(&manifest(), memory);
        memory = take();
        assert_eq!(names(&mut memory), ["a", "b"]);

        memory.complete(desired(1, 2), &after);
        memory.doubt(&after[0].key);
        memories.keep(&manifest(), memory);
        memory = take();
        assert_eq!(names(&mut memory), ["b", "c"]);
        memory.complete(desired(1, 2), &after);
        assert_eq!(names(&mut memory), ["a", "b", "c"]);
    }

    #[test]
    fn rechecks_back_off_while_the_cause_stays_the_same() {
        let memories = Memories::default();
        let mut memory = Memory::default();
        let mut longest = Duration::ZERO;
        for times in 0..10 {
            assert_eq!(memory.wait("waiting for a"), times);
            let bound = RECHECK.saturating_mul(2u32.pow(times)).min(MAX_RECHECK);
            let delay = memories.recheck(times, MAX_RECHECK);
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
