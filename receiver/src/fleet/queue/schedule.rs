//! The queue itself.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    time::Duration,
};

use tidewatch_shared::plan::Work;
use tokio::time::Instant;

use super::{Outcome, Priority, Wanted, Works, wanted::merge_into};
use crate::base::{class::Class, random::Random};

/// A user's change of a Kyma in backoff is tried no more often than this.
const USER_SPACING: Duration = Duration::from_secs(5);

/// A pass that takes longer tells that its runtime is slow, however well the pass ended.
const SLOW: Duration = Duration::from_secs(10);
/// How long a pass may take beside all others: longer than any call to a runtime, shorter than anybody else should wait for a slot.
const PATIENCE: Duration = Duration::from_secs(45);
/// How long it may take apart from them.
const PATIENCE_WITH_SLOW: Duration = Duration::from_secs(300);

/// In what order one pop in eight looks at the priorities: the lower two come first once each, so nothing starves them.
const TURNS: [[Priority; 3]; 8] = {
    use Priority::{Catalog, User, Verification};
    const URGENT: [Priority; 3] = [User, Catalog, Verification];
    const CATALOG: [Priority; 3] = [Catalog, User, Verification];
    const VERIFICATION: [Priority; 3] = [Verification, Catalog, User];
    [URGENT, URGENT, URGENT, CATALOG, URGENT, URGENT, URGENT, VERIFICATION]
};

/// Runtimes that the last pass could not reach, or took long for, wait apart, so that they cannot occupy all slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Lane {
    #[default]
    Normal,
    Slow,
}

/// Why a Kyma is wanted at a later time; one time per reason.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Later {
    /// The pass asked for it.
    Again,
    /// What a dead predecessor wrote last may have landed after our pass.
    Restart,
    /// This process has begun: all are verified, but not at once.
    Spread,
    /// Many are concerned, so many a second.
    Paced,
    /// A version is rolled out: each at its own time.
    RollOut,
    /// It was put off.
    PutOff,
}

/// How many reasons there are.
const LATER: usize = 6;

/// Where an entry stands; kept so that it can be taken out exactly.
#[derive(Clone, Copy, Debug, Default)]
enum Place {
    #[default]
    Idle,
    Ready(Lane, Priority, u64),
    Delayed(Instant, u64),
}

#[derive(Debug, Default)]
struct Entry {
    wanted: Option<Wanted>,
    /// What was paused: wanted again with the next wake.
    parked: Option<Wanted>,
    /// In work, and since when.
    running: Option<(Lane, Instant)>,
    /// What is paused was wanted again while this was in work.
    woken: bool,
    /// Removed while in work: forgotten when that ends.
    gone: bool,
    lane: Lane,
    failures: u32,
    /// In backoff until then; the second is when it failed.
    backoff: Option<(Instant, Instant)>,
    /// Since when it is ready, while it is.
    since: Option<Instant>,
    later: [Option<(Instant, Wanted)>; LATER],
    /// Works that were put off, and how often in a row.
    put_off: (Works, u32),
    place: Place,
}

/// Bounded by the number of Kymas: each has one entry, and each entry at most one place.
#[derive(Debug)]
pub(crate) struct Queue<K> {
    entries: HashMap<K, Entry>,
    ready: [[BTreeMap<u64, K>; 3]; 2],
    delayed: BTreeMap<(Instant, u64), K>,
    tickets: u64,
    turns: [usize; 2],
    running: usize,
    slow_running: usize,
    slow_slots: usize,
    /// Wants that found the same Kyma wanted already.
    coalesced: u64,
    random: Random,
}

impl<K: Clone + Eq + Hash> Queue<K> {
    /// For as many workers as `slots`.
    pub(crate) fn new(slots: usize, seed: u64) -> Self {
        Self {
            entries: HashMap::new(),
            ready: Default::default(),
            delayed: BTreeMap::new(),
            tickets: 0,
            turns: [0; 2],
            running: 0,
            slow_running: 0,
            slow_slots: (slots / 4).max(1),
            coalesced: 0,
            random: Random::new(seed),
        }
    }

    /// Any time up to this one.
    pub(crate) fn jitter(&mut self, most: Duration) -> Duration {
        Duration::from_millis(self.random.up_to(u64::try_from(most.as_millis()).unwrap_or(u64::MAX)))
    }

    /// Makes a Kyma known; only then it can be wanted.
    pub(crate) fn insert(&mut self, key: K) {
        let entry = self.entries.entry(key).or_default();
        if entry.gone {
            *entry = Entry { running: entry.running, ..Entry::default() };
        }
    }

    /// Forgets a Kyma and all that is wanted of it. If it is in work, it stays so until that ends, so that a new one of that name is
    /// not worked on at the same time.
    pub(crate) fn remove(&mut self, key: &K) {
        self.displace(key);
        let Some(entry) = self.entries.get_mut(key) else { return };
        match entry.running {
            running @ Some(_) => *entry = Entry { running, gone: true, ..Entry::default() },
            None => drop(self.entries.remove(key)),
        }
    }

    /// Wants something now, with whatever was paused. An unknown Kyma is ignored.
    pub(crate) fn want(&mut self, key: &K, wanted: Wanted, now: Instant) {
        let Some(entry) = self.entries.get_mut(key).filter(|entry| !entry.gone) else { return };
        if wanted.works.is_empty() {
            return;
        }
        if let (Priority::User, Some((until, failed))) = (wanted.priority, entry.backoff.as_mut()) {
            *until = (*until).min(*failed + USER_SPACING);
        }
        if let Some(parked) = entry.parked.take() {
            merge_into(&mut entry.wanted, Wanted { priority: wanted.priority, ..parked });
        }
        self.coalesced += u64::from(entry.wanted.is_some());
        merge_into(&mut entry.wanted, wanted);
        self.arrange(key, now);
    }

    /// Wants all that was paused, each at its own priority.
    pub(crate) fn unpark_all(&mut self, now: Instant) {
        self.entries.values_mut().for_each(|entry| entry.woken |= entry.running.is_some());
        let parked = self.entries.iter().filter(|(_, entry)| entry.parked.is_some());
        let parked: Vec<_> = parked.map(|(key, _)| key.clone()).collect();
        for key in parked {
            let wanted = self.entries.get_mut(&key).and_then(|entry| entry.parked.take());
            wanted.into_iter().for_each(|wanted| self.want(&key, wanted, now));
        }
    }

    /// Wants something at a later time; of one reason the earlier time and all works stay.
    pub(crate) fn want_later(&mut self, key: &K, reason: Later, at: Instant, wanted: Wanted, now: Instant) {
        let Some(entry) = self.entries.get_mut(key).filter(|entry| !entry.gone) else { return };
        match &mut entry.later[reason as usize] {
            Some((known, works)) => {
                *known = (*known).min(at);
                works.merge(wanted);
            }
            slot => *slot = Some((at, wanted)),
        }
        self.arrange(key, now);
    }

    /// Whether something is wanted later for this reason.
    pub(crate) fn is_later(&self, key: &K, reason: Later) -> bool {
        self.entries.get(key).is_some_and(|entry| entry.later[reason as usize].is_some())
    }

    /// Takes the next Kyma into work: fair between them, by priority, and never one that waits or is in work.
    pub(crate) fn take(&mut self, now: Instant) -> Option<(K, Wanted)> {
        self.promote(now);
        let (lane, priority, ticket) = self.pick()?;
        let key = self.ready[lane as usize][priority as usize].remove(&ticket)?;
        self.turns[lane as usize] += 1;
        let entry = self.entries.get_mut(&key)?;
        (entry.place, entry.since) = (Place::Idle, None);
        let wanted = entry.wanted.take()?;
        (entry.running, entry.woken) = (Some((lane, now)), false);
        self.running += 1;
        self.slow_running += usize::from(lane == Lane::Slow);
        Some((key, wanted))
    }

    /// Whether [`Self::take`] could succeed at once, apart from what becomes due.
    pub(crate) fn has_ready(&self) -> bool {
        self.candidates().next().is_some()
    }

    /// When something becomes due, if anything waits.
    pub(crate) fn earliest(&self) -> Option<Instant> {
        self.delayed.first_key_value().map(|((at, _), _)| *at)
    }

    /// Ends what [`Self::take`] began. Returns how long a failure waits.
    pub(crate) fn finish(&mut self, key: &K, begun: &Wanted, outcome: &Outcome, now: Instant) -> Option<Duration> {
        let entry = self.entries.get_mut(key)?;
        let (lane, since) = entry.running.take()?;
        self.running -= 1;
        self.slow_running -= usize::from(lane == Lane::Slow);
        if entry.gone {
            self.entries.remove(key);
            return None;
        }
        match (outcome.class, outcome.failed.is_empty()) {
            _ if now.saturating_duration_since(since) >= SLOW => entry.lane = Lane::Slow,
            (Some(Class::Transport), _) => entry.lane = Lane::Slow,
            (Some(_), _) | (None, false) => entry.lane = Lane::Normal,
            (None, true) if !outcome.ended.is_empty() => entry.lane = Lane::Normal,
            (None, true) => {}
        }
        let put_off = outcome.put_off.both(begun.works).minus(outcome.failed);
        let parked = begun.works.minus(outcome.ended | outcome.failed | put_off);
        if !parked.is_empty() {
            // A wake that came meanwhile may be the end of the pause, which this pass had not seen. If it was not, the next one parks again.
            let woken = entry.woken || entry.wanted.is_some();
            let slot = if woken { &mut entry.wanted } else { &mut entry.parked };
            merge_into(slot, Wanted { works: parked, ..begun.clone() });
        }
        let (before, times) = entry.put_off;
        if !put_off.is_empty() {
            entry.put_off = (before | put_off, times.saturating_add(1));
        } else if !before.both(outcome.ended).is_empty() {
            // They are well again.
            entry.put_off = (Works::EMPTY, 0);
            entry.later[Later::PutOff as usize] = None;
        }
        if !put_off.is_empty() {
            let delay = outcome.class.unwrap_or(Class::Ours).wait(entry.put_off.1, &mut self.random);
            let priority = begun.priority.max(Priority::Catalog);
            self.want_later(key, Later::PutOff, now + delay, Wanted { works: put_off, priority, ..begun.clone() }, now);
        }
        let entry = self.entries.get_mut(key)?;
        let mut wait = None;
        if outcome.failed.is_empty() {
            (entry.failures, entry.backoff) = (0, None);
            if let Some(after) = outcome.again_in {
                let works = Wanted::new(outcome.ended.both(begun.works), Priority::Verification);
                self.want_later(key, Later::Again, now + after, works, now);
            }
        } else {
            entry.failures = entry.failures.saturating_add(1);
            let mut delay = outcome.class.unwrap_or(Class::Ours).wait(entry.failures, &mut self.random);
            delay = delay.max(outcome.again_in.unwrap_or_default());
            if entry.wanted.as_ref().is_some_and(|wanted| wanted.priority == Priority::User) {
                delay = delay.min(USER_SPACING);
            }
            entry.backoff = Some((now + delay, now));
            merge_into(&mut entry.wanted, Wanted { works: outcome.failed, ..begun.clone() });
            wait = Some(delay);
        }
        if let Some(turn) = outcome.turn {
            let kyma = Wanted::new(Works::of(&[Work::Kyma]), Priority::Catalog);
            self.want_later(key, Later::RollOut, now + turn, kyma, now);
        }
        self.arrange(key, now);
        wait
    }

    /// What is wanted of a Kyma now or after its backoff, for summaries.
    pub(crate) fn wanted(&self, key: &K) -> Works {
        self.entries.get(key).and_then(|entry| entry.wanted.as_ref()).map_or(Works::EMPTY, |wanted| wanted.works)
    }

    /// What waits for the end of a pause.
    pub(crate) fn parked(&self, key: &K) -> Works {
        self.entries.get(key).and_then(|entry| entry.parked.as_ref()).map_or(Works::EMPTY, |parked| parked.works)
    }

    /// Passes of a Kyma that failed in a row.
    pub(crate) fn failures(&self, key: &K) -> u32 {
        self.entries.get(key).map_or(0, |entry| entry.failures)
    }

    /// Wants that found the same Kyma wanted already, since the start.
    pub(crate) const fn coalesced(&self) -> u64 {
        self.coalesced
    }

    /// Since when the Kyma is ready that has been so for the longest, of one priority.
    pub(crate) fn oldest(&self, priority: Priority) -> Option<Instant> {
        let first = self.ready.iter().filter_map(|lane| lane[priority as usize].first_key_value());
        first.filter_map(|(_, key)| self.entries.get(key)?.since).min()
    }

    /// Whether a Kyma is in work.
    pub(crate) fn in_work(&self, key: &K) -> bool {
        self.entries.get(key).is_some_and(|entry| entry.running.is_some())
    }

    /// How long the work on a Kyma may take that was just taken.
    pub(crate) fn patience(&self, key: &K) -> Duration {
        match self.entries.get(key).and_then(|entry| entry.running) {
            Some((Lane::Slow, _)) => PATIENCE_WITH_SLOW,
            Some((Lane::Normal, _)) | None => PATIENCE,
        }
    }

    /// Kymas in work.
    pub(crate) const fn running(&self) -> usize {
        self.running
    }

    /// Kymas that are ready, of one priority.
    pub(crate) fn ready(&self, priority: Priority) -> usize {
        self.ready.iter().map(|lane| lane[priority as usize].len()).sum()
    }

    /// Kymas that wait for a time.
    pub(crate) fn waiting(&self) -> usize {
        self.delayed.len()
    }

    /// The next of each lane, in the order of that lane's turn.
    fn candidates(&self) -> impl Iterator<Item = (Lane, Priority, u64)> {
        let slow = (self.slow_running < self.slow_slots).then_some(Lane::Slow);
        [Some(Lane::Normal), slow].into_iter().flatten().filter_map(|lane| {
            let turn = TURNS[self.turns[lane as usize] % TURNS.len()];
            turn.into_iter().find_map(|priority| {
                let first = self.ready[lane as usize][priority as usize].first_key_value();
                first.map(|(ticket, _)| (lane, priority, *ticket))
            })
        })
    }

    /// Between the lanes, whoever has waited longer.
    fn pick(&self) -> Option<(Lane, Priority, u64)> {
        self.candidates().min_by_key(|(_, _, ticket)| *ticket)
    }

    /// Brings what has become due to where it is ready.
    fn promote(&mut self, now: Instant) {
        while let Some(due) = self.delayed.first_entry().filter(|due| due.key().0 <= now) {
            let key = due.remove();
            if let Some(entry) = self.entries.get_mut(&key) {
                entry.place = Place::Idle;
            }
            self.arrange(&key, now);
        }
    }

    /// Puts an entry where it belongs now. One that is ready at the same priority keeps its turn.
    fn arrange(&mut self, key: &K, now: Instant) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        for slot in &mut entry.later {
            if let Some((_, wanted)) = slot.take_if(|(at, _)| *at <= now) {
                merge_into(&mut entry.wanted, wanted);
            }
        }
        let until = entry.backoff.map(|(until, _)| until).filter(|until| *until > now);
        let place = match (&entry.wanted, until) {
            _ if entry.running.is_some() => Place::Idle,
            (Some(wanted), None) => Place::Ready(entry.lane, wanted.priority, self.tickets),
            (wanted, until) => {
                let until = until.filter(|_| wanted.is_some());
                let later = entry.later.iter().flatten().map(|(at, _)| *at).chain(until).min();
                later.map_or(Place::Idle, |at| Place::Delayed(at, self.tickets))
            }
        };
        match (entry.place, place) {
            (Place::Ready(lane, priority, _), Place::Ready(new_lane, new_priority, _))
                if lane == new_lane && priority == new_priority => {}
            (Place::Delayed(at, _), Place::Delayed(new, _)) if at == new => {}
            _ => {
                let since = matches!(place, Place::Ready(..)).then(|| entry.since.unwrap_or(now));
                entry.since = since;
                self.displace(key);
                self.tickets += 1;
                self.put(key, place);
            }
        }
    }

    fn put(&mut self, key: &K, place: Place) {
        match place {
            Place::Idle => {}
            Place::Ready(lane, priority, ticket) => {
                self.ready[lane as usize][priority as usize].insert(ticket, key.clone());
            }
            Place::Delayed(at, ticket) => {
                self.delayed.insert((at, ticket), key.clone());
            }
        }
        if let Some(entry) = self.entries.get_mut(key) {
            entry.place = place;
        }
    }

    fn displace(&mut self, key: &K) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        match std::mem::take(&mut entry.place) {
            Place::Idle => {}
            Place::Ready(lane, priority, ticket) => {
                self.ready[lane as usize][priority as usize].remove(&ticket);
            }
            Place::Delayed(at, ticket) => {
                self.delayed.remove(&(at, ticket));
            }
        }
    }
}

#[cfg(test)]
mod tests;
