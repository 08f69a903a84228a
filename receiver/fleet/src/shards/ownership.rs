//! Decides which Leases this replica writes, and which shards it holds. Pure: records, results of writes and the time
//! are arguments.
//!
//! A replica holds a membership Lease, which it renews, and whose end ends all of its shards: the Lease of a shard names
//! its holder and is written only when the holder changes. A shard may be claimed when it has no holder, or when no
//! membership Lease names its holder any more. A replica that claims the shards of one that stopped renewing takes its
//! membership away first. Each write is a compare-and-swap of the record that led to it, so a decision on an old record
//! has no effect; and a replica whose membership was taken away finds that by its next renewal at the latest, long
//! after its fences have ended.
//!
//! Replicas with different numbers of shards are rivals, and so is one that shares its shards with none (`admission`).
//!
//! Fences end with the valid part (four fifths) of the duration, counted from the start of the last successful renewal,
//! and another replica waits for the whole duration, counted from its observation: the rest is for requests that were
//! sent at the last moment, and for clocks of different speed.

mod actions;
mod admission;
mod balance;
mod membership;
mod quota;
mod session;
mod view;

use std::collections::BTreeMap;

use tidewatch_api::leases::Unit;
use tidewatch_kit::random::Random;
use tokio::time::Instant;

pub(super) use self::actions::{Effect, EndReason, Outcome, Refusal, Settings, Step, Write, WriteKind};
use self::{session::Session, view::View};
use super::record::{LeaseId, Record};

/// State of a shard that this replica holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Active,
    /// Its work is being stopped.
    Stopping {
        deadline: Instant,
        has_stopped: bool,
    },
    /// Its fence is closed; it is released at this time.
    Closed {
        release: Instant,
    },
}

#[derive(Debug)]
struct Hold {
    /// The resourceVersion of the claim.
    version: String,
    /// The resourceVersion that the claim replaced: the view may still show it.
    replaced: Option<String>,
    phase: Phase,
}

/// Last write of a Lease.
#[derive(Debug)]
struct Attempt {
    kind: WriteKind,
    began: Instant,
    version: Option<String>,
    is_in_flight: bool,
    /// Until then, the same record is not written again.
    retry: Instant,
    /// Belongs to an earlier membership, so that its success opens no fence.
    is_obsolete: bool,
}

/// State of one replica.
#[derive(Debug)]
pub(super) struct Ownership {
    settings: Settings,
    random: Random,
    view: View,
    /// False until the first list is complete.
    is_synced: bool,
    session: Option<Session>,
    holds: BTreeMap<Unit, Hold>,
    attempts: BTreeMap<LeaseId, Attempt>,
    /// Live replicas that stay, in the order of their membership Leases, and since when they are the same.
    live: (Vec<String>, Instant),
    /// Until then, requests of ended shards may still arrive, so that no shard is given to another replica.
    quiet: Instant,
    is_leaving: bool,
    has_left: bool,
    effects: Vec<Effect>,
}

impl Ownership {
    /// `seed` spreads the retries.
    pub(super) fn new(settings: Settings, seed: u64, now: Instant) -> Self {
        Self {
            random: Random::new(seed),
            view: View::default(),
            is_synced: false,
            session: None,
            holds: BTreeMap::new(),
            attempts: BTreeMap::new(),
            live: (Vec::new(), now),
            quiet: now,
            is_leaving: false,
            has_left: false,
            effects: Vec::new(),
            settings,
        }
    }

    /// Takes a record that the watch delivered; `None` if the Lease was deleted.
    pub(super) fn observe(&mut self, id: LeaseId, record: Option<Record>, now: Instant) {
        let is_known = self.view.record(id).map(|known| &known.version) == record.as_ref().map(|new| &new.version);
        if is_known {
            return;
        }
        self.expire(now);
        self.view.observe(id, record, now);
        self.delivered(id);
        let LeaseId::Unit(unit) = id else { return };
        let is_mine = |record: &Record| record.holder() == Some(&*self.settings.identity);
        let is_older =
            |record: &Record| self.holds.get(&unit).is_some_and(|hold| hold.replaced.as_ref() == Some(&record.version));
        if self.view.record(id).is_none_or(|record| !is_mine(record) && !is_older(record)) {
            self.end(unit, EndReason::Taken, now);
        }
    }

    /// Takes a complete list. A Lease that is not in it was deleted.
    pub(super) fn observe_all(&mut self, records: BTreeMap<LeaseId, Record>, now: Instant) {
        let missing: Vec<_> = self.view.ids().into_iter().filter(|id| !records.contains_key(id)).collect();
        for (id, record) in records {
            self.observe(id, Some(record), now);
        }
        for id in missing {
            self.observe(id, None, now);
        }
        self.is_synced = true;
    }

    /// Takes the result of a write.
    pub(super) fn finished(&mut self, id: LeaseId, outcome: Outcome, now: Instant) {
        self.expire(now);
        let retry = self.settings.timings.retry;
        let later = now + retry + self.random.jitter(retry);
        let Some(attempt) = self.attempts.get_mut(&id) else { return };
        attempt.is_in_flight = false;
        attempt.retry = match outcome {
            // The watch delivers a newer record soon; if it does not, the same write is tried again.
            Outcome::Written(_) | Outcome::Conflict | Outcome::Taken => now + self.settings.timings.lease,
            Outcome::Failed => later,
        };
        let kind = attempt.kind;
        let began = attempt.began;
        let replaced = attempt.version.clone();
        let is_obsolete = attempt.is_obsolete;
        let timings = self.settings.timings;
        match (kind, id, outcome) {
            (WriteKind::Join, LeaseId::Member(number), Outcome::Written(version)) => {
                self.session = Some(Session::new(number, version, began, &timings));
            }
            (WriteKind::Renew { is_leaving }, _, outcome) if !is_obsolete => {
                let Some(session) = &mut self.session else { return };
                match outcome {
                    Outcome::Written(version) => {
                        session.renewed(version, began, &timings);
                        session.is_leaving |= is_leaving;
                    }
                    Outcome::Conflict => session.uncertain(now),
                    Outcome::Failed => session.uncertain(later),
                    Outcome::Taken => self.end_session(now),
                }
            }
            (WriteKind::Leave, _, Outcome::Written(_) | Outcome::Conflict) => self.has_left = true,
            // A claim that succeeded too late is repeated, or released, when the watch delivers it.
            (WriteKind::Claim, LeaseId::Unit(unit), Outcome::Written(version))
                if !is_obsolete && !self.is_leaving && self.until().is_some_and(|until| now < until) =>
            {
                self.holds.insert(unit, Hold { version, replaced, phase: Phase::Active });
                self.effects.push(Effect::Acquired(unit));
            }
            (WriteKind::Release, LeaseId::Unit(unit), Outcome::Written(_) | Outcome::Conflict) => {
                self.holds.remove(&unit);
            }
            _ => {}
        }
        // The watch may deliver a write before its response arrives.
        self.delivered(id);
    }

    /// Notes that the view shows the last own renewal, if it does.
    fn delivered(&mut self, id: LeaseId) {
        if let (Some(session), Some(record)) = (&mut self.session, self.view.record(id)) {
            session.delivered(&record.version);
        }
    }

    /// Records that all work of a shard has stopped which is being handed over.
    pub(super) fn stopped(&mut self, unit: Unit) {
        if let Some(Hold { phase: Phase::Stopping { has_stopped, .. }, .. }) = self.holds.get_mut(&unit) {
            *has_stopped = true;
        }
    }

    /// Hands all shards over, and then gives the membership back.
    pub(super) fn leave(&mut self, now: Instant) {
        self.is_leaving = true;
        if let Some(session) = &mut self.session {
            session.due = now;
        }
    }

    /// True when this replica holds nothing any more after [`Ownership::leave`].
    pub(super) fn has_left(&self) -> bool {
        self.has_left
    }

    /// Records that the fence of a shard had ended before it could be extended.
    pub(super) fn expired(&mut self, unit: Unit, now: Instant) {
        self.end(unit, EndReason::Expired, now);
    }

    /// Beginning of the first own renewal that the watch should have delivered by now.
    pub(super) fn undelivered(&self) -> Option<Instant> {
        self.session.as_ref()?.undelivered
    }

    /// All Leases as the watch last delivered them.
    pub(super) fn record(&self, id: LeaseId) -> Option<(&Record, Instant)> {
        Some((self.view.record(id)?, self.view.changed(id)?))
    }

    /// Ends all shards whose fences have ended. Called before anything that could move their end: a fence that has ended
    /// stays closed.
    fn expire(&mut self, now: Instant) {
        if self.until().is_none_or(|until| until <= now) {
            self.end_all(EndReason::Expired, now);
        }
    }

    /// End of all fences: that of the membership.
    fn until(&self) -> Option<Instant> {
        Some(self.session.as_ref()?.until)
    }

    /// Decides on everything that is due. At most one write of each Lease is in flight.
    pub(super) fn step(&mut self, now: Instant) -> Step {
        let mut step = Step::default();
        if self.has_left {
            return step;
        }
        self.expire(now);
        let until = self.until().filter(|until| now < *until);
        if self.is_synced {
            let no_membership = self.membership(now, &mut step);
            self.evict(now, &mut step);
            let not_admitted = self.admit(now);
            self.update_live(now);
            step.wanted = self.wanted();
            let unconfirmed = until.is_none().then_some(Refusal::Unconfirmed);
            step.refusal = no_membership.or(not_admitted).or(unconfirmed);
            if step.refusal.is_none() && !self.is_leaving {
                step.refusal = self.balance(now, &mut step);
            }
        }
        self.hand_over(now, &mut step);
        step.until = until;
        step.effects = std::mem::take(&mut self.effects);
        step
    }

    /// Sends a write, unless the same one has just been tried or another one of the Lease is in flight.
    fn send(&mut self, step: &mut Step, id: LeaseId, version: Option<String>, kind: WriteKind, now: Instant) {
        if self.attempts.get(&id).is_some_and(|attempt| attempt.is_in_flight) {
            return;
        }
        let attempt =
            Attempt { kind, began: now, version: version.clone(), is_in_flight: true, retry: now, is_obsolete: false };
        self.attempts.insert(id, attempt);
        step.writes.push(Write { id, version, kind });
    }

    /// True if a write of the Lease is in flight, or was made of the record that the view still shows.
    fn is_blocked(&self, id: LeaseId, now: Instant) -> bool {
        let Some(attempt) = self.attempts.get(&id) else { return false };
        let shown = self.view.record(id).map(|record| &record.version);
        attempt.is_in_flight || now < attempt.retry && attempt.version.as_ref() == shown
    }

    /// True if a write of the Lease is in flight, or failed a moment ago.
    fn is_paused(&self, id: LeaseId, kind: WriteKind, now: Instant) -> bool {
        let Some(attempt) = self.attempts.get(&id) else { return false };
        attempt.is_in_flight || attempt.kind == kind && now < attempt.retry
    }

    /// Ends a shard whose work has not stopped.
    fn end(&mut self, unit: Unit, reason: EndReason, now: Instant) {
        let Some(hold) = self.holds.remove(&unit) else { return };
        match hold.phase {
            Phase::Active | Phase::Stopping { .. } => {
                self.quiet = self.quiet.max(now + self.settings.reserve());
                self.effects.push(Effect::Ended(unit, reason));
            }
            Phase::Closed { release } => self.quiet = self.quiet.max(release),
        }
    }

    fn end_all(&mut self, reason: EndReason, now: Instant) {
        for unit in self.holds.keys().copied().collect::<Vec<_>>() {
            self.end(unit, reason, now);
        }
    }

    /// Ends the membership, which another writer took away.
    fn end_session(&mut self, now: Instant) {
        self.session = None;
        self.attempts.values_mut().for_each(|attempt| attempt.is_obsolete = true);
        self.end_all(EndReason::Taken, now);
    }
}

#[cfg(test)]
mod tests;
