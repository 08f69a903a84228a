//! Full-jitter exponential backoff: the wait is drawn between nothing and a ceiling that doubles.

use std::time::Duration;

use crate::random;

/// Counts failures in a row and says how long to wait after each.
#[derive(Debug)]
pub(crate) struct Backoff {
    base: Duration,
    failures: u32,
}

impl Backoff {
    /// The first ceiling is `base`.
    pub(crate) const fn new(base: Duration) -> Self {
        Self { base, failures: 0 }
    }

    /// One more failure; the wait is at most `cap`.
    pub(crate) fn fail(&mut self, cap: Duration) -> Duration {
        let ceiling = ceiling(self.base, self.failures, cap);
        self.failures = self.failures.saturating_add(1);
        random::up_to(ceiling)
    }

    /// The row of failures has ended.
    pub(crate) const fn reset(&mut self) {
        self.failures = 0;
    }
}

fn ceiling(base: Duration, failures: u32, cap: Duration) -> Duration {
    base.saturating_mul(1 << failures.min(20)).min(cap)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ceiling_doubles_up_to_the_cap() {
        let (base, cap) = (Duration::from_secs(1), Duration::from_secs(15));
        let ceilings: Vec<_> = (0..6).map(|failures| ceiling(base, failures, cap).as_secs()).collect();
        assert_eq!(ceilings, [1, 2, 4, 8, 15, 15]);
        assert_eq!(ceiling(base, u32::MAX, cap), cap);
    }
}
