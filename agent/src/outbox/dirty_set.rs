//! Dirty set of one watch.

use std::{
    collections::BTreeMap,
    ops::Bound::{Excluded, Unbounded},
    sync::Arc,
    time::Duration,
};

use tidewatch_contract::{digest::Digest, event::Change};
use tokio::time::Instant;

use super::{
    WatchInfo,
    entry::{Entry, Held, Keyed, Parking, Update},
    sweep::Sweep,
};
use crate::{index::Index, memory::tree_entry, random};

/// Key of the watch itself, for `watch.changed`. It cannot collide with an object, because the key of an object
/// contains a `/`.
pub(super) const WATCH_KEY: &str = "";
/// Longest delay before the next retry of a watch that the receiver refuses as unknown.
const UNKNOWN_WATCH_CAP: Duration = Duration::from_secs(300);
/// Least time between two events of a coarse watch; up to as much again is added at random.
const COARSE_SPACING: Duration = Duration::from_secs(30);

/// Result of dropping the entries of single objects on overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DroppedObjects {
    /// At least one entry was dropped.
    pub(super) any: bool,
    /// Deletions were dropped and their names are lost; the `watch.changed` must be marked unnamed.
    pub(super) unnamed: bool,
}

#[derive(Debug)]
struct Sent {
    sequence: u64,
    waiting: Entry,
}

impl Held for Sent {
    /// With the entry of the index by sequence.
    fn heap(&self) -> usize {
        self.waiting.heap() + tree_entry::<u64, Arc<str>>()
    }
}

/// Dirty set of one watch: entries that wait, are parked, or are sent and not settled.
#[derive(Debug, Default)]
pub(super) struct DirtySet {
    pub(super) info: WatchInfo,
    waiting: Keyed<Entry>,
    /// The newest event of each key that is in flight or accepted, until it is settled.
    sent: Keyed<Sent>,
    /// Index of `sent` by sequence.
    order: BTreeMap<u64, Arc<str>>,
    /// Refused entries; disjoint from `waiting`.
    parked: Keyed<Entry>,
    /// Enqueues every existing object as capacity permits, see [`Self::sweep`].
    pub(super) sweep: Sweep,
    /// Key that was taken last; the next one is its successor, so that no key starves. [`WATCH_KEY`] before the
    /// first.
    cursor: Arc<str>,
    hold: Option<Instant>,
    refusals: u32,
    /// Single objects are not tracked; every change makes the whole watch dirty.
    is_coarse: bool,
    /// Earliest next event while it is coarse.
    spacing: Option<Instant>,
}

impl DirtySet {
    pub(super) fn new(info: WatchInfo) -> Self {
        Self { info, ..Self::default() }
    }

    /// Number of events that wait; the objects that a sweep still has to enqueue count as one.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len() + usize::from(self.sweep.is_under_way())
    }

    pub(super) fn parked(&self) -> usize {
        self.parked.len()
    }

    pub(super) fn unsettled(&self) -> usize {
        self.sent.len()
    }

    pub(super) fn dirty(&self) -> usize {
        self.waiting.len() + self.sent.len() + self.parked.len()
    }

    /// Memory of all entries at most, in bytes.
    pub(super) const fn bytes(&self) -> usize {
        self.waiting.bytes() + self.sent.bytes() + self.parked.bytes()
    }

    pub(super) fn has_watch_waiting(&self) -> bool {
        self.waiting.contains_key(WATCH_KEY)
    }

    pub(super) fn has_watch_parked(&self) -> bool {
        self.parked.contains_key(WATCH_KEY)
    }

    /// Earliest time at which an event may be sent; `None` when none waits.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        (!self.waiting.is_empty()).then(|| now.max(self.hold.unwrap_or(now)).max(self.spacing.unwrap_or(now)))
    }

    /// Digest delta between the index and everything sent.
    pub(super) fn outstanding(&self) -> Digest {
        let beyond = |waiting: &Entry| match &waiting.update {
            Update::Watch | Update::Unnamed => Digest::ZERO,
            Update::Object { part, .. } => *part - waiting.base,
        };
        self.unsent().map(beyond).fold(Digest::ZERO, |sum, part| sum + part)
    }

    fn unsent(&self) -> impl Iterator<Item = &Entry> {
        self.waiting.values().chain(self.parked.values())
    }

    /// Changes the entry of a key that is parked or waiting. False if there is none.
    fn change_unsent(&mut self, key: &str, work: impl FnOnce(&mut Entry)) -> bool {
        let unsent = if self.parked.contains_key(key) { &mut self.parked } else { &mut self.waiting };
        unsent.change(key, work)
    }

    /// See [`super::Outbox::mark`]. `before` is the object's contribution to the digest before this change. True if the
    /// change was merged into an event that had not been sent.
    pub(super) fn mark(&mut self, key: &str, update: Update, before: Digest, at: i64) -> bool {
        if self.parked.contains_key(key) || self.waiting.contains_key(key) {
            return self.change_unsent(key, |waiting| waiting.update = merge(&waiting.update, update));
        }
        self.waiting.insert(key.into(), Entry::new(update, before, at));
        false
    }

    /// Records that the object just enqueued was created while the watch was running.
    pub(super) fn mark_unannounced(&mut self, key: &str) {
        if !self.sent.contains_key(key) {
            self.waiting.change(key, |waiting| waiting.unannounced = true);
        }
    }

    /// Enqueues the next objects of the sweep, at most `room`.
    pub(super) fn sweep(&mut self, room: usize, index: &Index) {
        for (key, entry) in self.sweep.take(room, index) {
            if !self.parked.contains_key(&key) && !self.waiting.contains_key(&key) {
                self.waiting.insert(key, entry);
            }
        }
    }

    /// Takes the next event to send; a `watch.changed` goes first.
    pub(super) fn next(&mut self) -> Option<(Arc<str>, Entry)> {
        let behind = || self.waiting.range::<str, _>((Excluded(&*self.cursor), Unbounded)).next();
        let watch_entry = || self.waiting.get_key_value(WATCH_KEY);
        let key =
            watch_entry().or_else(behind).or_else(|| self.waiting.first_key_value()).map(|(key, _)| key.clone())?;
        let waiting = self.waiting.remove(&key)?;
        self.cursor = key.clone();
        Some((key, waiting))
    }

    /// Records the sequence of an event. It supersedes an older unsettled event of the same key.
    pub(super) fn sent(&mut self, key: Arc<str>, sequence: u64, mut waiting: Entry) {
        if let Some(older) = self.sent.remove(&key) {
            self.order.remove(&older.sequence);
            waiting.update = merge(&older.waiting.update, waiting.update);
        }
        if let Update::Object { part, .. } = waiting.update {
            waiting.base = part;
        }
        waiting.unannounced = false;
        self.order.insert(sequence, key.clone());
        self.sent.insert(key, Sent { sequence, waiting });
    }

    /// Lowest sequence that is sent and not settled.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.order.first_key_value().map(|(sequence, _)| *sequence)
    }

    /// Removes every sent event up to a sequence; waiting entries stay. Calls `each` with the time at which the change
    /// was observed, in Unix milliseconds.
    pub(super) fn settle(&mut self, up_to: u64, mut each: impl FnMut(i64)) {
        let rest = self.order.split_off(&up_to.saturating_add(1));
        for key in std::mem::replace(&mut self.order, rest).into_values() {
            if let Some(sent) = self.sent.remove(&key) {
                each(sent.waiting.since);
            }
        }
    }

    /// Enqueues everything that is sent and not settled again, for a new epoch.
    pub(super) fn requeue_all(&mut self) {
        self.order.clear();
        for (key, sent) in self.sent.take() {
            self.restore(key, sent.waiting);
        }
    }

    /// Enqueues an event again that was sent but not processed, because the receiver does not know its watch yet; it will
    /// get a new sequence.
    pub(super) fn requeue(&mut self, key: &str, sequence: u64) {
        if let Some((key, waiting)) = self.take_sent(key, sequence) {
            self.restore(key, waiting);
        }
    }

    /// Parks a sent event, so that it is not retried with the others.
    pub(super) fn park(&mut self, key: &str, sequence: u64, parking: Parking) {
        if let Some((key, sent)) = self.take_sent(key, sequence) {
            self.restore(key.clone(), sent);
            if let Some(waiting) = self.waiting.remove(&key) {
                self.parked.insert(key, Entry { parking: Some(parking), ..waiting });
            }
        }
    }

    fn take_sent(&mut self, key: &str, sequence: u64) -> Option<(Arc<str>, Entry)> {
        self.sent.get(key).filter(|sent| sent.sequence == sequence)?;
        self.order.remove(&sequence);
        self.sent.remove_entry(key).map(|(key, sent)| (key, sent.waiting))
    }

    /// Enqueues a sent entry again. A newer state that already waits wins; its delta remains relative to the last state
    /// sent.
    fn restore(&mut self, key: Arc<str>, old: Entry) {
        let is_newer = self.change_unsent(&key, |newer| {
            newer.update = merge(&old.update, newer.update.clone());
            newer.since = old.since;
            newer.unannounced = false;
        });
        if !is_newer {
            self.waiting.insert(key, old);
        }
    }

    /// Delays the watch because the receiver does not know it; the delay doubles up to five minutes.
    pub(super) fn refused(&mut self, now: Instant) {
        self.refusals = self.refusals.saturating_add(1);
        let wait = Duration::from_secs(1 << self.refusals.min(10)).min(UNKNOWN_WATCH_CAP);
        // Jitter over the upper half of the delay. It is never zero, since an agent and a receiver with different plans
        // would otherwise retry in a tight loop.
        self.hold = Some(now + wait / 2 + random::up_to(wait / 2));
    }

    /// Resets the delay because the receiver accepted events of this watch.
    pub(super) fn clear_hold(&mut self) {
        self.refusals = 0;
        self.hold = None;
    }

    /// Enqueues everything that is parked and ends the delay.
    pub(super) fn release(&mut self) {
        self.clear_hold();
        self.waiting.extend(self.parked.take());
    }

    /// Enqueues the events that were parked for a limited time. The delay of the watch stays.
    pub(super) fn unpark(&mut self) {
        self.waiting.extend(self.parked.extract(|parked| parked.parking == Some(Parking::Temporary)));
    }

    /// Drops deletions of objects of which no event has ever been sent. True if at most `enough` entries of objects are
    /// left. Always false for a watch that is not forwarded: its overflow is handled by [`Self::drop_objects`].
    pub(super) fn drop_unannounced(&mut self, enough: usize) -> bool {
        if self.info.forward {
            self.waiting.retain(|_, waiting| !(waiting.unannounced && waiting.is_deleted()));
        }
        let watch_entries = usize::from(self.has_watch_waiting()) + usize::from(self.has_watch_parked());
        let watch_entries = watch_entries + usize::from(self.sent.contains_key(WATCH_KEY));
        self.info.forward && self.dirty() - watch_entries <= enough
    }

    /// Drops all entries except that of the watch itself. For a forwarded watch, a sweep then enqueues every existing
    /// object again, and deletions stay unless there are more than `keep`.
    pub(super) fn drop_objects(&mut self, keep: usize, at: i64) -> DroppedObjects {
        let before = self.dirty();
        let mut unnamed = false;
        if self.info.forward {
            unnamed = self.deleted_entries() > keep;
            self.sweep.begin(at);
        }
        let keeps_deleted = self.info.forward && !unnamed;
        let stays = |key: &str, waiting: &Entry| key == WATCH_KEY || (keeps_deleted && waiting.is_deleted());
        self.waiting.retain(stays);
        self.parked.retain(stays);
        self.sent.retain(|key, sent| stays(key, &sent.waiting));
        let sent = &self.sent;
        self.order.retain(|_, key| sent.contains_key(key));
        DroppedObjects { any: self.dirty() < before, unnamed }
    }

    /// Notes that the watch was taken for a request. Each of these events is a reconcile, and a coarse watch has one for
    /// every change.
    pub(super) fn space_coarse(&mut self, now: Instant) {
        if self.is_coarse {
            self.spacing = Some(now + COARSE_SPACING + random::up_to(COARSE_SPACING));
        }
    }

    /// Notes that a complete list has filled the index again.
    pub(super) fn end_coarse(&mut self) {
        (self.is_coarse, self.spacing) = (false, None);
    }

    /// Drops all entries except that of the watch itself, without a sweep, because the watch is coarse now and the names
    /// of its objects are no longer known. True if an entry was dropped.
    pub(super) fn drop_all_objects(&mut self, at: i64) -> bool {
        self.is_coarse = true;
        let forgotten = self.drop_objects(0, at);
        self.sweep.end();
        forgotten.any
    }

    /// Number of entries that are deletions.
    fn deleted_entries(&self) -> usize {
        self.unsent().chain(self.sent.values().map(|sent| &sent.waiting)).filter(|waiting| waiting.is_deleted()).count()
    }
}

/// Merges a newer subject into an older one that is not settled: the newer state wins, but a more significant change is
/// not hidden by a less significant one.
fn merge(old: &Update, new: Update) -> Update {
    if matches!((old, &new), (Update::Unnamed, Update::Watch)) {
        return Update::Unnamed;
    }
    let (Update::Object { change: before, .. }, Update::Object { seen, change, part }) = (old, &new) else {
        return new;
    };
    Update::Object { seen: seen.clone(), change: weightier(*before, *change), part: *part }
}

fn weightier(old: Change, new: Change) -> Change {
    // A deletion replaces any other change and is replaced by any: an existing object is never reported as deleted, nor a
    // deleted one as existing.
    if old == Change::Deleted || new == Change::Deleted { new } else { old.min(new) }
}
