//! State of one service: backoff, health, and the queues that wait for it.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tidewatch_api::identity::RuntimeId;
use tidewatch_kit::random::Random;
use tokio::time::Instant;

use super::{DeliveryOutcome, shares::Shares, watch_queue::LanePosition};

/// A runtime and one of its watches.
pub(crate) type QueueKey = (RuntimeId, Arc<str>);

/// Concurrent requests to one healthy service.
const CONCURRENCY: usize = 8;
/// Upper bound of the backoff after the first failure; it doubles with each consecutive failure.
const INITIAL_BACKOFF: Duration = Duration::from_secs(1);
/// Lower bound of every computed backoff.
const MIN_BACKOFF: Duration = Duration::from_millis(50);
/// Upper bound of every computed backoff.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Upper bound of a `Retry-After` that is honoured.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(300);
/// Consecutive failures after which a service is reported as unreachable.
const UNREACHABLE_AFTER: u32 = 3;
/// Time after its last final or repeated refusal during which a service is reported as refusing. It exceeds
/// [`PARK_PERIOD`], so that the condition does not flap between two attempts at a parked event.
const REFUSING_PERIOD: Duration = Duration::from_secs(600);
/// Consecutive refusals after which an event is parked for [`PARK_PERIOD`].
pub(super) const MAX_REFUSALS: u32 = 3;
/// Delay of a parked event, plus up to a tenth of jitter; after a fix of the service the operator waits no longer than
/// this.
pub(super) const PARK_PERIOD: Duration = Duration::from_secs(300);

/// Health of a service, as the conditions of its Watchers report it. Of several replicas the greatest counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Health {
    /// No failures or refusals to report.
    #[default]
    Healthy,
    /// It refused an event at least three times, with this HTTP status.
    Refusing(u16),
    /// At least three requests in succession failed.
    Unreachable,
}

/// State of a queue that determines its position in the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Disposition {
    /// Nothing to send, or everything is in flight.
    Idle,
    Ready,
    /// Every event to send is parked until then.
    Delayed(Instant),
}

/// Requests, backoff and queues of one service.
#[derive(Debug, Default)]
pub(super) struct Lane {
    /// Queues with something to send, each once, served round-robin.
    pub(super) queue: VecDeque<QueueKey>,
    /// Queues with parked events only, by the earliest retry.
    delayed: BTreeSet<(Instant, QueueKey)>,
    /// Objects in all queues of the lane, by runtime.
    pub(super) shares: Shares,
    /// Objects that the service refused and that await a retry, by runtime.
    pub(super) parked: Shares,
    pub(super) in_flight: usize,
    failures: u32,
    /// Time of the last counted failure.
    failed: Option<Instant>,
    until: Option<Instant>,
    health: Health,
    refused: Option<Instant>,
}

impl Lane {
    /// Returns true if as many requests are in flight as permitted: after a failure one, as a probe.
    const fn is_full(&self) -> bool {
        self.in_flight >= if self.failures == 0 { CONCURRENCY } else { 1 }
    }

    /// Moves a queue from its current position to the one that its disposition requires.
    pub(super) fn reposition(&mut self, key: &QueueKey, position: &mut LanePosition, disposition: Disposition) {
        match (*position, disposition) {
            // A queue that no longer belongs here is repositioned when its turn comes; searching for it costs more.
            (LanePosition::Queued, _) => return,
            (LanePosition::Delayed(until), Disposition::Delayed(disposition)) if until == disposition => return,
            (LanePosition::Delayed(until), _) => {
                self.delayed.remove(&(until, key.clone()));
            }
            (LanePosition::Idle, _) => {}
        }
        *position = match disposition {
            Disposition::Idle => LanePosition::Idle,
            Disposition::Ready => {
                self.queue.push_back(key.clone());
                LanePosition::Queued
            }
            Disposition::Delayed(until) => {
                self.delayed.insert((until, key.clone()));
                LanePosition::Delayed(until)
            }
        };
    }

    /// Removes the first queue that is due for a retry.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<QueueKey> {
        self.delayed.first().filter(|(until, _)| *until <= now)?;
        self.delayed.pop_first().map(|(_, key)| key)
    }

    /// Returns true if a request may be sent now and an event is due.
    pub(super) fn may_send(&self, now: Instant) -> bool {
        self.wake(now).is_some_and(|at| at <= now)
    }

    /// Time of the next possible request, not before the backoff ends, apart from responses that arrive earlier.
    pub(super) fn wake(&self, now: Instant) -> Option<Instant> {
        if self.is_full() {
            return None;
        }
        let first = if self.queue.is_empty() { self.delayed.first().map(|(at, _)| *at)? } else { now };
        Some(self.until.map_or(first, |until| until.max(first)))
    }

    pub(super) fn forget(&mut self, key: &QueueKey) {
        self.queue.retain(|queued| queued != key);
        self.delayed.retain(|(_, delayed)| delayed != key);
    }

    /// Removes all queues and keeps backoff and health.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.delayed.clear();
        (self.shares, self.parked) = (Shares::default(), Shares::default());
    }

    /// Health to report. Of a lane without objects a failure is no longer reported: its runtimes have left the shards of this
    /// replica, so no request will prove that the service has recovered.
    pub(super) fn health(&self, now: Instant) -> Health {
        match self.health {
            Health::Unreachable if self.shares.total() == 0 => Health::Healthy,
            Health::Refusing(_) if self.shares.total() == 0 && !self.has_refused(now) => Health::Healthy,
            health => health,
        }
    }

    /// Returns true if the service refused an event too often within the last [`REFUSING_PERIOD`].
    fn has_refused(&self, now: Instant) -> bool {
        self.refused.is_some_and(|at| now.saturating_duration_since(at) < REFUSING_PERIOD)
    }

    /// Completes a request that was sent at `sent`. `refusing` is the status of an event that was refused too often. Returns
    /// true if the health changed.
    pub(super) fn complete(
        &mut self,
        outcome: DeliveryOutcome,
        refusing: Option<u16>,
        sent: Instant,
        random: &mut Random,
        now: Instant,
    ) -> bool {
        self.in_flight = self.in_flight.saturating_sub(1);
        if let DeliveryOutcome::Failed(retry_after) = outcome {
            // Requests that were in flight together fail together: they count as one failure.
            if self.failed.is_none_or(|failed| failed < sent) {
                self.failures = self.failures.saturating_add(1);
                self.failed = Some(now);
                self.until = Some(now + backoff(self.failures, random));
            }
            let retry_after = retry_after.map(|after| now + after.min(MAX_RETRY_AFTER));
            self.until = self.until.max(retry_after);
        } else {
            // A refusal proves that the service is reachable.
            (self.failures, self.failed, self.until) = (0, None, None);
        }
        if refusing.is_some() {
            self.refused = Some(now);
        }
        let is_refusing = self.has_refused(now);
        let health = match (refusing, self.health) {
            (Some(status), _) => Health::Refusing(status),
            _ if self.failures >= UNREACHABLE_AFTER => Health::Unreachable,
            (None, Health::Unreachable) if self.failures > 0 => Health::Unreachable,
            (None, refusing @ Health::Refusing(_)) if is_refusing => refusing,
            (None, _) => Health::Healthy,
        };
        std::mem::replace(&mut self.health, health) != health
    }
}

/// Delay of an event after this many consecutive refusals.
pub(super) fn park_delay(refusals: u32, random: &mut Random) -> Duration {
    if refusals < MAX_REFUSALS {
        return backoff(refusals, random);
    }
    PARK_PERIOD + random.jitter(PARK_PERIOD / 10)
}

/// Delay of the next attempt after this many consecutive failures.
pub(super) fn backoff(failures: u32, random: &mut Random) -> Duration {
    random.backoff(INITIAL_BACKOFF, MAX_BACKOFF, failures).max(MIN_BACKOFF)
}
