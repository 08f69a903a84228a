//! Rate limiter per key: a sustained rate, and a burst after a pause.

use std::{collections::HashMap, hash::Hash, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

/// Rate limiter (GCRA) with bounded memory. Keys beyond the capacity are not limited, because a full table must not
/// lock clients out.
pub(super) struct RateLimiter<K> {
    /// Interval that one event costs.
    cost: Duration,
    /// Debt that is allowed at most.
    burst_allowance: Duration,
    capacity: usize,
    /// Time at which the debt of each key is paid off.
    paid_until: Mutex<HashMap<K, Instant>>,
}

impl<K: Eq + Hash> RateLimiter<K> {
    /// One event per `cost`, `burst` at once after a pause, for at most `capacity` keys.
    pub(super) fn new(cost: Duration, burst: u32, capacity: usize) -> Self {
        Self { cost, burst_allowance: cost * burst.saturating_sub(1), capacity, paid_until: Mutex::default() }
    }

    /// Counts one event, or returns the time to wait.
    pub(super) fn take(&self, key: K, now: Instant) -> Result<(), Duration> {
        let mut paid_until = self.paid_until.lock();
        if paid_until.len() >= self.capacity {
            paid_until.retain(|_, paid_until| *paid_until > now);
        }
        if paid_until.len() >= self.capacity && !paid_until.contains_key(&key) {
            return Ok(());
        }
        let paid_until = paid_until.entry(key).or_insert(now);
        let debt = paid_until.saturating_duration_since(now);
        if debt > self.burst_allowance {
            return Err(debt - self.burst_allowance);
        }
        *paid_until = (*paid_until).max(now) + self.cost;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn each_key_has_a_burst_and_then_the_rate() {
        let rate_limiter = RateLimiter::new(SECOND, 3, 10);
        let now = Instant::now();
        assert!((0..3).all(|_| rate_limiter.take("a", now).is_ok()));
        assert_eq!(rate_limiter.take("a", now), Err(SECOND));
        assert_eq!(rate_limiter.take("b", now), Ok(()), "other keys are not affected");
        assert_eq!(rate_limiter.take("a", now + SECOND), Ok(()));
        assert!(rate_limiter.take("a", now + SECOND).is_err());
    }

    #[test]
    fn full_table_stays_bounded_and_locks_no_key_out() {
        let rate_limiter = RateLimiter::new(SECOND, 1, 2);
        let now = Instant::now();
        assert!((0..9).all(|key| rate_limiter.take(key, now).is_ok()));
        assert_eq!(rate_limiter.paid_until.lock().len(), 2);
        assert!(rate_limiter.take(0, now).is_err() && rate_limiter.take(8, now).is_ok());
        assert!(
            rate_limiter.take(8, now + SECOND).is_ok() && rate_limiter.take(8, now + SECOND).is_err(),
            "room again"
        );
    }
}
