//! Load shedding and `Retry-After`. When many requests are refused at once, their clients must not all return at once:
//! each gets the next free return slot plus jitter, so that they return one by one.

use std::{
    hash::{BuildHasher, RandomState},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use super::{
    head::Route,
    refusal::{Refusal, RetryAfter},
};

/// Interval between return slots: enough for one thread to serve a request.
const SLOT: Duration = Duration::from_millis(2);
/// Upper bound of a staggered wait.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// Sheds requests while the executor lags, and spreads the return of refused clients.
pub(super) struct LoadShedder {
    limit: Duration,
    /// Last two measurements of the executor's lag. A single high one may stem from a process that was paused and has
    /// caught up.
    lag: Mutex<[Duration; 2]>,
    /// Last return slot assigned.
    last_slot: Mutex<Option<Instant>>,
    random: RandomState,
    draws: AtomicU64,
}

impl LoadShedder {
    /// Sheds heartbeats while the lag exceeds `limit`, and other requests while it exceeds twice the limit.
    pub(super) fn new(limit: Duration) -> Self {
        Self {
            limit,
            lag: Mutex::default(),
            last_slot: Mutex::default(),
            random: RandomState::new(),
            draws: AtomicU64::new(0),
        }
    }

    /// Takes a measurement of the executor's lag.
    pub(super) fn observe(&self, lag: Duration) {
        let mut last = self.lag.lock().unwrap_or_else(PoisonError::into_inner);
        *last = [last[1], lag];
    }

    /// True if a request of this route must be refused, so that others are served in time.
    pub(super) fn sheds(&self, route: Route) -> bool {
        let [a, b] = *self.lag.lock().unwrap_or_else(PoisonError::into_inner);
        let lag = a.min(b);
        lag > self.limit && self.draw() < shed_share(lag, self.limit, route)
    }

    /// Returns the `Retry-After` of a refusal, if it has one.
    pub(super) fn retry_after(&self, refusal: Refusal, now: Instant) -> Option<Duration> {
        match refusal.problem().retry? {
            RetryAfter::Exact(wait) => Some(wait),
            RetryAfter::Jittered(wait) => Some(jittered(wait, self.draw())),
            RetryAfter::Staggered(min) => {
                let mut last_slot = self.last_slot.lock().unwrap_or_else(PoisonError::into_inner);
                Some(staggered(&mut last_slot, now, min, self.draw()))
            }
        }
    }

    /// Returns a random number from 0 to 1.
    fn draw(&self) -> f64 {
        let bits = self.random.hash_one(self.draws.fetch_add(1, Ordering::Relaxed));
        f64::from(u32::try_from(bits >> 32).unwrap_or(0)) / f64::from(u32::MAX)
    }
}

/// Returns the share of requests to refuse: enough to bring the lag down to the limit, never all. Heartbeats are shed
/// first: a change is more urgent than a liveness signal.
fn shed_share(lag: Duration, limit: Duration, route: Route) -> f64 {
    let limit = match route {
        Route::Heartbeat => limit,
        Route::Events | Route::Certificates => limit * 2,
    };
    if lag <= limit { 0.0 } else { (1.0 - limit.as_secs_f64() / lag.as_secs_f64()).min(0.95) }
}

/// Spreads a wait over 50 to 150 % of its length.
fn jittered(wait: Duration, draw: f64) -> Duration {
    wait.mul_f64(0.5 + draw)
}

/// Assigns the next return slot. When the slots up to [`MAX_WAIT`] are taken, last_slot a wait between a third of it
/// and all of it.
fn staggered(last_slot: &mut Option<Instant>, now: Instant, min: Duration, draw: f64) -> Duration {
    let slot = last_slot.map_or(now, |last| last.max(now)) + SLOT;
    let wait = min + slot.saturating_duration_since(now);
    if wait > MAX_WAIT {
        return jittered(MAX_WAIT / 3 * 2, draw).min(MAX_WAIT);
    }
    *last_slot = Some(slot);
    wait + min.mul_f64(draw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_clients_return_one_by_one() {
        let (mut last_slot, now, min) = (None, Instant::now(), Duration::from_secs(2));
        let waits: Vec<_> = (0..5_000).map(|_| staggered(&mut last_slot, now, min, 0.0)).collect();
        assert!(waits.windows(2).all(|pair| pair[1] - pair[0] == SLOT));
        assert_eq!(waits[4_999], min + SLOT * 5_000);
        let late = staggered(&mut last_slot, now + MAX_WAIT, min, 0.0);
        assert_eq!(late, min + SLOT, "past slots are free again");
    }

    #[test]
    fn staggered_waits_are_bounded() {
        let (mut last_slot, now) = (None, Instant::now());
        for client in 0..100_000_u32 {
            let wait = staggered(&mut last_slot, now, Duration::from_secs(1), f64::from(client % 10) / 9.0);
            assert!(wait <= MAX_WAIT + Duration::from_secs(1), "{wait:?}");
        }
        assert!(last_slot.unwrap() <= now + MAX_WAIT);
    }

    #[test]
    fn heartbeats_are_shed_before_events_and_never_all() {
        let (limit, second) = (Duration::from_secs(1), Duration::from_secs(1));
        let share = |lag: u32, route| shed_share(second * lag, limit, route);
        assert_eq!((share(1, Route::Heartbeat), share(2, Route::Events)), (0.0, 0.0));
        assert_eq!((share(2, Route::Heartbeat), share(4, Route::Events)), (0.5, 0.5));
        assert!(share(1_000, Route::Events) <= 0.95);
    }

    #[test]
    fn single_high_measurement_sheds_nothing() {
        let shedder = LoadShedder::new(Duration::from_millis(100));
        let sheds = || (0..64).any(|_| shedder.sheds(Route::Heartbeat));
        shedder.observe(Duration::from_secs(60));
        assert!(!sheds());
        shedder.observe(Duration::from_secs(60));
        assert!(sheds());
        shedder.observe(Duration::ZERO);
        assert!(!sheds());
    }

    #[test]
    fn waits_for_a_kyma_are_jittered_and_within_five_minutes() {
        let shedder = LoadShedder::new(Duration::from_secs(1));
        let now = Instant::now();
        let refusal = Refusal::Placement(crate::fleet::table::PlacementError::Unknown);
        let waits: Vec<_> = (0..32).filter_map(|_| shedder.retry_after(refusal, now)).collect();
        assert!(waits.iter().all(|wait| *wait <= Duration::from_secs(300)) && waits.len() == 32);
        assert!(waits.iter().any(|wait| *wait != waits[0]));
        assert_eq!(shedder.retry_after(Refusal::Rate(SLOT), now), Some(SLOT), "a single runtime's wait is exact");
        assert_eq!(shedder.retry_after(Refusal::Replay, now), None);
    }
}
