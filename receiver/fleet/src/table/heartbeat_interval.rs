//! Heartbeat interval of the fleet.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use super::Settings;

/// Heartbeat interval announced to agents now, for the gateway's connection timeouts. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct HeartbeatInterval(Arc<AtomicU64>);

impl HeartbeatInterval {
    /// Returns the interval in whole seconds.
    pub fn get(&self) -> Duration {
        Duration::from_secs(self.0.load(Ordering::Relaxed))
    }

    /// Starts with this interval.
    pub fn new(interval: Duration) -> Self {
        Self(Arc::new(AtomicU64::new(interval.as_secs())))
    }

    pub(super) fn set(&self, interval: Duration) {
        self.0.store(interval.as_secs(), Ordering::Relaxed);
    }
}

/// Maximum interval: agents refuse longer ones, and a dead agent goes unnoticed for three intervals.
const MAX_INTERVAL: Duration = Duration::from_secs(3_600);

impl Settings {
    /// Heartbeat interval for this number of runtimes: the configured one, or longer to respect the maximum rate. Whole seconds,
    /// at least one.
    pub(super) fn heartbeat_interval(&self, runtimes: usize) -> Duration {
        let least =
            u64::try_from(runtimes).unwrap_or(u64::MAX).div_ceil(u64::from(self.max_heartbeats_per_second.max(1)));
        let configured = self.heartbeat.as_secs().max(1);
        Duration::from_secs(configured.max(least)).min(MAX_INTERVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interval_grows_with_the_number_of_runtimes_up_to_an_hour() {
        let settings = Settings { max_heartbeats_per_second: 100, ..Settings::default() };
        for (runtimes, seconds) in [(0, 30), (3_000, 30), (3_001, 31), (10_000, 100), (1_000_000_000, 3_600)] {
            assert_eq!(settings.heartbeat_interval(runtimes), Duration::from_secs(seconds), "{runtimes}");
        }
        let settings = Settings { heartbeat: Duration::ZERO, ..settings };
        assert_eq!(settings.heartbeat_interval(0), Duration::from_secs(1));
    }
}
