//! Results and schedule of all keys. Pure: callers pass the time.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use tidewatch_kit::random::Random;
use tokio::time::Instant;

use super::key::{Key, LookupError, Value};

/// Keys that are remembered.
pub(super) const MAX_KEYS: usize = 1_024;
/// Time without lookups after which a failed key is forgotten.
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
    due: VecDeque<Key>,
    delayed: BTreeMap<(Instant, u64), Key>,
    /// Number of the last use, for eviction and to distinguish simultaneous retries.
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
    Due,
    /// Fetched, since an epoch.
    Running(u64),
    Delayed(Instant, u64),
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
        Self {
            entries: HashMap::new(),
            due: VecDeque::new(),
            delayed: BTreeMap::new(),
            uses: 0,
            epoch: 0,
            renewed: 0,
            max_bytes,
            bytes: 0,
            random: Random::new(seed),
        }
    }

    /// Returns the last result of a key, and makes a first fetch due.
    pub(super) fn lookup(&mut self, key: &Key, now: Instant) -> Answer {
        self.uses += 1;
        if let Some(entry) = self.entries.get_mut(key) {
            (entry.asked, entry.used) = (now, self.uses);
            let due = entry.outcome.is_none() && entry.phase == Phase::Idle;
            if due {
                entry.phase = Phase::Due;
                self.due.push_back(key.clone());
            }
            return Answer { outcome: entry.outcome.clone(), due, displaced: None };
        }
        let displaced = if self.entries.len() < MAX_KEYS { None } else { self.displace() };
        let entry = Entry { outcome: None, phase: Phase::Due, failures: 0, asked: now, used: self.uses };
        self.entries.insert(key.clone(), entry);
        self.due.push_back(key.clone());
        Answer { outcome: None, due: true, displaced }
    }

    /// Begins the next due fetch.
    pub(super) fn begin(&mut self, now: Instant) -> Option<Key> {
        while let Some(first) = self.delayed.first_entry().filter(|first| first.key().0 <= now) {
            let key = first.remove();
            let Some(entry) = self.entries.get_mut(&key) else { continue };
            if now.saturating_duration_since(entry.asked) > FORGET_AFTER {
                self.entries.remove(&key);
            } else {
                entry.phase = Phase::Due;
                self.due.push_back(key);
            }
        }
        let key = self.due.pop_front()?;
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.phase = Phase::Running(self.epoch);
        }
        Some(key)
    }

    /// Time of the next retry.
    pub(super) fn next_retry(&self) -> Option<Instant> {
        self.delayed.first_key_value().map(|((at, _), _)| *at)
    }

    /// Records the result of a fetch, and returns whether a lookup now returns another one.
    pub(super) fn settle(&mut self, key: &Key, outcome: Result<Value, LookupError>, now: Instant) -> bool {
        let Some(entry) = self.entries.get_mut(key) else { return false };
        let begun = entry.phase;
        let is_outdated = matches!((key, begun), (Key::Descriptor(_), Phase::Running(epoch)) if epoch < self.renewed);
        let changed = match outcome {
            _ if is_outdated => {
                entry.phase = Phase::Due;
                self.due.push_back(key.clone());
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
                self.uses += 1;
                let at = (now + delay.max(demanded), self.uses);
                entry.phase = if begun == Phase::Running(self.epoch) { Phase::Delayed(at.0, at.1) } else { Phase::Due };
                match entry.phase {
                    Phase::Due => self.due.push_back(key.clone()),
                    _ => drop(self.delayed.insert(at, key.clone())),
                }
                let same = matches!(&entry.outcome, Some(Err(before)) if **before == error);
                entry.outcome = Some(Err(Arc::new(error)));
                !same
            }
        };
        self.evict(key);
        changed
    }

    /// Makes all failed keys due, also those that are being fetched and fail.
    pub(super) fn retry_all(&mut self) {
        self.epoch += 1;
        for key in std::mem::take(&mut self.delayed).into_values() {
            let Some(entry) = self.entries.get_mut(&key) else { continue };
            (entry.phase, entry.failures) = (Phase::Due, 0);
            self.due.push_back(key);
        }
    }

    /// Forgets the results of all descriptors, and makes them due, also those that are being fetched.
    pub(super) fn renew_descriptors(&mut self) {
        self.epoch += 1;
        self.renewed = self.epoch;
        for (key, entry) in &mut self.entries {
            let Key::Descriptor(_) = key else { continue };
            if let Some(Ok(value)) = entry.outcome.take() {
                self.bytes -= value.bytes();
            }
            match entry.phase {
                Phase::Running(_) | Phase::Due => continue,
                Phase::Delayed(at, number) => drop(self.delayed.remove(&(at, number))),
                Phase::Idle => {}
            }
            (entry.phase, entry.failures) = (Phase::Due, 0);
            self.due.push_back(key.clone());
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
        match entry.phase {
            Phase::Due => self.due.retain(|due| *due != key),
            Phase::Delayed(at, number) => drop(self.delayed.remove(&(at, number))),
            Phase::Idle | Phase::Running(_) => {}
        }
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
