//! The wall clock, the only source of calendar time.
//!
//! Tests of wrong clocks offset it for the whole process (`--clock-offset-seconds`) before the first read.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};
use rustls::{ClientConfig, pki_types::UnixTime, time_provider::TimeProvider};

/// Offset from the system clock, in seconds.
static OFFSET: AtomicI64 = AtomicI64::new(0);

/// Sets the offset from the system clock.
pub(crate) fn set_offset(seconds: i64) {
    OFFSET.store(seconds, Ordering::Relaxed);
}

/// The current time.
pub(crate) fn now() -> Timestamp {
    offset_by(Timestamp::now(), OFFSET.load(Ordering::Relaxed))
}

/// Milliseconds since the Unix epoch.
pub(crate) fn unix_millis() -> i64 {
    now().as_millisecond()
}

/// Seconds since the Unix epoch.
pub(crate) fn unix_seconds() -> i64 {
    now().as_second()
}

/// Verifies the validity of peer certificates with this clock.
pub(crate) fn with_wall_clock(mut config: ClientConfig) -> ClientConfig {
    config.time_provider = Arc::new(WallClock);
    config
}

fn offset_by(time: Timestamp, seconds: i64) -> Timestamp {
    let by = SignedDuration::from_secs(seconds);
    time.saturating_add(by).unwrap_or(time)
}

/// The wall clock as rustls' time provider.
#[derive(Debug)]
struct WallClock;

impl TimeProvider for WallClock {
    fn current_time(&self) -> Option<UnixTime> {
        let seconds = u64::try_from(unix_seconds()).ok()?;
        Some(UnixTime::since_unix_epoch(Duration::from_secs(seconds)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offset_saturates_at_the_bounds_of_the_clock() {
        let time = Timestamp::from_second(1_000).unwrap();
        assert_eq!(offset_by(time, -300).as_second(), 700);
        assert_eq!(offset_by(time, i64::MAX), Timestamp::MAX);
        assert_eq!(offset_by(time, i64::MIN), Timestamp::MIN);
    }
}
