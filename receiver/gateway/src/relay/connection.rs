//! Places of the connections to a holder.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustls_pki_types::ServerName;
use tidewatch_kit::random::Random;
use tidewatch_trust::ReplicaClient;
use tokio::{
    sync::Mutex,
    time::{Instant, timeout},
};
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;

use super::{Relay, RelayError, Replica, http2::Http2Connection};

/// Bound of the pause after a failed connection; doubled with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Longest pause.
const MAX_PAUSE: Duration = Duration::from_secs(2);

/// An open connection.
#[derive(Clone)]
pub(super) struct Connection {
    pub(super) http2: Http2Connection,
    /// Identity with which it was opened.
    client: Arc<ReplicaClient>,
}

/// Place of one connection, which is opened again when it ends.
pub(super) struct ConnectionSlot {
    state: Mutex<State>,
    /// The last attempt to open it failed.
    is_failing: AtomicBool,
}

struct State {
    connection: Option<Connection>,
    failures: u32,
    /// No attempt before it.
    retry_at: Instant,
    random: Random,
}

impl ConnectionSlot {
    pub(super) fn new(seed: u64) -> Self {
        let state = State { connection: None, failures: 0, retry_at: Instant::now(), random: Random::new(seed) };
        Self { state: Mutex::new(state), is_failing: AtomicBool::new(false) }
    }

    /// Returns the connection, opening it if there is none or the identity of this replica has changed since. Requests
    /// that come meanwhile wait for it; while the holder is not reachable they do not.
    pub(super) async fn connection(&self, relay: &Relay, holder: &Replica) -> Result<Connection, RelayError> {
        let mut state = if self.is_failing.load(Ordering::Relaxed) {
            self.state.try_lock().map_err(|_| RelayError::Gone)?
        } else {
            self.state.lock().await
        };
        let client = relay.tls().client();
        if let Some(Connection { http2, client: used }) = state.connection.clone() {
            if http2.has_answered() {
                state.failures = 0;
            }
            if Arc::ptr_eq(&used, &client) && !http2.has_ended() {
                return Ok(Connection { http2, client: used });
            }
            // Its requests in flight have clones of it.
            state.connection = None;
            if http2.has_ended() && !http2.has_answered() {
                self.failed(&mut state, holder, "the connection ended without a response");
            }
        }
        if Instant::now() < state.retry_at {
            return Err(RelayError::Gone);
        }
        let opening = relay.0.executor.spawn(open(relay.clone(), holder.clone(), client));
        let opened = match timeout(relay.0.deadlines.connect, AbortOnDropHandle::new(opening)).await {
            Ok(Ok(opened)) => opened,
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("timeout".to_owned()),
        };
        relay.0.metrics.connected(if opened.is_ok() { "opened" } else { "failed" });
        match opened {
            Ok(connection) => {
                state.connection = Some(connection.clone());
                self.is_failing.store(false, Ordering::Relaxed);
                Ok(connection)
            }
            Err(error) => {
                self.failed(&mut state, holder, &error);
                Err(RelayError::Gone)
            }
        }
    }

    /// Pauses before the next attempt.
    fn failed(&self, state: &mut State, holder: &Replica, error: &str) {
        if state.failures == 0 {
            tracing::warn!(replica = %holder.name, address = %holder.address, error, "No connection to a replica");
        }
        state.failures = state.failures.saturating_add(1);
        let failures = state.failures;
        let pause = state.random.backoff(FIRST_PAUSE, MAX_PAUSE, failures);
        state.retry_at = Instant::now() + pause;
        self.is_failing.store(true, Ordering::Relaxed);
    }
}

/// Opens a connection whose peer proves to be the holder. The current executor drives it from then on.
async fn open(relay: Relay, holder: Replica, client: Arc<ReplicaClient>) -> Result<Connection, String> {
    let config = client.config(&holder.name).map_err(|error| error.to_string())?;
    let stream = relay.0.connect.connect(holder.address).await.map_err(|error| error.to_string())?;
    // The name has no meaning: the holder's certificate is verified by its replica.
    let name = ServerName::from(holder.address.ip());
    let tls = TlsConnector::from(Arc::new(config)).connect(name, stream).await.map_err(|error| error.to_string())?;
    let http2 = Http2Connection::open(tls, relay.0.deadlines.ping).await.map_err(|error| error.to_string())?;
    Ok(Connection { http2, client })
}
