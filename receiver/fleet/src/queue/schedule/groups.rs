//! Groups of entries, such as the Manifests of one runtime, with a bound on the slots of each.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::Hash,
    time::Duration,
};

use tokio::time::Instant;

use super::{Lane, entry::BusyTime};
use crate::queue::Priority;

/// Groups by key. A group exists while it has a member or a reconcile in progress.
#[derive(Debug)]
pub(super) struct Groups<G, K> {
    /// Slots of each group. An entry occupies one while it is ready or running, so that groups take turns however many
    /// entries each has.
    slots: usize,
    groups: HashMap<G, Group<K>>,
    /// Entries of all groups that wait for a slot.
    held: usize,
}

#[derive(Debug)]
struct Group<K> {
    /// Lane of all its entries, which share a runtime.
    lane: Lane,
    /// Of the reconciles of all its entries.
    busy: BusyTime,
    members: BTreeSet<K>,
    running: usize,
    ready: BTreeMap<(Priority, u64), K>,
    /// Ready entries without a slot. The most urgent one, and of these the one that has waited longest, is next.
    held: BTreeMap<(Priority, u64), K>,
}

impl<K> Default for Group<K> {
    fn default() -> Self {
        Self {
            lane: Lane::default(),
            busy: BusyTime::default(),
            members: BTreeSet::new(),
            running: 0,
            ready: BTreeMap::new(),
            held: BTreeMap::new(),
        }
    }
}

/// Result of a request for a slot.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Admission<K> {
    /// The entry has a slot.
    Ready,
    /// The entry has the slot of a less urgent one, which is held from now on, with this priority and ticket.
    Instead(K, Priority, u64),
    /// The entry waits for a slot.
    Held,
}

impl<G: Clone + Eq + Hash, K: Clone + Ord> Groups<G, K> {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots: slots.max(1), groups: HashMap::new(), held: 0 }
    }

    /// Adds a member. Returns the group's key as stored, so that equal keys share their memory.
    pub(super) fn join(&mut self, group: G, member: K) -> G {
        let stored = self.groups.get_key_value(&group).map_or(group, |(stored, _)| stored.clone());
        self.groups.entry(stored.clone()).or_default().members.insert(member);
        stored
    }

    /// Removes a member that is neither ready nor held.
    pub(super) fn leave(&mut self, group: &G, member: &K) {
        if let Some(left) = self.groups.get_mut(group) {
            left.members.remove(member);
        }
        self.prune(group);
    }

    pub(super) fn members(&self, group: &G) -> Vec<K> {
        self.groups.get(group).map_or_else(Vec::new, |group| group.members.iter().cloned().collect())
    }

    pub(super) fn lane(&self, group: &G) -> Lane {
        self.groups.get(group).map_or(Lane::Normal, |group| group.lane)
    }

    /// Adds a reconcile to the busy time of a group. Returns true if the group has used up its share.
    pub(super) fn charge(&mut self, group: &G, spent: Duration, now: Instant) -> bool {
        self.groups.get_mut(group).is_some_and(|group| group.busy.charge(spent, now))
    }

    /// Sets the lane. Returns the entries with a position in the previous lane.
    pub(super) fn set_lane(&mut self, group: &G, lane: Lane) -> Vec<K> {
        match self.groups.get_mut(group).filter(|group| group.lane != lane) {
            Some(group) => {
                group.lane = lane;
                group.ready.values().cloned().collect()
            }
            None => Vec::new(),
        }
    }

    /// Requests a slot for a member that has none.
    pub(super) fn admit(&mut self, group: &G, priority: Priority, ticket: u64, member: K) -> Admission<K> {
        let slots = self.slots;
        let Some(group) = self.groups.get_mut(group) else { return Admission::Ready };
        if group.running + group.ready.len() < slots {
            group.ready.insert((priority, ticket), member);
            return Admission::Ready;
        }
        self.held += 1;
        let last = group.ready.last_entry().filter(|last| last.key().0 > priority);
        let Some(last) = last else {
            group.held.insert((priority, ticket), member);
            return Admission::Held;
        };
        let ((other_priority, other_ticket), other) = last.remove_entry();
        group.held.insert((other_priority, other_ticket), other.clone());
        group.ready.insert((priority, ticket), member);
        Admission::Instead(other, other_priority, other_ticket)
    }

    /// Removes an entry that is ready or held.
    pub(super) fn withdraw(&mut self, group: &G, priority: Priority, ticket: u64) {
        let Some(group) = self.groups.get_mut(group) else { return };
        if group.ready.remove(&(priority, ticket)).is_none() && group.held.remove(&(priority, ticket)).is_some() {
            self.held -= 1;
        }
    }

    /// Begins the reconcile of a ready entry.
    pub(super) fn start(&mut self, group: &G, priority: Priority, ticket: u64) {
        if let Some(group) = self.groups.get_mut(group) {
            group.ready.remove(&(priority, ticket));
            group.running += 1;
        }
    }

    /// Ends a reconcile, which frees its slot.
    pub(super) fn end(&mut self, group: &G) {
        if let Some(ended) = self.groups.get_mut(group) {
            ended.running = ended.running.saturating_sub(1);
        }
        self.prune(group);
    }

    /// Takes the next held entry if a slot is free.
    pub(super) fn next_held(&mut self, group: &G) -> Option<(Priority, K)> {
        let group = self.groups.get_mut(group)?;
        if group.running + group.ready.len() >= self.slots {
            return None;
        }
        let ((priority, _), member) = group.held.pop_first()?;
        self.held -= 1;
        Some((priority, member))
    }

    /// Number of held entries.
    pub(super) const fn held(&self) -> usize {
        self.held
    }

    /// The held entry of this priority that has waited longest, of each group.
    pub(super) fn first_held(&self, priority: Priority) -> impl Iterator<Item = &K> {
        let groups = self.groups.values();
        groups.filter_map(move |group| Some(group.held.range((priority, 0)..=(priority, u64::MAX)).next()?.1))
    }

    fn prune(&mut self, group: &G) {
        if self.groups.get(group).is_some_and(|group| group.members.is_empty() && group.running == 0) {
            self.groups.remove(group);
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty() && self.held == 0
    }
}
