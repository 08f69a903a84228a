//! A small pseudo-random generator for jitter: deterministic for a seed, and not for secrets.

use std::{
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

/// xorshift64*.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Default for Random {
    /// Seeds the generator at random, so that those of different processes differ.
    fn default() -> Self {
        Self::new(RandomState::new().hash_one(()))
    }
}

impl Random {
    /// Seeds the generator. Zero, a fixed point of xorshift, is replaced.
    pub const fn new(seed: u64) -> Self {
        Self(if seed == 0 { 0x9e37_79b9_7f4a_7c15 } else { seed })
    }

    /// Returns a number from 0 to `max`, both included.
    pub fn up_to(&mut self, max: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let drawn = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d);
        // The bias of the remainder is negligible for jitter.
        max.checked_add(1).map_or(drawn, |span| drawn % span)
    }

    /// Returns a duration from zero to `max`, both included, in whole milliseconds.
    pub fn jitter(&mut self, max: Duration) -> Duration {
        Duration::from_millis(self.up_to(u64::try_from(max.as_millis()).unwrap_or(u64::MAX)))
    }

    /// Returns the backoff after this many consecutive failures: full jitter below a bound that starts at `first` and
    /// doubles with each failure, up to `cap`. Simultaneous failures thus do not retry simultaneously.
    pub fn backoff(&mut self, first: Duration, cap: Duration, failures: u32) -> Duration {
        self.jitter(first.saturating_mul(2u32.saturating_pow(failures.saturating_sub(1))).min(cap))
    }
}

/// Rotates items by a random number, so that the same one is not always first.
pub fn rotate<T>(items: &mut [T]) {
    let mut random = Random::default();
    let first = random.up_to(u64::try_from(items.len()).unwrap_or(u64::MAX));
    items.rotate_left(usize::try_from(first).unwrap_or(0).min(items.len()));
}
