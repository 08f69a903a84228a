//! Steps of the wall clock, which timers do not see: pure.

use jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

/// Difference between the wall clock and the monotonic clock from which the wall clock counts as stepped. Time servers slew
/// smaller ones.
const STEP: SignedDuration = SignedDuration::from_secs(1);

/// Compares the wall clock with the monotonic one.
#[derive(Debug, Default)]
pub(super) struct WallClock(Option<(Timestamp, Instant)>);

impl WallClock {
    /// Returns true if the wall clock was set, or the machine slept, since the last call.
    pub(super) fn has_stepped(&mut self, wall: Timestamp, monotonic: Instant) -> bool {
        let Some((last_wall, last_monotonic)) = self.0.replace((wall, monotonic)) else { return false };
        let passed = monotonic.saturating_duration_since(last_monotonic);
        let passed = SignedDuration::try_from(passed).unwrap_or(SignedDuration::MAX);
        wall.duration_since(last_wall).saturating_sub(passed).abs() >= STEP
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_a_difference_between_the_clocks_is_a_step() {
        let (start, mut clock) = (Instant::now(), WallClock::default());
        let mut at = |wall_ms: i64, monotonic_ms: u64| {
            let wall = Timestamp::from_millisecond(1_000_000 + wall_ms).unwrap();
            clock.has_stepped(wall, start + Duration::from_millis(monotonic_ms))
        };
        assert!(!at(0, 0), "the first reading");
        assert!(!at(5_000, 5_000));
        assert!(!at(3_605_000, 3_605_000), "an hour without a reading");
        assert!(!at(3_610_300, 3_610_000), "a slewed clock");
        assert!(at(3_000_000, 3_615_000), "set back");
        assert!(!at(3_005_000, 3_620_000), "the new time goes on");
        assert!(at(9_005_000, 3_625_000), "set forward, or asleep");
        assert!(!at(9_010_000, 3_630_000));
    }
}
