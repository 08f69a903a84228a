//! The dirty set of one watch.

use std::{
    collections::BTreeMap,
    ops::Bound::{Excluded, Unbounded},
    sync::Arc,
    time::Duration,
};

use tidewatch_shared::{digest::Digest, event::Change};
use tokio::time::Instant;

use super::{
    Facts,
    single::Tried,
    sweep::{Sweep, Swept},
};
use crate::{
    index::{Index, Seen},
    random,
};

/// The key of the watch itself, for `watch.changed`. No object has it: their keys hold a `/`.
pub(super) const WHOLE: &str = "";
/// A watch that the receiver does not know is tried again after at most this time.
const UNKNOWN_WATCH_CAP: Duration = Duration::from_secs(300);

/// What an event tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// Something in the watch moved.
    Whole,
    /// The same, and it moved objects of which no event tells: only of a watch that goes to another manager.
    Unnamed,
    /// An object changed.
    Object {
        /// Its newest state; for a deleted one the last.
        seen: Seen,
        /// The weightiest change since it was last settled.
        change: Change,
        /// Its part of the digest now.
        part: Digest,
    },
}

#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub(super) what: What,
    /// The object's part of the digest as it was last sent.
    pub(super) base: Digest,
    /// When the agent saw it first, in Unix milliseconds.
    pub(super) since: i64,
    /// The object came while the watch was followed, and nobody has been told so: should it go, nobody need be told that either.
    pub(super) unheard: bool,
    /// Only in contract v2.
    pub(super) tried: Tried,
}

impl Waiting {
    /// What nobody was told yet.
    pub(super) fn new(what: What, base: Digest, since: i64) -> Self {
        Self { what, base, since, unheard: false, tried: Tried::default() }
    }

    fn is_gone(&self) -> bool {
        matches!(self.what, What::Object { change: Change::Deleted, .. })
    }
}

/// What became of single objects for which there was no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Forgotten {
    /// There were some.
    pub(super) any: bool,
    /// Of some that went nobody can tell any more which they were, and their manager must know that.
    pub(super) unnamed: bool,
}

/// For how long an event is parked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parking {
    /// The receiver has read it and named it: until there is another plan, or another instance.
    Named,
    /// Nobody has: for some time.
    ForNow,
}

#[derive(Debug)]
struct Parked {
    parking: Parking,
    waiting: Waiting,
}

#[derive(Debug)]
struct Sent {
    sequence: u64,
    waiting: Waiting,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Mailbox {
    facts: Facts,
    waiting: BTreeMap<Arc<str>, Waiting>,
    /// In flight or accepted: the newest event of each key, until it is settled.
    sent: BTreeMap<Arc<str>, Sent>,
    /// The keys of `sent` by sequence.
    order: BTreeMap<u64, Arc<str>>,
    /// A key that is here does not wait.
    parked: BTreeMap<Arc<str>, Parked>,
    sweep: Sweep,
    /// The key that was taken last: the next one is behind it, so that no key starves.
    cursor: Arc<str>,
    hold: Option<Instant>,
    refusals: u32,
}

impl Mailbox {
    pub(super) fn new(facts: Facts) -> Self {
        Self {
            facts,
            waiting: BTreeMap::new(),
            sent: BTreeMap::new(),
            order: BTreeMap::new(),
            parked: BTreeMap::new(),
            sweep: Sweep::default(),
            cursor: WHOLE.into(),
            hold: None,
            refusals: 0,
        }
    }

    pub(super) const fn facts(&self) -> &Facts {
        &self.facts
    }

    pub(super) fn describe(&mut self, version: &str, kind: &str) {
        self.facts.version = version.into();
        self.facts.kind = kind.into();
    }

    /// Events that wait; objects that are still to be swept count as one.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len() + usize::from(self.sweep.is_under_way())
    }

    pub(super) fn parked(&self) -> usize {
        self.parked.len()
    }

    pub(super) fn unsettled(&self) -> usize {
        self.sent.len()
    }

    pub(super) fn dirty(&self) -> usize {
        self.waiting.len() + self.sent.len() + self.parked.len()
    }

    pub(super) fn waits_whole(&self) -> bool {
        self.waiting.contains_key(WHOLE)
    }

    pub(super) fn parks_whole(&self) -> bool {
        self.parked.contains_key(WHOLE)
    }

    /// When something may be sent; `None` when nothing waits.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        (!self.waiting.is_empty()).then(|| self.hold.map_or(now, |hold| hold.max(now)))
    }

    /// What the index has beyond what was sent.
    pub(super) fn outstanding(&self) -> Digest {
        let beyond = |waiting: &Waiting| match &waiting.what {
            What::Whole | What::Unnamed => Digest::ZERO,
            What::Object { part, .. } => *part - waiting.base,
        };
        self.unsent().map(beyond).fold(Digest::ZERO, |sum, part| sum + part)
    }

    fn unsent(&self) -> impl Iterator<Item = &Waiting> {
        self.waiting.values().chain(self.parked.values().map(|parked| &parked.waiting))
    }

    /// What is parked, or else what waits.
    fn held(&mut self, key: &str) -> Option<&mut Waiting> {
        match self.parked.get_mut(key) {
            Some(parked) => Some(&mut parked.waiting),
            None => self.waiting.get_mut(key),
        }
    }

    /// See [`super::Outbox::mark`]. `before` is the object's part of the digest before this change. True if the change went into an
    /// event that had not been sent.
    pub(super) fn mark(&mut self, key: &str, what: What, before: Digest, at: i64) -> bool {
        match self.held(key) {
            Some(waiting) => {
                waiting.what = merge(&waiting.what, what);
                true
            }
            None => {
                self.waiting.insert(key.into(), Waiting::new(what, before, at));
                false
            }
        }
    }

    /// What was just marked came while the watch was followed.
    pub(super) fn born(&mut self, key: &str) {
        if let Some(waiting) = self.waiting.get_mut(key).filter(|_| !self.sent.contains_key(key)) {
            waiting.unheard = true;
        }
    }

    /// Every object that is there is to be told, as there is room.
    pub(super) fn tell_all(&mut self, at: i64) {
        self.sweep.begin(at);
    }

    pub(super) fn is_sweeping(&self) -> bool {
        self.sweep.is_under_way()
    }

    /// Marks the next objects of the sweep, at most so many.
    pub(super) fn sweep(&mut self, room: usize, index: &Index) {
        for Swept { key, seen, part, since } in self.sweep.take(room, index) {
            if !self.parked.contains_key(&key) {
                let what = What::object(seen, Change::Status, part);
                self.waiting.entry(key).or_insert(Waiting::new(what, part, since));
            }
        }
    }

    /// The next event to send, a whole watch first.
    pub(super) fn next(&mut self) -> Option<(Arc<str>, Waiting)> {
        let behind = || self.waiting.range::<str, _>((Excluded(&*self.cursor), Unbounded)).next();
        let whole = || self.waiting.get_key_value(WHOLE);
        let key = whole().or_else(behind).or_else(|| self.waiting.first_key_value()).map(|(key, _)| key.clone())?;
        let waiting = self.waiting.remove(&key)?;
        self.cursor = key.clone();
        Some((key, waiting))
    }

    /// An event has its sequence now; an older one of the same key is settled with it.
    pub(super) fn sent(&mut self, key: Arc<str>, sequence: u64, mut waiting: Waiting) {
        if let Some(older) = self.sent.remove(&key) {
            self.order.remove(&older.sequence);
            waiting.what = merge(&older.waiting.what, waiting.what);
        }
        if let What::Object { part, .. } = waiting.what {
            waiting.base = part;
        }
        waiting.unheard = false;
        self.order.insert(sequence, key.clone());
        self.sent.insert(key, Sent { sequence, waiting });
    }

    /// This very event, if it is sent and not settled.
    pub(super) fn flying(&mut self, key: &str, sequence: u64) -> Option<&mut Waiting> {
        self.sent.get_mut(key).filter(|sent| sent.sequence == sequence).map(|sent| &mut sent.waiting)
    }

    /// The lowest sequence that is not settled.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.order.first_key_value().map(|(sequence, _)| *sequence)
    }

    /// Everything up to a sequence is settled; what waits is not touched. `each` is told when the change was seen.
    pub(super) fn settle(&mut self, up_to: u64, mut each: impl FnMut(i64)) {
        let rest = self.order.split_off(&up_to.saturating_add(1));
        for key in std::mem::replace(&mut self.order, rest).into_values() {
            if let Some(sent) = self.sent.remove(&key) {
                each(sent.waiting.since);
            }
        }
    }

    /// A new epoch: what was sent waits again.
    pub(super) fn undo(&mut self) {
        self.order.clear();
        for (key, sent) in std::mem::take(&mut self.sent) {
            self.put_back(key, sent.waiting);
        }
    }

    /// The receiver does not know this watch (yet): the event waits again and will get a new sequence.
    pub(super) fn wait_again(&mut self, key: &str, sequence: u64) {
        if let Some((key, waiting)) = self.take_back(key, sequence) {
            self.put_back(key, waiting);
        }
    }

    /// This event cannot be sent.
    pub(super) fn park(&mut self, key: &str, sequence: u64, parking: Parking) {
        if let Some((key, sent)) = self.take_back(key, sequence) {
            self.put_back(key.clone(), sent);
            if let Some(mut waiting) = self.waiting.remove(&key) {
                waiting.tried = Tried::default();
                self.parked.insert(key, Parked { parking, waiting });
            }
        }
    }

    fn take_back(&mut self, key: &str, sequence: u64) -> Option<(Arc<str>, Waiting)> {
        self.sent.get(key).filter(|sent| sent.sequence == sequence)?;
        self.order.remove(&sequence);
        self.sent.remove_entry(key).map(|(key, sent)| (key, sent.waiting))
    }

    /// A newer state that waits already wins; its delta stays against what was last sent.
    fn put_back(&mut self, key: Arc<str>, old: Waiting) {
        match self.held(&key) {
            Some(newer) => {
                newer.what = merge(&old.what, newer.what.clone());
                newer.since = old.since;
                newer.unheard = false;
                newer.tried = old.tried;
            }
            None => {
                self.waiting.insert(key, old);
            }
        }
    }

    /// The receiver knows no such watch: the next try waits, up to five minutes.
    pub(super) fn refused(&mut self, now: Instant) {
        self.refusals = self.refusals.saturating_add(1);
        let wait = Duration::from_secs(1 << self.refusals.min(10)).min(UNKNOWN_WATCH_CAP);
        // Between half and all of it: never at once, or two sides with different plans would spin.
        self.hold = Some(now + wait / 2 + random::up_to(wait / 2));
    }

    /// An event of this watch was taken.
    pub(super) fn welcomed(&mut self) {
        self.refusals = 0;
        self.hold = None;
    }

    /// What was parked or held is tried again.
    pub(super) fn release(&mut self) {
        self.welcomed();
        self.waiting.extend(std::mem::take(&mut self.parked).into_iter().map(|(key, parked)| (key, parked.waiting)));
    }

    /// What was parked for now is tried again. What is held stays so.
    pub(super) fn unpark(&mut self) {
        let parked = self.parked.extract_if(.., |_, parked| parked.parking == Parking::ForNow);
        self.waiting.extend(parked.map(|(key, parked)| (key, parked.waiting)));
    }

    /// Objects that came and went and that their manager never heard of. True if no more than `enough` is left, the watch itself aside;
    /// what does not go to another manager has another remedy.
    pub(super) fn forget_unheard(&mut self, enough: usize) -> bool {
        if self.facts.forward {
            self.waiting.retain(|_, waiting| !(waiting.unheard && waiting.is_gone()));
        }
        let wholes = usize::from(self.waits_whole()) + usize::from(self.parks_whole());
        let wholes = wholes + usize::from(self.sent.contains_key(WHOLE));
        self.facts.forward && self.dirty() - wholes <= enough
    }

    /// Only the watch itself stays dirty. If it goes to another manager, every object that is there will be told again, and those that
    /// went stay too, unless they are more than `keep`.
    pub(super) fn forget_objects(&mut self, keep: usize, at: i64) -> Forgotten {
        let before = self.dirty();
        let mut unnamed = false;
        if self.facts.forward {
            unnamed = self.gone() > keep;
            self.sweep.begin(at);
        }
        let keeps_gone = self.facts.forward && !unnamed;
        let stays = |key: &str, waiting: &Waiting| key == WHOLE || (keeps_gone && waiting.is_gone());
        self.waiting.retain(|key, waiting| stays(key, waiting));
        self.parked.retain(|key, parked| stays(key, &parked.waiting));
        self.sent.retain(|key, sent| stays(key, &sent.waiting));
        let sent = &self.sent;
        self.order.retain(|_, key| sent.contains_key(key));
        Forgotten { any: self.dirty() < before, unnamed }
    }

    /// The same where nobody knows the objects any more. True if there was more than the watch itself.
    pub(super) fn give_up_objects(&mut self, at: i64) -> bool {
        let forgotten = self.forget_objects(0, at);
        self.sweep.end();
        forgotten.any
    }

    /// Entries of objects that went.
    fn gone(&self) -> usize {
        self.unsent().chain(self.sent.values().map(|sent| &sent.waiting)).filter(|waiting| waiting.is_gone()).count()
    }
}

/// Newest wins, but a lighter change does not hide a weightier one that was not told yet.
fn merge(old: &What, new: What) -> What {
    if matches!((old, &new), (What::Unnamed, What::Whole)) {
        return What::Unnamed;
    }
    let (What::Object { change: before, .. }, What::Object { seen, change, part }) = (old, &new) else {
        return new;
    };
    What::Object { seen: seen.clone(), change: weightier(*before, *change), part: *part }
}

fn weightier(old: Change, new: Change) -> Change {
    let weight = |change| match change {
        Change::Status => 0,
        Change::Metadata => 1,
        Change::Spec => 2,
        Change::Created => 3,
        Change::Deleted => 4,
    };
    match (old, new) {
        // What is there is never told as deleted, and what is gone never as anything else.
        (Change::Deleted, _) | (_, Change::Deleted) => new,
        _ if weight(old) > weight(new) => old,
        _ => new,
    }
}
