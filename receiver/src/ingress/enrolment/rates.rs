//! Rates of many at once: each may do something so often, and a few times more after a silence.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// See the module. Bounded; whoever is beyond the bound is not counted, because a table that is full must lock nobody out.
pub(super) struct Rates<K> {
    /// What one costs, in time.
    cost: Duration,
    /// How much may be owed.
    credit: Duration,
    most: usize,
    /// When all that each did is paid for.
    paid: Mutex<HashMap<K, Instant>>,
}

impl<K: Eq + Hash> Rates<K> {
    /// One for each `cost`, `burst` at once after a silence; `most` are counted at a time.
    pub(super) fn new(cost: Duration, burst: u32, most: usize) -> Self {
        Self { cost, credit: cost * burst.saturating_sub(1), most, paid: Mutex::default() }
    }

    /// Counts one, or tells how long to wait.
    pub(super) fn take(&self, who: K, now: Instant) -> Result<(), Duration> {
        let mut paid = self.paid.lock().unwrap_or_else(PoisonError::into_inner);
        if paid.len() >= self.most {
            paid.retain(|_, paid| *paid > now);
        }
        if paid.len() >= self.most && !paid.contains_key(&who) {
            return Ok(());
        }
        let paid = paid.entry(who).or_insert(now);
        let debt = paid.saturating_duration_since(now);
        if debt > self.credit {
            return Err(debt - self.credit);
        }
        *paid = (*paid).max(now) + self.cost;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_burst_and_then_the_rate_for_each() {
        let (rates, now) = (Rates::new(SECOND, 3, 10), Instant::now());
        assert!((0..3).all(|_| rates.take("a", now).is_ok()));
        assert_eq!(rates.take("a", now), Err(SECOND));
        assert_eq!(rates.take("b", now), Ok(()), "nobody else is disturbed");
        assert_eq!(rates.take("a", now + SECOND), Ok(()));
        assert!(rates.take("a", now + SECOND).is_err());
    }

    #[test]
    fn the_table_is_bounded_and_locks_nobody_out() {
        let (rates, now) = (Rates::new(SECOND, 1, 2), Instant::now());
        assert!((0..9).all(|who| rates.take(who, now).is_ok()));
        assert_eq!(rates.paid.lock().unwrap().len(), 2);
        assert!(rates.take(0, now).is_err() && rates.take(8, now).is_ok());
        assert!(rates.take(8, now + SECOND).is_ok() && rates.take(8, now + SECOND).is_err(), "room again");
    }
}
