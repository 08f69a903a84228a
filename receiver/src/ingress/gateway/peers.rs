//! What is kept of each runtime that speaks: its rate, its requests in flight, its nonces. Bounded in every direction.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tidewatch_shared::{identity::RuntimeId, signature::VerifiedSignature};
use tokio::time::Instant;

use super::{
    Now,
    refusal::Refusal,
    replay::{Nonces, Stale},
};

/// How often, at most, the whole table is searched for runtimes that are gone.
const SWEEP: Duration = Duration::from_secs(60);

/// A connection that broke, for example because the HTTP library had enough of it, counts like so many refusals.
const STRIKES_OF_A_BREAK: u32 = 10;
/// A runtime that floods is shut out so long the first time.
const SHORTEST_SHUT: Duration = Duration::from_secs(1);
/// And never longer than this.
const LONGEST_SHUT: Duration = Duration::from_secs(60);

/// How much one runtime may ask.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Requests a second, in the long run. An agent has one events request in flight, so an object that changes all the time
    /// makes a few hundred of them a second.
    pub per_second: u32,
    /// Requests at once, after a silence.
    pub burst: u32,
    /// Bytes of body that cost as much as one request more.
    pub bytes_per_request: usize,
    /// Requests in flight.
    pub in_flight: u32,
    /// Connections; beyond it the oldest one ends. An agent has one, and for a while two.
    pub connections: usize,
    /// Refusals for rate or requests in flight, beyond those that good requests make up for, after which the runtime is shut
    /// out for a while. Who waits as it is told never has more than a few.
    pub strikes: u32,
    /// Runtimes kept. Beyond it, new ones wait until one has been silent for a while.
    pub runtimes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            per_second: 200,
            burst: 400,
            bytes_per_request: 16 << 10,
            in_flight: 4,
            connections: 4,
            strikes: 100,
            runtimes: 50_000,
        }
    }
}

/// The table, shared by all connections.
pub(super) struct Peers {
    limits: Limits,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    peers: HashMap<RuntimeId, Peer>,
    swept: Option<Instant>,
}

struct Peer {
    /// When all that was asked is paid for (GCRA's theoretical arrival time).
    paid: Instant,
    in_flight: u32,
    nonces: Nonces,
    flood: Flood,
}

/// What becomes of a runtime that does not wait as it is told.
#[derive(Debug, Default)]
struct Flood {
    strikes: u32,
    /// Until when it is shut out, and for how long that was.
    shut: Option<(Instant, Duration)>,
}

impl Flood {
    fn until(&self, now: Instant) -> Option<Instant> {
        self.shut.map(|(until, _)| until).filter(|until| *until > now)
    }

    /// Counts refusals; one too many shuts the runtime out.
    fn strike(&mut self, count: u32, most: u32, now: Instant) {
        self.strikes = self.strikes.saturating_add(count);
        if self.strikes > most {
            self.shut(now);
        }
    }

    /// Shuts the runtime out: twice as long as the last time, if that was not long ago.
    fn shut(&mut self, now: Instant) {
        let last = self.shut.filter(|(until, last)| now < *until + *last * 4).map_or(Duration::ZERO, |(_, last)| last);
        let wait = (last * 2).clamp(SHORTEST_SHUT, LONGEST_SHUT);
        *self = Self { strikes: 0, shut: Some((now + wait, wait)) };
    }
}

/// One request in flight; ends when dropped, however the request ends.
pub(super) struct Pass {
    peers: Arc<Peers>,
    runtime: RuntimeId,
}

impl Peers {
    pub(super) fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits, table: Mutex::default() })
    }

    /// Lets one request in, or tells why not.
    pub(super) fn enter(self: &Arc<Self>, runtime: &RuntimeId, now: Now) -> Result<Pass, Refusal> {
        let mut table = self.lock();
        if !table.peers.contains_key(runtime) {
            table.make_room(now, self.limits.runtimes)?;
        }
        let peer = table.peers.entry(runtime.clone()).or_insert_with(|| Peer {
            paid: now.instant,
            in_flight: 0,
            nonces: Nonces::default(),
            flood: Flood::default(),
        });
        if let Some(until) = peer.flood.until(now.instant) {
            return Err(Refusal::Flood(until - now.instant));
        }
        let debt = peer.paid.saturating_duration_since(now.instant);
        let credit = self.cost(self.limits.burst.saturating_sub(1));
        if peer.in_flight >= self.limits.in_flight || debt > credit {
            peer.flood.strike(1, self.limits.strikes, now.instant);
            let is_fast = debt > credit;
            return Err(if is_fast { Refusal::Rate(debt - credit) } else { Refusal::Concurrency });
        }
        peer.flood.strikes = peer.flood.strikes.saturating_sub(1);
        peer.paid = peer.paid.max(now.instant) + self.cost(1);
        peer.in_flight += 1;
        drop(table);
        Ok(Pass { peers: self.clone(), runtime: runtime.clone() })
    }

    /// Shuts a runtime out that floods a connection with what is no request.
    pub(super) fn shut(&self, runtime: &RuntimeId, now: Instant) {
        if let Some(peer) = self.lock().peers.get_mut(runtime) {
            peer.flood.shut(now);
        }
    }

    /// Counts a connection that broke like as many refusals.
    pub(super) fn strike(&self, runtime: &RuntimeId, now: Instant) {
        if let Some(peer) = self.lock().peers.get_mut(runtime) {
            peer.flood.strike(STRIKES_OF_A_BREAK, self.limits.strikes, now);
        }
    }

    /// Until when a runtime is shut out, if it is.
    pub(super) fn shut_until(&self, runtime: &RuntimeId, now: Instant) -> Option<Instant> {
        self.lock().peers.get(runtime)?.flood.until(now)
    }

    /// Adds the price of a body to what a runtime owes, and tells it. It is never refused for this request, only for later ones.
    pub(super) fn charge(&self, runtime: &RuntimeId, bytes: usize, now: Now) -> Duration {
        let requests = u32::try_from(bytes / self.limits.bytes_per_request.max(1)).unwrap_or(u32::MAX);
        let cost = self.cost(requests.min(self.limits.burst));
        if let Some(peer) = self.lock().peers.get_mut(runtime) {
            peer.paid = peer.paid.max(now.instant) + cost;
        }
        cost
    }

    fn cost(&self, requests: u32) -> Duration {
        Duration::from_secs(1) / self.limits.per_second.max(1) * requests
    }

    /// A poisoned table is as good as any: each entry is changed in one step.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pass {
    /// For the body of its request.
    pub(super) const fn toll(&self) -> Toll<'_> {
        Toll { pass: self, bytes: 0 }
    }

    /// Takes the nonce of a signature that verified; each is taken once.
    pub(super) fn take(&self, verified: &VerifiedSignature, now: Now) -> Result<(), Refusal> {
        let mut table = self.peers.lock();
        // A peer with a request in flight is never swept.
        let peer = table.peers.get_mut(&self.runtime).ok_or(Refusal::Fault)?;
        peer.nonces.take(verified, now.unix).map_err(|stale| match stale {
            Stale::Used => Refusal::Replay,
            Stale::TooManyEpochs => Refusal::Epochs,
        })
    }
}

/// What a runtime pays for a body as it is let go of: for all that came of it, whether or not it came to its end, and also when the
/// sender took the request back while it was read.
pub(super) struct Toll<'a> {
    pass: &'a Pass,
    pub(super) bytes: usize,
}

impl Drop for Toll<'_> {
    fn drop(&mut self) {
        self.pass.peers.charge(&self.pass.runtime, self.bytes, Now::read());
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if let Some(peer) = self.peers.lock().peers.get_mut(&self.runtime) {
            peer.in_flight = peer.in_flight.saturating_sub(1);
        }
    }
}

impl Table {
    fn make_room(&mut self, now: Now, capacity: usize) -> Result<(), Refusal> {
        let due = self.swept.is_none_or(|swept| now.instant.saturating_duration_since(swept) >= SWEEP);
        if due {
            self.swept = Some(now.instant);
            self.peers.retain(|_, peer| {
                let is_shut = peer.flood.until(now.instant).is_some();
                peer.in_flight > 0 || is_shut || peer.paid > now.instant || peer.nonces.forget(now.unix)
            });
        }
        if self.peers.len() >= capacity { Err(Refusal::Busy) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use tidewatch_shared::{identity::Epoch, signature::Nonce};

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
    fn a_burst_passes_and_then_the_rate_holds() {
        let (peers, start, runtime) = (Peers::new(limits()), now(), id("r-1"));
        for _ in 0..3 {
            assert!(peers.enter(&runtime, start).is_ok());
        }
        assert_eq!(peers.enter(&runtime, start).err(), Some(Refusal::Rate(Duration::from_millis(100))));
        assert!(peers.enter(&id("r-2"), start).is_ok(), "nobody else is disturbed");
        assert!(peers.enter(&runtime, later(start, 100)).is_ok());
        assert!(peers.enter(&runtime, later(start, 100)).is_err());
    }

    #[test]
    fn who_floods_is_shut_out_for_longer_each_time() {
        let (peers, mut at, runtime) = (Peers::new(limits()), now(), id("r-1"));
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            let mut tries = 0;
            let wait = loop {
                match peers.enter(&runtime, at) {
                    Err(Refusal::Flood(wait)) => break wait,
                    _ => tries += 1,
                }
                assert!(tries < 20);
            };
            assert_eq!(wait, Duration::from_secs(seconds));
            assert_eq!(peers.shut_until(&runtime, at.instant), Some(at.instant + wait));
            assert!(peers.enter(&id("r-2"), at).is_ok(), "nobody else is disturbed");
            at = later(at, seconds * 1_000);
        }
        at = later(at, 300_000);
        while !matches!(peers.enter(&runtime, at), Err(Refusal::Flood(_))) {}
        assert_eq!(peers.shut_until(&runtime, at.instant), Some(at.instant + SHORTEST_SHUT), "it was quiet for long");
    }

    #[test]
    fn who_waits_as_told_is_never_shut_out() {
        let (peers, mut at, runtime) = (Peers::new(limits()), now(), id("r-1"));
        for _ in 0..200 {
            match peers.enter(&runtime, at) {
                Ok(_) => {}
                Err(Refusal::Rate(wait)) => at = later(at, u64::try_from(wait.as_millis()).unwrap()),
                Err(other) => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn bodies_cost_too() {
        let (peers, start, runtime) = (Peers::new(limits()), now(), id("r-1"));
        peers.enter(&runtime, start).unwrap();
        peers.charge(&runtime, 250, start);
        assert_eq!(peers.enter(&runtime, start).err(), Some(Refusal::Rate(Duration::from_millis(100))));
    }

    #[test]
    fn what_was_thrown_away_costs_too_and_who_waits_as_told_is_let_in() {
        let (peers, start, runtime) = (Peers::new(limits()), now(), id("r-1"));
        while peers.enter(&runtime, start).is_ok() {}
        let Err(Refusal::Rate(wait)) = peers.enter(&runtime, start) else { panic!("the rate") };
        let told = Refusal::Rate(wait).dearer_by(peers.charge(&runtime, 250, start));
        assert_eq!(told, Refusal::Rate(wait + Duration::from_millis(200)));
        assert!(peers.enter(&runtime, later(start, 200)).is_err(), "it costs");
        assert!(peers.enter(&runtime, later(start, 300)).is_ok());
        peers.charge(&id("unknown"), 250, start);
        assert_eq!(Refusal::Route.dearer_by(wait), Refusal::Route);
    }

    #[test]
    fn requests_in_flight_are_counted_until_they_end() {
        let (peers, start, runtime) = (Peers::new(limits()), now(), id("r-1"));
        let first = peers.enter(&runtime, start).unwrap();
        let _second = peers.enter(&runtime, start).unwrap();
        assert_eq!(peers.enter(&runtime, start).err(), Some(Refusal::Concurrency));
        drop(first);
        assert!(peers.enter(&runtime, start).is_ok());
    }

    #[test]
    fn the_table_is_bounded_and_forgets_who_is_gone() {
        let (peers, start) = (Peers::new(limits()), now());
        let pass = peers.enter(&id("r-1"), start).unwrap();
        pass.take(&VerifiedSignature { created: 1_000, nonce: Nonce { epoch: Epoch::new(1), counter: 1 } }, start)
            .unwrap();
        drop(pass);
        let held = peers.enter(&id("r-2"), start).unwrap();
        assert_eq!(peers.enter(&id("r-3"), start).err(), Some(Refusal::Busy));
        assert_eq!(
            peers.enter(&id("r-3"), later(start, 60_000)).err(),
            Some(Refusal::Busy),
            "r-1 can still be replayed"
        );
        assert!(peers.enter(&id("r-3"), later(start, 121_000)).is_ok());
        assert_eq!(
            peers.enter(&id("r-4"), later(start, 121_000)).err(),
            Some(Refusal::Busy),
            "r-2 has a request in flight"
        );
        drop(held);
    }
}
