//! Scheduling of queued work: lanes, priorities, delays and backoff.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    time::Duration,
};

use tidewatch_shared::plan::Work;
use tokio::time::Instant;

use super::{Priority, QueuedWork, ReconcileOutcome, WorkSet, queued_work::merge_into};
use crate::base::{error_class::ErrorClass, random::Random};

/// Minimum interval between two attempts for user changes of a Kyma in backoff.
const USER_SPACING: Duration = Duration::from_secs(5);

/// Duration from which a reconcile marks its runtime as slow, even if it succeeded.
const SLOW: Duration = Duration::from_secs(10);
/// Time limit of a reconcile in the normal lane: longer than any call to a runtime, and short enough that other Kymas
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

/// Lane of a Kyma. Runtimes that the last reconcile could not reach, or that were slow, wait in a lane of their own, so
/// that they cannot occupy all slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Lane {
    #[default]
    Normal,
    Slow,
}

/// Reason of a delay; an entry holds one due time per reason.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DelayReason {
    /// The last reconcile requested it ([`ReconcileOutcome::requeue_after`]).
    Requeue,
    /// A last write of the previous lease holder may land after our reconcile.
    StartupGrace,
    /// All Kymas are verified after startup, spread over time.
    Spread,
    /// Many Kymas are affected by one change, at a limited rate.
    Paced,
    /// A version is rolled out; each Kyma has its own time.
    Rollout,
    /// The work failed on its own ([`ReconcileOutcome::deferred`]).
    Deferred,
}

/// Number of reasons.
const DELAY_REASONS: usize = 6;

/// Position of an entry, kept so that it can be removed directly.
#[derive(Clone, Copy, Debug, Default)]
enum Position {
    #[default]
    Idle,
    Ready(Lane, Priority, u64),
    Delayed(Instant, u64),
}

#[derive(Debug, Default)]
struct Entry {
    queued: Option<QueuedWork>,
    /// Paused work; resumes with the next enqueue.
    parked: Option<QueuedWork>,
    /// Lane and start of the running reconcile.
    running: Option<(Lane, Instant)>,
    /// The end of a pause was signalled while the reconcile ran.
    enqueued_meanwhile: bool,
    /// Removed while its reconcile runs; forgotten when that ends.
    gone: bool,
    lane: Lane,
    failures: u32,
    /// End of the backoff, and the time of the failure.
    backoff: Option<(Instant, Instant)>,
    /// Time since which it has been ready.
    since: Option<Instant>,
    delayed: [Option<(Instant, QueuedWork)>; DELAY_REASONS],
    /// Deferred work and the number of consecutive deferrals.
    deferred: (WorkSet, u32),
    position: Position,
}

impl Entry {
    /// Parks paused work of the reconcile that ended.
    fn park(&mut self, taken: &QueuedWork, paused: WorkSet) {
        if !paused.is_empty() {
            // An enqueue during the reconcile may signal the end of the pause, which the reconcile had not seen. If it
            // did not, the next reconcile parks the work again.
            let enqueued_meanwhile = self.enqueued_meanwhile || self.queued.is_some();
            let slot = if enqueued_meanwhile { &mut self.queued } else { &mut self.parked };
            merge_into(slot, QueuedWork { work: paused, ..taken.clone() });
        }
    }

    /// Requeues failed work and returns its backoff; without failed work, ends the backoff.
    fn back_off(
        &mut self,
        taken: &QueuedWork,
        outcome: &ReconcileOutcome,
        random: &mut Random,
        now: Instant,
    ) -> Option<Duration> {
        if outcome.failed.is_empty() {
            (self.failures, self.backoff) = (0, None);
            return None;
        }
        self.failures = self.failures.saturating_add(1);
        let mut delay = outcome.class.unwrap_or(ErrorClass::Ours).delay(self.failures, random);
        delay = delay.max(outcome.requeue_after.unwrap_or_default());
        if self.queued.as_ref().is_some_and(|queued| queued.priority == Priority::User) {
            delay = delay.min(USER_SPACING);
        }
        self.backoff = Some((now + delay, now));
        merge_into(&mut self.queued, QueuedWork { work: outcome.failed, ..taken.clone() });
        Some(delay)
    }
}

/// The queue. Bounded by the number of Kymas: each has one entry, and each entry at most one position.
#[derive(Debug)]
pub(crate) struct Queue<K> {
    entries: HashMap<K, Entry>,
    ready: [[BTreeMap<u64, K>; 3]; 2],
    delayed: BTreeMap<(Instant, u64), K>,
    tickets: u64,
    rotations: [usize; 2],
    running: usize,
    slow_running: usize,
    slow_slots: usize,
    /// Enqueues that merged into work already queued.
    coalesced: u64,
    random: Random,
}

impl<K: Clone + Eq + Hash> Queue<K> {
    /// Creates a queue for this number of workers.
    pub(crate) fn new(slots: usize, seed: u64) -> Self {
        Self {
            entries: HashMap::new(),
            ready: Default::default(),
            delayed: BTreeMap::new(),
            tickets: 0,
            rotations: [0; 2],
            running: 0,
            slow_running: 0,
            slow_slots: (slots / 4).max(1),
            coalesced: 0,
            random: Random::new(seed),
        }
    }

    /// Random duration up to `most`.
    pub(crate) fn jitter(&mut self, most: Duration) -> Duration {
        self.random.jitter(most)
    }

    /// Registers a Kyma; only registered Kymas can be enqueued.
    pub(crate) fn insert(&mut self, key: K) {
        let entry = self.entries.entry(key).or_default();
        if entry.gone {
            *entry = Entry { running: entry.running, ..Entry::default() };
        }
    }

    /// Removes a Kyma and its work. While its reconcile runs, the entry is kept, so that a new Kyma of that name is not
    /// reconciled concurrently.
    pub(crate) fn remove(&mut self, key: &K) {
        self.displace(key);
        let Some(entry) = self.entries.get_mut(key) else { return };
        match entry.running {
            running @ Some(_) => *entry = Entry { running, gone: true, ..Entry::default() },
            None => drop(self.entries.remove(key)),
        }
    }

    /// Enqueues work now, together with any paused work. Unknown Kymas are ignored.
    pub(crate) fn enqueue(&mut self, key: &K, queued: QueuedWork, now: Instant) {
        let Some(entry) = self.entries.get_mut(key).filter(|entry| !entry.gone) else { return };
        if queued.work.is_empty() {
            return;
        }
        if let (Priority::User, Some((until, failed))) = (queued.priority, entry.backoff.as_mut()) {
            *until = (*until).min(*failed + USER_SPACING);
        }
        if let Some(parked) = entry.parked.take() {
            merge_into(&mut entry.queued, QueuedWork { priority: queued.priority, ..parked });
        }
        self.coalesced += u64::from(entry.queued.is_some());
        merge_into(&mut entry.queued, queued);
        self.arrange(key, now);
    }

    /// Resumes all paused work, each at its own priority.
    pub(crate) fn unpark_all(&mut self, now: Instant) {
        self.entries.values_mut().for_each(|entry| entry.enqueued_meanwhile |= entry.running.is_some());
        let parked = self.entries.iter().filter(|(_, entry)| entry.parked.is_some());
        let parked: Vec<_> = parked.map(|(key, _)| key.clone()).collect();
        for key in parked {
            let queued = self.entries.get_mut(&key).and_then(|entry| entry.parked.take());
            queued.into_iter().for_each(|queued| self.enqueue(&key, queued, now));
        }
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
        match &mut entry.delayed[reason as usize] {
            Some((known, work)) => {
                *known = (*known).min(at);
                work.merge(queued);
            }
            slot => *slot = Some((at, queued)),
        }
        self.arrange(key, now);
    }

    /// Returns true if work is delayed for this reason.
    pub(crate) fn is_delayed(&self, key: &K, reason: DelayReason) -> bool {
        self.entries.get(key).is_some_and(|entry| entry.delayed[reason as usize].is_some())
    }

    /// Takes the next Kyma: fair, by priority, and never one in backoff or in progress.
    pub(crate) fn take(&mut self, now: Instant) -> Option<(K, QueuedWork)> {
        self.promote(now);
        // The candidate that has waited longer.
        let (lane, priority, ticket) = self.candidates().min_by_key(|(_, _, ticket)| *ticket)?;
        let key = self.ready[lane as usize][priority as usize].remove(&ticket)?;
        self.rotations[lane as usize] += 1;
        let entry = self.entries.get_mut(&key)?;
        (entry.position, entry.since) = (Position::Idle, None);
        let queued = entry.queued.take()?;
        (entry.running, entry.enqueued_meanwhile) = (Some((lane, now)), false);
        self.running += 1;
        self.slow_running += usize::from(lane == Lane::Slow);
        Some((key, queued))
    }

    /// Returns true if [`Self::take`] would succeed now, apart from delayed work that is due.
    pub(crate) fn has_ready(&self) -> bool {
        self.candidates().next().is_some()
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
        let entry = self.entries.get_mut(key)?;
        let (lane, since) = entry.running.take()?;
        self.running -= 1;
        self.slow_running -= usize::from(lane == Lane::Slow);
        if entry.gone {
            self.entries.remove(key);
            return None;
        }
        if now.saturating_duration_since(since) >= SLOW || outcome.class == Some(ErrorClass::Transport) {
            entry.lane = Lane::Slow;
        } else if outcome.class.is_some() || !(outcome.failed | outcome.ended).is_empty() {
            entry.lane = Lane::Normal;
        }
        let deferred = outcome.deferred.both(taken.work).minus(outcome.failed);
        entry.park(taken, taken.work.minus(outcome.ended | outcome.failed | deferred));
        self.defer(key, taken, deferred, outcome, now);
        let backoff = self.entries.get_mut(key)?.back_off(taken, outcome, &mut self.random, now);
        if let (None, Some(after)) = (backoff, outcome.requeue_after) {
            let work = QueuedWork::new(outcome.ended.both(taken.work), Priority::Verification);
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

    /// Delays deferred work, or ends the deferral of work that succeeded.
    fn defer(&mut self, key: &K, taken: &QueuedWork, deferred: WorkSet, outcome: &ReconcileOutcome, now: Instant) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        let (before, times) = entry.deferred;
        if !deferred.is_empty() {
            let times = times.saturating_add(1);
            entry.deferred = (before | deferred, times);
            let at = now + outcome.class.unwrap_or(ErrorClass::Ours).delay(times, &mut self.random);
            let priority = taken.priority.max(Priority::Catalog);
            let queued = QueuedWork { work: deferred, priority, ..taken.clone() };
            self.enqueue_after(key, DelayReason::Deferred, at, queued, now);
        } else if !before.both(outcome.ended).is_empty() {
            entry.deferred = (WorkSet::EMPTY, 0);
            entry.delayed[DelayReason::Deferred as usize] = None;
        }
    }

    /// Work of a Kyma that is ready or in backoff, for summaries.
    pub(crate) fn queued(&self, key: &K) -> WorkSet {
        self.entries.get(key).and_then(|entry| entry.queued.as_ref()).map_or(WorkSet::EMPTY, |queued| queued.work)
    }

    /// Paused work of a Kyma.
    pub(crate) fn parked(&self, key: &K) -> WorkSet {
        self.entries.get(key).and_then(|entry| entry.parked.as_ref()).map_or(WorkSet::EMPTY, |parked| parked.work)
    }

    /// Consecutive failures of a Kyma.
    pub(crate) fn failures(&self, key: &K) -> u32 {
        self.entries.get(key).map_or(0, |entry| entry.failures)
    }

    /// Enqueues since startup that merged into work already queued.
    pub(crate) const fn coalesced(&self) -> u64 {
        self.coalesced
    }

    /// Time since which the longest waiting Kyma of a priority has been ready.
    pub(crate) fn oldest(&self, priority: Priority) -> Option<Instant> {
        let first = self.ready.iter().filter_map(|lane| lane[priority as usize].first_key_value());
        first.filter_map(|(_, key)| self.entries.get(key)?.since).min()
    }

    /// Returns true while a reconcile of the Kyma runs.
    pub(crate) fn in_progress(&self, key: &K) -> bool {
        self.entries.get(key).is_some_and(|entry| entry.running.is_some())
    }

    /// Time limit of the reconcile that was just taken.
    pub(crate) fn time_limit(&self, key: &K) -> Duration {
        match self.entries.get(key).and_then(|entry| entry.running) {
            Some((Lane::Slow, _)) => SLOW_TIME_LIMIT,
            Some((Lane::Normal, _)) | None => TIME_LIMIT,
        }
    }

    /// Number of Kymas in progress.
    pub(crate) const fn running(&self) -> usize {
        self.running
    }

    /// Number of ready Kymas of a priority.
    pub(crate) fn ready(&self, priority: Priority) -> usize {
        self.ready.iter().map(|lane| lane[priority as usize].len()).sum()
    }

    /// Number of delayed Kymas.
    pub(crate) fn waiting(&self) -> usize {
        self.delayed.len()
    }

    /// First Kyma of each lane, by the lane's priority rotation.
    fn candidates(&self) -> impl Iterator<Item = (Lane, Priority, u64)> {
        let slow = (self.slow_running < self.slow_slots).then_some(Lane::Slow);
        [Some(Lane::Normal), slow].into_iter().flatten().filter_map(|lane| {
            let order = PRIORITY_ROTATION[self.rotations[lane as usize] % PRIORITY_ROTATION.len()];
            order.into_iter().find_map(|priority| {
                let first = self.ready[lane as usize][priority as usize].first_key_value();
                first.map(|(ticket, _)| (lane, priority, *ticket))
            })
        })
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
        for slot in &mut entry.delayed {
            if let Some((_, queued)) = slot.take_if(|(at, _)| *at <= now) {
                merge_into(&mut entry.queued, queued);
            }
        }
        let until = entry.backoff.map(|(until, _)| until).filter(|until| *until > now);
        let position = match (&entry.queued, until) {
            _ if entry.running.is_some() => Position::Idle,
            (Some(queued), None) => Position::Ready(entry.lane, queued.priority, self.tickets),
            (queued, until) => {
                let until = until.filter(|_| queued.is_some());
                let due = entry.delayed.iter().flatten().map(|(at, _)| *at).chain(until).min();
                due.map_or(Position::Idle, |at| Position::Delayed(at, self.tickets))
            }
        };
        let keeps_turn = match (entry.position, position) {
            (Position::Ready(lane, priority, _), Position::Ready(new_lane, new_priority, _)) => {
                lane == new_lane && priority == new_priority
            }
            (Position::Delayed(at, _), Position::Delayed(new, _)) => at == new,
            _ => false,
        };
        if !keeps_turn {
            entry.since = matches!(position, Position::Ready(..)).then(|| entry.since.unwrap_or(now));
            self.displace(key);
            self.tickets += 1;
            self.put(key, position);
        }
    }

    fn put(&mut self, key: &K, position: Position) {
        match position {
            Position::Idle => {}
            Position::Ready(lane, priority, ticket) => {
                self.ready[lane as usize][priority as usize].insert(ticket, key.clone());
            }
            Position::Delayed(at, ticket) => {
                self.delayed.insert((at, ticket), key.clone());
            }
        }
        if let Some(entry) = self.entries.get_mut(key) {
            entry.position = position;
        }
    }

    fn displace(&mut self, key: &K) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        match std::mem::take(&mut entry.position) {
            Position::Idle => {}
            Position::Ready(lane, priority, ticket) => {
                self.ready[lane as usize][priority as usize].remove(&ticket);
            }
            Position::Delayed(at, ticket) => {
                self.delayed.remove(&(at, ticket));
            }
        }
    }
}

#[cfg(test)]
mod tests;
