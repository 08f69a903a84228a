//! Places for TLS handshakes, shared among the networks from which connections come.
//!
//! A network may hold at most as many places as are free (a "dynamic threshold", Choudhury and Hahne, 1998): a single
//! one half of all places, two of them a third each. So a network that holds none always finds a free place, however
//! many silent connections another one opens, and many agents behind the address of a NAT still get most of the
//! places. Further connections of a network wait in their order until one of its handshakes ends. They occupy
//! connections of the port, to which the same threshold applies.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{sync::oneshot, time::timeout};

use crate::source::network;

/// Metric label of a connection that closes because its network holds its share.
const CROWDED: &str = "address";

/// All places of a port. Clones share them.
#[derive(Clone)]
pub(super) struct HandshakePlaces(Arc<Mutex<Table>>);

struct Table {
    free: usize,
    /// Networks with handshakes in progress or waiting connections. The connections without a known source share one
    /// entry, which has no threshold. Bounded by the connections of the port.
    networks: HashMap<Network, Holder>,
    /// Networks with waiting connections that hold no place, because none is free.
    starved: VecDeque<Network>,
}

type Network = Option<IpAddr>;

/// State of one network.
#[derive(Default)]
struct Holder {
    held: usize,
    waiting: VecDeque<oneshot::Sender<HandshakePlace>>,
}

/// A place, released when dropped.
pub(super) struct HandshakePlace {
    places: HandshakePlaces,
    network: Network,
    /// Further places that the network could take when it got this one.
    pub(super) left: usize,
}

/// Answer to a request for a place.
enum Admission {
    Granted(HandshakePlace),
    Waits(oneshot::Receiver<HandshakePlace>),
    /// Too many connections of the network wait.
    Refused,
}

impl HandshakePlaces {
    pub(super) fn new(places: usize) -> Self {
        let (networks, starved) = Default::default();
        Self(Arc::new(Mutex::new(Table { free: places.max(1), networks, starved })))
    }

    /// Acquires a place for a connection from this address; waits for it within `deadline` if the network holds its
    /// share. `free_connections` is the number of connections that the port could still accept.
    ///
    /// # Errors
    /// Metric label of a connection that has waited for too long, or that may not wait since too many do.
    pub(super) async fn acquire(
        &self,
        source: Option<IpAddr>,
        free_connections: usize,
        deadline: Duration,
    ) -> Result<HandshakePlace, &'static str> {
        match self.request(source.map(network), free_connections) {
            Admission::Granted(place) => Ok(place),
            Admission::Waits(granted) => timeout(deadline, granted).await.ok().and_then(Result::ok).ok_or(CROWDED),
            Admission::Refused => Err(CROWDED),
        }
    }

    fn request(&self, network: Network, free_connections: usize) -> Admission {
        let mut table = self.0.lock();
        if table.may_take(network) {
            return Admission::Granted(self.grant(&mut table, network));
        }
        let holder = table.networks.entry(network).or_default();
        if holder.waiting.len() >= free_connections {
            // Those whose deadline has passed are the first ones.
            while holder.waiting.pop_front_if(|place| place.is_closed()).is_some() {}
        }
        if holder.waiting.len() >= free_connections {
            return Admission::Refused;
        }
        let is_starved = holder.held == 0 && holder.waiting.is_empty();
        let (place, granted) = oneshot::channel();
        holder.waiting.push_back(place);
        if is_starved {
            table.starved.push_back(network);
        }
        Admission::Waits(granted)
    }

    fn grant(&self, table: &mut Table, network: Network) -> HandshakePlace {
        let Table { free, networks, .. } = table;
        let holder = networks.entry(network).or_default();
        *free -= 1;
        holder.held += 1;
        let left = if network.is_some() { free.saturating_sub(holder.held) } else { *free };
        HandshakePlace { places: self.clone(), network, left }
    }

    fn release(&self, network: Network) {
        // A place whose receiver has just given up comes back, and is released after the lock.
        let mut undelivered = Vec::new();
        let mut table = self.0.lock();
        table.free += 1;
        if let Some(holder) = table.networks.get_mut(&network) {
            holder.held -= 1;
        }
        while table.free > 0
            && let Some(starved) = table.starved.pop_front()
        {
            undelivered.extend(self.serve(&mut table, starved));
        }
        while table.may_take(network) && table.has_waiting(network) {
            undelivered.extend(self.serve(&mut table, network));
        }
        table.forget_idle(network);
    }

    /// Grants a place to the first connection of a network that still waits. Returns the place if its receiver gave up.
    fn serve(&self, table: &mut Table, network: Network) -> Option<HandshakePlace> {
        let waiting = &mut table.networks.get_mut(&network)?.waiting;
        let mut next = waiting.pop_front();
        while next.as_ref().is_some_and(oneshot::Sender::is_closed) {
            next = waiting.pop_front();
        }
        let Some(next) = next else {
            table.forget_idle(network);
            return None;
        };
        let place = self.grant(table, network);
        next.send(place).err()
    }
}

impl Table {
    fn may_take(&self, network: Network) -> bool {
        let held = self.networks.get(&network).filter(|_| network.is_some()).map_or(0, |holder| holder.held);
        held < self.free
    }

    fn has_waiting(&self, network: Network) -> bool {
        self.networks.get(&network).is_some_and(|holder| !holder.waiting.is_empty())
    }

    fn forget_idle(&mut self, network: Network) {
        if self.networks.get(&network).is_some_and(|holder| holder.held == 0 && holder.waiting.is_empty()) {
            self.networks.remove(&network);
        }
    }
}

impl Drop for HandshakePlace {
    fn drop(&mut self) {
        self.places.release(self.network);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONNECTIONS: usize = 20_000;
    const PLACES: usize = 1_024;

    fn address(n: u32) -> Network {
        Some(IpAddr::V4(n.into()))
    }

    fn granted(admission: Admission) -> Option<HandshakePlace> {
        match admission {
            Admission::Granted(place) => Some(place),
            Admission::Waits(_) | Admission::Refused => None,
        }
    }

    fn is_empty(places: &HandshakePlaces) -> bool {
        let table = places.0.lock();
        (table.free, table.networks.len(), table.starved.len()) == (PLACES, 0, 0)
    }

    #[test]
    fn silent_connections_of_one_address_take_no_place_from_a_hundred_others() {
        let places = HandshakePlaces::new(PLACES);
        let silent: Vec<_> = (0..5_000).map(|_| places.request(address(0), CONNECTIONS)).collect();
        let held = silent.iter().filter(|admission| matches!(admission, Admission::Granted(_))).count();
        assert_eq!(held, PLACES / 2, "alone, an address gets half of the places");
        for round in 0..50 {
            let handshakes: Vec<_> =
                (1..=100).map(|other| granted(places.request(address(other), CONNECTIONS))).collect();
            assert!(handshakes.iter().all(Option::is_some), "round {round}");
        }
        drop(silent);
        assert!(is_empty(&places));
    }

    #[test]
    fn agents_behind_one_address_wait_in_order_and_all_get_a_place() {
        let places = HandshakePlaces::new(PLACES);
        let mut running = VecDeque::new();
        let mut waiting = VecDeque::new();
        for _ in 0..5_000 {
            match places.request(address(0), CONNECTIONS) {
                Admission::Granted(place) => running.push_back(place),
                Admission::Waits(place) => waiting.push_back(place),
                Admission::Refused => panic!("refused"),
            }
        }
        let mut served = 0;
        while let Some(place) = running.pop_front() {
            drop(place);
            served += 1;
            while let Some(Ok(place)) = waiting.front_mut().map(oneshot::Receiver::try_recv) {
                running.push_back(place);
                waiting.pop_front();
            }
        }
        assert_eq!((served, waiting.len()), (5_000, 0));
        assert!(is_empty(&places));
    }

    #[test]
    fn waiting_connections_of_one_address_leave_connections_to_others() {
        let places = HandshakePlaces::new(PLACES);
        let mut open = 0;
        let mut admitted = Vec::new();
        for _ in 0..100_000 {
            match places.request(address(0), CONNECTIONS - open) {
                Admission::Refused => {}
                admission => {
                    open += 1;
                    admitted.push(admission);
                }
            }
        }
        assert!((CONNECTIONS / 2..CONNECTIONS * 2 / 3).contains(&open), "{open} connections");
        // Their deadlines pass, and others may wait.
        admitted.retain(|admission| matches!(admission, Admission::Granted(_)));
        assert!(matches!(places.request(address(0), 100), Admission::Waits(_)));
    }

    #[test]
    fn without_a_free_place_each_address_waits_for_any_place() {
        let places = HandshakePlaces::new(PLACES);
        let taken: Vec<_> = (0..).map_while(|n| granted(places.request(address(n), CONNECTIONS))).collect();
        assert_eq!(taken.len(), PLACES);
        let others: Vec<_> = (0..10).map(|n| places.request(address(10_000 + n), CONNECTIONS)).collect();
        drop(taken);
        for other in others {
            let Admission::Waits(mut place) = other else { panic!("it has a place, or was refused") };
            assert!(place.try_recv().is_ok());
        }
        assert!(is_empty(&places));
    }

    #[test]
    fn connections_without_a_known_source_have_no_threshold() {
        let places = HandshakePlaces::new(PLACES);
        let taken: Vec<_> = (0..).map_while(|_| granted(places.request(None, CONNECTIONS))).collect();
        assert_eq!(taken.len(), PLACES);
        drop(taken);
        assert!(is_empty(&places));
    }

    #[tokio::test(start_paused = true)]
    async fn wait_for_a_place_ends_with_the_deadline() {
        let places = HandshakePlaces::new(2);
        let deadline = Duration::from_secs(5);
        let source = Some(IpAddr::from([127, 0, 0, 1]));
        let held = places.acquire(source, CONNECTIONS, deadline).await.ok().unwrap();
        let begun = tokio::time::Instant::now();
        assert_eq!(places.acquire(source, CONNECTIONS, deadline).await.err(), Some(CROWDED));
        assert_eq!(begun.elapsed(), deadline);
        assert_eq!(places.acquire(source, 0, deadline).await.err(), Some(CROWDED), "no connection is left for it");
        let (next, ()) = tokio::join!(places.acquire(source, CONNECTIONS, deadline), async { drop(held) });
        assert!(next.is_ok());
    }
}
