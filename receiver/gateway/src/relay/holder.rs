//! Connections and requests in flight to one holder.

use std::{
    collections::HashMap,
    hash::{BuildHasher as _, RandomState},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use http::{Request, Response};
use parking_lot::{Mutex, MutexGuard};
use tidewatch_api::identity::RuntimeId;
use tidewatch_kit::metrics::Counted;

use super::{Relay, RelayError, RelayedPort, Replica, connection::ConnectionSlot, http2::ResponseBody};

/// Connections to one holder: each is driven by one task, so one alone would be limited to a single core.
const CONNECTIONS: usize = 2;

/// Connections and requests in flight to one holder.
pub(super) struct HolderPool {
    pub(super) replica: Arc<Replica>,
    connections: [ConnectionSlot; CONNECTIONS],
    next: AtomicUsize,
    in_flight: Mutex<[InFlight; RelayedPort::COUNT]>,
}

/// Requests in flight of one port.
#[derive(Default)]
struct InFlight {
    count: usize,
    runtimes: HashMap<RuntimeId, u32>,
}

/// Place of a request in flight, released on drop.
pub(super) struct Permit<'a> {
    pool: &'a HolderPool,
    port: RelayedPort,
    runtime: RuntimeId,
}

impl HolderPool {
    pub(super) fn new(replica: Arc<Replica>) -> Self {
        let random = RandomState::new();
        let connections = std::array::from_fn(|at| ConnectionSlot::new(random.hash_one(at)));
        Self { replica, connections, next: AtomicUsize::new(0), in_flight: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, [InFlight; RelayedPort::COUNT]> {
        self.in_flight.lock()
    }

    /// Acquires a place for a request of a runtime, if both have one left.
    pub(super) fn acquire(&self, port: RelayedPort, runtime: &RuntimeId) -> Result<Permit<'_>, RelayError> {
        let mut in_flight = self.lock();
        let InFlight { count, runtimes } = &mut in_flight[port as usize];
        if *count >= port.slots() {
            return Err(RelayError::Full);
        }
        let own = runtimes.entry(runtime.clone()).or_default();
        if *own >= RelayedPort::SHARE {
            return Err(RelayError::Share);
        }
        *own += 1;
        *count += 1;
        Ok(Permit { pool: self, port, runtime: runtime.clone() })
    }

    /// Sends a request over one of the connections. A request of which certainly no byte was sent, because its
    /// connection ended, goes over a new one.
    pub(super) async fn send(
        &self,
        relay: &Relay,
        request: Request<Bytes>,
    ) -> Result<Response<ResponseBody>, RelayError> {
        let _counted = Counted::new(&relay.0.metrics.in_flight);
        let slot = &self.connections[self.next.fetch_add(1, Ordering::Relaxed) % CONNECTIONS];
        let connection = slot.connection(relay, &self.replica).await?;
        match connection.http2.send(request.clone()).await {
            Err(RelayError::Gone) => {}
            result => return result,
        }
        let connection = slot.connection(relay, &self.replica).await?;
        connection.http2.send(request).await.map_err(|_| RelayError::Broken)
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut in_flight = self.pool.lock();
        let InFlight { count, runtimes } = &mut in_flight[self.port as usize];
        *count = count.saturating_sub(1);
        if let Some(own) = runtimes.get_mut(&self.runtime) {
            *own = own.saturating_sub(1);
            if *own == 0 {
                runtimes.remove(&self.runtime);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> HolderPool {
        let name = "a".parse().unwrap();
        let address = "127.0.0.1:1".parse().unwrap();
        HolderPool::new(Arc::new(Replica { name, address }))
    }

    fn id(n: usize) -> RuntimeId {
        format!("r-{n}").parse().unwrap()
    }

    #[test]
    fn one_runtime_has_its_share_and_all_have_the_places_of_their_port() {
        let pool = pool();
        let mut permits: Vec<_> = (0..8).map(|_| pool.acquire(RelayedPort::Event, &id(0)).ok().unwrap()).collect();
        assert_eq!(pool.acquire(RelayedPort::Event, &id(0)).err(), Some(RelayError::Share));
        assert!(pool.acquire(RelayedPort::V2, &id(0)).is_ok(), "another port has places of its own");
        permits.extend((8..512).map(|n| pool.acquire(RelayedPort::Event, &id(n)).ok().unwrap()));
        assert_eq!(pool.acquire(RelayedPort::Event, &id(1_000)).err(), Some(RelayError::Full));
        assert!(pool.acquire(RelayedPort::Renewal, &id(1_000)).is_ok());
        permits.remove(0);
        assert!(pool.acquire(RelayedPort::Event, &id(0)).is_ok());
        permits.clear();
        assert!(pool.lock().iter().all(|in_flight| in_flight.count == 0 && in_flight.runtimes.is_empty()));
    }
}
