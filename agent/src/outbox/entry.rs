//! Events that wait to be sent, the map of them, which knows how much memory it holds, and what all events of a watch, or
//! of an epoch, share.

use std::{borrow::Borrow as _, collections::BTreeMap, ops::Deref, sync::Arc};

use strum::IntoStaticStr;
use tidewatch_api::{
    identity::Epoch,
    plan::{PlannedWatch, Work},
};
use tidewatch_contract::{digest::Digest, event::Change};
use tidewatch_kit::variant::VariantName as _;

use crate::{
    index::ObjectState,
    memory::{allocation, tree_entry},
};

/// Counters of an `Arc`, in bytes.
const COUNTERS: usize = 16;

/// Fields that all events of a watch share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WatchInfo {
    /// Name of the watch in the plan, which several watches have that are on resources of one group.
    pub(crate) watch: Box<str>,
    /// API group.
    pub(crate) group: Box<str>,
    /// API version; that of the plan until discovery has resolved it.
    pub(crate) version: Box<str>,
    /// Plural resource name.
    pub(crate) resource: Box<str>,
    /// Kind; empty until discovery has resolved it.
    pub(crate) kind: Box<str>,
    /// Manager that receives the events.
    pub(crate) manager: Box<str>,
    /// The receiver forwards the events to another manager, which understands single objects only.
    pub(crate) forward: bool,
}

impl WatchInfo {
    /// Metadata as the plan defines it, before discovery.
    pub(crate) fn of(planned: &PlannedWatch) -> Self {
        let PlannedWatch { name, group, version, resource, manager, work, .. } = planned;
        let [watch, group, version, resource, manager] =
            [name, group, version, resource, manager].map(|text| text.as_str().into());
        Self { watch, group, version, resource, kind: "".into(), manager, forward: work.contains(&Work::Forward) }
    }
}

/// Subject of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Update {
    /// The watch as a whole: any of its objects may have changed.
    Watch,
    /// The watch as a whole, including objects with unknown names. Only for forwarded watches.
    Unnamed,
    /// One object.
    Object {
        /// Newest state; the last one if the object is deleted.
        seen: ObjectState,
        /// Most significant change since the last settled one.
        change: Change,
        /// The object's current contribution to the digest.
        part: Digest,
    },
}

/// Duration for which a refused event is parked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parking {
    /// Until another plan is in effect or another receiver instance answers: the receiver has parsed the event and
    /// refused it by its id.
    UntilPlanChange,
    /// For a limited time ([`super::refusal::PARKED_RETRY`]): the request was refused as a whole, so the event may not
    /// be at fault.
    Temporary,
}

/// Event of one key: it waits, or is in a request.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) update: Update,
    /// The object's contribution to the digest as of the last event sent of it.
    pub(super) base: Digest,
    /// Time at which the agent first observed the change, in Unix milliseconds.
    pub(super) since: i64,
    /// The object was created while the watch was running and no event has been sent of it, so its deletion need not be
    /// sent either.
    pub(super) unannounced: bool,
    /// How it was parked last; `None` if it never was.
    pub(super) parking: Option<Parking>,
}

impl Update {
    /// Label of the change in metrics.
    pub(super) fn as_str(&self) -> &'static str {
        match self {
            Self::Watch => "whole",
            Self::Unnamed => "unnamed",
            Self::Object { change, .. } => change.as_str(),
        }
    }
}

impl Entry {
    /// Creates an entry that has not been sent.
    pub(super) fn new(update: Update, base: Digest, since: i64) -> Self {
        Self { update, base, since, unannounced: false, parking: None }
    }

    pub(super) fn is_deleted(&self) -> bool {
        matches!(self.update, Update::Object { change: Change::Deleted, .. })
    }
}

/// Counters of one epoch; all of them start at zero.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EpochState {
    /// The epoch.
    pub(crate) epoch: Epoch,
    /// Last sequence assigned to an event.
    pub(crate) sequence: u64,
    /// Highest sequence up to which the receiver has accepted every event.
    pub(crate) accepted: u64,
    /// Number of signed requests.
    pub(super) nonces: u64,
    /// Number of heartbeats.
    pub(crate) heartbeats: u64,
}

impl EpochState {
    pub(super) const fn new(epoch: Epoch) -> Self {
        Self { epoch, sequence: 0, accepted: 0, nonces: 0, heartbeats: 0 }
    }
}

/// Cause of a new epoch. The name is its label in metrics and logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum EpochReason {
    /// Another instance of the receiver answered.
    Instance,
    /// The receiver lost events that it had accepted.
    Forgotten,
    /// A parked event left a gap in the sequence.
    Parked,
    /// The receiver refused the signature or the nonce.
    Refused,
    /// Too many names of watches were remembered.
    Names,
}

/// A value with allocations of its own.
pub(super) trait Held {
    /// Heap memory beside the value itself, in bytes.
    fn heap(&self) -> usize;
}

impl Held for Entry {
    fn heap(&self) -> usize {
        match &self.update {
            Update::Watch | Update::Unnamed => 0,
            Update::Object { seen, .. } => seen.heap(),
        }
    }
}

/// A map that is read as a `BTreeMap`, and changed by its own methods alone.
#[derive(Debug)]
pub(super) struct Keyed<V> {
    entries: BTreeMap<Arc<str>, V>,
    bytes: usize,
}

impl<V> Default for Keyed<V> {
    fn default() -> Self {
        Self { entries: BTreeMap::new(), bytes: 0 }
    }
}

impl<V> Deref for Keyed<V> {
    type Target = BTreeMap<Arc<str>, V>;

    fn deref(&self) -> &Self::Target {
        &self.entries
    }
}

impl<V: Held> Keyed<V> {
    /// Memory of all entries at most, in bytes.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    fn cost(key: &str, value: &V) -> usize {
        tree_entry::<Arc<str>, V>() + allocation(COUNTERS + key.len()) + value.heap()
    }

    /// Replaces the entry of a key.
    pub(super) fn insert(&mut self, key: Arc<str>, value: V) {
        self.remove(&key);
        self.bytes += Self::cost(&key, &value);
        self.entries.insert(key, value);
    }

    /// Inserts all entries.
    pub(super) fn extend(&mut self, entries: impl IntoIterator<Item = (Arc<str>, V)>) {
        entries.into_iter().for_each(|(key, value)| self.insert(key, value));
    }

    /// Changes the value of a key. Returns false if there is none.
    pub(super) fn change(&mut self, key: &str, work: impl FnOnce(&mut V)) -> bool {
        let Some(value) = self.entries.get_mut(key) else { return false };
        let before = value.heap();
        work(value);
        self.bytes = self.bytes - before + value.heap();
        true
    }

    /// Removes the entry of a key.
    pub(super) fn remove(&mut self, key: &str) -> Option<V> {
        self.remove_entry(key).map(|(_, value)| value)
    }

    /// Removes the entry of a key, with the key.
    pub(super) fn remove_entry(&mut self, key: &str) -> Option<(Arc<str>, V)> {
        let (key, value) = self.entries.remove_entry(key)?;
        self.bytes -= Self::cost(key.borrow(), &value);
        Some((key, value))
    }

    /// Keeps the entries for which `stays` holds.
    pub(super) fn retain(&mut self, stays: impl Fn(&str, &V) -> bool) {
        self.entries.retain(|key, value| {
            let stays = stays(key, value);
            if !stays {
                self.bytes -= Self::cost(key, value);
            }
            stays
        });
    }

    /// Removes and returns the entries for which `leaves` holds.
    pub(super) fn extract(&mut self, leaves: impl Fn(&V) -> bool) -> Vec<(Arc<str>, V)> {
        let left: Vec<_> = self.entries.extract_if(.., |_, value| leaves(value)).collect();
        self.bytes -= left.iter().map(|(key, value)| Self::cost(key, value)).sum::<usize>();
        left
    }

    /// Removes and returns all entries.
    pub(super) fn take(&mut self) -> BTreeMap<Arc<str>, V> {
        std::mem::take(self).entries
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl Held for usize {
        fn heap(&self) -> usize {
            *self
        }
    }

    proptest! {
        #[test]
        fn bytes_are_those_of_the_entries(steps in prop::collection::vec((0u8..6, 0u8..5, 0usize..100), 0..60)) {
            let mut keyed = Keyed::default();
            for (step, key, value) in steps {
                let key = "k".repeat(key.into());
                match step {
                    0 | 1 => keyed.insert(key.as_str().into(), value),
                    2 => drop(keyed.remove(&key)),
                    3 => _ = keyed.change(&key, |held| *held = value),
                    4 => keyed.retain(|other, _| other != key),
                    _ => {
                        let left = keyed.extract(|held| *held > value);
                        keyed.extend(left);
                    }
                }
                prop_assert_eq!(keyed.bytes(), keyed.iter().map(|(key, value)| Keyed::cost(key, value)).sum::<usize>());
            }
            keyed.take();
            prop_assert_eq!(keyed.bytes(), 0);
        }
    }
}
