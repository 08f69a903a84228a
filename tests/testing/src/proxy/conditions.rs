//! Conditions of the network between the two sides of a proxy: distance, bandwidth, and how long a connection may be idle.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};

/// Conditions of a network. The default is that of loopback.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Conditions {
    /// Round-trip time. A new connection takes one more before its first bytes are delivered, for the handshake of TCP.
    pub round_trip: Duration,
    /// Bytes per second in each direction, shared by all connections; `None` for as many as there are.
    pub bandwidth: Option<NonZeroU32>,
    /// Resets a connection over which no byte has passed for this long, as a load balancer does.
    pub idle_limit: Option<Duration>,
}

/// A direction of a proxy.
#[derive(Debug, Clone, Copy)]
pub(super) enum Direction {
    ToServer,
    ToClient,
}

/// The network that all connections of a proxy share.
#[derive(Debug, Clone)]
pub(super) struct Link {
    conditions: watch::Receiver<Conditions>,
    /// When each direction has sent all bytes that were given to it; of use only with a bandwidth.
    to_server: Arc<Mutex<Instant>>,
    to_client: Arc<Mutex<Instant>>,
}

impl Link {
    pub(super) fn new(conditions: watch::Receiver<Conditions>) -> Self {
        let now = || Arc::new(Mutex::new(Instant::now()));
        Self { conditions, to_server: now(), to_client: now() }
    }

    pub(super) fn conditions(&self) -> Conditions {
        *self.conditions.borrow()
    }

    /// Takes so many bytes in at `now`, and returns when they arrive at the other side.
    pub(super) fn arrival(&self, direction: Direction, bytes: usize, now: Instant) -> Instant {
        let Conditions { round_trip, bandwidth, .. } = self.conditions();
        let sent = bandwidth.map_or(now, |bandwidth| {
            let free = match direction {
                Direction::ToServer => &self.to_server,
                Direction::ToClient => &self.to_client,
            };
            let mut free = free.lock();
            *free = now.max(*free) + transmission(bytes, bandwidth);
            *free
        });
        sent + round_trip / 2
    }

    /// Returns once no byte has passed for as long as a connection may be idle; `last` is when the latest one did.
    pub(super) async fn idle(mut self, last: impl Fn() -> Instant) {
        loop {
            let limit = self.conditions.borrow_and_update().idle_limit;
            let end = limit.map(|limit| last() + limit);
            if end.is_some_and(|end| end <= Instant::now()) {
                return;
            }
            let sleep = async {
                match end {
                    Some(end) => tokio::time::sleep_until(end).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = sleep => {}
                Ok(()) = self.conditions.changed() => {}
            }
        }
    }
}

/// Time in which so many bytes leave.
fn transmission(bytes: usize, bandwidth: NonZeroU32) -> Duration {
    let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
    Duration::from_secs(1).mul_f64(f64::from(bytes) / f64::from(bandwidth.get()))
}
