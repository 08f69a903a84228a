//! Use of one runtime's identity: replay protection, by a sliding bitmap of used nonces per epoch, and detection of a second
//! agent process, by the order of the epochs. The nonces of an epoch expire when no signature of it can be in the signature
//! window any more.

use std::time::Duration;

use tidewatch_api::identity::Epoch;
use tidewatch_contract::{
    certificate::Leaf,
    signature::{Nonce, VerifiedSignature, WINDOW_SECONDS},
};
use tokio::time::Instant;

use super::refusal::Refusal;

/// Counters per epoch that may arrive out of order.
const COUNTERS: u64 = 1_024;
const WORDS: usize = (COUNTERS / 64) as usize;
/// Epochs of one runtime at most; to evict one would permit replays of its signatures. An honest agent in a crash loop starts a handful within the signature window.
const MAX_EPOCHS: usize = 16;

/// Time in which requests of an earlier epoch may still arrive: a signature is valid for a minute, from at most a
/// minute in the future.
const GRACE: Duration = Duration::from_secs(2 * WINDOW_SECONDS.unsigned_abs() + 30);
/// Earlier epochs at most; beyond it the one without a request for longest is forgotten.
const MAX_EARLIER: usize = 16;

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

/// A certificate in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UsedLeaf {
    pub(super) fingerprint: String,
    /// End of validity, in Unix seconds.
    pub(super) not_after: i64,
}

impl UsedLeaf {
    pub(super) fn of(leaf: &Leaf) -> Self {
        Self { fingerprint: leaf.fingerprint.clone(), not_after: leaf.not_after }
    }
}

/// The certificates of two processes, which are equal if one of them was copied and not renewed since.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fork(pub(super) [UsedLeaf; 2]);

/// Epochs of one runtime, in the order of their first requests. Detects two agent processes that use the identity of the
/// runtime.
///
/// An agent draws an epoch when it starts, and another one when another receiver process answers; it never returns to
/// an earlier one. A request of an earlier epoch that arrives long after the first of a later one is therefore from a
/// second process: a copied key, or a pod that the runtime's API server believes to be gone. All times are those of
/// arrival at this receiver.
#[derive(Debug, Default)]
pub(super) struct Lineage {
    current: Option<(Epoch, UsedLeaf)>,
    earlier: Vec<EarlierEpoch>,
}

#[derive(Debug)]
struct EarlierEpoch {
    epoch: Epoch,
    /// First request of a later epoch.
    replaced: Instant,
    /// Last request of this one.
    seen: Instant,
}

impl Lineage {
    /// Observes a verified request. After a fork it starts anew.
    pub(super) fn observe(&mut self, epoch: Epoch, leaf: &Leaf, now: Instant) -> Result<(), Fork> {
        match &mut self.current {
            Some((current, used)) if *current == epoch => {
                if used.fingerprint != leaf.fingerprint {
                    *used = UsedLeaf::of(leaf);
                }
                return Ok(());
            }
            None => {
                self.current = Some((epoch, UsedLeaf::of(leaf)));
                return Ok(());
            }
            Some(_) => {}
        }
        if let Some(earlier) = self.earlier.iter_mut().find(|earlier| earlier.epoch == epoch) {
            earlier.seen = now;
            if now.saturating_duration_since(earlier.replaced) <= GRACE {
                return Ok(());
            }
            let other = self.current.take().map(|(_, leaf)| leaf);
            self.earlier.clear();
            let leaf = UsedLeaf::of(leaf);
            return Err(Fork([other.unwrap_or_else(|| leaf.clone()), leaf]));
        }
        if let Some((replaced, _)) = self.current.replace((epoch, UsedLeaf::of(leaf))) {
            if self.earlier.len() >= MAX_EARLIER {
                let oldest = self.earlier.iter().enumerate().min_by_key(|(_, earlier)| earlier.seen);
                oldest.map(|(at, _)| at).map(|at| self.earlier.swap_remove(at));
            }
            self.earlier.push(EarlierEpoch { epoch: replaced, replaced: now, seen: now });
        }
        Ok(())
    }
}

/// Returns word and bit of a counter. A remainder of 1,024 fits every `usize`.
const fn slot(counter: u64) -> (usize, u64) {
    let index = counter % COUNTERS;
    ((index / 64) as usize, 1 << (index % 64))
}

#[cfg(test)]
mod tests;
