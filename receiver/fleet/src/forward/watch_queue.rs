//! Pending events of one watch of one runtime for its manager.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use rustls_pki_types::CertificateDer;
use tidewatch_api::identity::Epoch;
use tidewatch_contract::{event::MAX_EVENTS, v2::Event};
use tokio::time::Instant;

/// Epochs with a remembered refusal; the fleet keeps as many epochs of a runtime.
const MAX_BLOCKED_EPOCHS: usize = 4;

/// Watermark up to which the watch is settled.
#[derive(Debug)]
pub(crate) struct Settlement<S> {
    pub(crate) accepted: S,
    /// Epochs that stay unsettled: an accepted event was not put, and the agent is not known to have seen its refusal.
    pub(crate) except: Vec<Epoch>,
}

/// Refused events of one epoch, until the agent is known to have seen their refusals.
#[derive(Debug, Default)]
struct BlockedEpoch {
    highest: u64,
    /// Sequences that no later request has delivered again and found room for.
    sequences: BTreeSet<u64>,
    /// Set when more were refused than a request can carry, so `sequences` is incomplete.
    overflown: bool,
}

/// Consecutive refusals of an object by the manager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Refusals {
    pub(super) count: u32,
    /// Start of the current series in which every refusal was about the event itself.
    pub(super) unprocessable_since: Option<Instant>,
}

/// Position of a queue in its lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum LanePosition {
    #[default]
    Idle,
    /// It has an event to send.
    Queued,
    /// It has no event to send until then.
    Delayed(Instant),
}

/// Pause of a queue whose runtime may park no further object.
#[derive(Debug)]
struct Hold {
    /// `None` once it is over.
    until: Option<Instant>,
    /// Time of the refusal that began it.
    since: Instant,
    /// Consecutive refusals, each after the pause for the one before.
    refusals: u32,
}

/// State of one object. At least one of the two tickets is set.
#[derive(Debug, Default)]
struct Entry {
    /// Ticket of the oldest event that no request has carried yet.
    waiting: Option<u64>,
    /// Ticket of the event in flight.
    in_flight: Option<u64>,
    refusals: Refusals,
}

/// Queue of one watch of one runtime, see the module. Bounded by its objects; `S` is the watermark type of the runtime
/// table.
#[derive(Debug)]
pub(super) struct WatchQueue<S> {
    /// Distinguishes this queue from an earlier one with the same key.
    pub(super) generation: u64,
    /// Newest certificate that the runtime has presented.
    pub(super) leaf: Arc<CertificateDer<'static>>,
    entries: HashMap<Arc<Event>, Entry>,
    /// Waiting events that may be sent, each once, in the order of arrival.
    ready: VecDeque<Arc<Event>>,
    /// Events that the manager refused, by retry time and ticket.
    parked: BTreeMap<(Instant, u64), Arc<Event>>,
    hold: Option<Hold>,
    /// Tickets that the manager has not taken, at most two per entry.
    open: BTreeSet<u64>,
    /// Ticket of the newest event.
    last: u64,
    /// Settlement that takes effect once every ticket up to this one is completed.
    mark: Option<(u64, Settlement<S>)>,
    /// Epochs with events that were refused for lack of room.
    blocked: Vec<(Epoch, BlockedEpoch)>,
    pub(super) position: LanePosition,
}

impl<S> WatchQueue<S> {
    pub(super) fn new(generation: u64, leaf: Arc<CertificateDer<'static>>) -> Self {
        Self {
            generation,
            leaf,
            entries: HashMap::new(),
            ready: VecDeque::new(),
            parked: BTreeMap::new(),
            hold: None,
            open: BTreeSet::new(),
            last: 0,
            mark: None,
            blocked: Vec::new(),
            position: LanePosition::Idle,
        }
    }

    /// Number of objects.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Number of objects that are parked after a refusal.
    pub(super) fn parked(&self) -> usize {
        self.parked.len()
    }

    pub(super) fn contains(&self, event: &Event) -> bool {
        self.entries.contains_key(event)
    }

    /// Returns true if no object is queued and no epoch is blocked.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.blocked.is_empty()
    }

    /// Puts an event; it coalesces with one of the same object that still waits.
    pub(super) fn put(&mut self, event: Event) {
        let event = Arc::new(event);
        let entry = self.entries.entry(event.clone()).or_default();
        self.last += 1;
        if entry.waiting.is_none() {
            entry.waiting = Some(self.last);
            self.open.insert(self.last);
            self.ready.push_back(event);
        }
    }

    /// Takes the next event to send; never an object that is in flight.
    pub(super) fn take(&mut self) -> Option<Arc<Event>> {
        let event = self.ready.remove(self.next()?)?;
        let entry = self.entries.get_mut(&event)?;
        entry.in_flight = entry.waiting.take();
        Some(event)
    }

    /// Returns true if [`Self::take`] would return an event.
    pub(super) fn can_take(&self) -> bool {
        self.next().is_some()
    }

    /// Position of the next event to send.
    fn next(&self) -> Option<usize> {
        if self.held_until().is_some() {
            return None;
        }
        let may_be_sent = |event| self.entries.get(event).is_some_and(|entry: &Entry| entry.in_flight.is_none());
        self.ready.iter().position(may_be_sent)
    }

    /// Completes an event in flight that the manager took, or that was given up.
    pub(super) fn complete(&mut self, event: &Arc<Event>) {
        let Some(entry) = self.entries.get_mut(event) else { return };
        entry.refusals = Refusals::default();
        self.hold = None;
        if let Some(ticket) = entry.in_flight.take() {
            self.open.remove(&ticket);
        }
        if entry.waiting.is_none() {
            self.entries.remove(event);
        }
    }

    /// Makes an event in flight ready again.
    pub(super) fn retry(&mut self, event: &Arc<Event>) {
        let Some(entry) = self.entries.get_mut(event) else { return };
        let Some(ticket) = entry.in_flight.take() else { return };
        match entry.waiting.replace(ticket) {
            // The older ticket represents both.
            Some(later) => drop(self.open.remove(&later)),
            None => self.ready.push_back(event.clone()),
        }
    }

    /// Counts a refusal; `is_unprocessable` means that it was about the event itself. Returns the current series.
    pub(super) fn count_refusal(&mut self, event: &Arc<Event>, is_unprocessable: bool, now: Instant) -> Refusals {
        let Some(entry) = self.entries.get_mut(event) else { return Refusals::default() };
        let Refusals { count, unprocessable_since } = entry.refusals;
        let unprocessable_since = is_unprocessable.then(|| unprocessable_since.unwrap_or(now));
        entry.refusals = Refusals { count: count.saturating_add(1), unprocessable_since };
        entry.refusals
    }

    /// Parks an event in flight until the given time.
    pub(super) fn park(&mut self, event: &Arc<Event>, until: Instant) {
        let Some(entry) = self.entries.get_mut(event) else { return };
        let Some(ticket) = entry.in_flight.take() else { return };
        if let Some(later) = entry.waiting.replace(ticket) {
            self.open.remove(&later);
            self.ready.retain(|ready| ready != event);
        }
        self.parked.insert((until, ticket), event.clone());
    }

    /// End of the hold, unless it is over.
    fn held_until(&self) -> Option<Instant> {
        self.hold.as_ref()?.until
    }

    /// Holds all events back after a refusal of one that was sent at `sent` and cannot be parked. `delay` computes the delay
    /// after this many refusals in succession.
    pub(super) fn hold(&mut self, sent: Instant, delay: impl FnOnce(u32) -> Duration, now: Instant) {
        let refusals = match &self.hold {
            // A refusal of a request that was in flight then is no further one.
            Some(hold) if sent <= hold.since => return,
            hold => hold.as_ref().map_or(0, |hold| hold.refusals).saturating_add(1),
        };
        self.hold = Some(Hold { until: Some(now + delay(refusals)), since: now, refusals });
    }

    /// Makes parked events ready that are due for a retry, and ends a hold that is over; returns the number of events.
    pub(super) fn unpark(&mut self, now: Instant) -> usize {
        if let Some(hold) = &mut self.hold {
            hold.until = hold.until.filter(|until| *until > now);
        }
        let mut count = 0;
        while let Some(first) = self.parked.first_entry().filter(|first| first.key().0 <= now) {
            self.ready.push_back(first.remove());
            count += 1;
        }
        count
    }

    /// Makes all parked events ready and forgets refusals, because another service serves the watch now.
    pub(super) fn reset_refusals(&mut self) {
        self.ready.extend(std::mem::take(&mut self.parked).into_values());
        self.entries.values_mut().for_each(|entry| entry.refusals = Refusals::default());
        self.hold = None;
    }

    /// Time of the first retry of a parked event, or the end of the hold.
    pub(super) fn next_retry(&self) -> Option<Instant> {
        if let Some(until) = self.held_until() {
            return (!self.entries.is_empty()).then_some(until);
        }
        self.parked.first_key_value().map(|((until, _), _)| *until)
    }

    /// Blocks the settlement of an epoch after one of its events found no room.
    pub(super) fn block(&mut self, epoch: Epoch, sequence: u64) {
        let at = self.blocked.iter().position(|(known, _)| *known == epoch).unwrap_or_else(|| {
            if self.blocked.len() == MAX_BLOCKED_EPOCHS {
                self.blocked.remove(0);
            }
            self.blocked.push((epoch, BlockedEpoch::default()));
            self.blocked.len() - 1
        });
        let blocked = &mut self.blocked[at].1;
        blocked.highest = sequence.max(blocked.highest);
        if blocked.sequences.len() < MAX_EVENTS {
            blocked.sequences.insert(sequence);
        } else {
            blocked.overflown |= !blocked.sequences.contains(&sequence);
        }
    }

    /// Removes the block of one event that was sent again and found room.
    pub(super) fn found_room(&mut self, epoch: Epoch, sequence: u64) {
        self.blocked.retain_mut(|(known, blocked)| {
            if *known == epoch {
                blocked.sequences.remove(&sequence);
            }
            blocked.overflown || !blocked.sequences.is_empty()
        });
    }

    /// Releases refusals below `first`, the lowest sequence of a new request of this epoch. An agent has one request in
    /// flight and repeats it unchanged until it is answered, so it has seen every refusal below `first`. Returns true
    /// if the epoch is released.
    pub(super) fn answered_below(&mut self, epoch: Epoch, first: u64) -> bool {
        let before = self.blocked.len();
        self.blocked.retain_mut(|(known, blocked)| {
            if *known != epoch {
                return true;
            }
            blocked.sequences = blocked.sequences.split_off(&first);
            blocked.overflown &= first <= blocked.highest;
            blocked.overflown || !blocked.sequences.is_empty()
        });
        before != self.blocked.len()
    }

    /// Returns the new settlement, if any; `now` returns the watermark accepted by now.
    pub(super) fn progress(&mut self, now: impl FnOnce() -> S) -> Option<Settlement<S>> {
        // A refused event may find room later, so the current watermark does not cover its epoch.
        let except = || self.blocked.iter().map(|(epoch, _)| *epoch).collect();
        let Some(lowest) = self.open.first() else {
            let settled = Settlement { accepted: now(), except: except() };
            self.mark = None;
            return Some(settled);
        };
        if self.mark.as_ref().is_some_and(|(limit, _)| lowest <= limit) {
            return None;
        }
        let next = Settlement { accepted: now(), except: except() };
        self.mark.replace((self.last, next)).map(|(_, settled)| settled)
    }
}
