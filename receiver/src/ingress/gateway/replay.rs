//! Which nonces of one runtime were used: per epoch a sliding bitmap, epochs kept while a signature of
//! theirs can still be in the window.

use tidewatch_shared::{
    identity::Epoch,
    signature::{Nonce, VerifiedSignature, WINDOW_SECONDS},
};

/// Counters that may arrive out of order, per epoch.
const COUNTERS: u64 = 1_024;
const WORDS: usize = (COUNTERS / 64) as usize;
/// Epochs of one runtime within a window. An honest agent that crashes at every start makes a handful.
const EPOCHS: usize = 16;

/// Why a nonce is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stale {
    /// It was used, or lies so far back that nobody knows.
    Used,
    /// The epoch is new and there are too many; forgetting one would let its signatures be used again.
    TooManyEpochs,
}

/// The nonces of one runtime.
#[derive(Debug, Default)]
pub(super) struct Nonces(Vec<Window>);

#[derive(Debug)]
struct Window {
    epoch: Epoch,
    /// Unix seconds: the newest signature's.
    newest: i64,
    highest: u64,
    seen: [u64; WORDS],
}

impl Nonces {
    /// Takes the nonce of a signature that verified at `now`, in Unix seconds.
    pub(super) fn take(&mut self, verified: &VerifiedSignature, now: i64) -> Result<(), Stale> {
        self.forget(now);
        let VerifiedSignature { created, nonce: Nonce { epoch, counter } } = *verified;
        if let Some(window) = self.0.iter_mut().find(|window| window.epoch == epoch) {
            return window.take(counter, created).then_some(()).ok_or(Stale::Used);
        }
        if self.0.len() >= EPOCHS {
            return Err(Stale::TooManyEpochs);
        }
        let mut window = Window { epoch, newest: created, highest: counter, seen: [0; WORDS] };
        window.mark(counter);
        // Nearly always the only one.
        self.0.reserve_exact(1);
        self.0.push(window);
        Ok(())
    }

    /// Drops the epochs whose every signature has left the window, and tells whether any is left.
    pub(super) fn forget(&mut self, now: i64) -> bool {
        self.0.retain(|window| window.newest.saturating_add(WINDOW_SECONDS) >= now);
        !self.0.is_empty()
    }
}

impl Window {
    fn take(&mut self, counter: u64, created: i64) -> bool {
        if counter > self.highest {
            let steps = (counter - self.highest).min(COUNTERS);
            for step in 0..steps {
                // The slots that come into the window; the last ones, when all of them do.
                let (word, bit) = slot(counter - step);
                self.seen[word] &= !bit;
            }
            self.highest = counter;
        } else if self.highest - counter >= COUNTERS || self.is_marked(counter) {
            return false;
        }
        self.mark(counter);
        self.newest = self.newest.max(created);
        true
    }

    fn mark(&mut self, counter: u64) {
        let (word, bit) = slot(counter);
        self.seen[word] |= bit;
    }

    fn is_marked(&self, counter: u64) -> bool {
        let (word, bit) = slot(counter);
        self.seen[word] & bit != 0
    }
}

/// A remainder of 1,024 fits every `usize`.
const fn slot(counter: u64) -> (usize, u64) {
    let index = counter % COUNTERS;
    ((index / 64) as usize, 1 << (index % 64))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn verified(epoch: u64, counter: u64, created: i64) -> VerifiedSignature {
        VerifiedSignature { created, nonce: Nonce { epoch: Epoch::new(epoch), counter } }
    }

    #[test]
    fn a_nonce_is_taken_once_in_any_order() {
        let mut nonces = Nonces::default();
        for (counter, taken) in
            [(5, true), (5, false), (3, true), (3, false), (7, true), (6, true), (0, true), (0, false)]
        {
            assert_eq!(nonces.take(&verified(1, counter, 100), 100).is_ok(), taken, "{counter}");
        }
        assert_eq!(nonces.take(&verified(2, 5, 100), 100), Ok(()), "another epoch has counters of its own");
    }

    #[test]
    fn what_left_the_window_is_refused() {
        let mut nonces = Nonces::default();
        for (counter, taken) in [(1_024, true), (1, true), (0, false), (2_048, true), (1_024, false), (1_025, true)] {
            assert_eq!(nonces.take(&verified(1, counter, 100), 100).is_ok(), taken, "{counter}");
        }
        assert!(nonces.take(&verified(1, u64::MAX, 100), 100).is_ok());
        assert!(nonces.take(&verified(1, u64::MAX, 100), 100).is_err());
    }

    #[test]
    fn epochs_are_kept_while_they_can_be_replayed_and_no_longer() {
        let mut nonces = Nonces::default();
        for epoch in 0..16 {
            assert_eq!(nonces.take(&verified(epoch, 1, 100), 100), Ok(()));
        }
        assert_eq!(nonces.take(&verified(16, 1, 100), 100), Err(Stale::TooManyEpochs));
        assert_eq!(nonces.take(&verified(0, 1, 100), 160), Err(Stale::Used));
        assert_eq!(nonces.take(&verified(16, 1, 161), 161), Ok(()));
        assert!(!nonces.forget(222));
    }

    proptest! {
        #[test]
        fn the_bitmap_agrees_with_a_set(counters in prop::collection::vec(prop_oneof![0u64..3_000, 0u64..64], 1..400)) {
            let mut nonces = Nonces::default();
            let mut set = BTreeSet::new();
            for counter in counters {
                let highest = set.last().copied().unwrap_or(counter);
                let expected = !set.contains(&counter) && counter.saturating_add(COUNTERS) > highest;
                prop_assert_eq!(nonces.take(&verified(1, counter, 100), 100).is_ok(), expected);
                if expected {
                    set.insert(counter);
                }
            }
        }
    }
}
