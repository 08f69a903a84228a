//! The gateway: TLS, identity, limits, signature, replay, and what comes out is [`Verified`] (`01`, section 6; `02`).
//!
//! Runs on a runtime of its own, so that reconciles never delay an answer; everything it awaits has a deadline, and everything
//! it keeps has a bound. A request goes this way, and the first refusal ends it:
//!
//! 1. connection cap, TLS 1.3 with a client certificate, deadline (`connection`)
//! 2. the certificate names a runtime (403) and holds now (401)
//! 3. rate and requests in flight of that runtime (429), before anything that costs (`peers`)
//! 4. route, method, authority, content type, length (`head`)
//! 5. the body, within its limit, its deadline, and the budget of all bodies (`body`)
//! 6. the signature over the raw bytes, then its nonce (401; `replay`)
//! 7. only now JSON, and whether it speaks for whom the certificate names (403)
//! 8. the [`Intake`]

mod authority;
mod body;
mod connection;
mod desk;
mod head;
mod intake;
mod metrics;
mod peers;
mod refusal;
mod replay;

use std::{hash::RandomState, net::SocketAddr, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use thiserror::Error;
use tidewatch_shared::{event::MAX_BODY_BYTES, identity::TrustDomain};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{Instant, sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use authority::{InvalidAuthority, OwnAuthority};
pub use intake::{Batch, Intake, Verified};
pub use metrics::Metrics;
pub use peers::Limits;

/// When the system cannot hand over a connection (no file handle, no memory), the next try comes after this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How the gateway behaves. All durations and sizes are bounds.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where it listens; port 0 for any.
    pub address: SocketAddr,
    /// The authorities it answers for (`--authority`); port 0 stands for the port that was bound.
    pub authorities: Vec<OwnAuthority>,
    /// Whose runtimes it knows.
    pub domain: TrustDomain,
    /// Connections, handshakes included. Beyond it the system's backlog holds them.
    pub max_connections: usize,
    /// From accept to the end of the handshake.
    pub handshake_deadline: Duration,
    /// From the end of the handshake to the first request; for HTTP/1.1, from each request to the next.
    pub head_deadline: Duration,
    /// From a request's head to the end of its body.
    pub body_deadline: Duration,
    /// Without a request in flight. Longer than any heartbeat interval, or each heartbeat needs a handshake.
    pub idle: Duration,
    /// After it a connection ends, and the next one sees the newest certificates and roots.
    pub max_age: Duration,
    /// What is in flight may take this long when a connection, or the gateway, ends.
    pub drain_deadline: Duration,
    /// Bytes of one body; 413 tells it.
    pub max_body: usize,
    /// Bytes of all bodies in memory.
    pub body_budget: usize,
    /// How much one runtime may ask.
    pub limits: Limits,
    /// Revision of the trust bundle that agents should have; heartbeats are told it where the intake tells none.
    pub trust_revision: Option<String>,
}

impl Settings {
    /// The settings as they are without flags.
    #[must_use]
    pub fn new(address: SocketAddr, authorities: Vec<OwnAuthority>, domain: TrustDomain) -> Self {
        Self {
            address,
            authorities,
            domain,
            max_connections: 20_000,
            handshake_deadline: Duration::from_secs(5),
            head_deadline: Duration::from_secs(10),
            body_deadline: Duration::from_secs(10),
            idle: Duration::from_secs(5 * 60),
            max_age: Duration::from_secs(10 * 60),
            drain_deadline: Duration::from_secs(10),
            max_body: MAX_BODY_BYTES,
            body_budget: 128 << 20,
            limits: Limits::default(),
            trust_revision: None,
        }
    }
}

/// Why the gateway does not listen.
#[derive(Debug, Error)]
pub enum Bind {
    /// The address is taken or not ours.
    #[error("could not listen on {address}")]
    Listen {
        /// Which one.
        address: SocketAddr,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// A gateway that listens and does not serve yet.
pub struct Gateway<I> {
    listener: TcpListener,
    address: SocketAddr,
    tls: Arc<ArcSwap<ServerConfig>>,
    context: Arc<connection::Context<I>>,
}

/// The time, read once per step: the wall clock for certificates and signatures, the steady one for rates.
#[derive(Clone, Copy, Debug)]
struct Now {
    /// Unix seconds.
    unix: i64,
    instant: Instant,
}

impl Now {
    fn read() -> Self {
        Self { unix: jiff::Timestamp::now().as_second(), instant: Instant::now() }
    }
}

impl<I: Intake> Gateway<I> {
    /// Listens. Call it on the runtime that is to serve. Each connection takes the TLS configuration that is newest when it comes.
    ///
    /// # Errors
    /// [`Bind`].
    pub async fn bind(
        mut settings: Settings,
        tls: Arc<ArcSwap<ServerConfig>>,
        intake: I,
        metrics: Metrics,
    ) -> Result<Self, Bind> {
        let wanted = settings.address;
        let listen = |source| Bind::Listen { address: wanted, source };
        let listener = TcpListener::bind(wanted).await.map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        for authority in &mut settings.authorities {
            *authority = authority.at(address.port());
        }
        let context = connection::Context {
            desk: desk::Desk::new(&settings, intake, metrics.clone()),
            domain: settings.domain.clone(),
            settings,
            metrics,
            drain: CancellationToken::new(),
            kill: CancellationToken::new(),
            spread: RandomState::new(),
        };
        Ok(Self { listener, address, tls, context: Arc::new(context) })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown`, then lets what is in flight end, within the drain deadline.
    pub async fn run(self, shutdown: CancellationToken) {
        let Self { listener, tls, context, .. } = self;
        let connections = TaskTracker::new();
        let room = Arc::new(Semaphore::new(context.settings.max_connections.min(Semaphore::MAX_PERMITS)));
        while let Some((tcp, permit)) = next(&listener, &room, &context.metrics, &shutdown).await {
            let (context, config) = (context.clone(), tls.load_full());
            connections.spawn(async move {
                let _permit = permit;
                connection::run(context, tcp, config).await;
            });
        }
        // No new connection; GOAWAY or `Connection: close` on the open ones.
        drop(listener);
        connections.close();
        context.drain.cancel();
        if timeout(context.settings.drain_deadline, connections.wait()).await.is_err() {
            tracing::warn!(open = connections.len(), "Connections outlived the drain deadline");
            context.kill.cancel();
            connections.wait().await;
        }
    }
}

/// The next connection, with its place among them; `None` at shutdown. The place is taken first, so that nobody is accepted
/// whom nobody serves.
async fn next(
    listener: &TcpListener,
    room: &Arc<Semaphore>,
    metrics: &Metrics,
    shutdown: &CancellationToken,
) -> Option<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let accept = async {
        let permit = room.clone().acquire_owned().await.ok()?;
        loop {
            match listener.accept().await {
                Ok((tcp, _)) => return Some((tcp, permit)),
                Err(error) => {
                    metrics.accepts_failed.inc();
                    tracing::warn!(%error, "Could not accept a connection");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    };
    tokio::select! {
        () = shutdown.cancelled() => None,
        accepted = accept => accepted,
    }
}

#[cfg(test)]
mod tests;
