//! Serves one connection, from its handshake to its end.

use std::{
    convert::Infallible,
    hash::{BuildHasher, RandomState},
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use http::{HeaderValue, Request, header};
use hyper::{
    body::Incoming,
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::graceful::GracefulConnection,
};
use rustls::ServerConfig;
use rustls_pki_types::CertificateDer;
use tidewatch_shared::identity::RuntimeId;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;

use super::{
    Now, Settings,
    connection_limiter::{Closing, ConnectionLimiter, ConnectionSlot},
    frame_limiter::FrameLimiter,
    handshakes,
    head_deadline::HeadDeadline,
    lifecycle::{ConnectionLifecycle, Liveness, TrackedBody},
    limited_stream::{FLOOD, LimitedStream, ReadLimit},
    listen::Stream,
    metrics::{PortMetrics, ReasonLabel},
    refusal::{HttpResponse, http_date},
    request_limiter::RequestLimiter,
};

/// Concurrent HTTP/2 streams of one runtime's connection: more than its requests in flight may be, so that excess
/// requests get a 429.
const STREAMS: u32 = 32;
/// The same on a proxy's connection, which many runtimes share.
const SHARED_STREAMS: u32 = 1_024;
/// HTTP/2 flow-control window in bytes, per stream and per connection: the protocol's minimum. Received bytes are read
/// at once and then count against the budget of all bodies, so a connection can occupy at most this much in addition.
const WINDOW: u32 = (64 << 10) - 1;
/// The same on a shared connection.
const SHARED_WINDOW: u32 = 1 << 20;
/// Size of the HPACK dynamic table in bytes (RFC 9113, section 6.5.2). The large fields of an agent's requests differ
/// each time; a table of them, with the buffers they arrived in, would be most of the memory of an idle connection.
const HEADER_TABLE: u32 = 0;
/// The same on a shared connection.
const SHARED_HEADER_TABLE: u32 = 4 << 10;
/// HTTP/2 frames without body bytes per second: several for each request that the rate limit admits.
const FRAMES: u32 = 1_000;
/// The same on a shared connection.
const SHARED_FRAMES: u32 = 50_000;
/// Header fields of one request over HTTP/1.1.
const HEAD_FIELDS: usize = 32;
/// The same on a shared connection: proxies add some.
const SHARED_HEAD_FIELDS: usize = 100;
/// Bytes of unread responses per stream. A response has a few hundred bytes, or some 64 KiB with a thousand refused
/// events.
const SEND_BYTES: usize = 64 << 10;
/// Streams that a client may open and reset before they are served (CVE-2023-44487).
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

/// Handler of a port's requests. Connections work the same on every port; authentication and requests differ.
pub trait Service: Send + Sync + 'static {
    /// Identity of a connection's client.
    type Peer: Send + Sync + 'static;

    /// Closes connections without a client certificate.
    const NEEDS_CERTIFICATE: bool = true;

    /// Identifies the client once per connection, by its certificate chain (leaf first, verified by the handshake) and
    /// its address, if known.
    fn identify(&self, chain: &[CertificateDer<'_>], source: Option<SocketAddr>) -> Self::Peer;

    /// Handles one request. The flag is true if the connection must close after the response.
    fn handle(
        &self,
        request: Request<Incoming>,
        peer: &Self::Peer,
    ) -> impl Future<Output = (HttpResponse, bool)> + Send;

    /// Returns the owner of a connection.
    fn owner<'a>(&self, _: &'a Self::Peer) -> Owner<'a> {
        Owner::Shared
    }

    /// True if definitely no Kyma has that runtime id; then its connections close.
    fn is_unknown(&self, _: &RuntimeId) -> bool {
        false
    }

    /// Returns the limiter that blocks runtimes for abuse of their connections.
    fn limiter(&self) -> Option<&RequestLimiter> {
        None
    }

    /// Reports that a runtime closed or lost its last connection at this time, or that the next heartbeat over one is
    /// overdue since then. Not called for connections that the receiver closes.
    fn connection_lost(&self, _: &RuntimeId, _since: Instant) {}

    /// Takes a measurement of the executor's lag.
    fn observe_lag(&self, _: Duration) {}
}

/// Owner of a connection, which decides its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner<'a> {
    /// A single runtime, with the fingerprint of its client certificate. The number of its connections is limited.
    Runtime(&'a RuntimeId, &'a str),
    /// A proxy on behalf of many runtimes. The number of connections is not limited.
    Shared,
    /// A client without a certificate, or with one that is refused with its first request.
    Unidentified,
}

/// State that all connections of a port share.
pub(super) struct Context<S> {
    pub(super) service: S,
    pub(super) settings: Settings,
    pub(super) metrics: PortMetrics,
    /// Closes connections after their requests in flight.
    pub(super) drain: CancellationToken,
    /// Closes connections at once.
    pub(super) kill: CancellationToken,
    /// Spreads the maximum ages.
    pub(super) jitter: RandomState,
    pub(super) connections: Arc<ConnectionLimiter>,
    /// Handshake steps that may run concurrently.
    pub(super) handshake_steps: Arc<Semaphore>,
}

/// Closes connections of revoked certificates, and of revoked or unknown runtimes, after each change, forever.
pub(super) async fn close_revoked<S: Service>(context: Arc<Context<S>>) {
    let Context { service, connections, settings: Settings { revocations, .. }, .. } = &*context;
    let mut changes = revocations.watch();
    while changes.changed().await.is_ok() {
        connections.close(|runtime, leaf| revocations.covers_leaf(runtime, leaf) || service.is_unknown(runtime));
        sleep(REVOCATION_PAUSE).await;
    }
}

/// Serves one connection until it ends, and counts it.
pub(super) async fn run<S: Service>(
    context: Arc<Context<S>>,
    (tcp, source): (impl Stream, Option<SocketAddr>),
    config: Arc<ServerConfig>,
    slot: OwnedSemaphorePermit,
) {
    let metrics = &context.metrics;
    metrics.connections.inc();
    let _open = OnDrop(|| {
        metrics.connections.dec();
    });
    let stream = tokio::select! {
        () = context.drain.cancelled() => return,
        // Boxed: as part of the connection's own future it would occupy memory for the life of the connection.
        result = Box::pin(handshake(&context, tcp, config, slot)) => result,
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

/// Performs the handshake within its deadline, and releases its slot. The error is a metric label.
async fn handshake<S: Service, T: Stream>(
    context: &Context<S>,
    tcp: T,
    config: Arc<ServerConfig>,
    slot: OwnedSemaphorePermit,
) -> Result<Box<TlsStream<T>>, &'static str> {
    let Settings { handshake_deadline, max_handshakes, .. } = context.settings;
    let free = slot.semaphore().available_permits();
    let deadline = handshakes::adaptive_deadline(handshake_deadline, free, max_handshakes);
    context.metrics.handshakes.inc();
    let _begun = OnDrop(|| {
        context.metrics.handshakes.dec();
    });
    let accept = handshakes::with_permits(context.handshake_steps.clone(), TlsAcceptor::from(config).accept(tcp));
    let result = timeout(deadline, accept).await;
    drop(slot);
    result.map_err(|_| "timeout")?.map(Box::new).map_err(|error| handshake_failure(&error))
}

/// Serves the requests of a connection. Returns the reason of its end, as metrics label it.
async fn serve<S: Service>(
    context: &Arc<Context<S>>,
    stream: Box<TlsStream<impl Stream>>,
    source: Option<SocketAddr>,
) -> &'static str {
    let session = stream.get_ref().1;
    let chain = session.peer_certificates().unwrap_or_default();
    if S::NEEDS_CERTIFICATE && chain.is_empty() {
        // The verifier already demands a certificate; this is defence in depth.
        return "no-certificate";
    }
    let peer = Arc::new(context.service.identify(chain, source));
    let is_http2 = session.alpn_protocol() == Some(b"h2");
    let owner = context.service.owner(&peer);
    let slot = match owner {
        Owner::Runtime(runtime, leaf) => {
            Some(context.connections.acquire(runtime, leaf, context.settings.limits.connections))
        }
        Owner::Shared | Owner::Unidentified => None,
    };
    let closing = &slot.as_ref().map_or_else(Closing::default, |slot| slot.closing.clone());
    if let (Owner::Runtime(runtime, _), Some(limiter)) = (owner, context.service.limiter())
        && let Some(until) = limiter.blocked_until(runtime, Instant::now())
    {
        return tarpit(context, closing, until).await;
    }
    let is_shared = owner == Owner::Shared;
    let now = Instant::now();
    let lifecycle = Arc::new(ConnectionLifecycle::new(&context.settings, is_http2, now, context.jitter.hash_one(now)));
    let limit = match is_http2 {
        true => ReadLimit::Frames(FrameLimiter::new(if is_shared { SHARED_FRAMES } else { FRAMES })),
        false => ReadLimit::Head(HeadDeadline::new(lifecycle.clone(), context.settings.head_deadline)),
    };
    let (stream, fault) = LimitedStream::new(stream, limit, context.settings.response_deadline);
    let service = service_fn({
        let (context, lifecycle, peer) = (context.clone(), lifecycle.clone(), peer.clone());
        move |request| {
            let (context, lifecycle, peer) = (context.clone(), lifecycle.clone(), peer.clone());
            // Outside the future, so that the request has begun before more bytes are read.
            let active = lifecycle.begin(Instant::now());
            async move {
                let (mut response, is_last) = context.service.handle(request, &peer).await;
                finish(&mut response, is_last, &lifecycle, is_http2);
                let active = if response.status().is_success() { active.accepted() } else { active };
                Ok::<_, Infallible>(response.map(|body| TrackedBody::new(body, active)))
            }
        }
    });
    // ALPN has selected the protocol; detecting it from the first bytes would wait for them without a deadline. Each
    // branch boxes its connection, so that it occupies only its own size.
    let reason = if is_http2 {
        let connection = http2(&context.settings, is_shared).serve_connection(TokioIo::new(stream), service);
        drive(context, Box::pin(connection), (&*lifecycle, &*peer), closing).await
    } else {
        let connection = http1(&context.settings, is_shared).serve_connection(TokioIo::new(stream), service);
        drive(context, Box::pin(connection), (&*lifecycle, &*peer), closing).await
    };
    let reason = match (fault.reason(), lifecycle.close_reason()) {
        (Some(fault), _) => fault,
        // The client closes after an announced end, over HTTP/1.1 always at once.
        (None, Some(announced)) if reason == PEER => announced,
        _ => reason,
    };
    if let Owner::Runtime(runtime, _) = context.service.owner(&peer) {
        // An agent renews its certificate over a second connection: with another one open it is not lost. Nor is a loss
        // reported twice.
        let was_last = slot.is_none_or(ConnectionSlot::release);
        report_end(&context.service, runtime, reason, was_last && !lifecycle.has_missed_heartbeat());
    }
    reason
}

/// Adds the date to a response, and over HTTP/1.1 `Connection: close` if the connection ends with it, which is decided
/// here.
fn finish(response: &mut HttpResponse, is_last: bool, lifecycle: &ConnectionLifecycle, is_http2: bool) {
    let now = Now::read();
    prevent_hpack_indexing(response, now.unix);
    if is_last {
        lifecycle.close_after_response("refused");
        lifecycle.close.notify_one();
    } else if !is_http2 && lifecycle.is_past_max_age(now.instant) {
        lifecycle.close_after_response("age");
    }
    if !is_http2 && lifecycle.close_reason().is_some() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
}

/// Reports the end of a runtime's connection: floods and protocol errors count towards a block, and a close by the
/// agent may mean that it is lost.
fn report_end<S: Service>(service: &S, runtime: &RuntimeId, reason: &'static str, may_be_lost: bool) {
    match (reason, service.limiter()) {
        (FLOOD, Some(limiter)) => limiter.block(runtime, Instant::now()),
        (BROKEN, Some(limiter)) => limiter.strike(runtime, Instant::now()),
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
        reason = closing.ordered() => reason,
        () = context.drain.cancelled() => "drain",
    }
}

/// Drives a connection to its end, and shuts it down when its lifecycle has expired. Returns the reason of the end.
async fn drive<S: Service, C: GracefulConnection<Error = hyper::Error>>(
    context: &Context<S>,
    mut connection: Pin<Box<C>>,
    (lifecycle, peer): (&ConnectionLifecycle, &S::Peer),
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
            reason = closing.ordered() => return reason,
            () = context.drain.cancelled(), if ending.is_none() => "drain",
            () = lifecycle.close.notified(), if ending.is_none() => "refused",
            () = sleep_until(wake) => match (ending, lifecycle.check(Instant::now())) {
                (Some((reason, _)), _) => return reason,
                (None, Liveness::Silent) => return "silent",
                (None, Liveness::Expired(reason)) => reason,
                (None, Liveness::MissedHeartbeat(since)) => {
                    if let Owner::Runtime(runtime, _) = context.service.owner(peer) {
                        context.service.connection_lost(runtime, since);
                    }
                    continue;
                }
                (None, Liveness::Alive) => continue,
            },
        };
        connection.as_mut().graceful_shutdown();
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

fn http1(settings: &Settings, is_shared: bool) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        // It would also limit the time between two requests, and cost each of them a timer: see `head_deadline`.
        .header_read_timeout(None)
        .max_buf_size(settings.max_head as usize)
        .max_headers(if is_shared { SHARED_HEAD_FIELDS } else { HEAD_FIELDS });
    builder
}

fn http2(settings: &Settings, is_shared: bool) -> http2::Builder<TokioExecutor> {
    let (streams, window, table) = match is_shared {
        true => (SHARED_STREAMS, SHARED_WINDOW, SHARED_HEADER_TABLE),
        false => (STREAMS, WINDOW, HEADER_TABLE),
    };
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(streams)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(window)
        .header_table_size(table)
        .max_header_list_size(settings.max_head)
        .max_send_buf_size(SEND_BYTES)
        .max_pending_accept_reset_streams(RESETS)
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

struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

#[cfg(test)]
mod tests {
    use super::{super::refusal::Refusal, *};

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
