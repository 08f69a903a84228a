//! Steps of the system's clock. Pure: both clocks are arguments.

use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

/// Steps below it stay within the accuracy of dates; a slow drift adds up to a step.
const LEAST_STEP: Duration = Duration::from_secs(1);

/// Compares the system's clock with the monotonic one, by which delays are measured. A clock that is set, and a machine
/// that was suspended, make them differ.
#[derive(Debug)]
pub(crate) struct ClockSteps {
    wall: Timestamp,
    monotonic: Instant,
}

impl ClockSteps {
    pub(crate) const fn new(wall: Timestamp, monotonic: Instant) -> Self {
        Self { wall, monotonic }
    }

    /// Returns by how much the system's clock has stepped forward since the last call. A step back returns `None`, and
    /// later steps count from there: work that was delayed until a date comes too early, and is delayed again.
    pub(crate) fn forward(&mut self, wall: Timestamp, monotonic: Instant) -> Option<Duration> {
        let passed = monotonic.saturating_duration_since(self.monotonic);
        let by_wall = Duration::try_from(wall.duration_since(self.wall)).unwrap_or_default();
        let (ahead, behind) = (by_wall.saturating_sub(passed), passed.saturating_sub(by_wall));
        if ahead.max(behind) < LEAST_STEP {
            return None;
        }
        *self = Self::new(wall, monotonic);
        (ahead >= LEAST_STEP).then_some(ahead)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_steps_forward_are_returned() {
        const S: Duration = Duration::from_secs(1);
        let at = |millis| Timestamp::from_millisecond(millis).unwrap();
        let start = Instant::now();
        let mut clock = ClockSteps::new(at(1_000_000), start);
        assert_eq!(clock.forward(at(1_005_000), start + 5 * S), None);
        assert_eq!(clock.forward(at(1_069_000), start + 9 * S), Some(60 * S), "set, or suspended meanwhile");
        assert_eq!(clock.forward(at(1_069_000), start + 9 * S), None, "once");
        assert_eq!(clock.forward(at(1_000), start + 10 * S), None, "set back");
        assert_eq!(clock.forward(at(9_000), start + 12 * S), Some(6 * S), "counted from there");
        // Half a second in each of two calls.
        assert_eq!(clock.forward(at(11_500), start + 14 * S), None);
        assert_eq!(clock.forward(at(14_000), start + 16 * S), Some(S), "a drift adds up");
    }
}
