//! Which sequences of one epoch have come.

/// Separate ranges above the run that are remembered, at most. An honest agent makes a hole only for an event that was refused one by
/// one, and fills it with its next request.
const MAX_RANGES: usize = 64;

/// What a sequence is to the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// The next of the run. `joined`: events above it, which had come before, now belong to the run too.
    Next {
        /// See above.
        joined: bool,
    },
    /// New, but something before it is missing.
    Ahead,
    /// It was seen before.
    Again,
    /// Lower than where the ledger begins, so nobody knows.
    Below,
    /// Above more holes than are remembered: not recorded, and so never accepted.
    TooFar,
}

/// The contiguous run of sequences and what lies above it.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    /// First and last of the run; empty when the last is one lower.
    ends: Option<(u64, u64)>,
    /// Closed ranges above the run, in order, with a hole before each.
    above: Vec<(u64, u64)>,
}

impl Run {
    /// Begins at the first sequence that is seen. Returns whether it did so just now.
    pub(super) fn begin(&mut self, first: u64) -> bool {
        let begins = self.ends.is_none() && first > 0;
        if begins {
            self.ends = Some((first, first - 1));
        }
        begins
    }

    /// Records one sequence.
    pub(super) fn record(&mut self, sequence: u64) -> Seen {
        self.begin(sequence);
        let Some((since, accepted)) = self.ends else { return Seen::Below };
        if sequence < since {
            return Seen::Below;
        }
        if sequence <= accepted {
            return Seen::Again;
        }
        if sequence - 1 > accepted {
            return self.record_above(sequence);
        }
        let joined = self.above.first().is_some_and(|(low, _)| *low - 1 == sequence);
        let last = if joined { self.above.remove(0).1 } else { sequence };
        self.ends = Some((since, last));
        Seen::Next { joined }
    }

    fn record_above(&mut self, sequence: u64) -> Seen {
        let at = self.above.partition_point(|(_, high)| *high < sequence);
        if self.above.get(at).is_some_and(|(low, _)| *low <= sequence) {
            return Seen::Again;
        }
        let extends = at > 0 && self.above[at - 1].1 == sequence - 1;
        let precedes = self.above.get(at).is_some_and(|(low, _)| *low - 1 == sequence);
        match (extends, precedes) {
            (true, true) => {
                let (_, high) = self.above.remove(at);
                self.above[at - 1].1 = high;
            }
            (true, false) => self.above[at - 1].1 = sequence,
            (false, true) => self.above[at].0 = sequence,
            (false, false) if self.above.len() == MAX_RANGES => return Seen::TooFar,
            (false, false) => self.above.insert(at, (sequence, sequence)),
        }
        Seen::Ahead
    }

    /// Every sequence from [`Self::since`] up to here has come; 0 before anything came.
    pub(super) fn accepted(&self) -> u64 {
        self.ends.map_or(0, |(_, accepted)| accepted)
    }

    /// Where the run begins; 1 before anything came.
    pub(super) fn since(&self) -> u64 {
        self.ends.map_or(1, |(since, _)| since)
    }

    /// Whether nothing has come at all.
    pub(super) fn is_empty(&self) -> bool {
        self.ends.is_none()
    }

    /// Whether nothing has come above a hole.
    pub(super) fn is_whole(&self) -> bool {
        self.above.is_empty()
    }

    /// Sequences that are missing below one that has come.
    pub(super) fn missing(&self) -> u64 {
        let mut before = self.accepted();
        let holes = self.above.iter().map(|(low, high)| low - 1 - std::mem::replace(&mut before, *high));
        holes.sum()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sequences_are_told_apart() {
        let next = Seen::Next { joined: false };
        let mut run = Run::default();
        assert_eq!((run.accepted(), run.since()), (0, 1));
        for (sequence, seen, accepted) in [
            (5, next, 5),
            (6, next, 6),
            (5, Seen::Again, 6),
            (4, Seen::Below, 6),
            (9, Seen::Ahead, 6),
            (9, Seen::Again, 6),
            (11, Seen::Ahead, 6),
            (10, Seen::Ahead, 6),
            (8, Seen::Ahead, 6),
            (7, Seen::Next { joined: true }, 11),
            (12, next, 12),
            (u64::MAX, Seen::Ahead, 12),
        ] {
            assert_eq!(run.record(sequence), seen, "{sequence}");
            assert_eq!(run.accepted(), accepted, "{sequence}");
        }
        assert_eq!(run.since(), 5);
        assert_eq!(run.missing(), u64::MAX - 13);
    }

    #[test]
    fn holes_have_a_bound_and_what_is_beyond_is_not_recorded() {
        let mut run = Run::default();
        run.begin(1);
        for n in 1..=MAX_RANGES as u64 {
            assert_eq!(run.record(n * 2), Seen::Ahead);
        }
        assert_eq!(run.record(1_000), Seen::TooFar);
        assert_eq!(run.record(1_000), Seen::TooFar);
        assert_eq!(run.record(3), Seen::Ahead, "a hole can still be filled");
        assert_eq!(run.record(1), Seen::Next { joined: true });
        assert_eq!(run.accepted(), 4);
    }

    proptest! {
        #[test]
        fn a_run_is_what_a_set_would_say(sequences in prop::collection::vec(1u64..40, 1..80)) {
            let mut run = Run::default();
            let mut set = BTreeSet::new();
            let since = sequences[0];
            for sequence in sequences {
                let new = sequence >= since && set.insert(sequence);
                let seen = run.record(sequence);
                prop_assert_eq!(new, matches!(seen, Seen::Next { .. } | Seen::Ahead));
                let accepted = (since..).find(|next| !set.contains(next)).unwrap() - 1;
                prop_assert_eq!(run.accepted(), accepted);
                prop_assert_eq!(run.is_whole(), set.last() == Some(&accepted));
                let top = *set.last().unwrap();
                prop_assert_eq!(run.missing(), (since..=top).filter(|n| !set.contains(n)).count() as u64);
            }
        }
    }
}
