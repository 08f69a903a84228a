//! Contract v2: one request for each event, and whatever is taken is settled.
//!
//! The dirty set is the same. What v2 cannot say is left out: there are no deltas and no watermarks, and since it knows objects
//! only, a `watch.changed` becomes one event for each object that is there.
//!
//! One event is under way for each manager, so that none waits for another's word, and of one object the older event has ended before the
//! newer one leaves. What was not taken waits again, behind the others.

use std::sync::Arc;

use tidewatch_shared::v2::{self, Event};
use tokio::time::Instant;

use super::{
    Outbox, What,
    mailbox::{Mailbox, Parking},
};

/// A refused event is tried so often before it is parked.
const TRIES: u8 = 5;

/// The first moment at or after the given one at which a manager may be told.
pub(crate) type Opens<'a> = &'a dyn Fn(&str, Instant) -> Instant;

/// An event to send by itself.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Single {
    /// Who is told.
    pub(crate) manager: String,
    /// What it says.
    pub(crate) event: Event,
    /// It was sent before.
    pub(crate) again: bool,
}

/// What comes next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// This is to be sent.
    Event(Single),
    /// All objects of this watch are to be marked.
    Whole(Arc<str>),
}

/// An event between its request and its end.
#[derive(Debug)]
pub(super) struct Alone {
    watch: Arc<str>,
    key: Arc<str>,
    sequence: u64,
}

/// What became of an event that was sent by itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tried {
    /// It was sent, and not taken.
    again: bool,
    /// It was refused so often.
    refusals: u8,
}

impl Outbox {
    /// When the next event may be sent; `None` when there is nothing to send, or every manager that it is for has one under way.
    pub(crate) fn single_due(&self, now: Instant, opens: Opens<'_>) -> Option<Instant> {
        let waiting = self.boxes.values().filter_map(|mailbox| self.due_alone(mailbox, now, opens));
        waiting.chain(self.parked_until.filter(|_| self.parked() > 0)).min()
    }

    fn due_alone(&self, mailbox: &Mailbox, now: Instant, opens: Opens<'_>) -> Option<Instant> {
        let manager = &*mailbox.facts().manager;
        let due = mailbox.due(now).filter(|_| !self.alone.contains_key(manager))?;
        Some(opens(manager, due))
    }

    /// The next event, which is under way until it is said what became of it; `None` when nothing is due. Of a watch whose objects nobody
    /// knows, which `coarse` tells, the event has no name.
    pub(crate) fn single(&mut self, now: Instant, opens: Opens<'_>, coarse: &dyn Fn(&str) -> bool) -> Option<Next> {
        self.unpark(now);
        loop {
            let is_due = |name: &Arc<str>| self.due_alone(&self.boxes[name], now, opens).is_some_and(|due| due <= now);
            let watch = self.turns().into_iter().find(is_due)?;
            self.served = Some(watch.clone());
            let mailbox = self.boxes.get_mut(&watch)?;
            let (key, waiting) = mailbox.next()?;
            if waiting.what == What::Whole && !coarse(&watch) {
                return Some(Next::Whole(watch));
            }
            let again = waiting.tried.again;
            if !again {
                self.metrics.boarded(&waiting.what, waiting.since);
            }
            self.life.sequence += 1;
            let sequence = self.life.sequence;
            mailbox.sent(key.clone(), sequence, waiting);
            let manager = mailbox.facts().manager.clone();
            if v2::is_manager(&manager) {
                let single = single(mailbox.facts(), &key, again);
                self.alone.insert(manager, Alone { watch, key, sequence });
                return Some(Next::Event(single));
            }
            // No path could name such a manager.
            mailbox.park(&key, sequence, Parking::ForNow);
            self.park_until(now);
        }
    }

    /// Whether a watch of the plan is for this manager.
    pub(crate) fn is_manager(&self, manager: &str) -> bool {
        self.boxes.values().any(|mailbox| &*mailbox.facts().manager == manager)
    }

    /// A manager has taken its event.
    pub(crate) fn single_taken(&mut self, manager: &str) {
        let Some(Alone { watch, sequence, .. }) = self.alone.remove(manager) else { return };
        if let Some(mailbox) = self.boxes.get_mut(&watch) {
            mailbox.settle(sequence, |since| {
                self.metrics.accepted(since);
                self.metrics.settled(since);
            });
        }
    }

    /// A manager did not take its event now.
    pub(crate) fn single_failed(&mut self, manager: &str) {
        self.untaken(manager, 0);
    }

    /// A manager refused its event. After some tries it is parked.
    pub(crate) fn single_refused(&mut self, manager: &str, now: Instant) {
        if self.untaken(manager, 1) {
            self.park_until(now);
        }
    }

    /// The event waits again, unless its watch has left the plan or tells all of its objects anew. True if it is parked instead.
    fn untaken(&mut self, manager: &str, refusals: u8) -> bool {
        let Some(Alone { watch, key, sequence }) = self.alone.remove(manager) else { return false };
        let Some(mailbox) = self.boxes.get_mut(&watch) else { return false };
        let Some(Tried { again, refusals: before }) = mailbox.flying(&key, sequence).map(|waiting| &mut waiting.tried)
        else {
            return false;
        };
        (*again, *before) = (true, before.saturating_add(refusals));
        // v2 does not tell a bad event from a listener that is set up badly.
        let is_parked = *before >= TRIES;
        if is_parked {
            mailbox.park(&key, sequence, Parking::ForNow);
        } else {
            mailbox.wait_again(&key, sequence);
        }
        is_parked
    }
}

fn single(facts: &super::Facts, key: &str, again: bool) -> Single {
    let (namespace, name) = key.split_once('/').unwrap_or_default();
    let [namespace, name, group, version, kind] =
        [namespace, name, &*facts.group, &*facts.version, &*facts.kind].map(str::to_owned);
    Single { manager: facts.manager.clone().into(), event: Event { namespace, name, group, version, kind }, again }
}

#[cfg(test)]
mod tests;
