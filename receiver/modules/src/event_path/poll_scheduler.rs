//! Schedules polls and verifications: one due time per Kyma, and one rate limit for all.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use tidewatch_api::key::KymaKey;
use tidewatch_fleet::{PathState, Unproven};
use tidewatch_kit::random::Random;
use tokio::time::Instant;

/// Reason for a reconcile without a known change. The name is the value of the label `reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(super) enum PollKind {
    /// The path is not proven, so changes may not be reported.
    Fallback,
    /// No event path reports every change.
    Verification,
}

impl PollKind {
    /// A runtime that is away is only verified, in case just its agent is gone.
    fn of(path: &PathState) -> Self {
        match path {
            PathState::Unknown | PathState::Proven | PathState::Unproven(Unproven::Away) => Self::Verification,
            PathState::Unproven(_) => Self::Fallback,
        }
    }
}

/// Scheduler with one entry per Kyma, so bounded by their number.
pub(super) struct PollScheduler {
    fallback: Duration,
    verification: Duration,
    due: BTreeSet<(Instant, KymaKey)>,
    slots: HashMap<KymaKey, (Instant, PollKind)>,
    random: Random,
}

impl PollScheduler {
    pub(super) fn new(fallback: Duration, verification: Duration) -> Self {
        let random = Random::default();
        Self { fallback, verification, due: BTreeSet::new(), slots: HashMap::new(), random }
    }

    /// Updates the state of a path. The first due time of a kind is random within its interval, so that paths that
    /// change together are spread.
    pub(super) fn path_changed(&mut self, key: &KymaKey, path: &PathState, now: Instant) {
        let kind = PollKind::of(path);
        let current = self.slots.get(key).copied();
        if current.is_some_and(|(_, current)| current == kind) {
            return;
        }
        let first = now + self.random.jitter(self.interval(kind));
        let earlier = current.filter(|_| kind == PollKind::Fallback).map_or(first, |(at, _)| at.min(first));
        self.put(key, earlier, kind);
    }

    /// Takes up to `limit` due entries, the longest due first, and reschedules each.
    pub(super) fn due(&mut self, now: Instant, limit: usize) -> Vec<(KymaKey, PollKind)> {
        let mut taken = Vec::new();
        while taken.len() < limit
            && let Some((_, key)) = self.due.first().filter(|(at, _)| *at <= now).cloned()
        {
            let Some((_, kind)) = self.slots.get(&key).copied() else { break };
            let interval = self.interval(kind);
            let next = now + interval / 2 + self.random.jitter(interval);
            self.put(&key, next, kind);
            taken.push((key, kind));
        }
        taken
    }

    /// Number of due entries, counted up to `limit`.
    pub(super) fn count_due(&self, now: Instant, limit: usize) -> usize {
        self.due.iter().take(limit).take_while(|(at, _)| *at <= now).count()
    }

    /// Retains only these Kymas.
    pub(super) fn retain(&mut self, keep: impl Fn(&KymaKey) -> bool) {
        self.slots.retain(|key, _| keep(key));
        self.due.retain(|(_, key)| keep(key));
    }

    fn interval(&self, kind: PollKind) -> Duration {
        match kind {
            PollKind::Fallback => self.fallback,
            PollKind::Verification => self.verification,
        }
    }

    fn put(&mut self, key: &KymaKey, at: Instant, kind: PollKind) {
        if let Some((before, _)) = self.slots.insert(key.clone(), (at, kind)) {
            self.due.remove(&(before, key.clone()));
        }
        self.due.insert((at, key.clone()));
    }
}

/// Rate limiter with a burst of one second.
pub(super) struct TokenBucket {
    per_second: f64,
    available: f64,
    at: Instant,
}

impl TokenBucket {
    pub(super) fn new(per_second: u32, now: Instant) -> Self {
        Self { per_second: per_second.into(), available: per_second.into(), at: now }
    }

    /// Changes the rate from now on.
    pub(super) fn set_rate(&mut self, per_second: u32) {
        self.per_second = per_second.into();
        self.available = self.available.min(self.per_second);
    }

    /// Takes up to `limit` available tokens.
    pub(super) fn take(&mut self, limit: usize, now: Instant) -> usize {
        let passed = now.saturating_duration_since(std::mem::replace(&mut self.at, now));
        self.available = (self.available + passed.as_secs_f64() * self.per_second).min(self.per_second);
        let taken = limit.min(self.available as usize);
        self.available -= taken as f64;
        taken
    }

    /// Returns unused tokens.
    pub(super) fn put_back(&mut self, unused: usize) {
        let unused = u32::try_from(unused).unwrap_or(u32::MAX);
        self.available = (self.available + f64::from(unused)).min(self.per_second);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);
    const LOST: PathState = PathState::Unproven(Unproven::NoHeartbeat);

    fn key(n: u32) -> KymaKey {
        KymaKey::new("ns", format!("k{n}"))
    }

    fn scheduler() -> PollScheduler {
        PollScheduler::new(S * 100, S * 10_000)
    }

    #[test]
    fn unproven_paths_are_polled_often_and_the_others_seldom() {
        let mut scheduler = scheduler();
        let start = Instant::now();
        let states = [PathState::Unknown, PathState::Proven, LOST, PathState::Unproven(Unproven::Away)];
        for (n, path) in (0..).zip(&states) {
            scheduler.path_changed(&key(n), path, start);
        }
        let mut counts = [0u32; 4];
        for second in 0..100_000 {
            for (key, kind) in scheduler.due(start + S * second, usize::MAX) {
                let n: usize = key.name[1..].parse().unwrap();
                assert_eq!(kind == PollKind::Fallback, n == 2);
                counts[n] += 1;
            }
        }
        assert!((700..1_400).contains(&counts[2]), "{counts:?}");
        for n in [0, 1, 3] {
            assert!((6..=20).contains(&counts[n]), "{counts:?}");
        }
    }

    #[test]
    fn paths_lost_together_are_spread_and_none_is_due_later_than_before() {
        let mut scheduler = scheduler();
        let start = Instant::now();
        for n in 0..1_000 {
            scheduler.path_changed(&key(n), &PathState::Proven, start);
            scheduler.path_changed(&key(n), &LOST, start);
            scheduler.path_changed(&key(n), &LOST, start);
        }
        assert!(scheduler.due(start + S * 10, usize::MAX).len() < 200);
        assert_eq!(scheduler.slots.len(), scheduler.due.len());
        let mut rest = 0;
        for second in 11..=100 {
            rest += scheduler.due(start + S * second, usize::MAX).len();
        }
        assert!(rest >= 800);
        scheduler.retain(|key| key.name == "k1");
        assert_eq!((scheduler.slots.len(), scheduler.due.len()), (1, 1));
    }

    #[test]
    fn polls_above_the_rate_wait_in_due_order() {
        let mut scheduler = scheduler();
        let start = Instant::now();
        (0..50).for_each(|n| scheduler.path_changed(&key(n), &LOST, start));
        let late = start + S * 101;
        let turns: Vec<_> = scheduler.due.iter().map(|(_, key)| key.clone()).collect();
        let mut tokens = TokenBucket::new(20, start);
        let limit = tokens.take(usize::MAX, late);
        assert_eq!(limit, 20);
        let taken: Vec<_> = scheduler.due(late, limit).into_iter().map(|(key, _)| key).collect();
        assert_eq!(taken, turns[..20]);
        assert_eq!(tokens.take(usize::MAX, late), 0);
        assert_eq!(tokens.take(3, late + S / 2), 3);
        tokens.put_back(100);
        assert_eq!(tokens.take(usize::MAX, late + S / 2), 20);
        tokens.put_back(100);
        tokens.set_rate(5);
        assert_eq!(tokens.take(usize::MAX, late + S / 2), 5, "another replica took shards over");
        assert_eq!(tokens.take(usize::MAX, late + S * 9), 5);
        tokens.set_rate(20);
        assert_eq!(tokens.take(usize::MAX, late + S * 10), 20);
    }
}
