//! The outbox: the dirty set of all watches, and the rules of contract v3 about sequences, epochs, accepted and settled. Pure: time,
//! randomness and digests come in as arguments, requests come out as bytes.
//!
//! An entry is keyed by (watch, object), newest wins. It is *waiting*, then in flight, then *accepted*, and gone only when
//! *settled*; it can be sent and waiting again at once. One request is in flight at a time and is repeated until it is
//! answered, so the sequences of an epoch have no holes.
//!
//! When there are too many entries of one watch, a `watch.changed` takes their place. Another manager knows objects only: of a watch that
//! goes to one, every object that is there is told again, as there is room (`sweep`), those that went are kept, and if even they are too
//! many, the `watch.changed` says that it moved objects which nobody can name.
//!
//! Invariant of the digests, per watch: index digest less what waits = what was sent = the remembered digest plus nothing,
//! except between the end of a list and its `watch.changed`, whose delta makes up the difference.

mod facts;
mod flight;
mod life;
mod limits;
mod mailbox;
mod pace;
mod refused;
mod room;
mod single;
mod sweep;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
    sync::Arc,
};

use bytes::Bytes;
use tidewatch_shared::{
    digest::Digest,
    event::{Change, EventId, Reason},
    exchange::{EventsAnswer, Settled},
    identity::{Epoch, Instance, RuntimeId},
    signature::Nonce,
};
use tokio::time::Instant;

pub(crate) use facts::Facts;
pub(crate) use life::Renewal;
pub use limits::Announced;
pub(crate) use mailbox::What;
pub(crate) use single::{Next, Opens, Single};

use crate::{index::Seen, telemetry::Metrics};
use flight::{Flight, Flying};
use life::Life;
use limits::Most;
use mailbox::{Mailbox, Parking, WHOLE};
use pace::Pace;
use single::Alone;

/// Events of one request. Fewer than the contract allows: a request's bytes are most of what a busy agent allocates.
const EVENTS_PER_REQUEST: usize = 250;
/// Names of watches whose digest is remembered, before a new epoch forgets those that left the plan.
const REMEMBERED: usize = 1_000;

/// Where the digest of a watch comes from: the index, `None` while it is not completely listed.
pub(crate) type Digests<'a> = &'a dyn Fn(&str) -> Option<Digest>;

/// A request to send: a batch, with what must be known of it when its answer comes.
#[derive(Debug)]
pub struct Batch {
    /// The life that it belongs to.
    pub epoch: Epoch,
    /// For the signature.
    pub nonce: Nonce,
    /// A JSON array of events.
    pub body: Bytes,
    /// Number of events in it.
    pub events: usize,
    /// It was sent before.
    pub again: bool,
}

/// The numbers that a heartbeat carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Numbers {
    /// The life that it belongs to.
    pub(crate) epoch: Epoch,
    /// The last sequence given to an event.
    pub(crate) sequence: u64,
    /// Of heartbeats, in this epoch.
    pub(crate) counter: u64,
    /// For the signature.
    pub(crate) nonce: Nonce,
}

/// See the module.
pub(crate) struct Outbox {
    runtime: RuntimeId,
    life: Life,
    instance: Option<Instance>,
    boxes: BTreeMap<Arc<str>, Mailbox>,
    /// What was last sent of each watch, by name, for the whole epoch.
    remembered: BTreeMap<Arc<str>, Digest>,
    flight: Option<Flight>,
    /// The events that are under way in contract v2, one for each manager.
    alone: BTreeMap<Box<str>, Alone>,
    /// When those parked events are tried again that nobody has refused by name.
    parked_until: Option<Instant>,
    /// Events of the next request; falls when one is refused as a whole, and grows again.
    limit: usize,
    /// What this instance of the receiver takes at once.
    most: Most,
    pace: Pace,
    /// The mailbox that was served last: the next request begins behind it.
    served: Option<Arc<str>>,
    draw: Box<dyn FnMut() -> u64 + Send>,
    metrics: Metrics,
}

impl Outbox {
    /// An empty outbox in an epoch of its own; `draw` gives 64 random bits.
    pub(crate) fn new(runtime: RuntimeId, mut draw: Box<dyn FnMut() -> u64 + Send>, metrics: Metrics) -> Self {
        let life = Life::new(Epoch::new(draw()));
        let (boxes, remembered) = (BTreeMap::new(), BTreeMap::new());
        let (pace, limit) = (Pace::default(), EVENTS_PER_REQUEST);
        Self {
            runtime,
            life,
            instance: None,
            boxes,
            remembered,
            flight: None,
            alone: BTreeMap::new(),
            parked_until: None,
            limit,
            most: Most::default(),
            pace,
            served: None,
            draw,
            metrics,
        }
    }

    /// A watch begins, or begins anew: nothing is known of its objects, and its first list will say so.
    pub(crate) fn open(&mut self, watch: Arc<str>, facts: Facts) {
        self.boxes.insert(watch, Mailbox::new(facts));
    }

    /// A watch has left the plan; its events are nobody's any more. What is in flight still goes, so that no hole is left.
    pub(crate) fn close(&mut self, watch: &str) {
        self.boxes.remove(watch);
        if self.remembered.len() > REMEMBERED {
            self.renew(Renewal::Names);
        }
    }

    /// What discovery found out about a watch.
    pub(crate) fn describe(&mut self, watch: &str, version: &str, kind: &str) {
        if let Some(mailbox) = self.boxes.get_mut(watch) {
            mailbox.describe(version, kind);
        }
    }

    /// An object changed: it is waiting, whatever becomes of an event that was sent before.
    pub(crate) fn mark(&mut self, watch: &str, key: &str, object: What, before: Digest, at: i64) {
        if self.boxes.get_mut(watch).is_some_and(|mailbox| mailbox.mark(key, object, before, at)) {
            self.metrics.coalesced.inc();
        }
    }

    /// The same for an object that came while its watch was followed: nobody knows it yet.
    pub(crate) fn mark_born(&mut self, watch: &str, key: &str, object: What, at: i64) {
        let Some(mailbox) = self.boxes.get_mut(watch) else { return };
        if mailbox.mark(key, object, Digest::ZERO, at) {
            self.metrics.coalesced.inc();
        } else {
            mailbox.born(key);
        }
    }

    /// Something in a watch moved while nobody looked.
    pub(crate) fn mark_whole(&mut self, watch: &str, at: i64) {
        self.mark(watch, WHOLE, What::Whole, Digest::ZERO, at);
    }

    /// Whether the next request is still to be made.
    pub(crate) const fn is_free(&self) -> bool {
        self.flight.is_none()
    }

    /// Objects of a watch that wait, or were sent and are not settled.
    pub(crate) fn dirty(&self, watch: &str) -> usize {
        self.boxes.get(watch).map_or(0, Mailbox::dirty)
    }

    /// The same of all watches.
    pub(crate) fn dirty_in_all(&self) -> usize {
        self.boxes.values().map(Mailbox::dirty).sum()
    }

    /// The watch that has the most of them.
    pub(crate) fn dirtiest(&self) -> Option<Arc<str>> {
        self.boxes.iter().max_by_key(|(_, mailbox)| mailbox.dirty()).map(|(name, _)| name.clone())
    }

    /// Another plan is followed: what waited for that is tried again.
    pub(crate) fn plan_changed(&mut self) {
        self.parked_until = None;
        for mailbox in self.boxes.values_mut() {
            mailbox.release();
        }
    }

    /// Events that wait to be sent.
    pub(crate) fn waiting(&self) -> usize {
        self.boxes.values().map(Mailbox::waiting).sum()
    }

    /// Events that cannot be sent, or not now.
    pub(crate) fn parked(&self) -> usize {
        self.boxes.values().map(Mailbox::parked).sum()
    }

    /// Events that were sent and are not settled.
    pub(crate) fn unsettled(&self) -> usize {
        self.boxes.values().map(Mailbox::unsettled).sum()
    }

    /// Whose events these are, in which epoch, up to which sequence, and which receiver answered last.
    pub(crate) fn whereabouts(&self) -> (&RuntimeId, Epoch, u64, Option<Instance>) {
        (&self.runtime, self.life.epoch, self.life.sequence, self.instance)
    }

    /// When the next request may be sent; `None` when there is nothing to send.
    pub(crate) fn due(&self, now: Instant) -> Option<Instant> {
        let after_pace = |at: Instant| self.pace.until().map_or(at, |until| until.max(at));
        if self.flight.is_some() {
            return Some(after_pace(now));
        }
        self.ripe(now).map(after_pace)
    }

    /// The digest of what was sent of a watch, computed from its index less what waits; `None` while it is not completely
    /// listed, or while the `watch.changed` of its list has not left.
    pub(crate) fn sent_digest(&self, watch: &str, digests: Digests<'_>) -> Option<Digest> {
        let mailbox = self.boxes.get(watch)?;
        // A parked whole watch stands for objects too, which may have been forgotten for its sake.
        let untold = mailbox.waits_whole() || mailbox.parks_whole();
        (!untold).then(|| digests(watch).map(|digest| digest - mailbox.outstanding())).flatten()
    }

    /// The numbers of the next heartbeat.
    pub(crate) fn heartbeat(&mut self) -> Numbers {
        self.life.heartbeats += 1;
        let nonce = self.nonce();
        let Life { epoch, sequence, heartbeats: counter, .. } = self.life;
        Numbers { epoch, sequence, counter, nonce }
    }

    /// The next request, or the same once more if it has not been answered; `None` when nothing is due.
    pub(crate) fn request(&mut self, now: Instant, digests: Digests<'_>) -> Option<Batch> {
        if self.pace.until().is_some_and(|until| until > now) {
            return None;
        }
        if self.flight.is_none() {
            self.unpark(now);
            self.flight = self.assemble(now, digests);
        }
        let flight = self.flight.as_mut()?;
        let again = flight.begin(self.limit.min(self.most.events), self.most.bytes);
        let (body, events) = (flight.body(), flight.outstanding());
        let (epoch, nonce) = (self.life.epoch, self.nonce());
        Some(Batch { epoch, nonce, body, events, again })
    }

    /// For one more request of this epoch.
    pub(crate) fn nonce(&mut self) -> Nonce {
        self.life.nonces += 1;
        Nonce { epoch: self.life.epoch, counter: self.life.nonces }
    }

    fn assemble(&mut self, now: Instant, digests: Digests<'_>) -> Option<Flight> {
        let mut flying = Vec::new();
        for name in self.turns() {
            let room = EVENTS_PER_REQUEST - flying.len();
            if room == 0 {
                break;
            }
            self.board(&name, room, now, digests, &mut flying);
        }
        Flight::new(flying)
    }

    /// All mailboxes, beginning behind the one that was served last.
    fn turns(&self) -> Vec<Arc<str>> {
        let behind = self.served.clone().map_or(Bound::Unbounded, Bound::Excluded);
        let names: Vec<Arc<str>> = self.boxes.range((behind, Bound::Unbounded)).map(|(name, _)| name.clone()).collect();
        let rest = self.boxes.keys().take(self.boxes.len() - names.len()).cloned();
        names.into_iter().chain(rest).collect()
    }

    /// Gives sequences to what waits in one mailbox.
    fn board(&mut self, name: &Arc<str>, room: usize, now: Instant, digests: Digests<'_>, flying: &mut Vec<Flying>) {
        let Some(mailbox) = self.boxes.get_mut(name) else { return };
        if mailbox.due(now).is_none_or(|due| due > now) {
            return;
        }
        let remembered = self.remembered.entry(name.clone()).or_default();
        for _ in 0..room {
            // What waits beside a whole watch is not covered by it: its own event brings its own delta.
            let others = if mailbox.waits_whole() { Some(mailbox.outstanding()) } else { None };
            let Some((key, waiting)) = mailbox.next() else { break };
            let delta = match &waiting.what {
                What::Object { part, .. } => *part - waiting.base,
                What::Whole | What::Unnamed => {
                    digests(name).map_or(Digest::ZERO, |digest| digest - others.unwrap_or_default() - *remembered)
                }
            };
            *remembered += delta;
            self.life.sequence += 1;
            let id = EventId { epoch: self.life.epoch, sequence: self.life.sequence };
            let text = flight::encode(&self.runtime, id, name, mailbox.facts(), &key, &waiting, delta);
            let whole = key.is_empty();
            flying.push(Flying {
                sequence: id.sequence,
                watch: name.clone(),
                key: key.clone(),
                delta,
                whole,
                since: waiting.since,
                text,
            });
            self.metrics.boarded(&waiting.what, waiting.since);
            mailbox.sent(key, id.sequence, waiting);
        }
        self.served = Some(name.clone());
    }

    /// The answer to a batch of an epoch.
    pub(crate) fn answered(&mut self, now: Instant, epoch: Epoch, answer: &EventsAnswer) {
        self.hear(now, answer.instance);
        let ours = epoch == self.life.epoch;
        let Some(mut flight) = ours.then(|| self.flight.take()).flatten() else { return };
        let landed = flight.land();
        let last = landed.last().map_or(0, |event| event.sequence);
        let refused = refused::by_sequence(epoch, answer);
        let (mut again, mut parked) = (Vec::new(), false);
        let mut clean: BTreeSet<Arc<str>> = landed.iter().map(|event| event.watch.clone()).collect();
        for event in landed {
            if let Some(reason) = refused.get(&event.sequence) {
                self.metrics.refused(reason.as_str());
            }
            match refused.get(&event.sequence) {
                None => self.metrics.accepted(event.since),
                Some(Reason::UnknownWatch) => {
                    if let Some(mailbox) = self.boxes.get_mut(&event.watch) {
                        mailbox.wait_again(&event.key, event.sequence);
                        if clean.remove(&event.watch) {
                            mailbox.refused(now);
                        }
                    }
                }
                Some(_) => parked |= !self.replace(event, Parking::Named, &mut again),
            }
        }
        for watch in clean {
            self.boxes.get_mut(&watch).into_iter().for_each(Mailbox::welcomed);
        }
        let whole = again.is_empty();
        flight.board_first(again);
        self.flight = flight.unfinished();
        self.limit = (self.limit * 2).min(EVENTS_PER_REQUEST);
        if parked {
            return self.renew(Renewal::Parked);
        }
        // A hole that a refusal left is filled by what is sent again; any other hole was accepted before, or is now forgotten.
        if answer.accepted < self.life.accepted || (whole && answer.accepted < last) || self.holds_below(answer.since) {
            self.pace.strike(now);
            return self.renew(Renewal::Forgotten);
        }
        self.life.accepted = answer.accepted;
        self.settle(&answer.settled);
    }

    /// The answer to a heartbeat of an epoch; true if it speaks for this one. What is settled there says nothing of what lies below
    /// `since`: that is forgotten.
    pub(crate) fn heartbeat_answered(
        &mut self,
        now: Instant,
        epoch: Epoch,
        instance: Instance,
        since: Option<u64>,
        settled: &Settled,
    ) -> bool {
        self.hear(now, instance);
        let ours = epoch == self.life.epoch;
        if ours && since.is_some_and(|since| self.holds_below(since)) {
            self.pace.strike(now);
            self.renew(Renewal::Forgotten);
        } else if ours {
            self.settle(settled);
        }
        ours
    }

    /// Whether something that was sent and is not settled has a lower sequence.
    fn holds_below(&self, since: u64) -> bool {
        self.boxes.values().filter_map(Mailbox::oldest).any(|sequence| sequence < since)
    }

    /// The signature or nonce was refused: the counters of this epoch are of no use.
    pub(crate) fn start_over(&mut self) {
        self.renew(Renewal::Refused);
    }

    /// Compared before anything else that an answer says.
    fn hear(&mut self, now: Instant, instance: Instance) {
        if self.instance.replace(instance).is_some_and(|known| known != instance) {
            self.pace.strike(now);
            self.plan_changed();
            self.most = Most::default();
            self.renew(Renewal::Instance);
        }
    }

    fn settle(&mut self, settled: &Settled) {
        for (watch, up_to) in settled {
            if let Some(mailbox) = self.boxes.get_mut(&**watch) {
                mailbox.settle((*up_to).min(self.life.sequence), |since| self.metrics.settled(since));
            }
        }
    }

    fn renew(&mut self, why: Renewal) {
        self.life = Life::new(Epoch::new((self.draw)()));
        self.flight = None;
        self.boxes.values_mut().for_each(Mailbox::undo);
        self.remembered.retain(|watch, _| self.boxes.contains_key(watch));
        self.metrics.renewed(why);
        tracing::info!(reason = why.as_str(), epoch = %self.life.epoch, "Began a new epoch");
    }
}

impl What {
    /// A change of an object, with its part of the digest after it.
    pub(crate) const fn object(seen: Seen, change: Change, part: Digest) -> Self {
        Self::Object { seen, change, part }
    }
}

#[cfg(test)]
mod tests;
