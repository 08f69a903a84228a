//! Who is told to come later, and when. Refusals of many at once must not bring the many back at once: each who is told to wait
//! is given the next free time to return, with some chance in it, so that they return one by one.

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
    refusal::{Refusal, Wait},
};

/// Between two who were told to return: what one thread can answer with ease.
const SPACING: Duration = Duration::from_millis(2);
/// Nobody is told to return later than this because there are many.
const MOST: Duration = Duration::from_secs(60);

/// Sheds load when answers lag, and spreads those who return.
pub(super) struct Pressure {
    limit: Duration,
    lag: Mutex<Lag>,
    returns: Mutex<Option<Instant>>,
    random: RandomState,
    drawn: AtomicU64,
}

impl Pressure {
    /// Sheds heartbeats once answers lag by more than `limit`, and events once they lag by twice that.
    pub(super) fn new(limit: Duration) -> Self {
        Self {
            limit,
            lag: Mutex::default(),
            returns: Mutex::default(),
            random: RandomState::new(),
            drawn: AtomicU64::new(0),
        }
    }

    /// Takes a measurement: how much later than it should something came to run.
    pub(super) fn observe(&self, lag: Duration) {
        self.lag.lock().unwrap_or_else(PoisonError::into_inner).observe(lag);
    }

    /// Whether a request of this route is to be refused, so that the others are answered in time.
    pub(super) fn sheds(&self, route: Route) -> bool {
        let level = self.lag.lock().unwrap_or_else(PoisonError::into_inner).level();
        level > self.limit && self.draw() < shed_share(level, self.limit, route)
    }

    /// How long somebody who is refused is told to wait, if at all.
    pub(super) fn wait(&self, refusal: Refusal, now: Instant) -> Option<Duration> {
        match refusal.wait()? {
            Wait::Exactly(wait) => Some(wait),
            Wait::About(wait) => Some(around(wait, self.draw())),
            Wait::InTurn(least) => {
                let mut returns = self.returns.lock().unwrap_or_else(PoisonError::into_inner);
                Some(in_turn(&mut returns, now, least, self.draw()))
            }
        }
    }

    /// From 0 to 1.
    fn draw(&self) -> f64 {
        let bits = self.random.hash_one(self.drawn.fetch_add(1, Ordering::Relaxed));
        f64::from(u32::try_from(bits >> 32).unwrap_or(0)) / f64::from(u32::MAX)
    }
}

/// The last two measurements. One alone may be a process that was stopped for a while and has nothing to do now.
#[derive(Default)]
struct Lag([Duration; 2]);

impl Lag {
    fn observe(&mut self, lag: Duration) {
        self.0 = [self.0[1], lag];
    }

    fn level(&self) -> Duration {
        self.0[0].min(self.0[1])
    }
}

/// The share of requests to refuse: so many that the rest takes the limit, and never all. Heartbeats go first: a change that
/// waits is worth more than the proof that nothing does.
fn shed_share(level: Duration, limit: Duration, route: Route) -> f64 {
    let limit = match route {
        Route::Heartbeat => limit,
        Route::Events | Route::Certificates => limit * 2,
    };
    if level <= limit { 0.0 } else { (1.0 - limit.as_secs_f64() / level.as_secs_f64()).min(0.95) }
}

/// Half to one and a half of a time.
fn around(wait: Duration, draw: f64) -> Duration {
    wait.mul_f64(0.5 + draw)
}

/// The next free time to return. When all are taken, any in the second half of the longest wait.
fn in_turn(returns: &mut Option<Instant>, now: Instant, least: Duration, draw: f64) -> Duration {
    let free = returns.map_or(now, |last| last.max(now)) + SPACING;
    let wait = least + free.saturating_duration_since(now);
    if wait > MOST {
        return around(MOST / 3 * 2, draw).min(MOST);
    }
    *returns = Some(free);
    wait + least.mul_f64(draw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_many_return_one_by_one() {
        let (mut returns, now, least) = (None, Instant::now(), Duration::from_secs(2));
        let waits: Vec<_> = (0..5_000).map(|_| in_turn(&mut returns, now, least, 0.0)).collect();
        assert!(waits.windows(2).all(|pair| pair[1] - pair[0] == SPACING));
        assert_eq!(waits[4_999], least + SPACING * 5_000);
        let late = in_turn(&mut returns, now + MOST, least, 0.0);
        assert_eq!(late, least + SPACING, "once they have returned, nobody waits for them");
    }

    #[test]
    fn nobody_is_told_to_wait_for_ever() {
        let (mut returns, now) = (None, Instant::now());
        for who in 0..100_000_u32 {
            let wait = in_turn(&mut returns, now, Duration::from_secs(1), f64::from(who % 10) / 9.0);
            assert!(wait <= MOST + Duration::from_secs(1), "{wait:?}");
        }
        assert!(returns.unwrap() <= now + MOST);
    }

    #[test]
    fn heartbeats_go_before_events_and_never_all() {
        let (limit, second) = (Duration::from_secs(1), Duration::from_secs(1));
        let share = |level: u32, route| shed_share(second * level, limit, route);
        assert_eq!((share(1, Route::Heartbeat), share(2, Route::Events)), (0.0, 0.0));
        assert_eq!((share(2, Route::Heartbeat), share(4, Route::Events)), (0.5, 0.5));
        assert!(share(1_000, Route::Events) <= 0.95);
    }

    #[test]
    fn one_late_measurement_sheds_nothing() {
        let pressure = Pressure::new(Duration::from_millis(100));
        let sheds = || (0..64).any(|_| pressure.sheds(Route::Heartbeat));
        pressure.observe(Duration::from_secs(60));
        assert!(!sheds());
        pressure.observe(Duration::from_secs(60));
        assert!(sheds());
        pressure.observe(Duration::ZERO);
        assert!(!sheds());
    }

    #[test]
    fn waits_for_a_kyma_are_spread_and_within_five_minutes() {
        let pressure = Pressure::new(Duration::from_secs(1));
        let now = Instant::now();
        let refusal = Refusal::Unplaced(crate::fleet::hub::Unplaced::Unknown);
        let waits: Vec<_> = (0..32).filter_map(|_| pressure.wait(refusal, now)).collect();
        assert!(waits.iter().all(|wait| *wait <= Duration::from_secs(300)) && waits.len() == 32);
        assert!(waits.iter().any(|wait| *wait != waits[0]));
        assert_eq!(
            pressure.wait(Refusal::Rate(SPACING), now),
            Some(SPACING),
            "what one runtime owes is its own affair"
        );
        assert_eq!(pressure.wait(Refusal::Replay, now), None);
    }
}
