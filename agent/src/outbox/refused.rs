//! What becomes of events that the receiver does not take.

use std::{collections::BTreeMap, time::Duration};

use tidewatch_shared::{
    digest::Digest,
    event::{EventId, Reason},
    exchange::EventsAnswer,
    identity::Epoch,
};
use tokio::time::Instant;

use super::{
    Announced, Mailbox, Outbox, Renewal,
    flight::{self, Flying},
    mailbox::{Parking, WHOLE, Waiting, What},
};
use crate::random;

/// What was not refused by name is tried again after this time at most, and not before half of it: nobody knows whether the event was bad,
/// or whether somebody on the way refuses everything for a while.
pub(super) const PARKED: Duration = Duration::from_secs(300);

impl Outbox {
    /// Puts a `watch.changed` with the same sequence and delta in the place of an event that is not taken, or parks it.
    pub(super) fn replace(&mut self, event: Flying, parking: Parking, again: &mut Vec<Flying>) -> bool {
        let Some(mailbox) = self.boxes.get_mut(&event.watch) else {
            // Its watch has left the plan. Whatever fills the hole will do; the text of that watch is the nearest.
            return false;
        };
        if event.whole || mailbox.facts().forward {
            mailbox.park(&event.key, event.sequence, parking);
            return false;
        }
        let id = EventId { epoch: self.life.epoch, sequence: event.sequence };
        let waiting = Waiting::new(What::Whole, Digest::ZERO, event.since);
        let text = flight::encode(&self.runtime, id, &event.watch, mailbox.facts(), WHOLE, &waiting, event.delta);
        again.push(Flying { whole: true, text, ..event });
        true
    }

    /// A request was too large (413). What the receiver announces holds from now on; without a word, half of what was refused
    /// does.
    pub(crate) fn too_large(&mut self, now: Instant, epoch: Epoch, announced: Announced) -> bool {
        let sent = self.flight.as_ref().filter(|flight| flight.outstanding() > 1).map(|flight| flight.body().len());
        if epoch == self.life.epoch {
            self.most.learn(announced, sent);
        }
        self.refused_whole(now, epoch)
    }

    /// A request was refused whole (400, 413): the next one has half of its events, until the one is found. True when it was,
    /// and something else is sent in its place, or it is parked for a while.
    pub(crate) fn refused_whole(&mut self, now: Instant, epoch: Epoch) -> bool {
        let ours = epoch == self.life.epoch;
        let Some(mut flight) = ours.then(|| self.flight.take()).flatten() else { return false };
        if flight.outstanding() > 1 {
            self.limit = flight.outstanding().div_ceil(2);
            self.flight = Some(flight);
            return false;
        }
        let mut again = Vec::new();
        let replaced = flight.land().into_iter().all(|event| self.replace(event, Parking::ForNow, &mut again));
        flight.board_first(again);
        self.flight = flight.unfinished();
        if !replaced {
            self.park_until(now);
            self.renew(Renewal::Parked);
        }
        true
    }

    /// What is parked for now waits from now on, unless something does already: then all of it is tried again with that.
    pub(super) fn park_until(&mut self, now: Instant) {
        self.parked_until.get_or_insert_with(|| now + PARKED / 2 + random::up_to(PARKED / 2));
    }

    /// When there is something to send: what waits, or what is parked for now.
    pub(super) fn ripe(&self, now: Instant) -> Option<Instant> {
        let waiting = self.boxes.values().filter_map(|mailbox| mailbox.due(now));
        waiting.chain(self.parked_until.filter(|_| self.parked() > 0)).min()
    }

    /// Tries again what is parked for now, when it is time.
    pub(super) fn unpark(&mut self, now: Instant) {
        if self.parked_until.is_some_and(|until| until <= now) {
            self.parked_until = None;
            self.boxes.values_mut().for_each(Mailbox::unpark);
        }
    }
}

/// The refused sequences of an answer; names that are not of this epoch are nobody's.
pub(super) fn by_sequence(epoch: Epoch, answer: &EventsAnswer) -> BTreeMap<u64, Reason> {
    let known = |text: &str| text.parse::<EventId>().ok().filter(|id| id.epoch == epoch);
    answer.refused.iter().filter_map(|refused| Some((known(&refused.id)?.sequence, refused.reason))).collect()
}
