//! Index of one watch: the last observed state of each object, in about 200 bytes, and the digest of all of them.
//!
//! Classifies changes from metadata alone: `created`, `spec` (the generation differs), `metadata` (the hash of labels,
//! annotations, finalizers, deletion timestamp and owner references differs), `status` (only the resourceVersion
//! differs), `deleted`. Where the generation does not tell a change of the spec, `spec` takes the place of `status`. A
//! value counts as changed when it differs, not when it grows, because a restored etcd goes backwards.

mod object;

use std::{
    collections::BTreeMap,
    ops::Bound::{Excluded, Included, Unbounded},
    sync::Arc,
};

use tidewatch_api::plan::Field;
use tidewatch_contract::{
    digest::{Digest, ObjectHasher},
    event::Change,
};

pub use object::{ObjectState, Uid, Version};

use crate::memory::{allocation, tree_entry};

/// Rule by which a watch counts changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChangeRule {
    /// Field that the plan selects.
    pub(crate) field: Field,
    /// The kind has no status subresource, so the generation does not separate spec changes from status changes.
    pub(crate) every_version: bool,
}

impl ChangeRule {
    /// True if a new resourceVersion alone counts as a change.
    fn counts_version(self, seen: &ObjectState) -> bool {
        self.field == Field::Status || self.is_blind(seen)
    }

    /// True if the spec may change with the resourceVersion alone, such as the data of a ConfigMap.
    fn is_blind(self, seen: &ObjectState) -> bool {
        self.every_version || seen.generation.is_none()
    }
}

/// Result of an observation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Applied {
    /// No change that this watch reports.
    Unchanged,
    /// A change to report.
    Changed(ObjectChange),
    /// The watch holds more objects than its cap; only the fact that something changed is known.
    Coarse,
}

/// One reported change, with the object's contribution to the digest before and after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ObjectChange {
    /// Classification of the change.
    pub(crate) change: Change,
    /// Zero if the object did not exist.
    pub(crate) before: Digest,
    /// Zero if the object is deleted.
    pub(crate) after: Digest,
}

/// An object that is missing from a list.
#[derive(Debug)]
pub(crate) struct RemovedObject {
    /// `<namespace>/<name>`.
    pub(crate) key: Box<str>,
    /// Last observed state.
    pub(crate) seen: ObjectState,
    /// Contribution to the digest.
    pub(crate) before: Digest,
}

struct Entry {
    seen: ObjectState,
    /// List in which the object was last observed.
    round: u32,
}

/// Index of one watch; see the module.
pub(crate) struct Index {
    hasher: Arc<ObjectHasher>,
    rule: ChangeRule,
    cap: usize,
    objects: BTreeMap<Box<str>, Entry>,
    /// Memory of the objects at most.
    bytes: usize,
    digest: Digest,
    round: u32,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Never listed completely; the content is incomplete.
    Partial,
    /// Holds exactly the objects that the watch selects, as of the last event.
    Complete,
    /// Listed completely before, with another list in progress.
    Relisting,
    /// Holds no objects, because there were more than `cap`.
    Coarse,
}

impl Index {
    /// Creates an empty index; above `cap` objects it becomes coarse.
    pub(crate) const fn new(hasher: Arc<ObjectHasher>, rule: ChangeRule, cap: usize) -> Self {
        let bytes = 0;
        let digest = Digest::ZERO;
        let round = 0;
        let state = State::Partial;
        Self { hasher, rule, cap, objects: BTreeMap::new(), bytes, digest, round, state }
    }

    /// True if it has been listed completely and kept up to date since.
    pub(crate) fn is_complete(&self) -> bool {
        matches!(self.state, State::Complete | State::Relisting)
    }

    /// True if only the fact that something changed is known.
    pub(crate) fn is_coarse(&self) -> bool {
        self.state == State::Coarse
    }

    /// Rule by which changes are counted.
    pub(crate) const fn rule(&self) -> ChangeRule {
        self.rule
    }

    /// Number of objects held.
    pub(crate) fn len(&self) -> usize {
        self.objects.len()
    }

    /// Memory of all objects at most, in bytes.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    fn cost(key: &str, seen: &ObjectState) -> usize {
        tree_entry::<Box<str>, Entry>() + allocation(key.len()) + seen.heap()
    }

    /// Digest of all objects; `None` unless the index is complete.
    pub(crate) fn digest(&self) -> Option<Digest> {
        self.is_complete().then_some(self.digest)
    }

    /// Objects with keys above `key` and up to `up_to`, in key order.
    pub(crate) fn after(&self, key: &str, up_to: Option<&str>) -> impl Iterator<Item = (&str, &ObjectState, Digest)> {
        let up_to = up_to.map(|last| last.max(key)).map_or(Unbounded, Included);
        let after = self.objects.range::<str, _>((Excluded(key), up_to));
        after.map(|(key, entry)| (&**key, &entry.seen, self.part(key, &entry.seen)))
    }

    /// Applies another rule from now on, which recomputes the digest over the same objects.
    pub(crate) fn follow(&mut self, rule: ChangeRule) {
        self.rule = rule;
        self.digest = self.after("", None).fold(Digest::ZERO, |sum, (_, _, part)| sum + part);
    }

    /// Starts a list; a coarse index is filled again.
    pub(crate) fn begin_list(&mut self) {
        self.round = self.round.wrapping_add(1);
        self.state = if self.is_complete() { State::Relisting } else { State::Partial };
    }

    /// Records an existing object, from a list or from the watch. While listing, a changed resourceVersion counts for
    /// every watch, because a list can merge several changes.
    pub(crate) fn apply(&mut self, key: &str, seen: ObjectState) -> Applied {
        if self.is_coarse() {
            return Applied::Coarse;
        }
        let Some(entry) = self.objects.get_mut(key) else {
            return self.insert(key, seen);
        };
        entry.round = self.round;
        let Some(change) = entry.seen.compare(&seen) else {
            return Applied::Unchanged;
        };
        let change = if change == Change::Status && self.rule.is_blind(&seen) { Change::Spec } else { change };
        let old = std::mem::replace(&mut entry.seen, seen.clone());
        self.bytes = self.bytes - old.heap() + seen.heap();
        if change == Change::Status && self.state == State::Complete && !self.rule.counts_version(&seen) {
            return Applied::Unchanged;
        }
        let before = self.part(key, &old);
        let after = self.part(key, &seen);
        self.digest += after - before;
        Applied::Changed(ObjectChange { change, before, after })
    }

    fn insert(&mut self, key: &str, seen: ObjectState) -> Applied {
        if self.objects.len() >= self.cap {
            self.go_coarse();
            return Applied::Coarse;
        }
        let after = self.part(key, &seen);
        self.digest += after;
        self.bytes += Self::cost(key, &seen);
        self.objects.insert(key.into(), Entry { seen, round: self.round });
        Applied::Changed(ObjectChange { change: Change::Created, before: Digest::ZERO, after })
    }

    /// Makes the index coarse: it holds no objects until the next list.
    pub(crate) fn go_coarse(&mut self) {
        self.state = State::Coarse;
        self.objects = BTreeMap::new();
        (self.bytes, self.digest) = (0, Digest::ZERO);
    }

    /// Removes an object that was deleted or has left the selection.
    pub(crate) fn delete(&mut self, key: &str) -> Applied {
        if self.is_coarse() {
            return Applied::Coarse;
        }
        let Some(entry) = self.objects.remove(key) else {
            return Applied::Unchanged;
        };
        let before = self.part(key, &entry.seen);
        self.digest -= before;
        self.bytes -= Self::cost(key, &entry.seen);
        Applied::Changed(ObjectChange { change: Change::Deleted, before, after: Digest::ZERO })
    }

    /// Ends a list: removes and returns the objects that it did not contain. A coarse index stays coarse until the next
    /// list.
    pub(crate) fn finish_list(&mut self) -> Vec<RemovedObject> {
        if self.is_coarse() {
            return Vec::new();
        }
        self.state = State::Complete;
        let round = self.round;
        let missing: Vec<_> = self
            .objects
            .extract_if(.., |_, entry| entry.round != round)
            .map(|(key, entry)| (key, entry.seen))
            .collect();
        let gone = |(key, seen): (Box<str>, ObjectState)| {
            let before = self.part(&key, &seen);
            self.digest -= before;
            self.bytes -= Self::cost(&key, &seen);
            RemovedObject { key, seen, before }
        };
        missing.into_iter().map(gone).collect()
    }

    /// One object's contribution to the digest: a hash of exactly the fields that the watch reports.
    pub(crate) fn part(&self, key: &str, seen: &ObjectState) -> Digest {
        let version = if self.rule.counts_version(seen) { seen.version.to_string() } else { String::new() };
        let generation = seen.generation.map_or(0, i64::from).to_be_bytes();
        let uid = seen.uid.to_string();
        let fields = [key.as_bytes(), uid.as_bytes(), &generation, &seen.metadata.to_be_bytes(), version.as_bytes()];
        self.hasher.hash(&fields)
    }
}

#[cfg(test)]
mod tests;
