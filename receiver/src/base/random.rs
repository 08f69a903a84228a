//! A small generator for jitter: not for secrets, and the same for the same seed.

/// xorshift64*.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// Any seed will do; zero, which the generator cannot leave, is replaced.
    pub(crate) const fn new(seed: u64) -> Self {
        Self(if seed == 0 { 0x9e37_79b9_7f4a_7c15 } else { seed })
    }

    /// Up to and including `max`.
    pub(crate) fn up_to(&mut self, max: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let drawn = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d);
        // The bias of the remainder is far below what jitter needs.
        max.checked_add(1).map_or(drawn, |span| drawn % span)
    }
}
