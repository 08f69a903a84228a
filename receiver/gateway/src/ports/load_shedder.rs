//! Load shedding and `Retry-After`. When many requests are refused at once, their clients must not all return at once:
//! each gets the next free return slot plus jitter, so that they return one by one.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use tidewatch_api::identity::RuntimeId;
use tokio::time::Instant;

use super::{
    head::Route,
    refusal::{Refusal, RetryAfter},
};

/// Interval between return slots: enough for one thread to serve a request.
const SLOT: Duration = Duration::from_millis(2);
/// Upper bound of a staggered wait.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// Slots within [`MAX_WAIT`], beyond which past ones are forgotten.
const MAX_SLOTS: usize = (MAX_WAIT.as_millis() / SLOT.as_millis()) as usize;

/// Sheds requests while the executor lags, and spreads the return of refused clients.
pub(super) struct LoadShedder {
    limit: Duration,
    /// Last two measurements of the executor's lag. A single high one may stem from a process that was paused and has
    /// caught up.
    lag: Mutex<[Duration; 2]>,
    slots: Mutex<ReturnSlots>,
    random: RandomState,
    draws: AtomicU64,
}

impl LoadShedder {
    /// Sheds heartbeats while the lag exceeds `limit`, and other requests while it exceeds twice the limit.
    pub(super) fn new(limit: Duration) -> Self {
        Self {
            limit,
            lag: Mutex::default(),
            slots: Mutex::default(),
            random: RandomState::new(),
            draws: AtomicU64::new(0),
        }
    }

    /// Takes a measurement of the executor's lag.
    pub(super) fn observe(&self, lag: Duration) {
        let mut last = self.lag.lock();
        *last = [last[1], lag];
    }

    /// True if a request of this route must be refused, so that others are served in time.
    pub(super) fn sheds(&self, route: Route) -> bool {
        let [a, b] = *self.lag.lock();
        let lag = a.min(b);
        lag > self.limit && self.draw() < shed_share(lag, self.limit, route)
    }

    /// Returns the `Retry-After` of a refusal, if it has one. A runtime has one return slot, however often it is refused
    /// before.
    pub(super) fn retry_after(&self, refusal: Refusal, runtime: Option<&RuntimeId>, now: Instant) -> Option<Duration> {
        match refusal.problem().retry? {
            RetryAfter::Exact(wait) => Some(wait),
            RetryAfter::Jittered(wait) => Some(jittered(wait, self.draw())),
            RetryAfter::Staggered(min) => {
                let mut slots = self.slots.lock();
                Some(slots.wait(runtime, now, min, self.draw()))
            }
        }
    }

    /// Returns a random number from 0 to 1.
    fn draw(&self) -> f64 {
        let bits = self.random.hash_one(self.draws.fetch_add(1, Ordering::Relaxed));
        f64::from(u32::try_from(bits >> 32).unwrap_or(0)) / f64::from(u32::MAX)
    }
}

/// Assigned return slots.
#[derive(Default)]
struct ReturnSlots {
    last: Option<Instant>,
    /// Slots of runtimes. Those to come lie within [`MAX_WAIT`], which bounds their number.
    runtimes: HashMap<RuntimeId, Instant>,
}

impl ReturnSlots {
    fn wait(&mut self, runtime: Option<&RuntimeId>, now: Instant, min: Duration, draw: f64) -> Duration {
        let known = runtime.and_then(|runtime| self.runtimes.get(runtime)).filter(|slot| **slot > now);
        if let Some(slot) = known {
            return min + (*slot - now) + min.mul_f64(draw);
        }
        let before = self.last;
        let wait = staggered(&mut self.last, now, min, draw);
        if let (Some(runtime), Some(slot)) = (runtime, self.last.filter(|_| self.last != before)) {
            if self.runtimes.len() >= MAX_SLOTS {
                self.runtimes.retain(|_, slot| *slot > now);
            }
            self.runtimes.insert(runtime.clone(), slot);
        }
        wait
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
        let mut last_slot = None;
        let now = Instant::now();
        let min = Duration::from_secs(2);
        let waits: Vec<_> = (0..5_000).map(|_| staggered(&mut last_slot, now, min, 0.0)).collect();
        assert!(waits.windows(2).all(|pair| pair[1] - pair[0] == SLOT));
        assert_eq!(waits[4_999], min + SLOT * 5_000);
        let late = staggered(&mut last_slot, now + MAX_WAIT, min, 0.0);
        assert_eq!(late, min + SLOT, "past slots are free again");
    }

    #[test]
    fn runtimes_that_ignore_their_wait_delay_no_other() {
        let mut slots = ReturnSlots::default();
        let now = Instant::now();
        let min = Duration::from_secs(2);
        let id = |n: usize| format!("r-{n}").parse::<RuntimeId>().unwrap();
        for _ in 0..10_000 {
            for runtime in (0..30).map(id) {
                assert!(slots.wait(Some(&runtime), now, min, 0.0) <= min + SLOT * 30);
            }
        }
        assert_eq!(slots.wait(Some(&id(30)), now, min, 0.0), min + SLOT * 31);
        for runtime in (0..100_000).map(id) {
            slots.wait(Some(&runtime), now, min, 0.5);
        }
        assert!(slots.runtimes.len() <= MAX_SLOTS);
    }

    #[test]
    fn staggered_waits_are_bounded() {
        let mut last_slot = None;
        let now = Instant::now();
        for client in 0..100_000_u32 {
            let wait = staggered(&mut last_slot, now, Duration::from_secs(1), f64::from(client % 10) / 9.0);
            assert!(wait <= MAX_WAIT + Duration::from_secs(1), "{wait:?}");
        }
        assert!(last_slot.unwrap() <= now + MAX_WAIT);
    }

    #[test]
    fn heartbeats_are_shed_before_events_and_never_all() {
        let limit = Duration::from_secs(1);
        let second = Duration::from_secs(1);
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
        let refusal = Refusal::Placement(tidewatch_fleet::table::PlacementError::Unknown);
        let waits: Vec<_> = (0..32).filter_map(|_| shedder.retry_after(refusal, None, now)).collect();
        assert!(waits.iter().all(|wait| *wait <= Duration::from_secs(300)) && waits.len() == 32);
        assert!(waits.iter().any(|wait| *wait != waits[0]));
        assert_eq!(shedder.retry_after(Refusal::Rate(SLOT), None, now), Some(SLOT), "a single runtime's wait is exact");
        assert_eq!(shedder.retry_after(Refusal::Replay, None, now), None);
    }
}
