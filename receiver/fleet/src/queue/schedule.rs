//! Scheduling of queued work: lanes, priorities, delays, backoff, and slots of groups.

mod entry;
mod groups;
mod lanes;
mod summary;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    mem,
    time::Duration,
};

use tidewatch_api::plan::Work;
use tidewatch_cluster::error_class::ErrorClass;
use tidewatch_kit::random::Random;
use tokio::time::Instant;

use self::{
    entry::{Entry, Position, Running},
    groups::{Admission, Groups},
    lanes::{Lane, Lanes},
};
use super::{
    Priority, QueuedWork, ReconcileOutcome, WorkSet,
    work::{merge_into, merge_older_into},
};

/// Minimum interval between two attempts for user changes of a key in backoff.
const USER_SPACING: Duration = Duration::from_secs(5);

/// Duration from which a reconcile marks its runtime as slow, even if it succeeded.
const SLOW: Duration = Duration::from_secs(10);
/// Time limit of a reconcile in the normal lane: longer than any call to a runtime, and short enough that others
/// do not wait too long for a slot.
const TIME_LIMIT: Duration = Duration::from_secs(45);
/// Time limit of a reconcile in the slow lane.
const SLOW_TIME_LIMIT: Duration = Duration::from_secs(300);

/// Order of priorities of eight consecutive takes: each lower priority comes first once, so neither starves.
const PRIORITY_ROTATION: [[Priority; 3]; 8] = {
    use Priority::{Catalog, User, Verification};
    const URGENT: [Priority; 3] = [User, Catalog, Verification];
    const CATALOG: [Priority; 3] = [Catalog, User, Verification];
    const VERIFICATION: [Priority; 3] = [Verification, Catalog, User];
    [URGENT, URGENT, URGENT, CATALOG, URGENT, URGENT, URGENT, VERIFICATION]
};

/// Reason of a delay; an entry holds one due time per reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DelayReason {
    /// The last reconcile requested it ([`ReconcileOutcome::requeue_after`]).
    Requeue,
    /// A last write of the previous lease holder may land after our reconcile.
    StartupGrace,
    /// All Kymas are verified after startup, spread over time.
    Spread,
    /// Many Kymas are affected by one change, at a limited rate.
    Paced,
    /// A version is rolled out, or a date takes effect; each Kyma has its own time, by the system's clock.
    Rollout,
    /// Nothing but the message of a module changed.
    Message,
    /// The work failed on its own ([`ReconcileOutcome::deferred`]).
    Deferred,
}

/// The queue. Bounded by the number of keys: each has one entry, and each entry at most one position.
///
/// Entries may belong to a group `G`. Groups take turns: each has a fixed number of slots, a slot belongs to an entry that
/// is ready or running, and the other entries of the group are held until a slot is free, the most urgent one first. A
/// group also shares one lane.
#[derive(Debug)]
pub(crate) struct Queue<K, G = K> {
    entries: HashMap<K, Entry<G>>,
    groups: Groups<G, K>,
    ready: [[BTreeMap<u64, K>; 3]; 2],
    delayed: BTreeMap<(Instant, u64), K>,
    /// Work became due earlier than all other delayed work.
    is_due_earlier: bool,
    running: usize,
    lanes: Lanes,
    /// Last ticket; tickets order the entries by their waiting time.
    ticket: u64,
    coalesced: u64,
    busy: u64,
    /// Time of the next key of [`Self::enqueue_paced`].
    paced: Option<Instant>,
    random: Random,
}

impl<K: Clone + Eq + Hash + Ord, G: Clone + Eq + Hash> Queue<K, G> {
    /// Creates a queue without groups for this number of workers.
    pub(crate) fn new(slots: usize, seed: u64) -> Self {
        Self::with_groups(slots, usize::MAX, seed)
    }

    /// Creates a queue for this number of workers, with so many slots for each group.
    pub(crate) fn with_groups(slots: usize, per_group: usize, seed: u64) -> Self {
        Self {
            entries: HashMap::new(),
            groups: Groups::new(per_group),
            ready: Default::default(),
            delayed: BTreeMap::new(),
            is_due_earlier: false,
            running: 0,
            lanes: Lanes::new(slots),
            ticket: 0,
            coalesced: 0,
            busy: 0,
            paced: None,
            random: Random::new(seed),
        }
    }

    /// Random duration up to `most`.
    pub(crate) fn jitter(&mut self, most: Duration) -> Duration {
        self.random.jitter(most)
    }

    /// Registers a key; only registered keys can be enqueued.
    pub(crate) fn insert(&mut self, key: K) {
        let entry = self.entries.entry(key).or_default();
        if entry.gone {
            *entry = Entry { running: entry.running.take(), ..Entry::default() };
        }
    }

    /// Registers a key as a member of a group, or moves it there with its work.
    pub(crate) fn insert_into(&mut self, key: K, group: G, now: Instant) {
        self.insert(key.clone());
        if self.group(&key) == Some(&group) {
            return;
        }
        self.displace(&key);
        let joined = self.groups.join(group, key.clone());
        let left = self.entries.get_mut(&key).and_then(|entry| entry.group.replace(joined));
        if let Some(left) = left {
            self.groups.leave(&left, &key);
            self.fill(&left);
        }
        self.arrange(&key, now);
    }

    /// Removes a key and its work. While its reconcile runs, the entry is kept, so that a new object of that name is not
    /// reconciled concurrently.
    pub(crate) fn remove(&mut self, key: &K) {
        self.displace(key);
        let Some(entry) = self.entries.get_mut(key) else { return };
        let group = entry.group.take();
        match entry.running.take() {
            running @ Some(_) => *entry = Entry { running, gone: true, ..Entry::default() },
            None => drop(self.entries.remove(key)),
        }
        if let Some(group) = group {
            self.groups.leave(&group, key);
            self.fill(&group);
        }
    }

    /// Enqueues work now, together with any paused work. Unknown keys are ignored.
    pub(crate) fn enqueue(&mut self, key: &K, queued: QueuedWork, now: Instant) {
        let Some(entry) = self.entries.get_mut(key).filter(|entry| !entry.gone) else { return };
        if queued.work.is_empty() {
            return;
        }
        if let (Priority::User, Some((until, failed))) = (queued.priority, entry.backoff.as_mut()) {
            *until = (*until).min(*failed + USER_SPACING);
        }
        if let Some(parked) = entry.parked.take() {
            merge_older_into(&mut entry.queued, QueuedWork { priority: queued.priority, ..parked });
        }
        if entry.queued.is_some() {
            self.coalesced += 1;
        }
        merge_into(&mut entry.queued, queued);
        self.arrange(key, now);
    }

    /// Resumes all paused work, each at its own priority.
    pub(crate) fn unpark_all(&mut self, now: Instant) {
        let keys: Vec<_> = self.entries.keys().cloned().collect();
        self.unpark(&keys, now);
    }

    /// Resumes the paused work of these keys; see [`Self::unpark_all`].
    pub(crate) fn unpark(&mut self, keys: &[K], now: Instant) {
        for key in keys {
            let Some(entry) = self.entries.get_mut(key) else { continue };
            entry.enqueued_meanwhile |= entry.running.is_some();
            if let Some(queued) = entry.parked.take() {
                self.enqueue(key, queued, now);
            }
        }
    }

    /// Enqueues work of these keys, this many per second; keys that already wait keep their turn.
    pub(crate) fn enqueue_paced(&mut self, keys: &[K], queued: &QueuedWork, per_second: u32, now: Instant) {
        let step = Duration::from_secs(1) / per_second.max(1);
        let mut at = self.paced.filter(|at| *at > now).unwrap_or(now);
        for key in keys {
            let is_waiting = self.is_delayed(key, DelayReason::Paced);
            self.enqueue_after(key, DelayReason::Paced, at, queued.clone(), now);
            if !is_waiting {
                at += step;
            }
        }
        self.paced = Some(at);
    }

    /// Enqueues work at a later time; per reason the earlier time and the union of the work apply.
    pub(crate) fn enqueue_after(
        &mut self,
        key: &K,
        reason: DelayReason,
        at: Instant,
        queued: QueuedWork,
        now: Instant,
    ) {
        let Some(entry) = self.entries.get_mut(key).filter(|entry| !entry.gone) else { return };
        entry.delay(reason, at, queued);
        self.arrange(key, now);
    }

    /// Brings the work of these keys that is delayed for a reason forward by `step`.
    pub(crate) fn advance(&mut self, keys: &[K], reason: DelayReason, step: Duration, now: Instant) {
        for key in keys.iter().filter(|key| self.is_delayed(key, reason)).cloned().collect::<Vec<_>>() {
            if let Some(entry) = self.entries.get_mut(&key) {
                entry.advance(reason, step, now);
            }
            self.arrange(&key, now);
        }
    }

    /// Returns true if work is delayed for this reason.
    pub(crate) fn is_delayed(&self, key: &K, reason: DelayReason) -> bool {
        self.entries.get(key).is_some_and(|entry| entry.is_delayed(reason))
    }

    /// Takes the next key: fair, by priority, and never one in backoff or in progress.
    pub(crate) fn take(&mut self, now: Instant) -> Option<(K, QueuedWork)> {
        self.promote(now);
        let (lane, priority) = self.choose()?;
        let (ticket, key) = self.ready[lane as usize][priority as usize].pop_first()?;
        self.lanes.begin(lane);
        let entry = self.entries.get_mut(&key)?;
        (entry.position, entry.since) = (Position::Idle, None);
        let queued = entry.queued.take()?;
        if let Some(group) = &entry.group {
            self.groups.start(group, priority, ticket);
        }
        entry.running = Some(Running { lane, since: now, group: entry.group.clone() });
        entry.enqueued_meanwhile = false;
        self.running += 1;
        Some((key, queued))
    }

    /// Key that [`Self::take`] takes next.
    pub(crate) fn first(&mut self, now: Instant) -> Option<K> {
        self.promote(now);
        let (lane, priority) = self.choose()?;
        self.ready[lane as usize][priority as usize].first_key_value().map(|(_, key)| key.clone())
    }

    /// Takes a key if it is still the [first](Self::first).
    pub(crate) fn take_first(&mut self, key: &K, now: Instant) -> Option<QueuedWork> {
        if self.first(now).as_ref() != Some(key) {
            return None;
        }
        self.take(now).map(|(_, queued)| queued)
    }

    /// Returns true if a waiting worker has to look again: work is ready, or has become due earlier since the last call.
    pub(crate) fn needs_worker(&mut self) -> bool {
        mem::take(&mut self.is_due_earlier) || self.has_ready()
    }

    /// Returns true if [`Self::take`] would succeed now, apart from delayed work that is due.
    fn has_ready(&self) -> bool {
        self.choose().is_some()
    }

    /// Earliest due time of delayed work.
    pub(crate) fn earliest(&self) -> Option<Instant> {
        self.delayed.first_key_value().map(|((at, _), _)| *at)
    }

    /// Ends the reconcile that [`Self::take`] started. Returns the backoff of a failure.
    pub(crate) fn finish(
        &mut self,
        key: &K,
        taken: &QueuedWork,
        outcome: &ReconcileOutcome,
        now: Instant,
    ) -> Option<Duration> {
        // Work that remains was retried or paused: the reports are no longer its only cause.
        let taken = &QueuedWork { drift: taken.drift.clone().with_other_cause(), ..*taken };
        let Running { since, group, .. } = self.end(key)?;
        let spent = now.saturating_duration_since(since);
        let is_slow = spent >= SLOW || outcome.class == Some(ErrorClass::Transport);
        // A slow reconcile has its own rule, and a runtime leaves the lane as soon as it is fast again.
        let is_busy = !is_slow && self.charge(key, group.as_ref(), spent, now);
        if is_busy {
            self.busy += 1;
        }
        let is_answered = outcome.class.is_some() || !(outcome.failed | outcome.ended).is_empty();
        let lane = (is_slow || is_busy).then_some(Lane::Slow).or_else(|| is_answered.then_some(Lane::Normal));
        self.release(key, group.as_ref(), lane, now);
        let entry = self.entries.get_mut(key)?;
        let deferred = outcome.deferred.both(taken.work).minus(outcome.failed);
        entry.park(taken, taken.work.minus(outcome.ended | outcome.failed | deferred));
        self.defer(key, taken, deferred, outcome, now);
        let entry = self.entries.get_mut(key)?;
        entry.rest = outcome.rest.map(|rest| now + rest);
        let backoff = entry.back_off(taken, outcome, &mut self.random, now);
        let ended = outcome.ended.both(taken.work).minus(outcome.failed);
        if let Some(after) = outcome.requeue_after.filter(|_| !ended.is_empty()) {
            let work = QueuedWork::new(ended, Priority::Verification);
            self.enqueue_after(key, DelayReason::Requeue, now + after, work, now);
        }
        if let Some(after) = outcome.rollout_after {
            let kyma = QueuedWork::new(WorkSet::of(&[Work::Kyma]), Priority::Catalog);
            self.enqueue_after(key, DelayReason::Rollout, now + after, kyma, now);
        }
        if let Some(entry) = self.entries.get_mut(key).filter(|_| !outcome.follow_up.is_empty()) {
            merge_into(&mut entry.queued, QueuedWork::new(outcome.follow_up, taken.priority));
        }
        self.arrange(key, now);
        backoff
    }

    /// Ends a reconcile without effect on its key: what it was about is gone.
    pub(crate) fn discard(&mut self, key: &K, now: Instant) {
        if let Some(Running { group, .. }) = self.end(key) {
            self.release(key, group.as_ref(), None, now);
            self.arrange(key, now);
        }
    }

    fn end(&mut self, key: &K) -> Option<Running<G>> {
        let entry = self.entries.get_mut(key)?;
        let running = entry.running.take()?;
        if entry.gone {
            self.entries.remove(key);
        }
        self.running -= 1;
        self.lanes.end(running.lane);
        Some(running)
    }

    /// Adds a reconcile to the busy time of its runtime. Returns true if the runtime has used up its share.
    fn charge(&mut self, key: &K, group: Option<&G>, spent: Duration, now: Instant) -> bool {
        match group {
            Some(group) => self.groups.charge(group, spent, now),
            None => self.entries.get_mut(key).is_some_and(|entry| entry.busy.charge(spent, now)),
        }
    }

    /// Frees the slot of a reconcile that ended, for the entries of its group that wait for one, and sets the lane of its
    /// runtime.
    fn release(&mut self, key: &K, group: Option<&G>, lane: Option<Lane>, now: Instant) {
        match group {
            Some(group) => {
                self.groups.end(group);
                let other_lane = lane.map(|lane| self.groups.set_lane(group, lane)).unwrap_or_default();
                other_lane.iter().for_each(|key| self.arrange(key, now));
                self.fill(group);
            }
            None => {
                if let (Some(lane), Some(entry)) = (lane, self.entries.get_mut(key)) {
                    entry.lane = lane;
                }
            }
        }
    }

    /// Delays deferred work, or ends the deferral of work that succeeded.
    fn defer(&mut self, key: &K, taken: &QueuedWork, deferred: WorkSet, outcome: &ReconcileOutcome, now: Instant) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        let (before, times) = entry.deferred;
        let left = before.minus(outcome.ended);
        if !deferred.is_empty() {
            let times = times.saturating_add(1);
            entry.deferred = (left | deferred, times);
            let at = now + outcome.class.unwrap_or(ErrorClass::Ours).delay(times, &mut self.random);
            let priority = taken.priority.max(Priority::Catalog);
            let queued = QueuedWork { work: deferred, priority, ..taken.clone() };
            self.enqueue_after(key, DelayReason::Deferred, at, queued, now);
        } else if left.is_empty() && !before.is_empty() {
            entry.deferred = (WorkSet::EMPTY, 0);
            entry.end_delay(DelayReason::Deferred);
        } else {
            // Other kinds of work are still due.
            entry.deferred = (left, times);
        }
    }

    fn choose(&self) -> Option<(Lane, Priority)> {
        let first = |lane, priority| self.ready[lane as usize][priority as usize].first_key_value();
        self.lanes.choose(|lane, priority| first(lane, priority).map(|(ticket, _)| *ticket))
    }

    /// Makes delayed entries ready that are due.
    fn promote(&mut self, now: Instant) {
        while let Some(due) = self.delayed.first_entry().filter(|due| due.key().0 <= now) {
            let key = due.remove();
            if let Some(entry) = self.entries.get_mut(&key) {
                entry.position = Position::Idle;
            }
            self.arrange(&key, now);
        }
    }

    /// Moves an entry to the position that its state requires. An entry that stays ready at the same priority keeps its
    /// turn.
    fn arrange(&mut self, key: &K, now: Instant) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        entry.queue_due(now);
        let lane = entry.group.as_ref().map_or(entry.lane, |group| self.groups.lane(group));
        let backoff = entry.backoff.map(|(until, _)| until);
        let until = backoff.into_iter().chain(entry.rest).max().filter(|until| *until > now);
        self.ticket += 1;
        let ticket = self.ticket;
        let position = match (&entry.queued, until) {
            _ if entry.running.is_some() => Position::Idle,
            (Some(queued), None) => Position::Ready(lane, queued.priority, ticket),
            (queued, until) => {
                let until = until.filter(|_| queued.is_some());
                let due = entry.first_due().into_iter().chain(until).min();
                due.map_or(Position::Idle, |at| Position::Delayed(at, ticket))
            }
        };
        let keeps_turn = match (entry.position, position) {
            (Position::Ready(lane, priority, _), Position::Ready(new_lane, new_priority, _)) => {
                lane == new_lane && priority == new_priority
            }
            (Position::Held(priority, _), Position::Ready(_, new, _)) => priority == new,
            (Position::Delayed(at, _), Position::Delayed(new, _)) => at == new,
            _ => false,
        };
        if !keeps_turn {
            let is_ready = matches!(position, Position::Ready(..));
            let left = entry.group.clone().filter(|_| matches!(entry.position, Position::Ready(..)) && !is_ready);
            entry.since = is_ready.then(|| entry.since.unwrap_or(now));
            self.displace(key);
            self.put(key, position);
            if let Some(group) = left {
                // It leaves its slot to another entry of the group.
                self.fill(&group);
            }
        }
    }

    /// Gives free slots of a group to its entries that wait for one. They queue behind those of other groups.
    fn fill(&mut self, group: &G) {
        while let Some((priority, key)) = self.groups.next_held(group) {
            if let Some(entry) = self.entries.get_mut(&key) {
                entry.position = Position::Idle;
            }
            self.ticket += 1;
            let position = Position::Ready(self.groups.lane(group), priority, self.ticket);
            self.put(&key, position);
        }
    }

    fn put(&mut self, key: &K, position: Position) {
        let position = match position {
            Position::Ready(lane, priority, ticket) if self.has_slot(key, priority, ticket) => {
                self.ready[lane as usize][priority as usize].insert(ticket, key.clone());
                position
            }
            Position::Ready(_, priority, ticket) => Position::Held(priority, ticket),
            Position::Delayed(at, ticket) => {
                self.is_due_earlier |= self.earliest().is_none_or(|earliest| at < earliest);
                self.delayed.insert((at, ticket), key.clone());
                position
            }
            Position::Idle | Position::Held(..) => position,
        };
        if let Some(entry) = self.entries.get_mut(key) {
            entry.position = position;
        }
    }

    /// Requests a slot for a ready entry. Returns false if it is held.
    fn has_slot(&mut self, key: &K, priority: Priority, ticket: u64) -> bool {
        let Some(group) = self.entries.get(key).and_then(|entry| entry.group.as_ref()) else { return true };
        match self.groups.admit(group, priority, ticket, key.clone()) {
            Admission::Ready => true,
            Admission::Held => false,
            Admission::Instead(other, priority, ticket) => {
                if let Some(other) = self.entries.get_mut(&other) {
                    if let Position::Ready(lane, ..) = other.position {
                        self.ready[lane as usize][priority as usize].remove(&ticket);
                    }
                    other.position = Position::Held(priority, ticket);
                }
                true
            }
        }
    }

    fn displace(&mut self, key: &K) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        match mem::take(&mut entry.position) {
            Position::Idle => {}
            Position::Ready(lane, priority, ticket) => {
                self.ready[lane as usize][priority as usize].remove(&ticket);
                self.withdraw(key, priority, ticket);
            }
            Position::Held(priority, ticket) => self.withdraw(key, priority, ticket),
            Position::Delayed(at, ticket) => {
                self.delayed.remove(&(at, ticket));
            }
        }
    }

    fn withdraw(&mut self, key: &K, priority: Priority, ticket: u64) {
        if let Some(group) = self.entries.get(key).and_then(|entry| entry.group.as_ref()) {
            self.groups.withdraw(group, priority, ticket);
        }
    }
}
