//! Read access to the queue: views and metrics.

use std::{hash::Hash, time::Duration};

use tokio::time::Instant;

use super::{Lane, Queue, SLOW_TIME_LIMIT, TIME_LIMIT};
use crate::queue::{Priority, WorkSet};

impl<K: Clone + Eq + Hash + Ord, G: Clone + Eq + Hash> Queue<K, G> {
    /// Returns true if the key is registered.
    pub(crate) fn contains(&self, key: &K) -> bool {
        self.entries.get(key).is_some_and(|entry| !entry.gone)
    }

    /// Group of a key that has one.
    pub(crate) fn group(&self, key: &K) -> Option<&G> {
        self.entries.get(key)?.group.as_ref()
    }

    /// Registered keys of a group.
    pub(crate) fn members(&self, group: &G) -> Vec<K> {
        self.groups.members(group)
    }

    /// Work of a key that is ready or in backoff, for summaries.
    pub(crate) fn queued(&self, key: &K) -> WorkSet {
        self.entries.get(key).and_then(|entry| entry.queued.as_ref()).map_or(WorkSet::EMPTY, |queued| queued.work)
    }

    /// Returns true if a key is ready, or waits for nothing but its turn.
    pub(crate) fn is_due(&self, key: &K, now: Instant) -> bool {
        let entry = self.entries.get(key).filter(|entry| entry.queued.is_some());
        entry.is_some_and(|entry| entry.backoff.is_none_or(|(until, _)| until <= now))
    }

    /// Paused work of a key.
    pub(crate) fn parked(&self, key: &K) -> WorkSet {
        self.entries.get(key).and_then(|entry| entry.parked.as_ref()).map_or(WorkSet::EMPTY, |parked| parked.work)
    }

    /// Consecutive failures of a key.
    pub(crate) fn failures(&self, key: &K) -> u32 {
        self.entries.get(key).map_or(0, |entry| entry.failures)
    }

    /// Time since which the longest waiting entry of a priority has been ready, with or without a free slot.
    pub(crate) fn oldest(&self, priority: Priority) -> Option<Instant> {
        let first = self.ready.iter().filter_map(|lane| Some(lane[priority as usize].first_key_value()?.1));
        first.chain(self.groups.first_held(priority)).filter_map(|key| self.entries.get(key)?.since).min()
    }

    /// Returns true while a reconcile of the key runs.
    pub(crate) fn in_progress(&self, key: &K) -> bool {
        self.entries.get(key).is_some_and(|entry| entry.running.is_some())
    }

    /// Time limit of the reconcile that was just taken.
    pub(crate) fn time_limit(&self, key: &K) -> Duration {
        let running = self.entries.get(key).and_then(|entry| entry.running.as_ref());
        match running.map(|running| running.lane) {
            Some(Lane::Slow) => SLOW_TIME_LIMIT,
            Some(Lane::Normal) | None => TIME_LIMIT,
        }
    }

    /// Number of enqueues that merged into work already queued.
    pub(crate) const fn coalesced(&self) -> u64 {
        self.coalesced
    }

    /// Number of reconciles after which their runtime had used up its share of time.
    pub(crate) const fn busy(&self) -> u64 {
        self.busy
    }

    /// Number of keys in progress.
    pub(crate) const fn running(&self) -> usize {
        self.running
    }

    /// Number of ready keys of a priority that have a slot.
    pub(crate) fn ready(&self, priority: Priority) -> usize {
        self.ready.iter().map(|lane| lane[priority as usize].len()).sum()
    }

    /// Number of ready keys that wait for a slot of their group.
    pub(crate) const fn held(&self) -> usize {
        self.groups.held()
    }

    /// Number of delayed keys.
    pub(crate) fn waiting(&self) -> usize {
        self.delayed.len()
    }

    /// Returns true if no key is registered or in progress.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.groups.is_empty() && self.delayed.is_empty() && self.running == 0
    }
}
