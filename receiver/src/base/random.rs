//! A small pseudo-random generator for jitter: deterministic for a seed, and not for secrets.

/// xorshift64*.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// Seeds the generator. Zero, a fixed point of xorshift, is replaced.
    pub(crate) const fn new(seed: u64) -> Self {
        Self(if seed == 0 { 0x9e37_79b9_7f4a_7c15 } else { seed })
    }

    /// Returns a number from 0 to `max`, both included.
    pub(crate) fn up_to(&mut self, max: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let drawn = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d);
        // The bias of the remainder is negligible for jitter.
        max.checked_add(1).map_or(drawn, |span| drawn % span)
    }
}
