//! Sequences received in one epoch.

/// Maximum number of disjoint ranges above the contiguous run. An honest agent leaves a gap only for an event that was
/// refused individually, and fills it with its next request.
const MAX_RANGES: usize = 64;

/// Classification of a received sequence. The name is its result in metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub(super) enum SequenceStatus {
    /// The next of the contiguous run.
    #[strum(serialize = "recorded")]
    Next {
        /// It closed a gap: events above it, received earlier, now belong to the run as well.
        closed_gap: bool,
    },
    /// New, but an earlier sequence is missing.
    Ahead,
    /// Received before.
    Duplicate,
    /// Below the start of the ledger, so it is unknown whether it was received.
    Below,
    /// Beyond the maximum number of ranges: not recorded, and therefore never accepted.
    TooFar,
}

/// Tracks the contiguous run of sequences and the ranges above it.
#[derive(Clone, Debug, Default)]
pub(super) struct SequenceTracker {
    /// First and last sequence of the run; empty if the last is one below the first.
    ends: Option<(u64, u64)>,
    /// Closed ranges above the run, ascending, each preceded by a gap.
    above: Vec<(u64, u64)>,
}

impl SequenceTracker {
    /// Starts the run at `first` unless it has started. Returns true if it started now.
    pub(super) fn begin(&mut self, first: u64) -> bool {
        let begins = self.ends.is_none() && first > 0;
        if begins {
            self.ends = Some((first, first - 1));
        }
        begins
    }

    /// Records one sequence.
    pub(super) fn record(&mut self, sequence: u64) -> SequenceStatus {
        self.begin(sequence);
        let Some((since, accepted)) = self.ends else { return SequenceStatus::Below };
        if sequence < since {
            return SequenceStatus::Below;
        }
        if sequence <= accepted {
            return SequenceStatus::Duplicate;
        }
        if sequence - 1 > accepted {
            return self.record_above(sequence);
        }
        let closed_gap = self.above.first().is_some_and(|(low, _)| *low - 1 == sequence);
        let last = if closed_gap { self.above.remove(0).1 } else { sequence };
        self.ends = Some((since, last));
        SequenceStatus::Next { closed_gap }
    }

    fn record_above(&mut self, sequence: u64) -> SequenceStatus {
        let at = self.above.partition_point(|(_, high)| *high < sequence);
        if self.above.get(at).is_some_and(|(low, _)| *low <= sequence) {
            return SequenceStatus::Duplicate;
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
            (false, false) if self.above.len() == MAX_RANGES => return SequenceStatus::TooFar,
            (false, false) => self.above.insert(at, (sequence, sequence)),
        }
        SequenceStatus::Ahead
    }

    /// Last sequence of the contiguous run from [`Self::since`]; 0 before the first.
    pub(super) fn accepted(&self) -> u64 {
        self.ends.map_or(0, |(_, accepted)| accepted)
    }

    /// First sequence of the run; 1 before the first.
    pub(super) fn since(&self) -> u64 {
        self.ends.map_or(1, |(since, _)| since)
    }

    /// Returns true if no sequence was received.
    pub(super) fn is_empty(&self) -> bool {
        self.ends.is_none()
    }

    /// Returns true if there is no gap.
    pub(super) fn is_whole(&self) -> bool {
        self.above.is_empty()
    }

    /// Number of missing sequences below the highest received.
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
    fn sequences_are_classified() {
        let next = SequenceStatus::Next { closed_gap: false };
        let mut tracker = SequenceTracker::default();
        assert_eq!((tracker.accepted(), tracker.since()), (0, 1));
        for (sequence, seen, accepted) in [
            (5, next, 5),
            (6, next, 6),
            (5, SequenceStatus::Duplicate, 6),
            (4, SequenceStatus::Below, 6),
            (9, SequenceStatus::Ahead, 6),
            (9, SequenceStatus::Duplicate, 6),
            (11, SequenceStatus::Ahead, 6),
            (10, SequenceStatus::Ahead, 6),
            (8, SequenceStatus::Ahead, 6),
            (7, SequenceStatus::Next { closed_gap: true }, 11),
            (12, next, 12),
            (u64::MAX, SequenceStatus::Ahead, 12),
        ] {
            assert_eq!(tracker.record(sequence), seen, "{sequence}");
            assert_eq!(tracker.accepted(), accepted, "{sequence}");
        }
        assert_eq!(tracker.since(), 5);
        assert_eq!(tracker.missing(), u64::MAX - 13);
    }

    #[test]
    fn sequences_beyond_the_maximum_of_gaps_are_not_recorded() {
        let mut tracker = SequenceTracker::default();
        tracker.begin(1);
        for n in 1..=MAX_RANGES as u64 {
            assert_eq!(tracker.record(n * 2), SequenceStatus::Ahead);
        }
        assert_eq!(tracker.record(1_000), SequenceStatus::TooFar);
        assert_eq!(tracker.record(1_000), SequenceStatus::TooFar);
        assert_eq!(tracker.record(3), SequenceStatus::Ahead, "a gap can still be filled");
        assert_eq!(tracker.record(1), SequenceStatus::Next { closed_gap: true });
        assert_eq!(tracker.accepted(), 4);
    }

    proptest! {
        #[test]
        fn tracker_agrees_with_a_set(sequences in prop::collection::vec(1u64..40, 1..80)) {
            let mut tracker = SequenceTracker::default();
            let mut set = BTreeSet::new();
            let since = sequences[0];
            for sequence in sequences {
                let new = sequence >= since && set.insert(sequence);
                let seen = tracker.record(sequence);
                prop_assert_eq!(new, matches!(seen, SequenceStatus::Next { .. } | SequenceStatus::Ahead));
                let accepted = (since..).find(|next| !set.contains(next)).unwrap() - 1;
                prop_assert_eq!(tracker.accepted(), accepted);
                prop_assert_eq!(tracker.is_whole(), set.last() == Some(&accepted));
                let top = *set.last().unwrap();
                prop_assert_eq!(tracker.missing(), (since..=top).filter(|n| !set.contains(n)).count() as u64);
            }
        }
    }
}
