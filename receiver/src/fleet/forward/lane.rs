//! How one service does, and who waits for it.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use tokio::time::Instant;

use super::{Outcome, mailbox::Stands, outbox::Place};
use crate::base::random::Random;

/// Requests on their way to one service, while it answers.
const CONCURRENCY: usize = 8;
/// Upper bound of the first wait after a failure; it doubles with each failure in a row.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// No wait of ours is longer.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// Nor does a service's own word keep us for longer.
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(300);
/// Failures in a row after which a service is called unreachable.
const UNREACHABLE: u32 = 3;
/// For so long after it refused an event for good, or once more, a service is called refusing, so that a condition does not flap: longer than
/// what was refused waits for its next try.
const REFUSING: Duration = Duration::from_secs(600);
/// What a service has refused so often in a row waits for long.
pub(super) const MAX_REFUSALS: u32 = 3;
/// For so long, and up to a tenth longer: who set the service right need not wait for more.
pub(super) const PARKED: Duration = Duration::from_secs(300);

/// How a service does, as its Watchers' conditions tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// Nothing speaks against it.
    #[default]
    Fine,
    /// The last three requests or more failed.
    Unreachable,
    /// It refused an event three times or more, with this HTTP status.
    Refusing(u16),
}

/// Where a mailbox shall stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shall {
    /// It has nothing to send, or what it has is on its way.
    Rest,
    Send,
    /// All that it has to send waits until then.
    Wait(Instant),
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Lane {
    /// Mailboxes with something to send, each once, served in turn.
    pub(super) queue: VecDeque<Place>,
    /// Mailboxes all of whose events wait for a time.
    held: BTreeMap<(Instant, u64), Place>,
    tickets: u64,
    /// Objects in all its mailboxes.
    pub(super) objects: usize,
    /// Those of them that it refused and that wait for their time.
    pub(super) parked: usize,
    in_flight: usize,
    failures: u32,
    until: Option<Instant>,
    health: Health,
    refused: Option<Instant>,
}

impl Lane {
    /// Whether a request may leave: after a failure one at a time, as a probe, and not before its time.
    fn is_open(&self, now: Instant) -> bool {
        self.in_flight < self.allowed() && self.until.is_none_or(|until| until <= now)
    }

    const fn allowed(&self) -> usize {
        if self.failures == 0 { CONCURRENCY } else { 1 }
    }

    /// Puts a mailbox where it shall stand, from where it stands.
    pub(super) fn stand(&mut self, place: &Place, stands: &mut Stands, shall: Shall) {
        match (*stands, shall) {
            // If it shall not stand there any more, it is put elsewhere when its turn comes: to look for it is not worth it.
            (Stands::Queued, _) => return,
            (Stands::Held(until, _), Shall::Wait(shall)) if until == shall => return,
            (Stands::Held(until, ticket), _) => drop(self.held.remove(&(until, ticket))),
            (Stands::Nowhere, _) => {}
        }
        *stands = match shall {
            Shall::Rest => Stands::Nowhere,
            Shall::Send => {
                self.queue.push_back(place.clone());
                Stands::Queued
            }
            Shall::Wait(until) => {
                self.tickets += 1;
                self.held.insert((until, self.tickets), place.clone());
                Stands::Held(until, self.tickets)
            }
        };
    }

    /// Mailboxes whose time has come.
    pub(super) fn due(&mut self, now: Instant) -> Option<Place> {
        let first = self.held.first_entry().filter(|first| first.key().0 <= now)?;
        Some(first.remove())
    }

    /// Whether it is open and something is due.
    pub(super) fn may_send(&self, now: Instant) -> bool {
        let due = self.held.first_key_value().is_some_and(|((at, _), _)| *at <= now);
        self.is_open(now) && (due || !self.queue.is_empty())
    }

    /// When it is worth to look again, apart from answers that come.
    pub(super) fn wake(&self, now: Instant) -> Option<Instant> {
        if self.in_flight >= self.allowed() {
            return None;
        }
        let first = if self.queue.is_empty() { self.held.first_key_value().map(|((at, _), _)| *at)? } else { now };
        Some(self.until.map_or(first, |until| until.max(first)))
    }

    pub(super) fn forget(&mut self, place: &Place) {
        self.queue.retain(|queued| queued != place);
        self.held.retain(|_, held| held != place);
    }

    /// Everything but how the service does.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.held.clear();
        (self.objects, self.parked) = (0, 0);
    }

    pub(super) fn sent(&mut self) {
        self.in_flight += 1;
    }

    /// A request has ended. `refuses` tells the status by which an event was refused too often. Returns whether its health moved.
    pub(super) fn ended(&mut self, outcome: Outcome, refuses: Option<u16>, random: &mut Random, now: Instant) -> bool {
        self.in_flight = self.in_flight.saturating_sub(1);
        if let Outcome::Failed(told) = outcome {
            self.failures = self.failures.saturating_add(1);
            let wait = wait(self.failures, random);
            self.until = Some(now + wait.max(told.unwrap_or_default().min(LONGEST_RETRY_AFTER)));
        } else {
            // It refuses, so it lives.
            (self.failures, self.until) = (0, None);
        }
        if refuses.is_some() {
            self.refused = Some(now);
        }
        let is_refusing = self.refused.is_some_and(|at| now.saturating_duration_since(at) < REFUSING);
        let health = match (refuses, self.health) {
            (Some(status), _) => Health::Refusing(status),
            _ if self.failures >= UNREACHABLE => Health::Unreachable,
            (None, Health::Unreachable) if self.failures > 0 => Health::Unreachable,
            (None, refusing @ Health::Refusing(_)) if is_refusing => refusing,
            (None, _) => Health::Fine,
        };
        std::mem::replace(&mut self.health, health) != health
    }

    pub(super) const fn health(&self) -> Health {
        self.health
    }
}

/// How long an event waits that was refused so often in a row.
pub(super) fn wait_refused(refusals: u32, random: &mut Random) -> Duration {
    if refusals < MAX_REFUSALS {
        return wait(refusals, random);
    }
    let tenth = u64::try_from(PARKED.as_millis() / 10).unwrap_or(u64::MAX);
    PARKED + Duration::from_millis(random.up_to(tenth))
}

/// Full jitter up to a bound that doubles, so that those who failed together do not return together.
pub(super) fn wait(failures: u32, random: &mut Random) -> Duration {
    let bound = FIRST_WAIT.saturating_mul(2u32.saturating_pow(failures.saturating_sub(1))).min(LONGEST_WAIT);
    let millis = u64::try_from(bound.as_millis()).unwrap_or(u64::MAX);
    Duration::from_millis(random.up_to(millis).max(50))
}
