//! The ports of agents and replicas: TLS listeners that authenticate, limit and verify requests. Their result is
//! [`Verified`](tidewatch_fleet::Verified) input.
//!
//! They run on an executor of their own, so that reconciles never delay a response. Every wait has a deadline, and everything
//! that is stored has a bound. A request passes these steps in order, and the first refusal ends it:
//!
//! 1. connection limit, TLS 1.3 handshake with a client certificate, deadline (`connection`)
//! 2. the certificate identifies a runtime (403) and is valid and not revoked (401)
//! 3. rate and concurrency limits of that runtime (429), before any expensive step (`request_limiter`)
//! 4. route, method, authority, content type, announced length (`head`)
//! 5. the body, within its size limit, its deadline and the memory budget of all bodies (`body`)
//! 6. the signature over the raw bytes, then its nonce (401; `replay`)
//! 7. the JSON, whose source must be the runtime of the certificate (403)
//! 8. the [`Intake`]
//!
//! A request of a runtime that another replica holds is relayed to it after step 5 ([`relay`](crate::relay)),
//! and arrives there at the relay port ([`relayed`]).
//!
//! The ports of contract v2 ([`v2`]) and of enrolment ([`enrol`]) have the same connections and, in `service`, the same
//! handling of a request: counters, body, refusal, end of the connection.

mod body;
mod connection;
mod connection_limiter;
mod departures;
pub mod enrol;
mod handler;
mod handshakes;
mod head;
mod http1;
mod intake;
mod lifecycle;
mod limited_stream;
mod listen;
mod load_shedder;
mod metrics;
mod peer;
mod proxy;
mod refusal;
pub mod relayed;
mod replay;
mod request_limiter;
mod service;
mod start_gate;
pub mod v2;

use std::{hash::RandomState, net::SocketAddr, sync::Arc, thread, time::Duration};

use arc_swap::ArcSwap;
use clap::Args;
use rustls::ServerConfig;
use tidewatch_api::identity::TrustDomain;
use tidewatch_cluster::flags::connections;
use tidewatch_contract::event::MAX_BODY_BYTES;
use tidewatch_fleet::table::HeartbeatInterval;
use tidewatch_trust::Trust;
use tokio::{
    net::TcpListener,
    sync::{Notify, OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::{
    sync::CancellationToken,
    task::{AbortOnDropHandle, TaskTracker},
};

use crate::{
    enrolment::{EnrolmentService, Revocations},
    http::{ListenError, listen},
    relay::Relay,
};

use handshakes::HandshakePlaces;

pub use departures::Departures;
pub use handler::V3Handler;
pub use head::{OwnAuthority, ParseAuthorityError};
pub use intake::Intake;
pub use listen::{Listen, Stream};
pub use metrics::{Metrics, PortMetrics};
pub use peer::Peer;
pub(crate) use refusal::HttpResponse;
pub use request_limiter::Limits;
pub use service::{Port, Service};
pub use start_gate::StartGate;

/// Pause after a failed `accept` (no file descriptor, no memory), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Interval of lag measurements: several within the default limit of one second.
const LAG_INTERVAL: Duration = Duration::from_millis(100);

/// Default of [`Settings::max_connections`].
pub const MAX_CONNECTIONS: u32 = 20_000;

/// Threads that serve the ports of the gateway at least, so that handshakes and requests do not wait for each other.
const MIN_THREADS: usize = 2;

/// Flags of the event port's capacity.
#[derive(Clone, Copy, Debug, Args)]
#[group(id = "event-capacity")]
#[command(next_help_heading = "Event port")]
pub struct Flags {
    /// Threads that serve the event port and that of contract v2; unset, as many as the process has cores, and at least
    /// two
    #[arg(long, env = "TIDEWATCH_EVENT_THREADS", value_name = "THREADS", value_parser = clap::value_parser!(u16).range(1..=1_024))]
    pub event_threads: Option<u16>,

    /// Maximum number of open connections of the event port, fewer under a low limit of open files; further ones wait in
    /// the kernel's backlog
    #[arg(long, env = "TIDEWATCH_EVENT_MAX_CONNECTIONS", value_name = "CONNECTIONS", default_value_t = MAX_CONNECTIONS, value_parser = connections())]
    pub event_max_connections: u32,
}

impl Flags {
    /// Threads of the gateway's executor.
    pub fn threads(self) -> usize {
        let cores = || thread::available_parallelism().map_or(MIN_THREADS, usize::from).max(MIN_THREADS);
        self.event_threads.map_or_else(cores, usize::from)
    }

    /// Steps of handshakes that may run concurrently on each port: half of the threads.
    pub fn handshake_steps(self) -> usize {
        (self.threads() / 2).max(1)
    }
}

/// Limits and deadlines of one gateway port.
#[derive(Clone)]
pub struct Settings {
    /// Address to listen on; port 0 selects any free port.
    pub address: SocketAddr,
    /// Authorities the port accepts in requests (`--authority`); port 0 stands for the bound port.
    pub authorities: Vec<OwnAuthority>,
    /// Trust domain of the runtimes' certificates.
    pub domain: TrustDomain,
    /// Open connections at most, handshakes included. Further ones wait in the kernel's backlog.
    pub max_connections: u32,
    /// Steps of handshakes that may run concurrently: fewer than the threads that serve, so that requests have the
    /// others.
    pub handshake_steps: usize,
    /// Concurrent handshakes at most, shared among the addresses of clients; see `handshakes`.
    pub max_handshakes: usize,
    /// Time from accept to the end of the handshake; reduced when more than half of `max_handshakes` are in progress.
    pub handshake_deadline: Duration,
    /// Time from the end of the handshake to the first request; over HTTP/1.1 also from the first to the last byte of
    /// each later head.
    pub head_deadline: Duration,
    /// Time from the head of a request to the end of its body.
    pub body_deadline: Duration,
    /// Time until the client has read a response, and until the network has taken written bytes.
    pub response_deadline: Duration,
    /// Interval of HTTP/2 PINGs, which detect a lost peer; it has a third of the interval to acknowledge one. HTTP/1.1
    /// relies on TCP keepalive and the next heartbeat.
    pub ping_interval: Duration,
    /// Time without a request in flight after which a connection closes; at least three heartbeat intervals.
    pub idle: Duration,
    /// Age at which a connection closes, over HTTP/1.1 with its next response, so that clients reconnect with the
    /// newest certificates and roots; at least sixty heartbeat intervals.
    pub max_age: Duration,
    /// Heartbeat interval announced to agents.
    pub heartbeat_interval: HeartbeatInterval,
    /// Time for requests in flight when a connection or the gateway closes.
    pub drain_deadline: Duration,
    /// Bytes of a request's head at most.
    pub max_head: u32,
    /// Bytes of a request's body at most; a refusal with 413 states it.
    pub max_body: usize,
    /// Bytes of all bodies in memory at most.
    pub body_budget: usize,
    /// Limits of each runtime.
    pub limits: Limits,
    /// Executor lag above which requests are shed, heartbeats first.
    pub lag_limit: Duration,
    /// Proxy that terminates TLS in front of the port. If set, only the proxy may connect.
    pub proxy: Option<tidewatch_trust::Proxy>,
    /// Revoked runtimes and certificates.
    pub revocations: Revocations,
    /// Roots of the client certificates. Connections with a certificate of a removed root are closed.
    pub trust: Option<watch::Receiver<Arc<Trust>>>,
    /// Runtimes without a Kyma. Their connections are closed.
    pub departures: Option<Arc<dyn Departures>>,
    /// Renews certificates. Without it the renewal route does not exist.
    pub enrolments: Option<EnrolmentService>,
    /// Relays the requests of runtimes that other replicas hold. Without it this replica processes all.
    pub relay: Option<Relay>,
    /// Delays the requests of new connections during a start.
    pub start_gate: StartGate,
}

impl Settings {
    /// Returns the defaults of the event port.
    pub fn new(address: SocketAddr, authorities: Vec<OwnAuthority>, domain: TrustDomain) -> Self {
        Self {
            address,
            authorities,
            domain,
            max_connections: MAX_CONNECTIONS,
            handshake_steps: 1,
            max_handshakes: 1_024,
            handshake_deadline: Duration::from_secs(5),
            head_deadline: Duration::from_secs(10),
            body_deadline: Duration::from_secs(10),
            response_deadline: Duration::from_secs(10),
            ping_interval: Duration::from_secs(30),
            idle: Duration::from_secs(5 * 60),
            max_age: Duration::from_secs(30 * 60),
            heartbeat_interval: HeartbeatInterval::default(),
            drain_deadline: Duration::from_secs(10),
            max_head: 16 << 10,
            max_body: MAX_BODY_BYTES,
            body_budget: 128 << 20,
            limits: Limits::default(),
            lag_limit: Duration::from_secs(1),
            proxy: None,
            revocations: Revocations::default(),
            trust: None,
            departures: None,
            enrolments: None,
            relay: None,
            start_gate: StartGate::default(),
        }
    }
}

/// A gateway that is bound and does not serve yet.
pub struct Gateway<S, L = TcpListener> {
    listener: L,
    address: SocketAddr,
    tls: Arc<ArcSwap<ServerConfig>>,
    context: Arc<connection::Context<S>>,
}

/// Current time, read once per step: wall clock for certificates and signatures, monotonic clock for rates.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Unix seconds.
    unix: i64,
    instant: Instant,
}

impl Now {
    fn read() -> Self {
        Self { unix: jiff::Timestamp::now().as_second(), instant: Instant::now() }
    }
}

impl<S: Service> Gateway<S> {
    /// Binds a TCP listener. Must run on the executor that will serve. Each connection uses the TLS configuration that
    /// is current when it is accepted. `service` creates the handler of requests from the settings with the authorities
    /// as bound; the port of relayed requests may share it.
    ///
    /// # Errors
    /// [`ListenError`]: the address is in use or does not belong to this host.
    pub async fn bind(
        settings: Settings,
        tls: Arc<ArcSwap<ServerConfig>>,
        service: impl FnOnce(&Settings) -> Arc<S>,
    ) -> Result<Self, ListenError> {
        let (listener, address) = listen(settings.address)?;
        Ok(Self::with_listener(listener, address, settings, tls, service))
    }
}

impl<S: Service, L: Listen> Gateway<S, L> {
    /// Uses another listener, which is bound to `address`.
    pub fn with_listener(
        listener: L,
        address: SocketAddr,
        mut settings: Settings,
        tls: Arc<ArcSwap<ServerConfig>>,
        service: impl FnOnce(&Settings) -> Arc<S>,
    ) -> Self {
        for authority in &mut settings.authorities {
            *authority = authority.at(address.port());
        }
        let service = service(&settings);
        let slots = usize::try_from(settings.max_connections).unwrap_or(usize::MAX).clamp(1, Semaphore::MAX_PERMITS);
        let context = connection::Context {
            metrics: service.port().metrics.clone(),
            service,
            slots: Arc::new(Semaphore::new(slots)),
            handshake_places: HandshakePlaces::new(settings.max_handshakes),
            handshake_steps: Arc::new(Semaphore::new(settings.handshake_steps.max(1))),
            settings,
            drain: CancellationToken::new(),
            kill: CancellationToken::new(),
            jitter: RandomState::new(),
            connections: Arc::default(),
        };
        Self { listener, address, tls, context: Arc::new(context) }
    }

    /// Handler of the requests.
    pub fn service(&self) -> &Arc<S> {
        &self.context.service
    }

    /// Returns the bound address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown`, then drains requests in flight within the drain deadline. A request on its way to an
    /// HTTP/1.1 connection without a request in flight finds it closed; its agent retries it.
    pub async fn run(self, shutdown: CancellationToken) {
        let Self { listener, tls, context, .. } = self;
        let tasks = TaskTracker::new();
        let accepted = Arc::<Notify>::default();
        let _lag = AbortOnDropHandle::new(tokio::spawn(measure_lag(context.clone(), tasks.clone(), accepted.clone())));
        let _revoked = AbortOnDropHandle::new(tokio::spawn(connection::close_revoked(context.clone())));
        while let Some((tcp, slot)) = accept(&listener, &context.slots, &context.metrics, &shutdown).await {
            let context = context.clone();
            let config = tls.load_full();
            tasks.spawn(async move {
                let _slot = slot;
                let source = L::source(&tcp);
                connection::run(context, tcp, source, config).await;
            });
            accepted.notify_one();
        }
        // From here on no new connections; open ones get GOAWAY, or `Connection: close` with the pending response.
        drop(listener);
        tasks.close();
        context.drain.cancel();
        if timeout(context.settings.drain_deadline, tasks.wait()).await.is_err() {
            tracing::warn!(open = tasks.len(), "Connections outlived the drain deadline");
            context.kill.cancel();
            tasks.wait().await;
        }
    }
}

/// Measures how late the executor runs a due task: a request is delayed as much. Sets no timer while no connection is
/// open, so that an idle port takes no CPU time. `accepted` is notified of each connection.
async fn measure_lag<S: Service>(
    context: Arc<connection::Context<S>>,
    connections: TaskTracker,
    accepted: Arc<Notify>,
) {
    loop {
        while connections.is_empty() {
            accepted.notified().await;
        }
        while !connections.is_empty() {
            let due = Instant::now() + LAG_INTERVAL;
            sleep_until(due).await;
            context.observe_lag(due.elapsed());
        }
        // The last measurements are obsolete when the next connection opens.
        context.observe_lag(Duration::ZERO);
    }
}

/// Accepts the next connection; `None` at shutdown. Acquires its slot first, so that further connections wait in the
/// kernel's backlog.
async fn accept<L: Listen>(
    listener: &L,
    slots: &Arc<Semaphore>,
    metrics: &PortMetrics,
    shutdown: &CancellationToken,
) -> Option<(L::Stream, OwnedSemaphorePermit)> {
    let accept = async {
        let slot = acquire(slots, metrics).await?;
        loop {
            match listener.next().await {
                Ok(stream) => return Some((stream, slot)),
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

/// Acquires a slot, waiting for a free one if necessary. Never `None`, as the semaphore is never closed.
async fn acquire(slots: &Arc<Semaphore>, metrics: &PortMetrics) -> Option<OwnedSemaphorePermit> {
    if let Ok(slot) = slots.clone().try_acquire_owned() {
        return Some(slot);
    }
    metrics.accepts_paused.get_or_create(&metrics::ReasonLabel { reason: "connections" }).inc();
    slots.clone().acquire_owned().await.ok()
}

#[cfg(test)]
mod tests;
