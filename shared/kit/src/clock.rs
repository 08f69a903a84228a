//! Steps of the system's clock. Pure: both clocks are arguments.

use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

/// Steps below it stay within the accuracy of dates; a slow drift adds up to a step.
const LEAST_STEP: Duration = Duration::from_secs(1);

/// A step of the system's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockStep {
    /// It was set forward by this time, or the machine was suspended.
    Forward(Duration),
    /// It was set back. Work that was delayed until a date comes too early, and is delayed again.
    Back,
}

/// Compares the system's clock with the monotonic one, by which delays are measured. A clock that is set, and a machine
/// that was suspended, make them differ.
#[derive(Debug)]
pub struct ClockSteps {
    wall: Timestamp,
    monotonic: Instant,
}

impl ClockSteps {
    /// Starts from a reading of both clocks.
    pub const fn new(wall: Timestamp, monotonic: Instant) -> Self {
        Self { wall, monotonic }
    }

    /// Returns the step since the last call, if there was one. Later steps count from there.
    pub fn step(&mut self, wall: Timestamp, monotonic: Instant) -> Option<ClockStep> {
        let passed = monotonic.saturating_duration_since(self.monotonic);
        let by_wall = Duration::try_from(wall.duration_since(self.wall)).unwrap_or_default();
        let ahead = by_wall.saturating_sub(passed);
        let behind = passed.saturating_sub(by_wall);
        if ahead.max(behind) < LEAST_STEP {
            return None;
        }
        *self = Self::new(wall, monotonic);
        Some(if ahead >= LEAST_STEP { ClockStep::Forward(ahead) } else { ClockStep::Back })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_difference_between_the_clocks_is_a_step() {
        const S: Duration = Duration::from_secs(1);
        let forward = |seconds| Some(ClockStep::Forward(seconds * S));
        let at = |millis| Timestamp::from_millisecond(millis).unwrap();
        let start = Instant::now();
        let mut clock = ClockSteps::new(at(1_000_000), start);
        assert_eq!(clock.step(at(1_005_000), start + 5 * S), None);
        assert_eq!(clock.step(at(1_069_000), start + 9 * S), forward(60), "set, or suspended meanwhile");
        assert_eq!(clock.step(at(1_069_000), start + 9 * S), None, "once");
        assert_eq!(clock.step(at(1_000), start + 10 * S), Some(ClockStep::Back));
        assert_eq!(clock.step(at(9_000), start + 12 * S), forward(6), "counted from there");
        assert_eq!(clock.step(at(3_609_000), start + 3_612 * S), None, "an hour without a call");
        // Half a second in each of two calls.
        assert_eq!(clock.step(at(3_611_500), start + 3_614 * S), None);
        assert_eq!(clock.step(at(3_614_000), start + 3_616 * S), forward(1), "a drift adds up");
    }
}
