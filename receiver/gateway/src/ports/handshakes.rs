//! Limits of TLS handshakes: the CPU that they take, and their places, which are shared among the networks from which
//! connections come.
//!
//! Clients decide how many handshakes there are, and each costs asymmetric cryptography; a limited share of the threads keeps
//! the others free for requests on open connections.
//!
//! A network may hold at most as many places as are free (a "dynamic threshold", Choudhury and Hahne, 1998): a single
//! one half of all places, two of them a third each. So a network that holds none always finds a free place, however
//! many silent connections another one opens, and many agents behind the address of a NAT still get most of the
//! places. Further connections of a network wait in their order until one of its handshakes ends. They occupy
//! connections of the port, to which the same threshold applies.

use std::{
    collections::{HashMap, VecDeque},
    future::poll_fn,
    net::IpAddr,
    pin::pin,
    sync::Arc,
    task::ready,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::{Semaphore, oneshot},
    time::timeout,
};
use tokio_util::sync::PollSemaphore;

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

/// Drives a future and holds a permit during each poll, so that at most as many polls run concurrently as there are
/// permits. A future that waits for its peer holds none; a stalled peer therefore delays no other.
pub(super) async fn with_permits<F: Future>(permits: Arc<Semaphore>, future: F) -> F::Output {
    let mut permits = PollSemaphore::new(permits);
    let mut future = pin!(future);
    poll_fn(|context| {
        let _permit = ready!(permits.poll_acquire(context));
        future.as_mut().poll(context)
    })
    .await
}

/// Returns the deadline of a handshake by the number of places that are free for its network: the full deadline while at
/// least half of all places are, then linearly down to a fifth when none is, so that stalled handshakes free their places
/// sooner under load.
pub(super) fn adaptive_deadline(deadline: Duration, free: usize, slots: usize) -> Duration {
    let half = (slots / 2).max(1);
    let share = free.min(half) as f64 / half as f64;
    deadline.mul_f64(0.2 + 0.8 * share)
}

#[cfg(test)]
mod tests;
