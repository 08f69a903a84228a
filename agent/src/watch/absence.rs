//! Lookups of a kind that the API server does not serve.

use std::time::Duration;

use crate::random;

/// Number of consecutive lookups that must miss a kind before its objects count as deleted: an API server that starts
/// does not serve its custom kinds at once.
pub(super) const CONFIRMATIONS: u32 = 3;
/// Ceiling of the delay after the first lookups; it doubles after each later one, because a kind often appears soon
/// after its watch.
const FIRST: Duration = Duration::from_secs(4);
/// Highest ceiling of the delay. It is shorter than the silence after which a watch counts as failing.
pub(super) const SLOWEST: Duration = Duration::from_secs(240);

/// Consecutive lookups that missed a kind.
#[derive(Debug, Default)]
pub(super) struct Absence {
    lookups: u32,
}

impl Absence {
    /// Counts a lookup without the kind; returns true if the absence is confirmed.
    pub(super) const fn observe(&mut self) -> bool {
        self.lookups = self.lookups.saturating_add(1);
        self.lookups >= CONFIRMATIONS
    }

    /// Delay until the next lookup, between half of the ceiling and all of it.
    pub(super) fn delay(&self) -> Duration {
        let doublings = self.lookups.saturating_sub(CONFIRMATIONS).min(10);
        spread(FIRST.saturating_mul(1 << doublings).min(SLOWEST))
    }

    /// The definition of the kind changed: lookups become frequent again, and a confirmed absence stays confirmed.
    pub(super) fn redefined(&mut self) {
        self.lookups = self.lookups.min(CONFIRMATIONS);
    }

    /// A lookup found the kind, or failed.
    pub(super) const fn reset(&mut self) {
        self.lookups = 0;
    }
}

/// A random delay between half of a ceiling and all of it.
pub(super) fn spread(ceiling: Duration) -> Duration {
    let half = ceiling / 2;
    half + random::up_to(half)
}

#[cfg(test)]
mod tests {
    use tidewatch_contract::heartbeat::SILENT_AFTER_SECONDS;

    use super::*;

    #[test]
    fn lookups_are_frequent_until_confirmed_and_become_rare() {
        let mut absence = Absence::default();
        let seconds = |least: u64, most: u64| Duration::from_secs(least)..=Duration::from_secs(most);
        for (confirmed, delay) in [(false, seconds(2, 4)), (false, seconds(2, 4)), (true, seconds(2, 4))] {
            assert_eq!(absence.observe(), confirmed);
            assert!(delay.contains(&absence.delay()));
        }
        for (least, most) in [(4, 8), (8, 16), (16, 32), (32, 64), (64, 128), (120, 240), (120, 240)] {
            assert!(absence.observe() && seconds(least, most).contains(&absence.delay()));
        }
        absence.lookups = u32::MAX;
        assert!(absence.observe() && seconds(120, 240).contains(&absence.delay()));
        absence.redefined();
        assert!(absence.observe() && seconds(4, 8).contains(&absence.delay()));
        absence.reset();
        assert!(!absence.observe());
    }

    #[test]
    fn watch_of_an_absent_kind_is_never_silent_for_too_long() {
        assert!(SLOWEST + Duration::from_secs(30) < Duration::from_secs(SILENT_AFTER_SECONDS));
    }
}
