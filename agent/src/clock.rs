//! The wall clock, read in one place.
//!
//! Tests of wrong clocks shift it for the whole process (`--clock-offset-seconds`), before anything reads it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};
use rustls::{ClientConfig, pki_types::UnixTime, time_provider::TimeProvider};

/// Added to the system's clock, in seconds.
static SHIFT: AtomicI64 = AtomicI64::new(0);

/// From now on the clock is wrong by so many seconds.
pub(crate) fn shift(seconds: i64) {
    SHIFT.store(seconds, Ordering::Relaxed);
}

/// Now.
pub(crate) fn now() -> Timestamp {
    shifted(Timestamp::now(), SHIFT.load(Ordering::Relaxed))
}

/// Milliseconds since 1970.
pub(crate) fn unix_millis() -> i64 {
    now().as_millisecond()
}

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> i64 {
    now().as_second()
}

/// Lets certificates of peers be judged by this clock.
pub(crate) fn judge_by(mut config: ClientConfig) -> ClientConfig {
    config.time_provider = Arc::new(Wall);
    config
}

fn shifted(time: Timestamp, seconds: i64) -> Timestamp {
    let by = SignedDuration::from_secs(seconds);
    time.saturating_add(by).unwrap_or(time)
}

/// The clock as rustls reads it.
#[derive(Debug)]
struct Wall;

impl TimeProvider for Wall {
    fn current_time(&self) -> Option<UnixTime> {
        let seconds = u64::try_from(unix_seconds()).ok()?;
        Some(UnixTime::since_unix_epoch(Duration::from_secs(seconds)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shift_moves_the_clock_and_never_out_of_bounds() {
        let time = Timestamp::from_second(1_000).unwrap();
        assert_eq!(shifted(time, -300).as_second(), 700);
        assert_eq!(shifted(time, i64::MAX), Timestamp::MAX);
        assert_eq!(shifted(time, i64::MIN), Timestamp::MIN);
    }
}
