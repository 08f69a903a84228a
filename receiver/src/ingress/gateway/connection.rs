//! One connection, from its handshake to its end.

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
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;

use super::{
    Now, Settings,
    frames::Meter,
    handshakes,
    heads::Heads,
    life::{Held, Life, Look},
    listen::Stream,
    metered::{FLOOD, Limit, Metered},
    metrics::{Metrics, Why},
    refusal::{Answer, http_date},
    seats::{Seat, Seats},
};

/// Requests at once on one HTTP/2 connection: more than one runtime may have in flight, so that it is told so.
const STREAMS: u32 = 32;
/// On a connection that many share behind a proxy.
const STREAMS_OF_MANY: u32 = 1_024;
/// Bytes on their way, per stream and per connection: the least that the protocol has. What arrives is read at once and then
/// counts against the budget of all bodies, so that this is what a connection can hold beside it.
const WINDOW: u32 = (64 << 10) - 1;
/// On a connection that many share.
const WINDOW_OF_MANY: u32 = 1 << 20;
/// Bytes of header fields that HTTP/2 keeps of a peer to compress the next ones by (RFC 9113, section 6.5.2). What is large in an
/// agent's requests is another one each time; to keep it, and the buffers that it came in, is most of what a quiet connection costs.
const HEADER_TABLE: u32 = 0;
/// On a connection that many share.
const HEADER_TABLE_OF_MANY: u32 = 4 << 10;
/// HTTP/2 frames a second that carry no body: a few for each request that the rate allows.
const FRAMES: u32 = 1_000;
/// On a connection that many share.
const FRAMES_OF_MANY: u32 = 50_000;
/// The reason when the protocol was broken, or the network.
const BROKEN: &str = "error";
/// The reason when the peer ended it, unless we had decided to.
const PEER: &str = "peer";
/// Who is refused for good may still read why.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Fields of one request's head, over HTTP/1.1.
const HEAD_FIELDS: usize = 32;
/// On a connection that many share: proxies add some.
const HEAD_FIELDS_OF_MANY: usize = 100;
/// Bytes of answers that wait for a reader, per stream. Ours have a few hundred, or some 64 KiB with a thousand refusals.
const SEND_BYTES: usize = 64 << 10;
/// Streams that a peer may open and reset before they were served (CVE-2023-44487).
const RESETS: usize = 20;
/// Streams that we may reset for a peer's faults.
const LOCAL_RESETS: usize = 128;

/// Who answers what connections bring. Connections are the same on every port of ours; what is said on them is not.
pub trait Service: Send + Sync + 'static {
    /// Who holds the other end.
    type Peer: Send + Sync + 'static;

    /// Whether the handshake must have brought a certificate.
    const NEEDS_CERTIFICATE: bool = true;

    /// Reads, once per connection, whom its certificates name: leaf first, verified by the handshake. With the address from where the
    /// connection comes, where that is known.
    fn peer(&self, chain: &[CertificateDer<'_>], from: Option<SocketAddr>) -> Self::Peer;

    /// Answers one request, and tells whether the connection has no more to say.
    fn answer(&self, request: Request<Incoming>, peer: &Self::Peer) -> impl Future<Output = (Answer, bool)> + Send;

    /// Whose connection it is.
    fn holder<'a>(&self, _: &'a Self::Peer) -> Holder<'a> {
        Holder::Many
    }

    /// The fingerprint of the certificate that it was opened with, if one runtime has it.
    fn leaf<'a>(&self, _: &'a Self::Peer) -> Option<&'a str> {
        None
    }

    /// Told whenever somebody with a connection may have to go.
    fn moves(&self) -> Option<watch::Receiver<u64>> {
        None
    }

    /// Whether a runtime with that certificate may speak no longer.
    fn is_out(&self, _: &RuntimeId, _leaf: Option<&str>) -> bool {
        false
    }

    /// Until when a runtime is shut out, if it is.
    fn shut_until(&self, _: &RuntimeId, _now: Instant) -> Option<Instant> {
        None
    }

    /// Shuts a runtime out that flooded its connection with what is no request.
    fn shut(&self, _: &RuntimeId, _now: Instant) {}

    /// Holds it against a runtime that its connection broke; a network that breaks will not do it often enough to matter.
    fn strike(&self, _: &RuntimeId, _now: Instant) {}

    /// Told that a runtime let go of its last connection, or lost it, or that its next heartbeat did not come over one: nothing came since
    /// then. Not told of what this receiver ends.
    fn closed(&self, _: &RuntimeId, _since: Instant) {}

    /// Takes how much later than it should something came to run.
    fn observe_lag(&self, _: Duration) {}
}

/// Whose a connection is, which decides what it may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder<'a> {
    /// One runtime's, which has few connections.
    One(&'a RuntimeId),
    /// Of many behind a proxy, which has as many as it wants.
    Many,
    /// Of somebody who is told so and ends, or who brings no certificate.
    Nobody,
}

/// Everything a connection needs.
pub(super) struct Context<S> {
    pub(super) service: S,
    pub(super) settings: Settings,
    pub(super) metrics: Metrics,
    /// Asks connections to end after what is in flight.
    pub(super) drain: CancellationToken,
    /// Ends them at once.
    pub(super) kill: CancellationToken,
    pub(super) spread: RandomState,
    /// Of each runtime's connections.
    pub(super) seats: Arc<Seats>,
    /// Steps of handshakes that may run at the same time.
    pub(super) handshakes: Arc<Semaphore>,
}

/// After a look at who may stay, the next one comes no sooner: many Kymas may go at once.
const LOOK_PAUSE: Duration = Duration::from_millis(500);

/// Ends the connections of those who may speak no longer, whenever that may have changed. Runs for ever.
pub(super) async fn watch_out<S: Service>(context: Arc<Context<S>>) {
    let Some(mut moves) = context.service.moves() else { return };
    while moves.changed().await.is_ok() {
        context.seats.end(|runtime, leaf| context.service.is_out(runtime, leaf));
        sleep(LOOK_PAUSE).await;
    }
}

/// What ends one runtime's connection.
#[derive(Default)]
struct End {
    /// The runtime has newer ones.
    gone: CancellationToken,
    /// It may speak no longer.
    out: CancellationToken,
}

/// Serves one connection until it ends.
pub(super) async fn run<S: Service>(
    context: Arc<Context<S>>,
    (tcp, source): (impl Stream, Option<SocketAddr>),
    config: Arc<ServerConfig>,
    place: OwnedSemaphorePermit,
) {
    let metrics = &context.metrics;
    metrics.connections.inc();
    let _open = OnDrop(|| {
        metrics.connections.dec();
    });
    let stream = tokio::select! {
        () = context.drain.cancelled() => return,
        // Not in the connection's own future, which would keep the room that it takes.
        result = Box::pin(shake(&context, tcp, config, place)) => result,
    };
    match stream {
        Ok(stream) => {
            let reason = serve(&context, stream, source).await;
            metrics.connections_ended.get_or_create(&Why { reason }).inc();
        }
        Err(reason) => {
            metrics.handshakes_failed.get_or_create(&Why { reason }).inc();
            tracing::debug!(reason, "TLS handshake failed");
        }
    }
}

/// The handshake, within its share and its deadline. Its place is free again when it has ended.
async fn shake<S: Service, T: Stream>(
    context: &Context<S>,
    tcp: T,
    config: Arc<ServerConfig>,
    place: OwnedSemaphorePermit,
) -> Result<Box<TlsStream<T>>, &'static str> {
    let Settings { handshake_deadline, max_handshakes, .. } = context.settings;
    let deadline = handshakes::patience(handshake_deadline, place.semaphore().available_permits(), max_handshakes);
    context.metrics.handshakes.inc();
    let _begun = OnDrop(|| {
        context.metrics.handshakes.dec();
    });
    let accept = handshakes::within(context.handshakes.clone(), TlsAcceptor::from(config).accept(tcp));
    let result = timeout(deadline, accept).await;
    drop(place);
    result.map_err(|_| "timeout")?.map(Box::new).map_err(|error| reason(&error))
}

/// Returns why it ended, from a closed set.
async fn serve<S: Service>(
    context: &Arc<Context<S>>,
    stream: Box<TlsStream<impl Stream>>,
    source: Option<SocketAddr>,
) -> &'static str {
    let session = stream.get_ref().1;
    let chain = session.peer_certificates().unwrap_or_default();
    if S::NEEDS_CERTIFICATE && chain.is_empty() {
        // The verifier demands one; without it nobody is served.
        return "no-certificate";
    }
    let peer = Arc::new(context.service.peer(chain, source));
    let is_http2 = session.alpn_protocol() == Some(b"h2");
    let holder = context.service.holder(&peer);
    let seat = take_seat(context, &peer);
    let End { gone, out } =
        &seat.as_ref().map_or_else(End::default, |seat| End { gone: seat.gone.clone(), out: seat.out.clone() });
    if let Holder::One(runtime) = holder
        && let Some(until) = context.service.shut_until(runtime, Instant::now())
    {
        // Ended at once, it would be back at once, for one more handshake.
        return hold(context, (gone, out), until).await;
    }
    let is_many = holder == Holder::Many;
    let now = Instant::now();
    let life = Arc::new(Life::new(&context.settings, is_http2, now, context.spread.hash_one(now)));
    let limit = match is_http2 {
        true => Limit::Frames(Meter::new(if is_many { FRAMES_OF_MANY } else { FRAMES })),
        false => Limit::Heads(Heads::new(life.clone(), context.settings.head_deadline)),
    };
    let (stream, fault) = Metered::new(stream, limit, context.settings.answer_deadline);
    let service = service_fn({
        let (context, life, peer) = (context.clone(), life.clone(), peer.clone());
        move |request| {
            let (context, life, peer) = (context.clone(), life.clone(), peer.clone());
            // Before anything more is read.
            let busy = life.begin(Instant::now());
            async move {
                let (mut answer, is_last) = context.service.answer(request, &peer).await;
                conclude(&mut answer, is_last, &life, is_http2);
                let busy = if answer.status().is_success() { busy.taken() } else { busy };
                Ok::<_, Infallible>(answer.map(|body| Held::new(body, busy)))
            }
        }
    });
    // ALPN has told which; guessing from the first bytes would wait for them without a deadline. Each is as large as it is, and
    // lies nowhere else: a future would keep room for where it comes from, too.
    let reason = if is_http2 {
        let connection = http2(&context.settings, is_many).serve_connection(TokioIo::new(stream), service);
        drive(context, Box::pin(connection), (&*life, &*peer), (gone, out)).await
    } else {
        let connection = http1(&context.settings, is_many).serve_connection(TokioIo::new(stream), service);
        drive(context, Box::pin(connection), (&*life, &*peer), (gone, out)).await
    };
    let reason = match (fault.reason(), life.ends()) {
        (Some(fault), _) => fault,
        // Who is told that it ends does so as well, over HTTP/1.1 always at once.
        (None, Some(ends)) if reason == PEER => ends,
        _ => reason,
    };
    if let Holder::One(runtime) = context.service.holder(&peer) {
        // An agent has a connection of its own for each renewal: whoever still has another one is not gone. Nor is it told twice.
        let was_last = seat.is_none_or(Seat::leave);
        note(&context.service, runtime, reason, was_last && !life.has_missed());
    }
    reason
}

/// What an answer says besides: the date, and over HTTP/1.1 whether the connection ends with it, which is decided here.
fn conclude(answer: &mut Answer, is_last: bool, life: &Life, is_http2: bool) {
    let now = Now::read();
    leave_nothing(answer, now.unix);
    if is_last {
        life.end("refused");
        life.last.notify_one();
    } else if !is_http2 && life.is_old(now.instant) {
        life.end("age");
    }
    if !is_http2 && life.ends().is_some() {
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
}

/// The seat of a runtime's connection; others need none.
fn take_seat<S: Service>(context: &Context<S>, peer: &S::Peer) -> Option<Seat> {
    let Holder::One(runtime) = context.service.holder(peer) else { return None };
    Some(context.seats.take(runtime, context.service.leaf(peer), context.settings.limits.connections))
}

/// Notes how the connection of a runtime ended: who floods or breaks is remembered, and who went by itself may be gone.
fn note<S: Service>(service: &S, runtime: &RuntimeId, reason: &'static str, tells: bool) {
    match reason {
        FLOOD => service.shut(runtime, Instant::now()),
        BROKEN => service.strike(runtime, Instant::now()),
        _ => {}
    }
    if tells && [PEER, "timeout", "incomplete", BROKEN].contains(&reason) {
        service.closed(runtime, Instant::now());
    }
}

/// HTTP/2 keeps the fields of answers to compress the next ones by, as long as a connection lives (RFC 7541, section 4.1). Ours are
/// short, and the date is another one each time: it would be kept some sixty times. What is marked as sensitive is not kept.
fn leave_nothing(answer: &mut Answer, now: i64) {
    let fields = answer.headers_mut();
    if !fields.contains_key(header::DATE)
        && let Some(date) = http_date(now)
    {
        fields.insert(header::DATE, date);
    }
    fields.values_mut().for_each(|value| value.set_sensitive(true));
}

/// Keeps a connection that is not served, until somebody may connect again.
async fn hold<S>(
    context: &Context<S>,
    (gone, out): (&CancellationToken, &CancellationToken),
    until: Instant,
) -> &'static str {
    tokio::select! {
        () = sleep_until(until) => FLOOD,
        () = gone.cancelled() => "crowded",
        () = out.cancelled() => "out",
        () = context.drain.cancelled() => "drain",
    }
}

/// Drives a connection to its end, and ends it when it has lived long enough.
async fn drive<S: Service, C: GracefulConnection<Error = hyper::Error>>(
    context: &Context<S>,
    mut connection: Pin<Box<C>>,
    (life, peer): (&Life, &S::Peer),
    (gone, out): (&CancellationToken, &CancellationToken),
) -> &'static str {
    let mut ending: Option<(&'static str, Instant)> = None;
    loop {
        let wake = ending.map_or_else(|| life.next_look(Instant::now()), |(_, end)| end);
        let why = tokio::select! {
            result = connection.as_mut() => {
                let ended = result.map_or_else(|error| broken(&error), |()| PEER);
                return ending.map_or(ended, |(why, _)| why);
            }
            () = context.kill.cancelled() => return "killed",
            () = gone.cancelled() => return "crowded",
            () = out.cancelled() => return "out",
            () = context.drain.cancelled(), if ending.is_none() => "drain",
            () = life.last.notified(), if ending.is_none() => "refused",
            () = sleep_until(wake) => match (ending, life.look(Instant::now())) {
                (Some((why, _)), _) => return why,
                (None, Look::Silent) => return "silent",
                (None, Look::Over(why)) => why,
                (None, Look::Missed(since)) => {
                    if let Holder::One(runtime) = context.service.holder(peer) {
                        context.service.closed(runtime, since);
                    }
                    continue;
                }
                (None, Look::Alive) => continue,
            },
        };
        connection.as_mut().graceful_shutdown();
        let last_words = context.settings.drain_deadline;
        // Who is refused for good has nothing in flight that anybody waits for.
        let last_words = if why == "refused" { last_words.min(LAST_WORDS) } else { last_words };
        ending = Some((why, Instant::now() + last_words));
    }
}

/// Why the HTTP library ended a connection.
fn broken(error: &hyper::Error) -> &'static str {
    match error {
        error if error.is_timeout() => "timeout",
        error if error.is_parse_too_large() => "head",
        error if error.is_parse() => "malformed",
        error if error.is_incomplete_message() => "incomplete",
        _ => BROKEN,
    }
}

fn http1(settings: &Settings, is_many: bool) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        // It would hold for the rest between two requests as well, and cost each one a timer: see `heads`.
        .header_read_timeout(None)
        .max_buf_size(settings.max_head as usize)
        .max_headers(if is_many { HEAD_FIELDS_OF_MANY } else { HEAD_FIELDS });
    builder
}

fn http2(settings: &Settings, is_many: bool) -> http2::Builder<TokioExecutor> {
    let (streams, window, table) = match is_many {
        true => (STREAMS_OF_MANY, WINDOW_OF_MANY, HEADER_TABLE_OF_MANY),
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

/// What went wrong in a handshake, as metrics name it.
fn reason(error: &std::io::Error) -> &'static str {
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
    fn an_answer_tells_the_date_and_http2_keeps_nothing_of_it() {
        let mut answer = Refusal::Method.answer(0);
        leave_nothing(&mut answer, 784_111_777);
        assert_eq!(answer.headers()[header::DATE], "Sun, 06 Nov 1994 08:49:37 GMT");
        assert!(answer.headers().len() > 2 && answer.headers().values().all(http::HeaderValue::is_sensitive));
        leave_nothing(&mut answer, 0);
        assert_eq!(answer.headers()[header::DATE], "Sun, 06 Nov 1994 08:49:37 GMT", "who tells a time knows why");
    }
}
