//! What one watch of one runtime has for its manager.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
};

use rustls_pki_types::CertificateDer;
use tidewatch_shared::{event::MAX_EVENTS, identity::Epoch, v2::Event};
use tokio::time::Instant;

/// Epochs of which a refusal is remembered; the fleet knows no more of one runtime.
const MAX_FROZEN: usize = 4;

/// What can be settled.
#[derive(Debug)]
pub(crate) struct Settled<S> {
    pub(crate) accepted: S,
    /// Epochs of which something that was accepted was neither put nor is the agent known to have seen so.
    pub(crate) except: Vec<Epoch>,
}

/// What of an epoch was refused, as far as the agent is not known to have seen so.
#[derive(Debug, Default)]
struct Frozen {
    highest: u64,
    /// Those that no request has brought again since, when there was room.
    sequences: BTreeSet<u64>,
    /// More than a request can carry, so not all of them are known.
    overflown: bool,
}

/// How often the manager has refused an object in a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Refusals {
    pub(super) count: u32,
    /// Since when each of them was for what the event is.
    pub(super) own_since: Option<Instant>,
}

/// Where a mailbox stands in its lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stands {
    #[default]
    Nowhere,
    /// It has something to send.
    Queued,
    /// All that it has to send waits until then; with the number of its place.
    Held(Instant, u64),
}

/// An object. At least one of the two tickets is there.
#[derive(Debug, Default)]
struct Entry {
    /// Ticket of the oldest event that no request has carried yet.
    waiting: Option<u64>,
    /// Ticket of the request that is on its way.
    in_flight: Option<u64>,
    refusals: Refusals,
}

/// See the module. Bounded by its objects; `S` is what the hub settles by.
#[derive(Debug)]
pub(super) struct Mailbox<S> {
    /// Tells it from an earlier one of the same name.
    pub(super) life: u64,
    /// The newest certificate that the runtime has shown.
    pub(super) leaf: Arc<CertificateDer<'static>>,
    entries: HashMap<Arc<Event>, Entry>,
    /// What waits and may go, each once, in the order in which it came.
    ready: VecDeque<Arc<Event>>,
    /// What the manager refused and what waits for its time, by that and its ticket.
    parked: BTreeMap<(Instant, u64), Arc<Event>>,
    /// Tickets of what the manager has not taken: of each entry at most two.
    open: BTreeSet<u64>,
    /// Counts events.
    last: u64,
    /// When every ticket up to this one has gone, what was accepted then is settled.
    mark: Option<(u64, Settled<S>)>,
    /// Epochs of which something was refused for want of room.
    frozen: Vec<(Epoch, Frozen)>,
    pub(super) stands: Stands,
}

impl<S> Mailbox<S> {
    pub(super) fn new(life: u64, leaf: Arc<CertificateDer<'static>>) -> Self {
        Self {
            life,
            leaf,
            entries: HashMap::new(),
            ready: VecDeque::new(),
            parked: BTreeMap::new(),
            open: BTreeSet::new(),
            last: 0,
            mark: None,
            frozen: Vec::new(),
            stands: Stands::Nowhere,
        }
    }

    /// Objects in it.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Those of them that wait because they were refused.
    pub(super) fn parked(&self) -> usize {
        self.parked.len()
    }

    pub(super) fn has(&self, event: &Event) -> bool {
        self.entries.contains_key(event)
    }

    /// Nothing is in it and nothing is remembered.
    pub(super) fn is_done(&self) -> bool {
        self.entries.is_empty() && self.frozen.is_empty()
    }

    /// Puts an event; one that waits already is the same event.
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

    /// The next event to send; never one whose object is on its way.
    pub(super) fn take(&mut self) -> Option<Arc<Event>> {
        let at = self
            .ready
            .iter()
            .position(|event| self.entries.get(event).is_some_and(|entry| entry.in_flight.is_none()))?;
        let event = self.ready.remove(at)?;
        let entry = self.entries.get_mut(&event)?;
        entry.in_flight = entry.waiting.take();
        Some(event)
    }

    /// Whether [`Self::take`] would give something.
    pub(super) fn can_take(&self) -> bool {
        self.ready.iter().any(|event| self.entries.get(event).is_some_and(|entry| entry.in_flight.is_none()))
    }

    /// What was sent is with the manager, or given up.
    pub(super) fn close(&mut self, event: &Arc<Event>) {
        let Some(entry) = self.entries.get_mut(event) else { return };
        entry.refusals = Refusals::default();
        if let Some(ticket) = entry.in_flight.take() {
            self.open.remove(&ticket);
        }
        if entry.waiting.is_none() {
            self.entries.remove(event);
        }
    }

    /// What was sent must be sent again.
    pub(super) fn reopen(&mut self, event: &Arc<Event>) {
        let Some(entry) = self.entries.get_mut(event) else { return };
        let Some(ticket) = entry.in_flight.take() else { return };
        match entry.waiting.replace(ticket) {
            // The older ticket stands for both.
            Some(later) => drop(self.open.remove(&later)),
            None => self.ready.push_back(event.clone()),
        }
    }

    /// Counts a refusal by the manager, of what the event is or of something else; returns what there were in a row.
    pub(super) fn refused(&mut self, event: &Arc<Event>, is_own: bool, now: Instant) -> Refusals {
        let Some(entry) = self.entries.get_mut(event) else { return Refusals::default() };
        let Refusals { count, own_since } = entry.refusals;
        let own_since = is_own.then(|| own_since.unwrap_or(now));
        entry.refusals = Refusals { count: count.saturating_add(1), own_since };
        entry.refusals
    }

    /// What was sent must be sent again, and not before this.
    pub(super) fn park(&mut self, event: &Arc<Event>, until: Instant) {
        let Some(entry) = self.entries.get_mut(event) else { return };
        let Some(ticket) = entry.in_flight.take() else { return };
        if let Some(later) = entry.waiting.replace(ticket) {
            self.open.remove(&later);
            self.ready.retain(|ready| ready != event);
        }
        self.parked.insert((until, ticket), event.clone());
    }

    /// What waited for its time may go; returns how much that is.
    pub(super) fn unpark(&mut self, now: Instant) -> usize {
        let mut count = 0;
        while let Some(first) = self.parked.first_entry().filter(|first| first.key().0 <= now) {
            self.ready.push_back(first.remove());
            count += 1;
        }
        count
    }

    /// Another service is asked: what the last one refused says nothing about it.
    pub(super) fn forgive(&mut self) {
        self.ready.extend(std::mem::take(&mut self.parked).into_values());
        self.entries.values_mut().for_each(|entry| entry.refusals = Refusals::default());
    }

    /// When the first of what waits for its time may go.
    pub(super) fn due(&self) -> Option<Instant> {
        self.parked.first_key_value().map(|((until, _), _)| *until)
    }

    /// Something of this epoch found no room.
    pub(super) fn freeze(&mut self, epoch: Epoch, sequence: u64) {
        let at = self.frozen.iter().position(|(known, _)| *known == epoch).unwrap_or_else(|| {
            if self.frozen.len() == MAX_FROZEN {
                self.frozen.remove(0);
            }
            self.frozen.push((epoch, Frozen::default()));
            self.frozen.len() - 1
        });
        let frozen = &mut self.frozen[at].1;
        frozen.highest = sequence.max(frozen.highest);
        if frozen.sequences.len() < MAX_EVENTS {
            frozen.sequences.insert(sequence);
        } else {
            frozen.overflown |= !frozen.sequences.contains(&sequence);
        }
    }

    /// The same event came again, and this time there was room.
    pub(super) fn found_room(&mut self, epoch: Epoch, sequence: u64) {
        self.frozen.retain_mut(|(known, frozen)| {
            if *known == epoch {
                frozen.sequences.remove(&sequence);
            }
            frozen.overflown || !frozen.sequences.is_empty()
        });
    }

    /// A request of this epoch began at this sequence. An agent has one request on its way, and sends it again as it was until it is
    /// answered: what was refused below this one, the agent has seen refused. Returns whether the epoch thawed.
    pub(super) fn heard(&mut self, epoch: Epoch, first: u64) -> bool {
        let before = self.frozen.len();
        self.frozen.retain_mut(|(known, frozen)| {
            if *known != epoch {
                return true;
            }
            frozen.sequences = frozen.sequences.split_off(&first);
            frozen.overflown &= first <= frozen.highest;
            frozen.overflown || !frozen.sequences.is_empty()
        });
        before != self.frozen.len()
    }

    pub(super) fn is_frozen(&self) -> bool {
        !self.frozen.is_empty()
    }

    /// What can be settled now, if anything; `now` is what has been accepted by now.
    pub(super) fn progress(&mut self, now: impl FnOnce() -> S) -> Option<Settled<S>> {
        // What is refused now may find room later, so what is accepted now says nothing about it then.
        let except = || self.frozen.iter().map(|(epoch, _)| *epoch).collect();
        let Some(lowest) = self.open.first() else {
            let settled = Settled { accepted: now(), except: except() };
            self.mark = None;
            return Some(settled);
        };
        if self.mark.as_ref().is_some_and(|(limit, _)| lowest <= limit) {
            return None;
        }
        let next = Settled { accepted: now(), except: except() };
        self.mark.replace((self.last, next)).map(|(_, settled)| settled)
    }
}
