//! How long a certificate is good for, and when it is renewed. Pure.

use std::time::Duration;

use tokio::time::Instant;

/// What an issuer dates back, for clocks that are behind, in seconds.
const DATED_BACK: i64 = 600;
/// The renewals of certificates that were issued together are spread over this part of their life.
const SPREAD: u32 = 12;

/// The life of a certificate, by a clock that nobody sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    /// When it is renewed.
    pub(super) due: Instant,
    /// When it is of no use any more.
    pub(super) end: Instant,
}

impl Life {
    /// Of a certificate that has just been issued, and ends so many seconds from now.
    pub(super) fn issued(now: Instant, seconds: i64, spread: impl FnOnce(Duration) -> Duration) -> Self {
        Self::new(now, Duration::ZERO, duration(seconds), spread)
    }

    /// Of one that was found, at a time in Unix seconds. When it was issued is not written in it, but nearly.
    pub(super) fn found(
        now: Instant,
        unix: i64,
        (not_before, not_after): (i64, i64),
        spread: impl FnOnce(Duration) -> Duration,
    ) -> Self {
        let issued = not_before.saturating_add(DATED_BACK).min(unix);
        let (age, whole) = (duration(unix.saturating_sub(issued)), duration(not_after.saturating_sub(issued)));
        Self::new(now, age, whole, spread)
    }

    fn new(now: Instant, age: Duration, whole: Duration, spread: impl FnOnce(Duration) -> Duration) -> Self {
        let due = whole / 3 * 2 + spread(whole / SPREAD);
        let after = |time: Duration| now.checked_add(time.saturating_sub(age)).unwrap_or(now);
        Self { due: after(due), end: after(whole) }
    }
}

/// A hundred years are as good as for ever, and clocks can tell them.
fn duration(seconds: i64) -> Duration {
    const FOREVER: u64 = 100 * 366 * 86_400;
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0).min(FOREVER))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3_600;

    fn hours(life: Life, now: Instant) -> (f64, f64) {
        let hours = |at: Instant| at.duration_since(now).as_secs_f64() / 3_600.0;
        (hours(life.due), hours(life.end))
    }

    #[test]
    fn renewal_is_due_after_two_thirds_and_before_three_quarters() {
        let now = Instant::now();
        assert_eq!(hours(Life::issued(now, 24 * HOUR, |_| Duration::ZERO), now), (16.0, 24.0));
        assert_eq!(hours(Life::issued(now, 24 * HOUR, |most| most), now), (18.0, 24.0));
        assert_eq!(hours(Life::issued(now, -1, |most| most), now), (0.0, 0.0));
        let forever = Life::issued(now, i64::MAX, |most| most);
        assert!(forever.due > now && forever.end > forever.due);
    }

    #[test]
    fn one_that_is_found_is_as_old_as_it_says() {
        let now = Instant::now();
        let found = |unix| Life::found(now, unix, (HOUR - DATED_BACK, 25 * HOUR), |_| Duration::ZERO);
        assert_eq!(hours(found(HOUR), now), (16.0, 24.0));
        assert_eq!(hours(found(9 * HOUR), now), (8.0, 16.0));
        assert_eq!(hours(found(20 * HOUR), now), (0.0, 5.0), "overdue");
        // An issuer that dates nothing back.
        assert_eq!(hours(found(HOUR - DATED_BACK), now).1, 24.0 + 1.0 / 6.0);
    }
}
