//! Serves one connection, from its handshake to its end.

use std::{
    convert::Infallible,
    future::pending,
    hash::{BuildHasher, RandomState},
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use http::{HeaderValue, Request, header};
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ServerConfig;
use tidewatch_api::identity::RuntimeId;
use tidewatch_contract::certificate::KeyId;
use tidewatch_kit::{frame_limiter::FrameLimiter, metrics::Counted};
use tidewatch_trust::{Trust, TrustBundle};
use tokio::{
    sync::{
        Semaphore,
        broadcast::{self, error::RecvError},
        watch,
    },
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;

use super::{
    Now, Settings,
    connection_limiter::{Closing, ConnectionLimiter},
    departures::Departures,
    handshakes::{self, HandshakePlaces},
    http1::{HeadLimits, Http1Connection},
    lifecycle::{ConnectionLifecycle, Liveness, RequestBody, TrackedBody},
    limited_stream::{FLOOD, HeadDeadline, LimitedStream, ReadLimit},
    listen::Stream,
    metrics::{PortMetrics, ReasonLabel},
    peer::Peer,
    refusal::{HttpResponse, http_date},
    service::Service,
};

/// HTTP/2 flow-control window of a stream in bytes: the protocol's minimum. Received bytes are read at once and then
/// count against the budget of all bodies, so a connection can occupy at most its window in addition.
const WINDOW: u32 = (64 << 10) - 1;
/// Bytes of unread responses per stream. A response has a few hundred bytes, or some 64 KiB with a thousand refused
/// events.
const SEND_BYTES: usize = 64 << 10;
/// Streams that a client may open and reset before they are served.
const RESETS: usize = 20;
/// Streams that the server may reset for protocol errors of the client.
const LOCAL_RESETS: usize = 128;
/// Label of a protocol violation or network error.
const BROKEN: &str = "error";
/// Label of a close by the client, unless the server had announced one.
const PEER: &str = "peer";
/// Drain deadline of a connection closed with a refusal: time to read the response.
const REFUSED_DRAIN: Duration = Duration::from_secs(2);
/// Minimum interval between searches for revoked connections: many Kymas may be deleted at once.
const REVOCATION_PAUSE: Duration = Duration::from_millis(500);

/// State that all connections of a port share.
pub(super) struct Context<S> {
    pub(super) service: Arc<S>,
    pub(super) settings: Settings,
    pub(super) metrics: PortMetrics,
    /// Closes connections after their requests in flight.
    pub(super) drain: CancellationToken,
    /// Closes connections at once.
    pub(super) kill: CancellationToken,
    /// Spreads the maximum ages.
    pub(super) jitter: RandomState,
    pub(super) connections: Arc<ConnectionLimiter>,
    /// Connections that the port may accept.
    pub(super) slots: Arc<Semaphore>,
    pub(super) handshake_places: HandshakePlaces,
    /// Handshake steps that may run concurrently.
    pub(super) handshake_steps: Arc<Semaphore>,
}

impl<S: Service> Context<S> {
    pub(super) fn observe_lag(&self, lag: Duration) {
        self.metrics.lag.set(lag.as_secs_f64());
        self.service.port().shedder.observe(lag);
    }
}

/// Limits of one connection.
struct ConnectionLimits {
    /// Concurrent HTTP/2 streams: more than the requests in flight of a runtime may be, so that excess requests get a
    /// 429.
    streams: u32,
    /// HTTP/2 flow-control window in bytes.
    window: u32,
    /// Size of the HPACK dynamic table in bytes (RFC 9113, section 6.5.2).
    header_table: u32,
    /// HTTP/2 frames without body bytes per second: several for each request that the rate limit admits.
    frames: u32,
    /// Header fields of one request over HTTP/1.1.
    head_fields: usize,
    /// Streams that the client may open and reset before they are served (CVE-2023-44487).
    resets: usize,
}

impl ConnectionLimits {
    /// Connection of one runtime. The large fields of an agent's requests differ each time; a table of them, with the
    /// buffers they arrived in, would be most of the memory of an idle connection.
    const SINGLE: Self =
        Self { streams: 32, window: WINDOW, header_table: 0, frames: 1_000, head_fields: 32, resets: RESETS };
    /// Connection of a proxy, which many runtimes share, and which adds header fields.
    const SHARED: Self = Self {
        streams: 1_024,
        window: 1 << 20,
        header_table: 4 << 10,
        frames: 50_000,
        head_fields: 100,
        resets: RESETS,
    };
    /// Connection of another replica. Clients that leave reset their streams there, which must not end the connection of
    /// all others; the accepting replica limits them.
    const REPLICA: Self = Self { window: 4 << 20, frames: 500_000, resets: 1_024, ..Self::SHARED };
}

/// Closes connections of revoked certificates, of revoked or departed runtimes, and of removed roots, after each change,
/// forever.
pub(super) async fn close_revoked<S: Service>(context: Arc<Context<S>>) {
    let Context { connections, settings: Settings { revocations, trust, departures, .. }, .. } = &*context;
    let mut changes = revocations.watch();
    let mut trust = trust.clone();
    let mut departed = departures.as_ref().map(|departures| departures.departures());
    let mut known = trust.as_ref().map(|trust| trust.borrow().clients.clone());
    loop {
        tokio::select! {
            changed = changes.changed() => {
                if changed.is_err() {
                    return;
                }
                connections.close(|certificate| revocations.covers_leaf(&certificate.runtime, &certificate.leaf));
            }
            runtime = next_departure(departed.as_mut()) => {
                if let Some(departures) = departures {
                    close_departed(&**departures, connections, runtime.as_ref());
                }
                if runtime.is_some() {
                    continue;
                }
            }
            roots = roots_changed(trust.as_mut()) => {
                let is_removed = |root: &_| !roots.roots().contains(root);
                if known.is_some_and(|known| known.roots().iter().any(is_removed)) {
                    // A certificate of an intermediate authority is verified again when its agent reconnects.
                    let is_trusted = |key: &KeyId| roots.has_authority(key);
                    connections.close(|certificate| !certificate.leaf.authority.as_ref().is_some_and(is_trusted));
                }
                known = Some(roots);
            }
        }
        sleep(REVOCATION_PAUSE).await;
    }
}

/// Waits for the next runtime without a Kyma. `None` stands for any: more departed than the channel keeps.
async fn next_departure(departures: Option<&mut broadcast::Receiver<RuntimeId>>) -> Option<RuntimeId> {
    let Some(departures) = departures else { return pending().await };
    match departures.recv().await {
        Ok(runtime) => Some(runtime),
        Err(RecvError::Lagged(_)) => None,
        Err(RecvError::Closed) => pending().await,
    }
}

/// Closes the connections of a departed runtime, unless it has a Kyma again; `None` looks at all runtimes.
fn close_departed(departures: &dyn Departures, connections: &ConnectionLimiter, departed: Option<&RuntimeId>) {
    let runtimes = departed.map_or_else(|| connections.runtimes(), |runtime| vec![runtime.clone()]);
    for runtime in runtimes.into_iter().filter(|runtime| departures.is_unknown(runtime)) {
        connections.close_of(&runtime);
    }
}

/// Waits until the roots of the client certificates change; forever where they never do.
async fn roots_changed(trust: Option<&mut watch::Receiver<Arc<Trust>>>) -> TrustBundle {
    let Some(trust) = trust else { return pending().await };
    if trust.changed().await.is_err() {
        return pending().await;
    }
    trust.borrow_and_update().clients.clone()
}

/// Serves one connection until it ends, and counts it.
pub(super) async fn run<S: Service>(
    context: Arc<Context<S>>,
    tcp: impl Stream,
    source: Option<SocketAddr>,
    config: Arc<ServerConfig>,
) {
    let metrics = &context.metrics;
    let _open = Counted::new(&metrics.connections);
    let stream = tokio::select! {
        () = context.drain.cancelled() => return,
        // Boxed: as part of the connection's own future it would occupy memory for the life of the connection.
        result = Box::pin(handshake(&context, tcp, source, config)) => result,
    };
    match stream {
        Ok(stream) => {
            let reason = serve(&context, stream, source).await;
            metrics.connections_ended.get_or_create(&ReasonLabel { reason }).inc();
        }
        Err(reason) => {
            metrics.handshakes_failed.get_or_create(&ReasonLabel { reason }).inc();
            tracing::debug!(reason, "TLS handshake failed");
        }
    }
}

/// Waits for a place and performs the handshake, each within its deadline. The error is a metric label.
async fn handshake<S: Service, T: Stream>(
    context: &Context<S>,
    tcp: T,
    source: Option<SocketAddr>,
    config: Arc<ServerConfig>,
) -> Result<Box<TlsStream<T>>, &'static str> {
    let Settings { handshake_deadline, max_handshakes, .. } = context.settings;
    let source = source.map(|source| source.ip());
    let free = context.slots.available_permits();
    let waiting = Counted::new(&context.metrics.handshakes_waiting);
    let place = context.handshake_places.acquire(source, free, handshake_deadline).await?;
    drop(waiting);
    let deadline = handshakes::adaptive_deadline(handshake_deadline, place.left, max_handshakes);
    let _begun = Counted::new(&context.metrics.handshakes);
    let accept = handshakes::with_permits(context.handshake_steps.clone(), TlsAcceptor::from(config).accept(tcp));
    let result = timeout(deadline, accept).await;
    drop(place);
    result.map_err(|_| "timeout")?.map(Box::new).map_err(|error| handshake_failure(&error))
}

/// Identifies the client and serves its connection. Returns the reason of its end, as metrics label it.
async fn serve<S: Service>(
    context: &Arc<Context<S>>,
    stream: Box<TlsStream<impl Stream>>,
    source: Option<SocketAddr>,
) -> &'static str {
    let Context { service, connections, settings, .. } = &**context;
    let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
    if S::NEEDS_CERTIFICATE && chain.is_empty() {
        // The verifier already demands a certificate; this is defence in depth.
        return "no-certificate";
    }
    let peer = Arc::new(service.identify(chain, source));
    if !service.admits(&peer) {
        return "not-admitted";
    }
    let Peer::Runtime(certificate, _) = &*peer else {
        return serve_requests(context, stream, &peer, &Closing::default()).await.0;
    };
    let runtime = &certificate.runtime;
    let slot = connections.acquire(certificate, settings.limits.connections);
    if let Some(until) = service.port().limiter.blocked_until(runtime, Instant::now()) {
        return tarpit(context, &slot.closing, until).await;
    }
    let (reason, lifecycle) = serve_requests(context, stream, &peer, &slot.closing).await;
    // An agent renews its certificate over a second connection: with another one open it is not lost. Nor is a loss
    // reported twice.
    let was_last = slot.release();
    report_end(&**service, runtime, reason, was_last && !lifecycle.has_missed_heartbeat());
    reason
}

/// Serves the requests of a connection. Returns the reason of its end, and its lifecycle.
async fn serve_requests<S: Service>(
    context: &Arc<Context<S>>,
    stream: Box<TlsStream<impl Stream>>,
    peer: &Arc<Peer>,
    closing: &Closing,
) -> (&'static str, Arc<ConnectionLifecycle>) {
    let Context { settings, jitter, .. } = &**context;
    let limits = match &**peer {
        Peer::Proxy => &ConnectionLimits::SHARED,
        Peer::Replica(_) => &ConnectionLimits::REPLICA,
        Peer::Runtime(..) | Peer::Client(_) | Peer::Rejected(_) => &ConnectionLimits::SINGLE,
    };
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    tokio::select! {
        () = settings.start_gate.opened() => {}
        // Requests that have arrived are answered all the same.
        () = context.drain.cancelled() => {}
        _ = closing.wait() => {}
    }
    let now = Instant::now();
    let lifecycle = Arc::new(ConnectionLifecycle::new(settings, is_http2, now, jitter.hash_one(now)));
    let limit = match is_http2 {
        true => ReadLimit::Frames(FrameLimiter::of_client(limits.frames)),
        false => ReadLimit::Head(HeadDeadline::new(lifecycle.clone(), settings.head_deadline)),
    };
    let (stream, state) = LimitedStream::new(stream, limit, settings.response_deadline);
    let requests = service_fn({
        let context = context.clone();
        let lifecycle = lifecycle.clone();
        let peer = peer.clone();
        move |request: Request<Incoming>| {
            let context = context.clone();
            let lifecycle = lifecycle.clone();
            let peer = peer.clone();
            // Outside the future, so that the request has begun before more bytes are read.
            let mut active = lifecycle.begin(Instant::now());
            let request = request.map(|body| RequestBody::new(body, lifecycle.clone()));
            async move {
                let (mut response, is_last) = context.service.handle(request, &peer).await;
                finish(&mut response, is_last, &lifecycle, is_http2);
                active.is_accepted = response.status().is_success();
                Ok::<_, Infallible>(response.map(|body| TrackedBody { body, _request: active }))
            }
        }
    });
    // ALPN has selected the protocol; detecting it from the first bytes would wait for them without a deadline. Each
    // branch boxes its connection, so that it occupies only its own size.
    let reason = if is_http2 {
        let connection = http2(settings, limits).serve_connection(TokioIo::new(stream), requests);
        let shutdown: GracefulShutdown<_> = http2::Connection::graceful_shutdown;
        drive(context, Box::pin(connection), shutdown, &lifecycle, peer, closing).await
    } else {
        let limits = HeadLimits { bytes: settings.max_head as usize, fields: limits.head_fields };
        let connection = Http1Connection::new(stream, requests, lifecycle.clone(), limits);
        let shutdown: GracefulShutdown<_> = Http1Connection::graceful_shutdown;
        drive(context, Box::pin(connection), shutdown, &lifecycle, peer, closing).await
    };
    let reason = match (state.fault(), lifecycle.close_reason.get()) {
        (Some(fault), _) => fault,
        // The client closes after an announced end, over HTTP/1.1 always at once.
        (None, Some(announced)) if reason == PEER => announced,
        _ => reason,
    };
    (reason, lifecycle)
}

/// Adds the date to a response, and over HTTP/1.1 `Connection: close` if the connection ends with it, which is decided
/// here.
fn finish(response: &mut HttpResponse, is_last: bool, lifecycle: &ConnectionLifecycle, is_http2: bool) {
    let now = Now::read();
    prevent_hpack_indexing(response, now.unix);
    if is_last {
        let _ = lifecycle.close_reason.set("refused");
        lifecycle.close.notify_one();
    } else if !is_http2 && lifecycle.is_past_max_age(now.instant) {
        let _ = lifecycle.close_reason.set("age");
    }
    if !is_http2 && lifecycle.close_reason.get().is_some() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
}

/// Reports the end of a runtime's connection: floods and protocol errors count towards a block, and a close by the
/// agent may mean that it is lost.
fn report_end<S: Service>(service: &S, runtime: &RuntimeId, reason: &'static str, may_be_lost: bool) {
    let limiter = &service.port().limiter;
    match reason {
        FLOOD => limiter.block(runtime, Instant::now()),
        BROKEN => limiter.count_broken_connection(runtime, Instant::now()),
        _ => {}
    }
    if may_be_lost && [PEER, "timeout", "incomplete", BROKEN].contains(&reason) {
        service.connection_lost(runtime, Instant::now());
    }
}

/// Adds the date and marks all fields as sensitive, which keeps them out of the HPACK dynamic table. The table would
/// live as long as the connection (RFC 7541, section 4.1); the fields are short, and it would hold some sixty past
/// dates.
fn prevent_hpack_indexing(response: &mut HttpResponse, now: i64) {
    let fields = response.headers_mut();
    if !fields.contains_key(header::DATE)
        && let Some(date) = http_date(now)
    {
        fields.insert(header::DATE, date);
    }
    fields.values_mut().for_each(|value| value.set_sensitive(true));
}

/// Keeps the connection of a blocked runtime open, unserved, until the block ends: closed at once, it would be back at
/// once with another handshake.
async fn tarpit<S>(context: &Context<S>, closing: &Closing, until: Instant) -> &'static str {
    tokio::select! {
        () = sleep_until(until) => FLOOD,
        &reason = closing.wait() => reason,
        () = context.drain.cancelled() => "drain",
    }
}

/// Ends a connection after its requests in flight.
type GracefulShutdown<C> = fn(Pin<&mut C>);

/// Drives a connection to its end, and shuts it down when its lifecycle has expired. Returns the reason of the end.
async fn drive<S: Service, C: Future<Output = hyper::Result<()>>>(
    context: &Context<S>,
    mut connection: Pin<Box<C>>,
    graceful_shutdown: GracefulShutdown<C>,
    lifecycle: &ConnectionLifecycle,
    peer: &Peer,
    closing: &Closing,
) -> &'static str {
    let mut ending: Option<(&'static str, Instant)> = None;
    loop {
        let wake = ending.map_or_else(|| lifecycle.next_check(Instant::now()), |(_, end)| end);
        let reason = tokio::select! {
            result = connection.as_mut() => {
                let ended = result.map_or_else(|error| error_reason(&error), |()| PEER);
                return ending.map_or(ended, |(reason, _)| reason);
            }
            () = context.kill.cancelled() => return "killed",
            &reason = closing.wait() => return reason,
            () = context.drain.cancelled(), if ending.is_none() => "drain",
            () = lifecycle.close.notified(), if ending.is_none() => "refused",
            () = sleep_until(wake) => match (ending, lifecycle.check(Instant::now())) {
                (Some((reason, _)), _) => return reason,
                (None, Liveness::Silent) => return "silent",
                (None, Liveness::Expired(reason)) => reason,
                (None, Liveness::MissedHeartbeat(since)) => {
                    if let Peer::Runtime(certificate, _) = peer {
                        context.service.connection_lost(&certificate.runtime, since);
                    }
                    continue;
                }
                (None, Liveness::Alive) => continue,
            },
        };
        graceful_shutdown(connection.as_mut());
        let drain = context.settings.drain_deadline;
        // After a final refusal no request in flight matters.
        let drain = if reason == "refused" { drain.min(REFUSED_DRAIN) } else { drain };
        ending = Some((reason, Instant::now() + drain));
    }
}

/// Returns the metric label of an error of the HTTP library.
fn error_reason(error: &hyper::Error) -> &'static str {
    match error {
        error if error.is_timeout() => "timeout",
        error if error.is_parse_too_large() => "head",
        error if error.is_parse() => "malformed",
        error if error.is_incomplete_message() => "incomplete",
        _ => BROKEN,
    }
}

fn http2(settings: &Settings, limits: &ConnectionLimits) -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.streams)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(limits.window)
        .header_table_size(limits.header_table)
        .max_header_list_size(settings.max_head)
        .max_send_buf_size(SEND_BYTES)
        .max_pending_accept_reset_streams(limits.resets)
        .max_local_error_reset_streams(LOCAL_RESETS)
        .keep_alive_interval(settings.ping_interval)
        .keep_alive_timeout(settings.ping_interval / 3);
    builder
}

/// Returns the metric label of a failed handshake.
fn handshake_failure(error: &std::io::Error) -> &'static str {
    use rustls::{CertificateError as C, Error as E};
    let Some(error) = error.get_ref().and_then(|error| error.downcast_ref::<E>()) else { return "transport" };
    match error {
        E::NoCertificatesPresented => "no-certificate",
        E::InvalidCertificate(C::Expired | C::ExpiredContext { .. }) => "expired",
        E::InvalidCertificate(C::NotValidYet | C::NotValidYetContext { .. }) => "not-yet-valid",
        E::InvalidCertificate(C::UnknownIssuer | C::BadSignature) => "unknown-issuer",
        E::InvalidCertificate(C::Revoked) => "revoked",
        E::InvalidCertificate(C::InvalidPurpose | C::InvalidPurposeContext { .. }) => "purpose",
        E::InvalidCertificate(_) => "certificate",
        E::PeerIncompatible(_) => "incompatible",
        E::AlertReceived(_) => "alert",
        _ => "protocol",
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{refusal::Refusal, tests::testing::RecordingIntake},
        *,
    };
    use crate::enrolment::tests::testing::certificate;

    #[test]
    fn departure_of_one_runtime_asks_about_no_other() {
        let intake = RecordingIntake::default();
        let connections = Arc::<ConnectionLimiter>::default();
        let id = |n: usize| format!("r-{n}").parse::<RuntimeId>().unwrap();
        let certificate = |n: usize| Arc::new(certificate(id(n).as_str(), "f"));
        let open: Vec<_> = (0..5_000).map(|n| connections.acquire(&certificate(n), 4)).collect();
        let closed = || open.iter().filter(|slot| slot.closing.get() == Some(&"out")).count();
        close_departed(&intake, &connections, Some(&id(1)));
        assert_eq!((intake.asked(), closed()), (1, 0), "it has a Kyma again");
        intake.unknown.lock().extend([id(1), id(2)]);
        close_departed(&intake, &connections, Some(&id(1)));
        assert_eq!((intake.asked(), closed()), (2, 1));
        close_departed(&intake, &connections, None);
        assert_eq!((intake.asked(), closed()), (5_002, 2));
    }

    #[test]
    fn response_has_a_date_and_its_fields_are_never_indexed() {
        let mut response = Refusal::Method.response(0);
        prevent_hpack_indexing(&mut response, 784_111_777);
        assert_eq!(response.headers()[header::DATE], "Sun, 06 Nov 1994 08:49:37 GMT");
        assert!(response.headers().len() > 2 && response.headers().values().all(http::HeaderValue::is_sensitive));
        prevent_hpack_indexing(&mut response, 0);
        assert_eq!(response.headers()[header::DATE], "Sun, 06 Nov 1994 08:49:37 GMT", "an existing date is kept");
    }
}
