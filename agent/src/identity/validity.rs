//! Validity of a certificate, and the time of its renewal. Pure.

use std::time::Duration;

use tokio::time::Instant;

/// Seconds by which issuers backdate certificates, to tolerate slow clocks.
const DATED_BACK: i64 = 600;
/// Jitter of the renewal as a fraction of the validity, so that certificates issued together are not renewed together.
const SPREAD: u32 = 12;

/// Validity of a certificate by the monotonic clock, which is independent of the system time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Validity {
    /// Time of the renewal.
    pub(super) due: Instant,
    /// Time of expiry.
    pub(super) end: Instant,
}

impl Validity {
    /// Validity of a certificate that has just been issued and expires in `seconds`.
    pub(super) fn issued(now: Instant, seconds: i64, spread: impl FnOnce(Duration) -> Duration) -> Self {
        Self::new(now, Duration::ZERO, duration(seconds), spread)
    }

    /// Validity of a stored certificate, at a time in Unix seconds. A certificate does not contain its time of issue;
    /// it is estimated from the start of validity and [`DATED_BACK`].
    pub(super) fn found(
        now: Instant,
        unix: i64,
        not_before: i64,
        not_after: i64,
        spread: impl FnOnce(Duration) -> Duration,
    ) -> Self {
        let issued = not_before.saturating_add(DATED_BACK).min(unix);
        let age = duration(unix.saturating_sub(issued));
        let total = duration(not_after.saturating_sub(issued));
        Self::new(now, age, total, spread)
    }

    fn new(now: Instant, age: Duration, total: Duration, spread: impl FnOnce(Duration) -> Duration) -> Self {
        let due = total / 3 * 2 + spread(total / SPREAD);
        let after = |time: Duration| now.checked_add(time.saturating_sub(age)).unwrap_or(now);
        Self { due: after(due), end: after(total) }
    }
}

/// Limits a duration to a hundred years, which `Instant` can represent.
fn duration(seconds: i64) -> Duration {
    const FOREVER: u64 = 100 * 366 * 86_400;
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0).min(FOREVER))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3_600;

    fn hours(validity: Validity, now: Instant) -> (f64, f64) {
        let hours = |at: Instant| at.duration_since(now).as_secs_f64() / 3_600.0;
        (hours(validity.due), hours(validity.end))
    }

    #[test]
    fn renewal_is_due_after_two_thirds_and_before_three_quarters() {
        let now = Instant::now();
        assert_eq!(hours(Validity::issued(now, 24 * HOUR, |_| Duration::ZERO), now), (16.0, 24.0));
        assert_eq!(hours(Validity::issued(now, 24 * HOUR, |spread| spread), now), (18.0, 24.0));
        assert_eq!(hours(Validity::issued(now, -1, |spread| spread), now), (0.0, 0.0));
        let forever = Validity::issued(now, i64::MAX, |spread| spread);
        assert!(forever.due > now && forever.end > forever.due);
    }

    #[test]
    fn age_of_a_stored_certificate_is_estimated_from_its_validity() {
        let now = Instant::now();
        let found = |unix| Validity::found(now, unix, HOUR - DATED_BACK, 25 * HOUR, |_| Duration::ZERO);
        assert_eq!(hours(found(HOUR), now), (16.0, 24.0));
        assert_eq!(hours(found(9 * HOUR), now), (8.0, 16.0));
        assert_eq!(hours(found(20 * HOUR), now), (0.0, 5.0), "overdue");
        // An issuer that does not backdate.
        assert_eq!(hours(found(HOUR - DATED_BACK), now).1, 24.0 + 1.0 / 6.0);
    }
}
