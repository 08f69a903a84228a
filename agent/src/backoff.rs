//! Exponential backoff with full jitter: each delay is drawn between zero and a ceiling that doubles.

use std::time::Duration;

use crate::random;

/// Counts consecutive failures and draws the delay after each.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Counts a failure and returns the delay, at most `cap`. The first ceiling is `first`.
    pub(crate) fn fail(&mut self, first: Duration, cap: Duration) -> Duration {
        let ceiling = ceiling(first, self.failures, cap);
        self.failures = self.failures.saturating_add(1);
        random::up_to(ceiling)
    }

    /// Resets the ceiling after a success.
    pub(crate) const fn reset(&mut self) {
        self.failures = 0;
    }
}

fn ceiling(first: Duration, failures: u32, cap: Duration) -> Duration {
    first.saturating_mul(1 << failures.min(20)).min(cap)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ceiling_doubles_up_to_the_cap() {
        let first = Duration::from_secs(1);
        let cap = Duration::from_secs(15);
        let ceilings: Vec<_> = (0..6).map(|failures| ceiling(first, failures, cap).as_secs()).collect();
        assert_eq!(ceilings, [1, 2, 4, 8, 15, 15]);
        assert_eq!(ceiling(first, u32::MAX, cap), cap);
    }
}
