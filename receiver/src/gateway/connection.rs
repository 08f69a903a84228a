//! One connection, from its handshake to its end.

use std::{
    convert::Infallible,
    hash::{BuildHasher, RandomState},
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use hyper::service::service_fn;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use rustls::ServerConfig;
use tidewatch_shared::identity::TrustDomain;
use tokio::{
    net::TcpStream,
    sync::Notify,
    time::{Instant, sleep_until, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;

use super::{
    Settings,
    desk::{Desk, Peer},
    intake::Intake,
    metrics::{Metrics, Why},
};

/// Requests at once on one HTTP/2 connection: more than one runtime may have in flight, so that it learns so by 429.
const STREAMS: u32 = 32;
/// Bytes on their way, per stream and per connection. A batch is up to 1 MiB, most are under one.
const WINDOW: u32 = 128 << 10;
/// Bytes of one request's head.
const HEAD_BYTES: u32 = 16 << 10;
/// Fields of one request's head, over HTTP/1.1.
const HEAD_FIELDS: usize = 32;
/// Bytes of answers that wait for a reader, per stream. Ours have a few hundred, or some 64 KiB with a thousand refusals.
const SEND_BYTES: usize = 64 << 10;
/// Streams that a peer may open and reset before they were served (CVE-2023-44487).
const RESETS: usize = 20;
/// Streams that we may reset for a peer's faults.
const LOCAL_RESETS: usize = 128;
/// PINGs on HTTP/2, so that a peer that is gone is noticed.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// How long a PING may go without an answer.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Everything a connection needs.
pub(super) struct Context<I> {
    pub(super) desk: Desk<I>,
    pub(super) domain: TrustDomain,
    pub(super) settings: Settings,
    pub(super) metrics: Metrics,
    /// Asks connections to end after what is in flight.
    pub(super) drain: CancellationToken,
    /// Ends them at once.
    pub(super) kill: CancellationToken,
    pub(super) spread: RandomState,
}

/// Serves one connection until it ends.
pub(super) async fn run<I: Intake>(context: Arc<Context<I>>, tcp: TcpStream, config: Arc<ServerConfig>) {
    let metrics = &context.metrics;
    metrics.connections.inc();
    let _open = OnDrop(|| {
        metrics.connections.dec();
    });
    // Answers are small; waiting for more to send only delays them.
    let _ = tcp.set_nodelay(true);
    let handshake = timeout(context.settings.handshake_deadline, TlsAcceptor::from(config).accept(tcp));
    let stream = tokio::select! {
        () = context.drain.cancelled() => return,
        result = handshake => result.map_err(|_| "timeout").and_then(|result| result.map_err(|error| reason(&error))),
    };
    match stream {
        Ok(stream) => {
            let reason = serve(&context, stream).await;
            metrics.connections_ended.get_or_create(&Why { reason }).inc();
        }
        Err(reason) => {
            metrics.handshakes_failed.get_or_create(&Why { reason }).inc();
            tracing::debug!(reason, "TLS handshake failed");
        }
    }
}

/// Returns why it ended, from a closed set.
async fn serve<I: Intake>(context: &Arc<Context<I>>, stream: TlsStream<TcpStream>) -> &'static str {
    let session = stream.get_ref().1;
    let Some(leaf) = session.peer_certificates().and_then(|chain| chain.first()) else {
        // The verifier demands one; without it nobody is served.
        return "no-certificate";
    };
    let peer = Arc::new(Peer::read(leaf, &context.domain));
    if let Peer::Nobody(why) = &*peer {
        tracing::debug!(%why, "Client certificate names no runtime");
    }
    let is_http2 = session.alpn_protocol() == Some(b"h2");
    let builder = builder(&context.settings, is_http2);
    let life = Arc::new(Life::new(context));
    let service = service_fn({
        let (context, life) = (context.clone(), life.clone());
        move |request| {
            let (context, life, peer) = (context.clone(), life.clone(), peer.clone());
            async move {
                let _busy = life.begin();
                let (answer, is_last) = context.desk.answer(request, &peer).await;
                if is_last {
                    life.last.notify_one();
                }
                Ok::<_, Infallible>(answer)
            }
        }
    });
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let mut ending: Option<(&'static str, Instant)> = None;
    loop {
        let wake = ending.map_or_else(|| life.next_look(), |(_, end)| end);
        let why = tokio::select! {
            result = connection.as_mut() => {
                return ending.map_or(if result.is_ok() { "peer" } else { "error" }, |(why, _)| why);
            }
            () = context.kill.cancelled() => return "killed",
            () = context.drain.cancelled(), if ending.is_none() => Some("drain"),
            () = life.last.notified(), if ending.is_none() => Some("refused"),
            () = sleep_until(wake) => match (ending, life.look(Instant::now())) {
                (Some((why, _)), _) => return why,
                (None, Look::Silent) => return "silent",
                (None, Look::Over(why)) => Some(why),
                (None, Look::Alive) => None,
            },
        };
        if let Some(why) = why {
            connection.as_mut().graceful_shutdown();
            ending = Some((why, Instant::now() + context.settings.drain_deadline));
        }
    }
}

fn builder(settings: &Settings, is_http2: bool) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(settings.head_deadline)
        .max_buf_size(HEAD_BYTES as usize)
        .max_headers(HEAD_FIELDS);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_header_list_size(HEAD_BYTES)
        .max_send_buf_size(SEND_BYTES)
        .max_pending_accept_reset_streams(RESETS)
        .max_local_error_reset_streams(LOCAL_RESETS)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    // ALPN has told which; guessing from the first bytes would wait for them without a deadline.
    if is_http2 { builder.http2_only() } else { builder.http1_only() }
}

/// How long a connection may live, and when it was last of use.
struct Life {
    opened: Instant,
    /// When it is old enough: certificates, roots and instances change, and connections should follow.
    old: Instant,
    first: Duration,
    idle: Duration,
    usage: Mutex<Usage>,
    last: Notify,
}

struct Usage {
    active: u32,
    ended: Option<Instant>,
}

enum Look {
    Alive,
    /// It never asked for anything.
    Silent,
    Over(&'static str),
}

impl Life {
    fn new<I>(context: &Context<I>) -> Self {
        let Settings { head_deadline: first, idle, max_age, .. } = context.settings;
        let opened = Instant::now();
        // Between 75 and 100 % of the age, so that thousands that came together do not go together.
        let spread = u32::try_from(context.spread.hash_one(opened) % 256).unwrap_or(0);
        let old = opened + max_age * 3 / 4 + max_age / 1_024 * spread;
        Self { opened, old, first, idle, usage: Mutex::new(Usage { active: 0, ended: None }), last: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(self: &Arc<Self>) -> impl Drop + use<> {
        self.state().active += 1;
        let life = self.clone();
        OnDrop(move || {
            let mut state = life.state();
            state.active -= 1;
            state.ended = Some(Instant::now());
        })
    }

    /// At the latest after one idle time: requests that come and go meanwhile wake nobody.
    fn next_look(&self) -> Instant {
        self.quiet_until().min(self.old).min(Instant::now() + self.idle)
    }

    /// While a request is in flight its own deadlines hold, and silence is looked for again later.
    fn quiet_until(&self) -> Instant {
        match &*self.state() {
            Usage { active: 0, ended: None } => self.opened + self.first,
            Usage { active: 0, ended: Some(ended) } => *ended + self.idle,
            Usage { .. } => Instant::now() + self.idle,
        }
    }

    fn look(&self, now: Instant) -> Look {
        if now >= self.old {
            Look::Over("age")
        } else if now < self.quiet_until() {
            Look::Alive
        } else if self.state().ended.is_none() {
            Look::Silent
        } else {
            Look::Over("idle")
        }
    }
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
