//! Replay protection for one runtime: a sliding bitmap of used nonces per epoch. An epoch expires when no signature of
//! it can be in the signature window any more.

use tidewatch_api::identity::Epoch;
use tidewatch_contract::signature::{Nonce, VerifiedSignature, WINDOW_SECONDS};

use super::refusal::Refusal;

/// Counters per epoch that may arrive out of order.
const COUNTERS: u64 = 1_024;
const WORDS: usize = (COUNTERS / 64) as usize;
/// Epochs of one runtime at most; to evict one would permit replays of its signatures. An honest agent in a crash loop starts a handful within the signature window.
const MAX_EPOCHS: usize = 16;

/// Used nonces of one runtime.
#[derive(Debug, Default)]
pub(super) struct ReplayWindows(Vec<Window>);

#[derive(Debug)]
struct Window {
    epoch: Epoch,
    /// Creation time of the newest signature, Unix seconds.
    newest: i64,
    highest: u64,
    seen: [u64; WORDS],
}

impl ReplayWindows {
    /// Uses the nonce of a signature that was verified at `now` (Unix seconds). A nonce too old for the bitmap counts as
    /// used.
    pub(super) fn take(&mut self, verified: &VerifiedSignature, now: i64) -> Result<(), Refusal> {
        self.expire(now);
        let VerifiedSignature { created, nonce: Nonce { epoch, counter }, .. } = *verified;
        if let Some(window) = self.0.iter_mut().find(|window| window.epoch == epoch) {
            return window.take(counter, created).then_some(()).ok_or(Refusal::Replay);
        }
        if self.0.len() >= MAX_EPOCHS {
            return Err(Refusal::Epochs);
        }
        let mut window = Window { epoch, newest: created, highest: counter, seen: [0; WORDS] };
        window.mark(counter);
        // Nearly always the only one.
        self.0.reserve_exact(1);
        self.0.push(window);
        Ok(())
    }

    /// Removes epochs without any signature left in the signature window.
    pub(super) fn expire(&mut self, now: i64) {
        self.0.retain(|window| window.newest.saturating_add(WINDOW_SECONDS) >= now);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Window {
    fn take(&mut self, counter: u64, created: i64) -> bool {
        if counter > self.highest {
            let steps = (counter - self.highest).min(COUNTERS);
            for step in 0..steps {
                // Clears the slots that enter the window, at most all of them.
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

/// Returns word and bit of a counter. A remainder of 1,024 fits every `usize`.
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
        VerifiedSignature::unchecked(created, Nonce { epoch: Epoch::new(epoch), counter })
    }

    #[test]
    fn nonce_is_taken_once_in_any_order() {
        let mut nonces = ReplayWindows::default();
        for (counter, taken) in
            [(5, true), (5, false), (3, true), (3, false), (7, true), (6, true), (0, true), (0, false)]
        {
            assert_eq!(nonces.take(&verified(1, counter, 100), 100).is_ok(), taken, "{counter}");
        }
        assert_eq!(nonces.take(&verified(2, 5, 100), 100), Ok(()), "another epoch has counters of its own");
    }

    #[test]
    fn counter_below_the_window_is_refused() {
        let mut nonces = ReplayWindows::default();
        for (counter, taken) in [(1_024, true), (1, true), (0, false), (2_048, true), (1_024, false), (1_025, true)] {
            assert_eq!(nonces.take(&verified(1, counter, 100), 100).is_ok(), taken, "{counter}");
        }
        assert!(nonces.take(&verified(1, u64::MAX, 100), 100).is_ok());
        assert!(nonces.take(&verified(1, u64::MAX, 100), 100).is_err());
    }

    #[test]
    fn epoch_expires_once_it_cannot_be_replayed() {
        let mut nonces = ReplayWindows::default();
        for epoch in 0..16 {
            assert_eq!(nonces.take(&verified(epoch, 1, 100), 100), Ok(()));
        }
        assert_eq!(nonces.take(&verified(16, 1, 100), 100), Err(Refusal::Epochs));
        assert_eq!(nonces.take(&verified(0, 1, 100), 160), Err(Refusal::Replay));
        assert_eq!(nonces.take(&verified(16, 1, 161), 161), Ok(()));
        nonces.expire(222);
        assert!(nonces.is_empty());
    }

    proptest! {
        #[test]
        fn bitmap_agrees_with_a_set(counters in prop::collection::vec(prop_oneof![0u64..3_000, 0u64..64], 1..400)) {
            let mut nonces = ReplayWindows::default();
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
