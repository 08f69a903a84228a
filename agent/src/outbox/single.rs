//! Contract v2: one request for each event, and whatever is taken is settled.
//!
//! The dirty set is the same. What v2 cannot say is left out: there are no deltas and no watermarks, and since it knows objects
//! only, a `watch.changed` becomes one event for each object that is there.

use std::sync::Arc;

use tidewatch_shared::v2::{self, Event};
use tokio::time::Instant;

use super::{Outbox, What, mailbox::Parking};

/// A refused event is tried so often before it is parked.
const TRIES: u32 = 5;

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

/// The one event between its first request and its end.
#[derive(Debug)]
pub(super) struct Alone {
    watch: Arc<str>,
    key: Arc<str>,
    sequence: u64,
    refusals: u32,
}

impl Outbox {
    /// When the next event may be sent; `None` when there is nothing to send.
    pub(crate) fn single_due(&self, now: Instant) -> Option<Instant> {
        if self.alone.is_some() { Some(now) } else { self.ripe(now) }
    }

    /// The next event, or the same once more if it has not ended; `None` when nothing is due. Of a watch whose objects nobody
    /// knows, which `coarse` tells, the event has no name.
    pub(crate) fn single(&mut self, now: Instant, coarse: &dyn Fn(&str) -> bool) -> Option<Next> {
        if let Some(same) = self.same() {
            return Some(Next::Event(same));
        }
        self.unpark(now);
        loop {
            let due = |name: &Arc<str>| self.boxes[name].due(now).is_some_and(|due| due <= now);
            let watch = self.turns().into_iter().find(due)?;
            self.served = Some(watch.clone());
            let mailbox = self.boxes.get_mut(&watch)?;
            let (key, waiting) = mailbox.next()?;
            if waiting.what == What::Whole && !coarse(&watch) {
                return Some(Next::Whole(watch));
            }
            self.metrics.boarded(&waiting.what, waiting.since);
            self.life.sequence += 1;
            let sequence = self.life.sequence;
            mailbox.sent(key.clone(), sequence, waiting);
            if v2::is_manager(&mailbox.facts().manager) {
                let single = single(mailbox.facts(), &key, false);
                self.alone = Some(Alone { watch, key, sequence, refusals: 0 });
                return Some(Next::Event(single));
            }
            // No path could name such a manager.
            mailbox.park(&key, sequence, Parking::ForNow);
            self.park_until(now);
        }
    }

    /// The event that has not ended, unless its watch has left the plan or tells all of its objects anew.
    fn same(&mut self) -> Option<Single> {
        let known = |alone: &Alone| {
            let mailbox = self.boxes.get(&alone.watch)?;
            mailbox.flies(&alone.key, alone.sequence).then(|| single(mailbox.facts(), &alone.key, true))
        };
        let same = self.alone.as_ref().and_then(known);
        if same.is_none() {
            self.alone = None;
        }
        same
    }

    /// The event was taken.
    pub(crate) fn single_taken(&mut self) {
        let Some(Alone { watch, sequence, .. }) = self.alone.take() else { return };
        if let Some(mailbox) = self.boxes.get_mut(&watch) {
            mailbox.settle(sequence, |since| {
                self.metrics.accepted(since);
                self.metrics.settled(since);
            });
        }
    }

    /// The event was refused. After some tries it is parked, and others go on.
    pub(crate) fn single_refused(&mut self, now: Instant) {
        let Some(alone) = &mut self.alone else { return };
        alone.refusals += 1;
        if alone.refusals < TRIES {
            return;
        }
        let Some(Alone { watch, key, sequence, .. }) = self.alone.take() else { return };
        if let Some(mailbox) = self.boxes.get_mut(&watch) {
            // v2 does not tell a bad event from a listener that is set up badly.
            mailbox.park(&key, sequence, Parking::ForNow);
            self.park_until(now);
        }
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
