//! Dirty set of all watches, with the rules of the wire contract on sequences, epochs, acceptance and settling. Pure: time,
//! randomness and digests are arguments, requests are returned as bytes.
//!
//! An entry is keyed by (watch, object) and the newest state wins. It is *waiting*, then in flight, then *accepted*,
//! and is removed only when *settled*; an object can be sent and waiting again at the same time. One request is in
//! flight at a time and is retried until it is answered, so the sequences of an epoch have no gaps.
//!
//! On overflow of one watch, a single `watch.changed` replaces its entries. The events of a *forwarded* watch go to
//! another manager, which understands single objects only. So on overflow of a forwarded watch, every object that
//! exists is sent again as capacity permits (`sweep`), and the deletions are kept; if the deletions alone are too many,
//! the `watch.changed` is marked *unnamed*: it covers objects with unknown names.
//!
//! Invariant of the digests, per watch: the index digest minus the deltas that wait equals the digest of everything
//! sent, which is the remembered digest. The only exception is between the end of a list and its `watch.changed`, which
//! carries the difference as its delta.

mod dirty_set;
mod entry;
mod in_flight;
mod limits;
mod overflow;
mod refusal;
mod resend_backoff;
mod sweep;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
    sync::Arc,
};

use bytes::Bytes;
use tidewatch_api::identity::{Epoch, Instance, RuntimeId};
use tidewatch_contract::{
    digest::Digest,
    event::{EventId, Reason},
    exchange::{EventsResponse, Settled},
    signature::Nonce,
};
use tidewatch_kit::variant::VariantName as _;
use tokio::time::Instant;

pub(crate) use entry::{EpochReason, EpochState, Update, WatchInfo};
pub use limits::AnnouncedLimits;

use crate::telemetry::Metrics;
use dirty_set::{DirtySet, WATCH_KEY};
use entry::Parking;
use in_flight::{InFlight, SequencedEvent};
use limits::RequestLimits;
use resend_backoff::ResendBackoff;

/// Events per request. Below the limit of the contract, because request bodies dominate the allocations of a busy
/// agent.
const EVENTS_PER_REQUEST: usize = 250;
/// Number of watch names with a remembered digest above which a new epoch drops those that have left the plan.
const REMEMBERED: usize = 1_000;

/// Looks up the digest of a watch in the index; `None` until its list is complete.
pub(crate) type Digests<'a> = &'a dyn Fn(&str) -> Option<Digest>;

/// A batch to send, with the data needed to process its response.
#[derive(Debug)]
pub struct Batch {
    /// Epoch of the events.
    pub epoch: Epoch,
    /// Nonce to sign the request with.
    pub nonce: Nonce,
    /// Events as a JSON array.
    pub body: Bytes,
    /// Number of events in the body.
    pub events: usize,
    /// True if its first event has been sent before.
    pub again: bool,
}

/// Dirty set of all watches and state of the current epoch; see the module.
pub(crate) struct Outbox {
    pub(crate) runtime: RuntimeId,
    pub(crate) epoch_state: EpochState,
    /// Receiver instance that answered last.
    pub(crate) instance: Option<Instance>,
    watches: BTreeMap<Arc<str>, DirtySet>,
    /// Digest of everything sent of each watch, by watch name; kept for the whole epoch, also after the watch has left
    /// the plan.
    remembered: BTreeMap<Arc<str>, Digest>,
    in_flight: Option<InFlight>,
    /// Time of the next retry of the events that are parked for a limited time ([`Parking::Temporary`]).
    parked_until: Option<Instant>,
    /// Maximum number of events in the next request: halved when a request is refused as a whole, doubled on success.
    batch_limit: usize,
    /// Request limits of the current receiver instance.
    limits: RequestLimits,
    resend_backoff: ResendBackoff,
    /// Watch that was served last; the next request begins with its successor (round-robin).
    served: Option<Arc<str>>,
    random_bits: Box<dyn FnMut() -> u64 + Send>,
    metrics: Metrics,
}

impl Outbox {
    /// Creates an empty outbox with a fresh epoch; `random_bits` returns 64 random bits.
    pub(crate) fn new(runtime: RuntimeId, mut random_bits: Box<dyn FnMut() -> u64 + Send>, metrics: Metrics) -> Self {
        Self {
            runtime,
            epoch_state: EpochState::new(Epoch::new(random_bits())),
            instance: None,
            watches: BTreeMap::new(),
            remembered: BTreeMap::new(),
            in_flight: None,
            parked_until: None,
            batch_limit: EVENTS_PER_REQUEST,
            limits: RequestLimits::default(),
            resend_backoff: ResendBackoff::default(),
            served: None,
            random_bits,
            metrics,
        }
    }

    /// Starts or restarts a watch with an empty dirty set; its first list marks the watch as changed.
    pub(crate) fn open(&mut self, watch: Arc<str>, info: WatchInfo) {
        self.watches.insert(watch, DirtySet::new(info));
    }

    /// Drops a watch that has left the plan, with its pending events. Events in flight are still sent, so that the
    /// sequence has no gap.
    pub(crate) fn close(&mut self, watch: &str) {
        self.watches.remove(watch);
        if self.remembered.len() > REMEMBERED {
            self.begin_epoch(EpochReason::Names);
        }
    }

    /// Sets the version and kind that discovery has resolved for a watch.
    pub(crate) fn describe(&mut self, watch: &str, version: &str, kind: &str) {
        if let Some(dirty_set) = self.watches.get_mut(watch) {
            dirty_set.info.version = version.into();
            dirty_set.info.kind = kind.into();
        }
    }

    /// Enqueues a changed object, also if an earlier event of it is in flight or accepted.
    pub(crate) fn mark(&mut self, watch: &str, key: &str, object: Update, before: Digest, at: i64) {
        if self.watches.get_mut(watch).is_some_and(|dirty_set| dirty_set.mark(key, object, before, at)) {
            self.metrics.coalesced.inc();
        }
    }

    /// Enqueues an object that was created while its watch was running, so that no event has been sent of it yet.
    pub(crate) fn mark_created(&mut self, watch: &str, key: &str, object: Update, at: i64) {
        let Some(dirty_set) = self.watches.get_mut(watch) else { return };
        if dirty_set.mark(key, object, Digest::ZERO, at) {
            self.metrics.coalesced.inc();
        } else {
            dirty_set.mark_unannounced(key);
        }
    }

    /// Enqueues a `watch.changed`, for changes that were not observed one by one.
    pub(crate) fn mark_watch(&mut self, watch: &str, at: i64) {
        self.mark(watch, WATCH_KEY, Update::Watch, Digest::ZERO, at);
    }

    /// True if no batch is in flight.
    pub(crate) const fn is_free(&self) -> bool {
        self.in_flight.is_none()
    }

    /// Number of objects of a watch that are waiting, parked, or sent and not settled.
    pub(crate) fn dirty(&self, watch: &str) -> usize {
        self.watches.get(watch).map_or(0, DirtySet::dirty)
    }

    /// Number of dirty objects of all watches.
    pub(crate) fn total_dirty(&self) -> usize {
        self.watches.values().map(DirtySet::dirty).sum()
    }

    /// Memory of the dirty objects of all watches at most, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.watches.values().map(DirtySet::bytes).sum()
    }

    /// Watch whose dirty objects need the most memory.
    pub(crate) fn dirtiest(&self) -> Option<Arc<str>> {
        self.watches.iter().max_by_key(|(_, dirty_set)| dirty_set.bytes()).map(|(name, _)| name.clone())
    }

    /// Retries everything that is parked or delayed, because another plan is in effect.
    pub(crate) fn plan_changed(&mut self) {
        self.parked_until = None;
        for dirty_set in self.watches.values_mut() {
            dirty_set.release();
        }
    }

    /// Number of events that wait to be sent.
    pub(crate) fn waiting(&self) -> usize {
        self.watches.values().map(DirtySet::waiting).sum()
    }

    /// Number of parked events, which are retried later or under another plan.
    pub(crate) fn parked(&self) -> usize {
        self.watches.values().map(DirtySet::parked).sum()
    }

    /// Number of events that were sent and are not settled.
    pub(crate) fn unsettled(&self) -> usize {
        self.watches.values().map(DirtySet::unsettled).sum()
    }

    /// Number of times that the receiver lacked an event that had been sent.
    pub(crate) fn gaps(&self) -> u64 {
        self.metrics.epochs(EpochReason::Forgotten.as_str())
    }

    /// Earliest time of the next request; `None` when there is nothing to send.
    pub(crate) fn due(&self, now: Instant) -> Option<Instant> {
        let after_backoff = |at: Instant| self.resend_backoff.until.map_or(at, |until| until.max(at));
        if self.in_flight.is_some() {
            return Some(after_backoff(now));
        }
        // Events that wait, and those that are parked for a limited time.
        let waiting = self.watches.values().filter_map(|dirty_set| dirty_set.due(now));
        waiting.chain(self.parked_until.filter(|_| self.parked() > 0)).min().map(after_backoff)
    }

    /// Digest of everything sent of a watch: its index digest minus the deltas that wait. `None` until its list is
    /// complete and the `watch.changed` of that list has been sent.
    pub(crate) fn sent_digest(&self, watch: &str, digests: Digests<'_>) -> Option<Digest> {
        let dirty_set = self.watches.get(watch)?;
        // A parked `watch.changed` covers objects as well: their own entries may have been dropped for it.
        let is_incomplete = dirty_set.has_watch_waiting() || dirty_set.has_watch_parked();
        (!is_incomplete).then(|| digests(watch).map(|digest| digest - dirty_set.outstanding())).flatten()
    }

    /// Digest of everything sent of closed watches whose names have a prefix. The receiver adds up the deltas of a watch
    /// of the plan, so it counts them until the next epoch.
    pub(crate) fn closed_digest(&self, prefix: &str) -> Digest {
        let named = self.remembered.range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
        let named = named.take_while(|(name, _)| name.starts_with(prefix));
        let closed = named.filter(|(name, _)| !self.watches.contains_key(*name));
        closed.fold(Digest::ZERO, |sum, (_, digest)| sum + *digest)
    }

    /// Counters of the next heartbeat, which include it, and the nonce of its request.
    pub(crate) fn heartbeat(&mut self) -> (EpochState, Nonce) {
        self.epoch_state.heartbeats += 1;
        let nonce = self.nonce();
        (self.epoch_state, nonce)
    }

    /// Returns the next request, or the unanswered one again; `None` when nothing is due.
    pub(crate) fn request(&mut self, now: Instant, digests: Digests<'_>) -> Option<Batch> {
        if self.resend_backoff.until.is_some_and(|until| until > now) {
            return None;
        }
        if self.in_flight.is_none() {
            self.unpark(now);
            self.in_flight = self.assemble(now, digests);
        }
        let in_flight = self.in_flight.as_mut()?;
        let again = in_flight.begin(self.batch_limit.min(self.limits.events), self.limits.bytes);
        let body = in_flight.body();
        let events = in_flight.outstanding;
        let epoch = self.epoch_state.epoch;
        let nonce = self.nonce();
        Some(Batch { epoch, nonce, body, events, again })
    }

    /// Draws the nonce of one more signed request of this epoch.
    pub(crate) fn nonce(&mut self) -> Nonce {
        self.epoch_state.nonces += 1;
        Nonce { epoch: self.epoch_state.epoch, counter: self.epoch_state.nonces }
    }

    fn assemble(&mut self, now: Instant, digests: Digests<'_>) -> Option<InFlight> {
        let mut events = Vec::new();
        for name in self.round_robin() {
            let room = EVENTS_PER_REQUEST - events.len();
            if room == 0 {
                break;
            }
            self.assign_sequences(&name, room, now, digests, &mut events);
        }
        InFlight::new(events)
    }

    /// All watches, beginning with the successor of the one that was served last.
    fn round_robin(&self) -> Vec<Arc<str>> {
        let behind = self.served.clone().map_or(Bound::Unbounded, Bound::Excluded);
        let names: Vec<Arc<str>> =
            self.watches.range((behind, Bound::Unbounded)).map(|(name, _)| name.clone()).collect();
        let rest = self.watches.keys().take(self.watches.len() - names.len()).cloned();
        names.into_iter().chain(rest).collect()
    }

    /// Assigns sequences to the waiting events of one watch, at most `room`, and encodes them.
    fn assign_sequences(
        &mut self,
        name: &Arc<str>,
        room: usize,
        now: Instant,
        digests: Digests<'_>,
        events: &mut Vec<SequencedEvent>,
    ) {
        let Some(dirty_set) = self.watches.get_mut(name) else { return };
        if dirty_set.due(now).is_none_or(|due| due > now) {
            return;
        }
        let remembered = self.remembered.entry(name.clone()).or_default();
        for _ in 0..room {
            // The delta of a `watch.changed` excludes objects that wait beside it: their own events carry their deltas.
            let others = if dirty_set.has_watch_waiting() { Some(dirty_set.outstanding()) } else { None };
            let Some((key, waiting)) = dirty_set.next() else { break };
            let delta = match &waiting.update {
                Update::Object { part, .. } => *part - waiting.base,
                Update::Watch | Update::Unnamed => {
                    digests(name).map_or(Digest::ZERO, |digest| digest - others.unwrap_or_default() - *remembered)
                }
            };
            *remembered += delta;
            self.epoch_state.sequence += 1;
            let id = EventId { epoch: self.epoch_state.epoch, sequence: self.epoch_state.sequence };
            let text = in_flight::encode(&self.runtime, id, &dirty_set.info, &key, &waiting, delta);
            let is_watch = key.is_empty();
            if is_watch {
                dirty_set.space_coarse(now);
            }
            events.push(SequencedEvent {
                sequence: id.sequence,
                watch: name.clone(),
                key: key.clone(),
                delta,
                is_watch,
                since: waiting.since,
                text,
            });
            self.metrics.sequenced(waiting.update.as_str(), waiting.since);
            dirty_set.sent(key, id.sequence, waiting);
        }
        self.served = Some(name.clone());
    }

    /// Processes the response to a batch of an epoch.
    pub(crate) fn apply_response(&mut self, now: Instant, epoch: Epoch, response: &EventsResponse) {
        self.observe_instance(now, response.instance);
        let ours = epoch == self.epoch_state.epoch;
        let Some(mut in_flight) = ours.then(|| self.in_flight.take()).flatten() else { return };
        let answered = in_flight.take_answered();
        let last = answered.last().map_or(0, |event| event.sequence);
        let refused = refusal::by_sequence(epoch, response);
        let mut again = Vec::new();
        let mut parked = false;
        let mut clean: BTreeSet<Arc<str>> = answered.iter().map(|event| event.watch.clone()).collect();
        for event in answered {
            if let Some(reason) = refused.get(&event.sequence) {
                self.metrics.refused(reason.as_str());
            }
            match refused.get(&event.sequence) {
                None => self.metrics.accepted(event.since),
                Some(Reason::UnknownWatch) => {
                    if let Some(dirty_set) = self.watches.get_mut(&event.watch) {
                        dirty_set.requeue(&event.key, event.sequence);
                        if clean.remove(&event.watch) {
                            dirty_set.refused(now);
                        }
                    }
                }
                Some(_) => parked |= !self.replace(event, Parking::UntilPlanChange, &mut again),
            }
        }
        for watch in clean {
            self.watches.get_mut(&watch).into_iter().for_each(DirtySet::clear_hold);
        }
        let unreplaced = again.is_empty();
        in_flight.prepend(again);
        self.in_flight = in_flight.non_empty();
        self.batch_limit = (self.batch_limit * 2).min(EVENTS_PER_REQUEST);
        if parked {
            return self.begin_epoch(EpochReason::Parked);
        }
        // A gap left by a refusal is filled by the replacement event. Any other gap means that the receiver lost an
        // event that it had accepted.
        if response.accepted < self.epoch_state.accepted
            || (unreplaced && response.accepted < last)
            || self.has_unsettled_below(response.since)
        {
            self.resend_backoff.trigger(now);
            return self.begin_epoch(EpochReason::Forgotten);
        }
        self.epoch_state.accepted = response.accepted;
        self.settle(&response.settled);
    }

    /// Processes the response to a heartbeat of an epoch; true if that epoch is the current one. The settled watermarks
    /// do not cover sequences below `since`, which the receiver has lost: if an unsettled event lies there, a new epoch
    /// begins.
    pub(crate) fn apply_heartbeat_response(
        &mut self,
        now: Instant,
        epoch: Epoch,
        instance: Instance,
        since: Option<u64>,
        settled: &Settled,
    ) -> bool {
        self.observe_instance(now, instance);
        let ours = epoch == self.epoch_state.epoch;
        if ours && since.is_some_and(|since| self.has_unsettled_below(since)) {
            self.resend_backoff.trigger(now);
            self.begin_epoch(EpochReason::Forgotten);
        } else if ours {
            self.settle(settled);
        }
        ours
    }

    /// True if an event below this sequence is sent and not settled.
    fn has_unsettled_below(&self, since: u64) -> bool {
        self.watches.values().filter_map(DirtySet::oldest).any(|sequence| sequence < since)
    }

    /// Compares the receiver instance with the last known one, before any other field of a response is processed; on a
    /// change, limits are reset and a new epoch begins.
    fn observe_instance(&mut self, now: Instant, instance: Instance) {
        if self.instance.replace(instance).is_some_and(|known| known != instance) {
            self.resend_backoff.trigger(now);
            self.plan_changed();
            self.limits = RequestLimits::default();
            self.begin_epoch(EpochReason::Instance);
        }
    }

    fn settle(&mut self, settled: &Settled) {
        for dirty_set in self.watches.values_mut() {
            if let Some(up_to) = settled.get(&*dirty_set.info.watch) {
                dirty_set.settle((*up_to).min(self.epoch_state.sequence), |since| self.metrics.settled(since));
            }
        }
    }

    /// Begins a new epoch: everything that is sent and not settled is sent again, with new counters.
    pub(crate) fn begin_epoch(&mut self, reason: EpochReason) {
        self.epoch_state = EpochState::new(Epoch::new((self.random_bits)()));
        self.in_flight = None;
        self.watches.values_mut().for_each(DirtySet::requeue_all);
        self.remembered.retain(|watch, _| self.watches.contains_key(watch));
        self.metrics.epoch_begun(reason.as_str());
        tracing::info!(reason = reason.as_str(), epoch = %self.epoch_state.epoch, "Began a new epoch");
    }
}

#[cfg(test)]
mod tests;
