//! The gateway: TLS, identity, limits, signature, replay, and what comes out is [`Verified`].
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
pub mod enrol;
mod frames;
mod handshakes;
mod head;
mod heads;
mod intake;
mod life;
mod listen;
mod metered;
mod metrics;
mod peers;
mod pressure;
mod proxy;
mod refusal;
mod replay;
mod seats;
pub mod v2;

use std::{hash::RandomState, net::SocketAddr, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use thiserror::Error;
use tidewatch_shared::{event::MAX_BODY_BYTES, identity::TrustDomain};
use tokio::{
    net::TcpListener,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::{
    sync::CancellationToken,
    task::{AbortOnDropHandle, TaskTracker},
};

use crate::{
    fleet::hub::Interval,
    ingress::enrolment::{Office, Revocations},
};

pub use authority::{InvalidAuthority, OwnAuthority};
pub use connection::{Holder, Service};
pub use desk::Desk;
pub use intake::{Batch, Intake, Verified};
pub use listen::Listen;
pub use metrics::Metrics;
pub use peers::Limits;

/// When the system cannot hand over a connection (no file handle, no memory), the next try comes after this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How often the lag is measured: a few times within what anybody would notice.
const LAG_INTERVAL: Duration = Duration::from_millis(100);

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
    /// Handshakes at the same time. Beyond it the system's backlog holds them.
    pub max_handshakes: usize,
    /// Steps of handshakes that may run at the same time: fewer than the threads that serve, so that requests have the others.
    pub handshake_share: usize,
    /// From accept to the end of the handshake; less when nearly all places are taken.
    pub handshake_deadline: Duration,
    /// From the end of the handshake to the first request; over HTTP/1.1 also from the first byte of each later head to its last.
    pub head_deadline: Duration,
    /// From a request's head to the end of its body.
    pub body_deadline: Duration,
    /// Until what was written is taken: an answer by its reader, bytes by the network.
    pub answer_deadline: Duration,
    /// Between PINGs on HTTP/2, so that a peer that is gone is noticed; one may go a third of it without an answer. On HTTP/1.1 there are
    /// probes of TCP, and the next heartbeat.
    pub ping_interval: Duration,
    /// Without a request in flight; longer while the heartbeat interval is.
    pub idle: Duration,
    /// After it a connection ends, over HTTP/1.1 with its next answer, and the next one sees the newest certificates and roots; longer while
    /// the heartbeat interval is.
    pub max_age: Duration,
    /// The heartbeat interval that agents are told.
    pub interval: Interval,
    /// What is in flight may take this long when a connection, or the gateway, ends.
    pub drain_deadline: Duration,
    /// Bytes of one request's head.
    pub max_head: u32,
    /// Bytes of one body; 413 tells it.
    pub max_body: usize,
    /// Bytes of all bodies in memory.
    pub body_budget: usize,
    /// How much one runtime may ask.
    pub limits: Limits,
    /// Answers may lag by so much before requests are shed, heartbeats first.
    pub lag_limit: Duration,
    /// The proxy that ends TLS in front of this port, if one does: then nobody else may connect.
    pub proxy: Option<crate::pki::Proxy>,
    /// Whose certificates hold no longer.
    pub revocations: Revocations,
    /// Who serves renewals; without one there is no such route.
    pub office: Option<Office>,
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
            max_handshakes: 1_024,
            handshake_share: 1,
            handshake_deadline: Duration::from_secs(5),
            head_deadline: Duration::from_secs(10),
            body_deadline: Duration::from_secs(10),
            answer_deadline: Duration::from_secs(10),
            ping_interval: Duration::from_secs(30),
            idle: Duration::from_secs(5 * 60),
            max_age: Duration::from_secs(10 * 60),
            interval: Interval::default(),
            drain_deadline: Duration::from_secs(10),
            max_head: 16 << 10,
            max_body: MAX_BODY_BYTES,
            body_budget: 128 << 20,
            limits: Limits::default(),
            lag_limit: Duration::from_secs(1),
            proxy: None,
            revocations: Revocations::default(),
            office: None,
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
pub struct Gateway<S, L = TcpListener> {
    listener: L,
    address: SocketAddr,
    tls: Arc<ArcSwap<ServerConfig>>,
    context: Arc<connection::Context<S>>,
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

impl<I: Intake> Gateway<Desk<I>> {
    /// Listens for what v3 says. Call it on the runtime that is to serve. Each connection takes the TLS configuration that is newest when it comes.
    ///
    /// # Errors
    /// [`Bind`].
    pub async fn bind(
        settings: Settings,
        tls: Arc<ArcSwap<ServerConfig>>,
        intake: I,
        metrics: Metrics,
    ) -> Result<Self, Bind> {
        let desk = |settings: &Settings| Desk::new(settings, intake, metrics.clone());
        Self::listen(settings, tls, desk, metrics.clone()).await
    }
}

impl<S: Service> Gateway<S> {
    /// Listens; the service is made with the authorities as they are bound.
    async fn listen(
        settings: Settings,
        tls: Arc<ArcSwap<ServerConfig>>,
        service: impl FnOnce(&Settings) -> S,
        metrics: Metrics,
    ) -> Result<Self, Bind> {
        let wanted = settings.address;
        let listen = |source| Bind::Listen { address: wanted, source };
        let listener = TcpListener::bind(wanted).await.map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        Ok(Self::serve(listener, address, settings, tls, service, metrics))
    }
}

impl<I: Intake, L: Listen> Gateway<Desk<I>, L> {
    /// Serves what v3 says through another listener, which is bound to `address`.
    pub fn over(
        listener: L,
        address: SocketAddr,
        settings: Settings,
        tls: Arc<ArcSwap<ServerConfig>>,
        intake: I,
        metrics: Metrics,
    ) -> Self {
        let desk = |settings: &Settings| Desk::new(settings, intake, metrics.clone());
        Self::serve(listener, address, settings, tls, desk, metrics.clone())
    }
}

impl<S: Service, L: Listen> Gateway<S, L> {
    fn serve(
        listener: L,
        address: SocketAddr,
        mut settings: Settings,
        tls: Arc<ArcSwap<ServerConfig>>,
        service: impl FnOnce(&Settings) -> S,
        metrics: Metrics,
    ) -> Self {
        let handshake_share = settings.handshake_share.clamp(1, Semaphore::MAX_PERMITS);
        for authority in &mut settings.authorities {
            *authority = authority.at(address.port());
        }
        let context = connection::Context {
            service: service(&settings),
            settings,
            metrics,
            drain: CancellationToken::new(),
            kill: CancellationToken::new(),
            spread: RandomState::new(),
            seats: Arc::default(),
            handshakes: Arc::new(Semaphore::new(handshake_share)),
        };
        Self { listener, address, tls, context: Arc::new(context) }
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown`, then lets what is in flight end, within the drain deadline. A request that is on its way to a connection of
    /// HTTP/1.1 on which nothing is in flight finds it closed, and is for its agent to send again.
    pub async fn run(self, shutdown: CancellationToken) {
        let Self { listener, tls, context, .. } = self;
        let connections = TaskTracker::new();
        let places = |most: usize| Arc::new(Semaphore::new(most.clamp(1, Semaphore::MAX_PERMITS)));
        let (room, shaking) = (places(context.settings.max_connections), places(context.settings.max_handshakes));
        let _watch = AbortOnDropHandle::new(tokio::spawn(watch_lag(context.clone())));
        let _out = AbortOnDropHandle::new(tokio::spawn(connection::watch_out(context.clone())));
        while let Some((tcp, permit, place)) = next(&listener, &room, &shaking, &context.metrics, &shutdown).await {
            let (context, config) = (context.clone(), tls.load_full());
            connections.spawn(async move {
                let _permit = permit;
                let source = L::source(&tcp);
                connection::run(context, (tcp, source), config, place).await;
            });
        }
        // No new connection; GOAWAY, or `Connection: close` with the answer that is awaited, on the open ones.
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

/// Measures how much later than it should something comes to run here: a request would, too.
async fn watch_lag<S: Service>(context: Arc<connection::Context<S>>) {
    loop {
        let due = Instant::now() + LAG_INTERVAL;
        sleep_until(due).await;
        let lag = due.elapsed();
        context.metrics.lag.set(lag.as_secs_f64());
        context.service.observe_lag(lag);
    }
}

/// The next connection, with its place among them; `None` at shutdown. The place is taken first, so that nobody is accepted
/// whom nobody serves.
async fn next<L: Listen>(
    listener: &L,
    room: &Arc<Semaphore>,
    shaking: &Arc<Semaphore>,
    metrics: &Metrics,
    shutdown: &CancellationToken,
) -> Option<(L::Stream, OwnedSemaphorePermit, OwnedSemaphorePermit)> {
    let accept = async {
        let permit = place(room, "connections", metrics).await?;
        let place = place(shaking, "handshakes", metrics).await?;
        loop {
            match listener.next().await {
                Ok(stream) => return Some((stream, permit, place)),
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

/// One of the places there are, at once or when one is free; `None` never, as nobody closes them.
async fn place(places: &Arc<Semaphore>, of: &'static str, metrics: &Metrics) -> Option<OwnedSemaphorePermit> {
    if let Ok(place) = places.clone().try_acquire_owned() {
        return Some(place);
    }
    metrics.accepts_paused.get_or_create(&metrics::Why { reason: of }).inc();
    places.clone().acquire_owned().await.ok()
}

#[cfg(test)]
mod tests;
