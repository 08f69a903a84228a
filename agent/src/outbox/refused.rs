//! What becomes of events that the receiver does not take.

use tidewatch_shared::{digest::Digest, event::EventId, identity::Epoch};

use super::{
    Announced, Outbox, Renewal,
    flight::{self, Flying},
    mailbox::{WHOLE, Waiting, What},
};

impl Outbox {
    /// Puts a `watch.changed` with the same sequence and delta in the place of an event that is not taken, or parks it.
    pub(super) fn replace(&mut self, event: Flying, again: &mut Vec<Flying>) -> bool {
        let Some(mailbox) = self.boxes.get_mut(&event.watch) else {
            // Its watch has left the plan. Whatever fills the hole will do; the text of that watch is the nearest.
            return false;
        };
        if event.whole || mailbox.facts().forward {
            mailbox.park(&event.key, event.sequence);
            return false;
        }
        let id = EventId { epoch: self.life.epoch, sequence: event.sequence };
        let waiting = Waiting { what: What::Whole, base: Digest::ZERO, since: event.since, unheard: false };
        let text = flight::encode(&self.runtime, id, &event.watch, mailbox.facts(), WHOLE, &waiting, event.delta);
        again.push(Flying { whole: true, text, ..event });
        true
    }

    /// A request was too large (413). What the receiver announces holds from now on; without a word, half of what was refused
    /// does.
    pub(crate) fn too_large(&mut self, epoch: Epoch, announced: Announced) -> bool {
        let sent = self.flight.as_ref().filter(|flight| flight.outstanding() > 1).map(|flight| flight.body().len());
        if epoch == self.life.epoch {
            self.most.learn(announced, sent);
        }
        self.refused_whole(epoch)
    }

    /// A request was refused whole (400, 413): the next one has half of its events, until the one is found. True when it was,
    /// and something else is sent in its place, or it is parked.
    pub(crate) fn refused_whole(&mut self, epoch: Epoch) -> bool {
        let ours = epoch == self.life.epoch;
        let Some(mut flight) = ours.then(|| self.flight.take()).flatten() else { return false };
        if flight.outstanding() > 1 {
            self.limit = flight.outstanding().div_ceil(2);
            self.flight = Some(flight);
            return false;
        }
        let mut again = Vec::new();
        let replaced = flight.land().into_iter().all(|event| self.replace(event, &mut again));
        flight.board_first(again);
        self.flight = flight.unfinished();
        if !replaced {
            self.renew(Renewal::Parked);
        }
        true
    }
}
