//! How often agents shall speak, and when a silent one is called away.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// The heartbeat interval that agents are told now, for those who keep their connections. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Interval(Arc<AtomicU64>);

impl Interval {
    /// Whole seconds.
    #[must_use]
    pub fn get(&self) -> Duration {
        Duration::from_secs(self.0.load(Ordering::Relaxed))
    }

    #[cfg(test)]
    pub(crate) fn of(interval: Duration) -> Self {
        let told = Self::default();
        told.set(interval);
        told
    }

    pub(super) fn set(&self, interval: Duration) {
        self.0.store(interval.as_secs(), Ordering::Relaxed);
    }
}

/// No interval is longer: an agent refuses more, and three of it are how long a dead one goes unnoticed.
const MAX_INTERVAL: Duration = Duration::from_secs(3_600);

/// See [`super::Settings`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    pub(super) heartbeat: Duration,
    /// Heartbeats of all runtimes in one second, at most.
    pub(super) per_second: u32,
    pub(super) away_after: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self { heartbeat: Duration::from_secs(30), per_second: 200, away_after: Duration::from_secs(2 * 3_600) }
    }
}

impl Pace {
    /// The interval that so many runtimes are told: the configured one, or longer when they would be too many. Whole seconds, at
    /// least one.
    pub(super) fn interval(&self, runtimes: usize) -> Duration {
        let least = u64::try_from(runtimes).unwrap_or(u64::MAX).div_ceil(u64::from(self.per_second.max(1)));
        let configured = self.heartbeat.as_secs().max(1);
        Duration::from_secs(configured.max(least)).min(MAX_INTERVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_grows_with_the_number_of_runtimes_up_to_an_hour() {
        let pace = Pace { per_second: 100, ..Pace::default() };
        for (runtimes, seconds) in [(0, 30), (3_000, 30), (3_001, 31), (10_000, 100), (1_000_000_000, 3_600)] {
            assert_eq!(pace.interval(runtimes), Duration::from_secs(seconds), "{runtimes}");
        }
        assert_eq!(Pace { heartbeat: Duration::ZERO, ..pace }.interval(0), Duration::from_secs(1));
    }
}
