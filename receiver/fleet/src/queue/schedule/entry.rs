//! An entry of the queue: the work of one key, its delays, and its position.

use std::time::Duration;

use tidewatch_cluster::error_class::ErrorClass;
use tidewatch_kit::random::Random;
use tokio::time::Instant;

use super::{DelayReason, Lane, USER_SPACING};
use crate::queue::{Priority, QueuedWork, ReconcileOutcome, WorkSet, work::merge_older_into};

/// Time that the reconciles of a runtime may take at once, many times that of the installation of all modules.
pub(super) const BUSY: Duration = Duration::from_secs(20);
/// Beyond it, they may take one second in so many, without pause.
pub(super) const SHARE_DIVISOR: u32 = 10;

/// Time that the reconciles of a runtime have taken beyond its share of a worker (GCRA): the time at which all of it is
/// worked off.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BusyTime(Option<Instant>);

impl BusyTime {
    /// Adds a reconcile. Returns true if the runtime has used up its share.
    pub(super) fn charge(&mut self, spent: Duration, now: Instant) -> bool {
        let worked_off = self.0.unwrap_or(now).max(now) + spent * SHARE_DIVISOR;
        self.0 = Some(worked_off);
        worked_off.saturating_duration_since(now) > BUSY * SHARE_DIVISOR
    }
}

/// Position of an entry, kept so that it can be removed directly.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Position {
    #[default]
    Idle,
    Ready(Lane, Priority, u64),
    /// Ready, except that its group has no free slot.
    Held(Priority, u64),
    Delayed(Instant, u64),
}

/// A reconcile in progress.
#[derive(Debug)]
pub(super) struct Running<G> {
    /// Lane with the slot that the reconcile occupies.
    pub(super) lane: Lane,
    pub(super) since: Instant,
    /// Group with the slot that the reconcile occupies.
    pub(super) group: Option<G>,
}

#[derive(Debug)]
pub(super) struct Entry<G> {
    /// `None` for an entry without bound on its slots, which is a group of its own.
    pub(super) group: Option<G>,
    pub(super) queued: Option<QueuedWork>,
    /// Paused work; resumes with the next enqueue.
    pub(super) parked: Option<QueuedWork>,
    pub(super) running: Option<Running<G>>,
    /// The end of a pause was signalled while the reconcile ran.
    pub(super) enqueued_meanwhile: bool,
    /// Removed while its reconcile runs; forgotten when that ends.
    pub(super) gone: bool,
    /// Lane of an entry without group.
    pub(super) lane: Lane,
    /// Busy time of an entry without group.
    pub(super) busy: BusyTime,
    pub(super) failures: u32,
    /// End of the backoff, and the time of the failure.
    pub(super) backoff: Option<(Instant, Instant)>,
    /// End of the delay of any further reconcile ([`ReconcileOutcome::rest`]).
    pub(super) rest: Option<Instant>,
    /// Time since which it has been ready.
    pub(super) since: Option<Instant>,
    /// At most one per reason.
    pub(super) delays: Vec<Delay>,
    /// Deferred work and the number of consecutive deferrals.
    pub(super) deferred: (WorkSet, u32),
    pub(super) position: Position,
}

/// Work that is due later.
#[derive(Debug)]
pub(super) struct Delay {
    reason: DelayReason,
    at: Instant,
    queued: QueuedWork,
}

impl<G> Default for Entry<G> {
    fn default() -> Self {
        Self {
            group: None,
            queued: None,
            parked: None,
            running: None,
            enqueued_meanwhile: false,
            gone: false,
            lane: Lane::default(),
            busy: BusyTime::default(),
            failures: 0,
            backoff: None,
            rest: None,
            since: None,
            delays: Vec::new(),
            deferred: (WorkSet::EMPTY, 0),
            position: Position::default(),
        }
    }
}

impl<G> Entry<G> {
    /// Delays work; per reason the earlier time and the union of the work apply.
    pub(super) fn delay(&mut self, reason: DelayReason, at: Instant, queued: QueuedWork) {
        match self.delays.iter_mut().find(|delay| delay.reason == reason) {
            Some(delay) => {
                delay.at = delay.at.min(at);
                delay.queued.merge(queued);
            }
            None => {
                // Thousands of entries have one delay or none.
                self.delays.reserve_exact(1);
                self.delays.push(Delay { reason, at, queued });
            }
        }
    }

    pub(super) fn is_delayed(&self, reason: DelayReason) -> bool {
        self.delays.iter().any(|delay| delay.reason == reason)
    }

    /// Brings the work that is delayed for a reason forward by `step`.
    pub(super) fn advance(&mut self, reason: DelayReason, step: Duration, now: Instant) {
        for delay in self.delays.iter_mut().filter(|delay| delay.reason == reason) {
            delay.at = delay.at.checked_sub(step).unwrap_or(now);
        }
    }

    pub(super) fn end_delay(&mut self, reason: DelayReason) {
        self.delays.retain(|delay| delay.reason != reason);
    }

    /// Queues the delayed work that is due.
    pub(super) fn queue_due(&mut self, now: Instant) {
        for delay in self.delays.extract_if(.., |delay| delay.at <= now) {
            merge_older_into(&mut self.queued, delay.queued);
        }
        if self.delays.is_empty() {
            self.delays = Vec::new();
        }
    }

    /// Due time of the first delayed work.
    pub(super) fn first_due(&self) -> Option<Instant> {
        self.delays.iter().map(|delay| delay.at).min()
    }

    /// Parks paused work of the reconcile that ended.
    pub(super) fn park(&mut self, taken: &QueuedWork, paused: WorkSet) {
        if !paused.is_empty() {
            // An enqueue during the reconcile may signal the end of the pause, which the reconcile had not seen. If it
            // did not, the next reconcile parks the work again.
            let enqueued_meanwhile = self.enqueued_meanwhile || self.queued.is_some();
            let slot = if enqueued_meanwhile { &mut self.queued } else { &mut self.parked };
            merge_older_into(slot, QueuedWork { work: paused, ..taken.clone() });
        }
    }

    /// Requeues failed work and returns its backoff; without failed work, ends the backoff.
    pub(super) fn back_off(
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
        delay = delay.max(outcome.min_backoff.unwrap_or_default());
        if self.queued.as_ref().is_some_and(|queued| queued.priority == Priority::User) {
            delay = delay.min(USER_SPACING);
        }
        self.backoff = Some((now + delay, now));
        merge_older_into(&mut self.queued, QueuedWork { work: outcome.failed, ..taken.clone() });
        Some(delay)
    }
}
