//! Who is looked at when: one time per Kyma, and one rate for all.

use std::{
    collections::{BTreeSet, HashMap},
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    base::{key::KymaKey, random::Random},
    fleet::{PathState, Unproven},
};

/// Why a runtime is looked at although nothing is known to have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Its path is not proven: what changes there may not be told.
    Fallback,
    /// No path shows everything.
    Verification,
}

impl Kind {
    /// Who is away is not polled; the slow round comes by all the same, in case only its agent is gone.
    fn of(path: &PathState) -> Self {
        match path {
            PathState::Unknown | PathState::Proven | PathState::Unproven(Unproven::Away) => Self::Verification,
            PathState::Unproven(_) => Self::Fallback,
        }
    }
}

/// One entry per Kyma, so bounded by their number.
pub(super) struct Rounds {
    fallback: Duration,
    verification: Duration,
    due: BTreeSet<(Instant, KymaKey)>,
    slots: HashMap<KymaKey, (Instant, Kind)>,
    random: Random,
}

impl Rounds {
    pub(super) fn new(fallback: Duration, verification: Duration) -> Self {
        let random = Random::new(RandomState::new().hash_one(()));
        Self { fallback, verification, due: BTreeSet::new(), slots: HashMap::new(), random }
    }

    /// A path is in this state now. The first turn of a kind comes at any time within its interval, so that those who moved together
    /// are not looked at together.
    pub(super) fn moved(&mut self, key: &KymaKey, path: &PathState, now: Instant) {
        let kind = Kind::of(path);
        let known = self.slots.get(key).copied();
        if known.is_some_and(|(_, known)| known == kind) {
            return;
        }
        let first = now + self.draw(self.interval(kind));
        self.put(key, known.map_or(first, |(at, _)| if kind == Kind::Fallback { at.min(first) } else { first }), kind);
    }

    /// Takes those whose turn has come, at most so many, the longest due first; each gets its next turn.
    pub(super) fn due(&mut self, now: Instant, most: usize) -> Vec<(KymaKey, Kind)> {
        let mut taken = Vec::new();
        while taken.len() < most
            && let Some((_, key)) = self.due.first().filter(|(at, _)| *at <= now).cloned()
        {
            let Some((_, kind)) = self.slots.get(&key).copied() else { break };
            let interval = self.interval(kind);
            let next = now + interval / 2 + self.draw(interval);
            self.put(&key, next, kind);
            taken.push((key, kind));
        }
        taken
    }

    /// Forgets all others.
    pub(super) fn retain(&mut self, keep: impl Fn(&KymaKey) -> bool) {
        self.slots.retain(|key, _| keep(key));
        self.due.retain(|(_, key)| keep(key));
    }

    fn interval(&self, kind: Kind) -> Duration {
        match kind {
            Kind::Fallback => self.fallback,
            Kind::Verification => self.verification,
        }
    }

    fn draw(&mut self, most: Duration) -> Duration {
        Duration::from_millis(self.random.up_to(u64::try_from(most.as_millis()).unwrap_or(u64::MAX)))
    }

    fn put(&mut self, key: &KymaKey, at: Instant, kind: Kind) {
        if let Some((before, _)) = self.slots.insert(key.clone(), (at, kind)) {
            self.due.remove(&(before, key.clone()));
        }
        self.due.insert((at, key.clone()));
    }
}

/// So many a second; a second's worth can be saved.
pub(super) struct Tokens {
    per_second: f64,
    has: f64,
    at: Instant,
}

impl Tokens {
    pub(super) fn new(per_second: u32, now: Instant) -> Self {
        Self { per_second: per_second.into(), has: per_second.into(), at: now }
    }

    /// Takes as many as there are, up to `most`.
    pub(super) fn take(&mut self, most: usize, now: Instant) -> usize {
        let passed = now.saturating_duration_since(std::mem::replace(&mut self.at, now));
        self.has = (self.has + passed.as_secs_f64() * self.per_second).min(self.per_second);
        let mut taken = 0;
        while taken < most && self.has >= 1.0 {
            self.has -= 1.0;
            taken += 1;
        }
        taken
    }

    /// Puts back what was taken in vain.
    pub(super) fn give_back(&mut self, unused: usize) {
        let unused = u32::try_from(unused).unwrap_or(u32::MAX);
        self.has = (self.has + f64::from(unused)).min(self.per_second);
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

    fn rounds() -> Rounds {
        Rounds::new(S * 100, S * 10_000)
    }

    #[test]
    fn who_is_not_proven_comes_often_and_the_others_seldom() {
        let (mut rounds, start) = (rounds(), Instant::now());
        let states = [PathState::Unknown, PathState::Proven, LOST, PathState::Unproven(Unproven::Away)];
        for (n, path) in (0..).zip(&states) {
            rounds.moved(&key(n), path, start);
        }
        let mut counts = [0u32; 4];
        for second in 0..100_000 {
            for (key, kind) in rounds.due(start + S * second, usize::MAX) {
                let n: usize = key.name[1..].parse().unwrap();
                assert_eq!(kind == Kind::Fallback, n == 2);
                counts[n] += 1;
            }
        }
        assert!((700..1_400).contains(&counts[2]), "{counts:?}");
        for n in [0, 1, 3] {
            assert!((6..=20).contains(&counts[n]), "{counts:?}");
        }
    }

    #[test]
    fn those_who_are_lost_together_are_spread_and_none_waits_longer_than_before() {
        let (mut rounds, start) = (rounds(), Instant::now());
        for n in 0..1_000 {
            rounds.moved(&key(n), &PathState::Proven, start);
            rounds.moved(&key(n), &LOST, start);
            rounds.moved(&key(n), &LOST, start);
        }
        assert!(rounds.due(start + S * 10, usize::MAX).len() < 200);
        assert_eq!(rounds.slots.len(), rounds.due.len());
        let mut rest = 0;
        for second in 11..=100 {
            rest += rounds.due(start + S * second, usize::MAX).len();
        }
        assert!(rest >= 800);
        rounds.retain(|key| key.name == "k1");
        assert_eq!((rounds.slots.len(), rounds.due.len()), (1, 1));
    }

    #[test]
    fn more_than_the_rate_allows_wait_in_the_order_of_their_turns() {
        let (mut rounds, start) = (rounds(), Instant::now());
        (0..50).for_each(|n| rounds.moved(&key(n), &LOST, start));
        let late = start + S * 101;
        let turns: Vec<_> = rounds.due.iter().map(|(_, key)| key.clone()).collect();
        let mut tokens = Tokens::new(20, start);
        let most = tokens.take(usize::MAX, late);
        assert_eq!(most, 20);
        let taken: Vec<_> = rounds.due(late, most).into_iter().map(|(key, _)| key).collect();
        assert_eq!(taken, turns[..20]);
        assert_eq!(tokens.take(usize::MAX, late), 0);
        assert_eq!(tokens.take(3, late + S / 2), 3);
        tokens.give_back(100);
        assert_eq!(tokens.take(usize::MAX, late + S / 2), 20);
    }
}
