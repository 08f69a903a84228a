//! Results and schedule of all keys. Pure: callers pass the time.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tidewatch_kit::random::Random;
use tokio::time::Instant;

use super::key::{Key, LookupError, Value};

/// Keys that are remembered. They are few, so that the next fetch is found by looking at all of them.
pub(super) const MAX_KEYS: usize = 1_024;
/// Time without lookups after which a failed key is forgotten, once its next fetch is due.
const FORGET_AFTER: Duration = Duration::from_secs(24 * 3_600);
/// First bound of the backoff after a failure that may pass by itself.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// First bound of the backoff after a failure that a person has to correct.
const FIRST_RETRY_OF_MISTAKE: Duration = Duration::from_secs(30);
/// Largest bound of the backoff.
const MAX_RETRY: Duration = Duration::from_secs(300);

/// Result of the last fetch.
pub(super) type Outcome = Result<Value, Arc<LookupError>>;

/// Keys by last result and next fetch.
#[derive(Debug)]
pub(super) struct Table {
    entries: HashMap<Key, Entry>,
    /// Number of the last use, for eviction and the order of fetches that are due at the same time.
    uses: u64,
    /// Number of calls of [`Self::retry_all`] and [`Self::renew_descriptors`].
    epoch: u64,
    /// Epoch of the last call of [`Self::renew_descriptors`].
    renewed: u64,
    max_bytes: usize,
    bytes: usize,
    random: Random,
}

#[derive(Debug)]
struct Entry {
    /// `None` before the first result, and after eviction from memory.
    outcome: Option<Outcome>,
    phase: Phase,
    failures: u32,
    asked: Instant,
    used: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No fetch is planned: there is a result, or it was evicted from memory.
    Idle,
    /// Fetched from this time on.
    Planned(Instant),
    /// Fetched, since an epoch.
    Running(u64),
}

impl Entry {
    /// Time of the planned fetch.
    const fn planned(&self) -> Option<Instant> {
        match self.phase {
            Phase::Planned(at) => Some(at),
            Phase::Idle | Phase::Running(_) => None,
        }
    }
}

/// Answer to a lookup.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) outcome: Option<Outcome>,
    /// True if a fetch became due.
    pub(super) due: bool,
    /// Key that gave way before it had a usable result, and has to be looked up again.
    pub(super) displaced: Option<Key>,
}

impl Table {
    /// Creates an empty table that keeps results of at most this many bytes, and the last one of any size.
    pub(super) fn new(max_bytes: usize, seed: u64) -> Self {
        Self { entries: HashMap::new(), uses: 0, epoch: 0, renewed: 0, max_bytes, bytes: 0, random: Random::new(seed) }
    }

    /// Returns the last result of a key, and makes a first fetch due.
    pub(super) fn lookup(&mut self, key: &Key, now: Instant) -> Answer {
        self.uses += 1;
        if let Some(entry) = self.entries.get_mut(key) {
            (entry.asked, entry.used) = (now, self.uses);
            let due = entry.outcome.is_none() && entry.phase == Phase::Idle;
            if due {
                entry.phase = Phase::Planned(now);
            }
            return Answer { outcome: entry.outcome.clone(), due, displaced: None };
        }
        let displaced = if self.entries.len() < MAX_KEYS { None } else { self.displace() };
        let entry = Entry { outcome: None, phase: Phase::Planned(now), failures: 0, asked: now, used: self.uses };
        self.entries.insert(key.clone(), entry);
        Answer { outcome: None, due: true, displaced }
    }

    /// Begins the next due fetch.
    pub(super) fn begin(&mut self, now: Instant) -> Option<Key> {
        self.entries.retain(|_, entry| {
            let is_forgotten = now.saturating_duration_since(entry.asked) > FORGET_AFTER;
            let is_failed = matches!(entry.outcome, Some(Err(_)));
            !(is_forgotten && is_failed && entry.planned().is_some_and(|at| at <= now))
        });
        let planned = self.entries.iter_mut().filter_map(|(key, entry)| Some((entry.planned()?, key, entry)));
        let due = planned.filter(|(at, ..)| *at <= now);
        let (_, key, entry) = due.min_by_key(|(at, _, entry)| (*at, entry.used))?;
        entry.phase = Phase::Running(self.epoch);
        Some(key.clone())
    }

    /// Time of the next planned fetch.
    pub(super) fn next_planned(&self) -> Option<Instant> {
        self.entries.values().filter_map(Entry::planned).min()
    }

    /// Records the result of a fetch, and returns whether a lookup now returns another one.
    pub(super) fn settle(&mut self, key: &Key, outcome: Result<Value, LookupError>, now: Instant) -> bool {
        let Some(entry) = self.entries.get_mut(key) else { return false };
        let begun = entry.phase;
        let is_outdated = matches!((key, begun), (Key::Descriptor(_), Phase::Running(epoch)) if epoch < self.renewed);
        let changed = match outcome {
            _ if is_outdated => {
                entry.phase = Phase::Planned(now);
                false
            }
            Ok(value) => {
                self.bytes += value.bytes();
                entry.outcome = Some(Ok(value));
                (entry.phase, entry.failures) = (Phase::Idle, 0);
                true
            }
            Err(error) => {
                entry.failures = entry.failures.saturating_add(1);
                let bound = if error.is_retryable() { FIRST_RETRY } else { FIRST_RETRY_OF_MISTAKE };
                let bound = bound.saturating_mul(2u32.saturating_pow(entry.failures - 1)).min(MAX_RETRY);
                // From half of the bound on: a failing registry gets a pause in any case.
                let delay = bound / 2 + self.random.jitter(bound / 2);
                let demanded = error.fetch().and_then(|error| error.retry_after()).unwrap_or_default();
                let is_current = begun == Phase::Running(self.epoch);
                entry.phase = Phase::Planned(if is_current { now + delay.max(demanded) } else { now });
                let same = matches!(&entry.outcome, Some(Err(before)) if **before == error);
                entry.outcome = Some(Err(Arc::new(error)));
                !same
            }
        };
        self.evict(key);
        changed
    }

    /// Makes all failed keys due, also those that are being fetched and fail.
    pub(super) fn retry_all(&mut self, now: Instant) {
        self.epoch += 1;
        for entry in self.entries.values_mut() {
            if let Some(at) = entry.planned() {
                (entry.phase, entry.failures) = (Phase::Planned(at.min(now)), 0);
            }
        }
    }

    /// Forgets the results of all descriptors, and makes them due, also those that are being fetched.
    pub(super) fn renew_descriptors(&mut self, now: Instant) {
        self.epoch += 1;
        self.renewed = self.epoch;
        for (key, entry) in &mut self.entries {
            let Key::Descriptor(_) = key else { continue };
            if let Some(Ok(value)) = entry.outcome.take() {
                self.bytes -= value.bytes();
            }
            let at = match entry.phase {
                Phase::Running(_) => continue,
                Phase::Planned(at) => at.min(now),
                Phase::Idle => now,
            };
            (entry.phase, entry.failures) = (Phase::Planned(at), 0);
        }
    }

    /// Counts keys without a result, and those whose last fetch failed.
    pub(super) fn pending_and_failed(&self) -> (usize, usize) {
        let pending =
            self.entries.values().filter(|entry| entry.outcome.is_none() && entry.phase != Phase::Idle).count();
        (pending, self.entries.values().filter(|entry| matches!(entry.outcome, Some(Err(_)))).count())
    }

    /// Forgets the key that was looked up longest ago and is not being fetched, and returns it if a fetch was to follow.
    fn displace(&mut self) -> Option<Key> {
        let movable = self.entries.iter().filter(|(_, entry)| !matches!(entry.phase, Phase::Running(_)));
        let key = movable.min_by_key(|(_, entry)| entry.used).map(|(key, _)| key.clone())?;
        let entry = self.entries.remove(&key)?;
        if let Some(Ok(value)) = &entry.outcome {
            self.bytes -= value.bytes();
        }
        (entry.phase != Phase::Idle).then_some(key)
    }

    /// Drops results that were looked up longest ago, down to the limit, but not that of the key.
    fn evict(&mut self, kept: &Key) {
        while self.bytes > self.max_bytes {
            let results = self.entries.iter_mut().filter_map(|(key, entry)| match &entry.outcome {
                Some(Ok(value)) if key != kept => Some((value.bytes(), entry)),
                _ => None,
            });
            let Some((bytes, entry)) = results.min_by_key(|(_, entry)| entry.used) else { break };
            entry.outcome = None;
            self.bytes -= bytes;
        }
    }
}
