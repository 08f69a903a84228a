//! The index of one watch: what was last seen of each object, in about 200 bytes, and the digest over all of them.
//!
//! It decides what happened to an object from metadata alone: `created`, `spec` (the generation differs), `metadata` (the hash
//! of labels, annotations, finalizers, deletion timestamp and owners differs), `status` (only the resource version
//! differs), `deleted`. "Moved" means differs, not grew: an etcd that was restored goes backwards.

mod object;

use std::{
    collections::BTreeMap,
    ops::Bound::{Excluded, Included, Unbounded},
    sync::Arc,
};

use tidewatch_shared::{
    digest::{Digest, ObjectHasher},
    event::Change,
    plan::Field,
};

pub use object::{Seen, Uid, Version};

/// What a watch counts as a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    /// What the plan asks for.
    pub(crate) field: Field,
    /// The kind has no status subresource, so the generation does not tell spec from status.
    pub(crate) every_version: bool,
}

impl Rule {
    /// Whether a new resource version alone is a change. Objects without generation have nothing else that tells.
    fn counts_version(self, seen: &Seen) -> bool {
        self.field == Field::Status || self.every_version || seen.generation.is_none()
    }
}

/// What an observation did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Applied {
    /// Nothing that this watch reports.
    Unchanged,
    /// A change to report.
    Changed(Moved),
    /// The watch holds more objects than it may and only knows that something changed.
    Coarse,
}

/// One reported change, with the object's part of the digest before and after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moved {
    /// What happened.
    pub(crate) change: Change,
    /// Zero when the object was not there.
    pub(crate) before: Digest,
    /// Zero when the object is gone.
    pub(crate) after: Digest,
}

/// An object that a list no longer had.
#[derive(Debug)]
pub(crate) struct Gone {
    /// `<namespace>/<name>`.
    pub(crate) key: Box<str>,
    /// Its last state.
    pub(crate) seen: Seen,
    /// Its part of the digest.
    pub(crate) before: Digest,
}

struct Entry {
    seen: Seen,
    /// The list in which the object was last seen.
    round: u32,
}

/// See the module.
pub(crate) struct Index {
    hasher: Arc<ObjectHasher>,
    rule: Rule,
    cap: usize,
    objects: BTreeMap<Box<str>, Entry>,
    digest: Digest,
    round: u32,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Never listed to the end; what is here is part of the truth.
    Partial,
    /// Holds exactly what the watch selects, as of the last event.
    Complete,
    /// Listed to the end before, and being listed again.
    Relisting,
    /// Holds nothing, because there were more than `cap` objects.
    Coarse,
}

impl Index {
    /// An empty index; `cap` is the number of objects above which it goes coarse.
    pub(crate) const fn new(hasher: Arc<ObjectHasher>, rule: Rule, cap: usize) -> Self {
        Self { hasher, rule, cap, objects: BTreeMap::new(), digest: Digest::ZERO, round: 0, state: State::Partial }
    }

    /// Whether it was once listed to the end and has been kept up since.
    pub(crate) fn is_complete(&self) -> bool {
        matches!(self.state, State::Complete | State::Relisting)
    }

    /// Whether it only knows that something changed.
    pub(crate) fn is_coarse(&self) -> bool {
        self.state == State::Coarse
    }

    /// What counts as a change.
    pub(crate) const fn rule(&self) -> Rule {
        self.rule
    }

    /// Objects held.
    pub(crate) fn len(&self) -> usize {
        self.objects.len()
    }

    /// The digest over everything that is held; `None` unless that is complete.
    pub(crate) fn digest(&self) -> Option<Digest> {
        self.is_complete().then_some(self.digest)
    }

    /// All objects with their part of the digest.
    fn iter(&self) -> impl Iterator<Item = (&str, &Seen, Digest)> {
        self.objects.iter().map(|(key, entry)| (&**key, &entry.seen, self.part(key, &entry.seen)))
    }

    /// The objects behind a key, up to another, in their order.
    pub(crate) fn behind(&self, key: &str, up_to: Option<&str>) -> impl Iterator<Item = (&str, &Seen, Digest)> {
        let up_to = up_to.map(|last| last.max(key)).map_or(Unbounded, Included);
        let behind = self.objects.range::<str, _>((Excluded(key), up_to));
        behind.map(|(key, entry)| (&**key, &entry.seen, self.part(key, &entry.seen)))
    }

    /// Counts by another rule from now on: another digest over the same objects.
    pub(crate) fn follow(&mut self, rule: Rule) {
        self.rule = rule;
        self.digest = self.iter().fold(Digest::ZERO, |sum, (_, _, part)| sum + part);
    }

    /// A list begins; a coarse index gets another chance.
    pub(crate) fn begin_list(&mut self) {
        self.round = self.round.wrapping_add(1);
        self.state = if self.is_complete() { State::Relisting } else { State::Partial };
    }

    /// An object is there, from a list or from the watch. While listing, a changed resource version counts for every watch,
    /// because several changes merge there.
    pub(crate) fn apply(&mut self, key: &str, seen: Seen) -> Applied {
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
        let old = std::mem::replace(&mut entry.seen, seen.clone());
        if change == Change::Status && self.state == State::Complete && !self.rule.counts_version(&seen) {
            return Applied::Unchanged;
        }
        let (before, after) = (self.part(key, &old), self.part(key, &seen));
        self.digest += after - before;
        Applied::Changed(Moved { change, before, after })
    }

    fn insert(&mut self, key: &str, seen: Seen) -> Applied {
        if self.objects.len() >= self.cap {
            self.give_up();
            return Applied::Coarse;
        }
        let after = self.part(key, &seen);
        self.digest += after;
        self.objects.insert(key.into(), Entry { seen, round: self.round });
        Applied::Changed(Moved { change: Change::Created, before: Digest::ZERO, after })
    }

    /// Goes coarse: holds nothing until the next list.
    pub(crate) fn give_up(&mut self) {
        self.state = State::Coarse;
        self.objects = BTreeMap::new();
        self.digest = Digest::ZERO;
    }

    /// An object left the set that the watch selects.
    pub(crate) fn delete(&mut self, key: &str) -> Applied {
        if self.is_coarse() {
            return Applied::Coarse;
        }
        let Some(entry) = self.objects.remove(key) else {
            return Applied::Unchanged;
        };
        let before = self.part(key, &entry.seen);
        self.digest -= before;
        Applied::Changed(Moved { change: Change::Deleted, before, after: Digest::ZERO })
    }

    /// The list is complete: what it did not have is gone. A coarse index stays so until the next list.
    pub(crate) fn finish_list(&mut self) -> Vec<Gone> {
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
        let gone = |(key, seen): (Box<str>, Seen)| {
            let before = self.part(&key, &seen);
            self.digest -= before;
            Gone { key, seen, before }
        };
        missing.into_iter().map(gone).collect()
    }

    /// One object's part of the digest: over exactly what the watch reports.
    pub(crate) fn part(&self, key: &str, seen: &Seen) -> Digest {
        let version = if self.rule.counts_version(seen) { seen.version.to_string() } else { String::new() };
        let generation = seen.generation.map_or(0, i64::from).to_be_bytes();
        let uid = seen.uid.to_string();
        let fields = [key.as_bytes(), uid.as_bytes(), &generation, &seen.metadata.to_be_bytes(), version.as_bytes()];
        self.hasher.hash(&fields)
    }
}

#[cfg(test)]
mod tests;
