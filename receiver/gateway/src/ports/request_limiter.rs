//! State of each runtime that sends requests: rate, requests in flight, used nonces, blocks. Every part is bounded.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use tidewatch_api::identity::RuntimeId;
use tidewatch_contract::{certificate::Leaf, signature::VerifiedSignature};
use tokio::time::Instant;

use super::{
    Now,
    refusal::Refusal,
    replay::{Fork, Lineage, ReplayWindows},
};

/// Minimum interval between searches of the whole table for inactive runtimes.
const SWEEP_INTERVAL: Duration = Duration::from_secs(60);

/// Strikes for a broken connection, for example one that the HTTP library closed for abuse.
const STRIKES_PER_BROKEN_CONNECTION: u32 = 10;
/// Strikes for an invalid request. It was admitted, which cancelled one.
const STRIKES_PER_INVALID_REQUEST: u32 = 2;
/// Duration of a first block.
const MIN_BLOCK: Duration = Duration::from_secs(1);
/// Upper bound of a block.
const MAX_BLOCK: Duration = Duration::from_secs(60);

/// Limits of one runtime.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Sustained requests per second. An agent has one events request in flight, and sends what changed meanwhile
    /// with the next one, so objects that change constantly are delayed by a rate, not lost.
    pub per_second: u32,
    /// Requests in a burst after a pause.
    pub burst: u32,
    /// Bytes of body that cost as much as one further request.
    pub bytes_per_request: usize,
    /// Requests in flight.
    pub in_flight: u32,
    /// Connections; beyond it the oldest one closes. An agent has one, and a second one while it renews its
    /// certificate.
    pub connections: usize,
    /// Refusals for rate, concurrency or an invalid request before the runtime is blocked for a while; each valid
    /// request cancels one. A client that honours `Retry-After` never has more than a few.
    pub strikes: u32,
    /// Runtimes in the table. Beyond it, new ones are refused until another one is inactive and swept.
    pub runtimes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            per_second: 50,
            burst: 400,
            bytes_per_request: 16 << 10,
            in_flight: 4,
            connections: 4,
            strikes: 100,
            runtimes: 50_000,
        }
    }
}

/// Limits requests by runtime, over all connections of a port.
pub(super) struct RequestLimiter {
    limits: Limits,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    runtimes: HashMap<RuntimeId, RuntimeState>,
    swept: Option<Instant>,
}

struct RuntimeState {
    /// GCRA's theoretical arrival time, at which all requests so far are paid for.
    paid: Instant,
    in_flight: u32,
    nonces: ReplayWindows,
    lineage: Lineage,
    /// A request with a large body is in flight.
    has_large_body: bool,
    breaker: CircuitBreaker,
}

/// Blocks a runtime that ignores `Retry-After`, or sends invalid requests.
#[derive(Debug, Default)]
struct CircuitBreaker {
    strikes: u32,
    /// End and duration of the last block.
    block: Option<(Instant, Duration)>,
}

impl CircuitBreaker {
    fn blocked_until(&self, now: Instant) -> Option<Instant> {
        self.block.map(|(until, _)| until).filter(|until| *until > now)
    }

    /// Adds strikes; more than `max` block the runtime.
    fn strike(&mut self, count: u32, max: u32, now: Instant) {
        self.strikes = self.strikes.saturating_add(count);
        if self.strikes > max {
            self.block(now);
        }
    }

    /// Blocks the runtime, for twice as long as the last time unless that is more than four of its durations ago.
    fn block(&mut self, now: Instant) {
        let last = self.block.filter(|(until, last)| now < *until + *last * 4).map_or(Duration::ZERO, |(_, last)| last);
        let wait = (last * 2).clamp(MIN_BLOCK, MAX_BLOCK);
        *self = Self { strikes: 0, block: Some((now + wait, wait)) };
    }
}

/// Permit of one request in flight, released on drop.
pub(super) struct RequestPermit<'a> {
    limiter: &'a RequestLimiter,
    runtime: RuntimeId,
    /// It holds the runtime's place for a large body.
    has_large_body: AtomicBool,
}

impl RequestLimiter {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, table: Mutex::default() }
    }

    /// Admits one request within the limits of its runtime.
    pub(super) fn acquire(&self, runtime: &RuntimeId, now: Now) -> Result<RequestPermit<'_>, Refusal> {
        let mut table = self.table.lock();
        if !table.runtimes.contains_key(runtime) {
            table.make_room(now, self.limits.runtimes)?;
        }
        let state = table.runtimes.entry(runtime.clone()).or_insert_with(|| RuntimeState {
            paid: now.instant,
            in_flight: 0,
            nonces: ReplayWindows::default(),
            lineage: Lineage::default(),
            has_large_body: false,
            breaker: CircuitBreaker::default(),
        });
        if let Some(until) = state.breaker.blocked_until(now.instant) {
            return Err(Refusal::Flood(until - now.instant));
        }
        let debt = state.paid.saturating_duration_since(now.instant);
        let credit = self.cost(self.limits.burst.saturating_sub(1));
        let is_fast = debt > credit;
        if is_fast || state.in_flight >= self.limits.in_flight {
            state.breaker.strike(1, self.limits.strikes, now.instant);
            return Err(if is_fast { Refusal::Rate(debt - credit) } else { Refusal::Concurrency });
        }
        state.breaker.strikes = state.breaker.strikes.saturating_sub(1);
        state.paid = state.paid.max(now.instant) + self.cost(1);
        state.in_flight += 1;
        drop(table);
        Ok(RequestPermit { limiter: self, runtime: runtime.clone(), has_large_body: AtomicBool::new(false) })
    }

    /// Blocks a runtime that flooded a connection with frames.
    pub(super) fn block(&self, runtime: &RuntimeId, now: Instant) {
        self.update(runtime, |state| state.breaker.block(now));
    }

    /// Counts a broken connection towards a block.
    pub(super) fn count_broken_connection(&self, runtime: &RuntimeId, now: Instant) {
        self.strike(runtime, STRIKES_PER_BROKEN_CONNECTION, now);
    }

    /// Counts an invalid request towards a block: it costs as much as a valid one, and agents do not send it.
    pub(super) fn count_invalid_request(&self, runtime: &RuntimeId, now: Instant) {
        self.strike(runtime, STRIKES_PER_INVALID_REQUEST, now);
    }

    fn strike(&self, runtime: &RuntimeId, count: u32, now: Instant) {
        let max = self.limits.strikes;
        self.update(runtime, |state| state.breaker.strike(count, max, now));
    }

    /// Returns the end of the runtime's block, if it is blocked.
    pub(super) fn blocked_until(&self, runtime: &RuntimeId, now: Instant) -> Option<Instant> {
        self.table.lock().runtimes.get(runtime)?.breaker.blocked_until(now)
    }

    /// Charges the bytes of a body to the rate limit of a runtime, and returns their cost. It delays later requests,
    /// never this one.
    pub(super) fn charge(&self, runtime: &RuntimeId, bytes: usize, now: Now) -> Duration {
        let requests = u32::try_from(bytes / self.limits.bytes_per_request.max(1)).unwrap_or(u32::MAX);
        let cost = self.cost(requests.min(self.limits.burst));
        self.update(runtime, |state| state.paid = state.paid.max(now.instant) + cost);
        cost
    }

    /// Updates the state of a runtime, if it is in the table.
    fn update<T>(&self, runtime: &RuntimeId, change: impl FnOnce(&mut RuntimeState) -> T) -> Option<T> {
        self.table.lock().runtimes.get_mut(runtime).map(change)
    }

    fn cost(&self, requests: u32) -> Duration {
        Duration::from_secs(1) / self.limits.per_second.max(1) * requests
    }
}

impl RequestPermit<'_> {
    /// Uses the nonce of a verified signature, which is possible once.
    pub(super) fn use_nonce(&self, verified: &VerifiedSignature, now: Now) -> Result<(), Refusal> {
        let used = self.limiter.update(&self.runtime, |state| state.nonces.take(verified, now.unix));
        // A runtime with a request in flight is never swept.
        used.ok_or(Refusal::Internal)?
    }

    /// Takes the runtime's place for a large body, of which an agent needs one: it has one request of events in flight.
    pub(super) fn begin_large_body(&self) -> Result<(), Refusal> {
        let is_taken = self.limiter.update(&self.runtime, |state| std::mem::replace(&mut state.has_large_body, true));
        if is_taken.unwrap_or(true) {
            return Err(Refusal::Concurrency);
        }
        self.has_large_body.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Observes the epoch of a request whose nonce was used for the first time.
    pub(super) fn observe(&self, verified: &VerifiedSignature, leaf: &Leaf, now: Now) -> Result<(), Fork> {
        let observe = |state: &mut RuntimeState| state.lineage.observe(verified.nonce.epoch, leaf, now.instant);
        self.limiter.update(&self.runtime, observe).unwrap_or(Ok(()))
    }
}

/// Charges the bytes read to the runtime's rate limit on drop, also if the body is incomplete or the client resets the
/// stream.
pub(super) struct BodyCharge<'a> {
    pub(super) permit: &'a RequestPermit<'a>,
    pub(super) bytes: usize,
}

impl Drop for BodyCharge<'_> {
    fn drop(&mut self) {
        self.permit.limiter.charge(&self.permit.runtime, self.bytes, Now::read());
    }
}

impl Drop for RequestPermit<'_> {
    fn drop(&mut self) {
        let had_large_body = self.has_large_body.load(Ordering::Relaxed);
        self.limiter.update(&self.runtime, |state| {
            state.in_flight = state.in_flight.saturating_sub(1);
            state.has_large_body &= !had_large_body;
        });
    }
}

impl Table {
    fn make_room(&mut self, now: Now, capacity: usize) -> Result<(), Refusal> {
        let due = self.swept.is_none_or(|swept| now.instant.saturating_duration_since(swept) >= SWEEP_INTERVAL);
        if due {
            self.swept = Some(now.instant);
            self.runtimes.retain(|_, state| {
                state.nonces.expire(now.unix);
                let is_blocked = state.breaker.blocked_until(now.instant).is_some();
                state.in_flight > 0 || is_blocked || state.paid > now.instant || !state.nonces.is_empty()
            });
        }
        if self.runtimes.len() >= capacity { Err(Refusal::Busy) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use tidewatch_api::identity::Epoch;
    use tidewatch_contract::signature::Nonce;

    use super::*;

    fn limits() -> Limits {
        Limits {
            per_second: 10,
            burst: 3,
            bytes_per_request: 100,
            in_flight: 2,
            runtimes: 2,
            strikes: 5,
            ..Limits::default()
        }
    }

    fn id(name: &str) -> RuntimeId {
        name.parse().unwrap()
    }

    fn now() -> Now {
        Now { unix: 1_000, instant: Instant::now() }
    }

    fn later(now: Now, milliseconds: u64) -> Now {
        Now {
            unix: now.unix + i64::try_from(milliseconds / 1_000).unwrap(),
            instant: now.instant + Duration::from_millis(milliseconds),
        }
    }

    #[test]
    fn burst_is_admitted_and_then_the_rate_applies() {
        let limiter = RequestLimiter::new(limits());
        let start = now();
        let runtime = id("r-1");
        for _ in 0..3 {
            assert!(limiter.acquire(&runtime, start).is_ok());
        }
        assert_eq!(limiter.acquire(&runtime, start).err(), Some(Refusal::Rate(Duration::from_millis(100))));
        assert!(limiter.acquire(&id("r-2"), start).is_ok(), "other runtimes are unaffected");
        assert!(limiter.acquire(&runtime, later(start, 100)).is_ok());
        assert!(limiter.acquire(&runtime, later(start, 100)).is_err());
    }

    #[test]
    fn flooding_runtime_is_blocked_for_longer_each_time() {
        let limiter = RequestLimiter::new(limits());
        let mut at = now();
        let runtime = id("r-1");
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            let mut tries = 0;
            let wait = loop {
                match limiter.acquire(&runtime, at) {
                    Err(Refusal::Flood(wait)) => break wait,
                    _ => tries += 1,
                }
                assert!(tries < 20);
            };
            assert_eq!(wait, Duration::from_secs(seconds));
            assert_eq!(limiter.blocked_until(&runtime, at.instant), Some(at.instant + wait));
            assert!(limiter.acquire(&id("r-2"), at).is_ok(), "other runtimes are unaffected");
            at = later(at, seconds * 1_000);
        }
        at = later(at, 300_000);
        while !matches!(limiter.acquire(&runtime, at), Err(Refusal::Flood(_))) {}
        assert_eq!(
            limiter.blocked_until(&runtime, at.instant),
            Some(at.instant + MIN_BLOCK),
            "the previous block is long ago"
        );
    }

    #[test]
    fn client_that_honours_retry_after_is_never_blocked() {
        let limiter = RequestLimiter::new(limits());
        let mut at = now();
        let runtime = id("r-1");
        for _ in 0..200 {
            match limiter.acquire(&runtime, at) {
                Ok(_) => {}
                Err(Refusal::Rate(wait)) => at = later(at, u64::try_from(wait.as_millis()).unwrap()),
                Err(other) => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn body_bytes_are_charged() {
        let limiter = RequestLimiter::new(limits());
        let start = now();
        let runtime = id("r-1");
        limiter.acquire(&runtime, start).unwrap();
        limiter.charge(&runtime, 250, start);
        assert_eq!(limiter.acquire(&runtime, start).err(), Some(Refusal::Rate(Duration::from_millis(100))));
    }

    #[test]
    fn discarded_bytes_are_charged_and_extend_the_wait() {
        let limiter = RequestLimiter::new(limits());
        let start = now();
        let runtime = id("r-1");
        while limiter.acquire(&runtime, start).is_ok() {}
        let Err(Refusal::Rate(wait)) = limiter.acquire(&runtime, start) else { panic!("the rate") };
        let extended = Refusal::Rate(wait).extended_by(limiter.charge(&runtime, 250, start));
        assert_eq!(extended, Refusal::Rate(wait + Duration::from_millis(200)));
        assert!(limiter.acquire(&runtime, later(start, 200)).is_err(), "the bytes were charged");
        assert!(limiter.acquire(&runtime, later(start, 300)).is_ok());
        limiter.charge(&id("unknown"), 250, start);
        assert_eq!(Refusal::Route.extended_by(wait), Refusal::Route);
    }

    #[test]
    fn requests_in_flight_count_until_they_end() {
        let limiter = RequestLimiter::new(limits());
        let start = now();
        let runtime = id("r-1");
        let first = limiter.acquire(&runtime, start).unwrap();
        let _second = limiter.acquire(&runtime, start).unwrap();
        assert_eq!(limiter.acquire(&runtime, start).err(), Some(Refusal::Concurrency));
        drop(first);
        assert!(limiter.acquire(&runtime, start).is_ok());
    }

    #[test]
    fn table_is_bounded_and_sweeps_inactive_runtimes() {
        let limiter = RequestLimiter::new(limits());
        let start = now();
        let permit = limiter.acquire(&id("r-1"), start).unwrap();
        permit
            .use_nonce(&VerifiedSignature::unchecked(1_000, Nonce { epoch: Epoch::new(1), counter: 1 }), start)
            .unwrap();
        drop(permit);
        let held = limiter.acquire(&id("r-2"), start).unwrap();
        assert_eq!(limiter.acquire(&id("r-3"), start).err(), Some(Refusal::Busy));
        assert_eq!(
            limiter.acquire(&id("r-3"), later(start, 60_000)).err(),
            Some(Refusal::Busy),
            "r-1 can still be replayed"
        );
        assert!(limiter.acquire(&id("r-3"), later(start, 121_000)).is_ok());
        assert_eq!(
            limiter.acquire(&id("r-4"), later(start, 121_000)).err(),
            Some(Refusal::Busy),
            "r-2 has a request in flight"
        );
        drop(held);
    }
}
