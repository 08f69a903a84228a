//! Metrics and probes on a port of their own: `/metrics`, `/healthz`, `/readyz`. And on loopback, for `status`, what people want to
//! know.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Bytes, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use jiff::Timestamp;
use tidewatch_shared::metrics::Registry;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::{Metrics, Readiness};
use crate::{
    canary::Sightings,
    clock,
    core::Core,
    identity::Standing,
    status::{Runtime, STATUS_PATH, Status},
};

/// Connections at a time: a scraper, two probes, and room for a curious person.
const CONNECTIONS: usize = 8;
/// Until the head of a request.
const HEAD: Duration = Duration::from_secs(5);
/// Until a connection is closed, whatever is going on in it.
const CONNECTION: Duration = Duration::from_secs(60);
/// Names of watches that a probe's answer lists.
const NAMED: usize = 20;

/// Bound, and ready to serve.
pub(crate) struct Server {
    listener: TcpListener,
    view: Arc<View>,
    shows: Shows,
}

/// Which of two servers it is.
#[derive(Clone, Copy)]
enum Shows {
    Probes,
    Status,
}

/// What is shown.
struct View {
    registry: Registry,
    metrics: Metrics,
    readiness: Readiness,
    /// Empty until an identity tells which runtime this is.
    core: Arc<OnceLock<Core>>,
    sightings: Sightings,
    standing: Standing,
}

impl Server {
    /// Binds; port 0 takes a free one.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub(crate) async fn bind(
        address: SocketAddr,
        metrics: Metrics,
        readiness: Readiness,
        core: Arc<OnceLock<Core>>,
        sightings: Sightings,
        standing: Standing,
    ) -> io::Result<(Self, SocketAddr)> {
        let listener = TcpListener::bind(address).await?;
        let bound = listener.local_addr()?;
        let registry = metrics.registry();
        let view = Arc::new(View { registry, metrics, readiness, core, sightings, standing });
        Ok((Self { listener, view, shows: Shows::Probes }, bound))
    }

    /// Binds one more server, which shows what this one knows to whoever asks for the status.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub(crate) async fn admin(&self, address: SocketAddr) -> io::Result<(Self, SocketAddr)> {
        let listener = TcpListener::bind(address).await?;
        let bound = listener.local_addr()?;
        Ok((Self { listener, view: self.view.clone(), shows: Shows::Status }, bound))
    }

    /// Serves for ever.
    pub(crate) async fn run(self) {
        let permits = Arc::new(Semaphore::new(CONNECTIONS));
        let mut connections = JoinSet::new();
        loop {
            // Nobody closes the semaphore.
            let Ok(permit) = permits.clone().acquire_owned().await else { return };
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let (view, shows) = (self.view.clone(), self.shows);
                    connections.spawn(async move {
                        serve(stream, view, shows).await;
                        drop(permit);
                    });
                }
                // No more files, or the peer is gone already: neither gets better by trying at once.
                Err(_) => sleep(Duration::from_millis(100)).await,
            }
            while connections.try_join_next().is_some() {}
        }
    }
}

async fn serve(stream: TcpStream, view: Arc<View>, shows: Shows) {
    let service = service_fn(|request| {
        let answer = match shows {
            Shows::Probes => view.answer(&request),
            Shows::Status => view.admin(&request),
        };
        std::future::ready(Ok::<_, Infallible>(answer))
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(16 << 10)
        .serve_connection(TokioIo::new(stream), service);
    // A peer that leaves early or never does is no concern of ours.
    let _ = timeout(CONNECTION, connection).await;
}

impl View {
    fn answer<B>(&self, request: &Request<B>) -> Response<Full<Bytes>> {
        let plain = "text/plain; charset=utf-8";
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return respond(StatusCode::METHOD_NOT_ALLOWED, plain, String::new());
        }
        match request.uri().path() {
            "/healthz" => respond(StatusCode::OK, plain, "ok\n".to_owned()),
            "/readyz" => self.ready(),
            "/metrics" => {
                let age = self.sightings.canary(Instant::now()).map(|canary| canary.age_seconds);
                let figures = self.core.get().map(Core::figures).unwrap_or_default();
                let objects = self.core.get().map(Core::objects).unwrap_or_default();
                self.metrics.observe(figures, objects, age);
                let openmetrics = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                let broken = || respond(StatusCode::INTERNAL_SERVER_ERROR, plain, String::new());
                self.registry.encode().map_or_else(broken, |text| respond(StatusCode::OK, openmetrics, text))
            }
            _ => respond(StatusCode::NOT_FOUND, plain, String::new()),
        }
    }

    fn admin<B>(&self, request: &Request<B>) -> Response<Full<Bytes>> {
        let plain = "text/plain; charset=utf-8";
        if !is_local(request) {
            return respond(StatusCode::MISDIRECTED_REQUEST, plain, String::new());
        }
        match (request.method(), request.uri().path()) {
            (&Method::GET, STATUS_PATH) => {
                let status = serde_json::to_string(&self.status()).expect("strings and numbers have a JSON form");
                respond(StatusCode::OK, "application/json", status + "\n")
            }
            (_, STATUS_PATH) => respond(StatusCode::METHOD_NOT_ALLOWED, plain, String::new()),
            _ => respond(StatusCode::NOT_FOUND, plain, String::new()),
        }
    }

    fn status(&self) -> Status {
        let now = Instant::now();
        // Zero is what a gauge says before it is set.
        let set = |seconds: i64| (seconds != 0).then_some(seconds);
        let ago = |at: i64| u64::try_from(clock::unix_seconds() - at).unwrap_or(0);
        let not_after = set(self.metrics.certificate_not_after.get()).and_then(|at| Timestamp::from_second(at).ok());
        let canary_age_seconds = self.sightings.canary(now).map(|canary| canary.age_seconds);
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pending: self.pending(),
            answered_seconds_ago: set(self.metrics.answered.get()).map(ago),
            canary_age_seconds,
            certificate_not_after: not_after.map(|at| at.to_string()),
            identity: self.standing.told(),
            clock_offset_seconds: self.metrics.clock_offset.get(),
            runtime: self.core.get().map(|core| Runtime::new(core.account(now), canary_age_seconds)),
        }
    }

    fn pending(&self) -> Vec<String> {
        let watches =
            self.core.get().map(|core| core.untried(NAMED)).into_iter().flatten().map(|name| format!("watch {name}"));
        self.readiness.pending().into_iter().map(str::to_owned).chain(watches).collect()
    }

    fn ready(&self) -> Response<Full<Bytes>> {
        let pending = self.pending();
        let (status, text) = if pending.is_empty() {
            (StatusCode::OK, "ready\n".to_owned())
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, format!("pending: {}\n", pending.join(", ")))
        };
        respond(status, "text/plain; charset=utf-8", text)
    }
}

/// Whether the request names this machine by an address of the loopback: a page in a browser can send requests here by a name of
/// its own, and must not read the answers.
fn is_local<B>(request: &Request<B>) -> bool {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    let local = |host: &str| host.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_loopback());
    host.is_some_and(|host| local(host) || host.split(':').next() == Some("localhost"))
}

fn respond(status: StatusCode, content_type: &'static str, text: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    response
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    #[tokio::test]
    async fn readiness_says_what_is_pending() {
        let (metrics, readiness) = (Metrics::default(), Readiness::default());
        let address = "127.0.0.1:0".parse().unwrap();
        let bound = Server::bind(
            address,
            metrics,
            readiness.clone(),
            Arc::default(),
            Sightings::default(),
            Standing::default(),
        )
        .await;
        let view = bound.unwrap().0.view;
        let get = |path: &str| view.answer(&Request::get(path).body(()).unwrap()).status().as_u16();
        let (plan, identity) = (readiness.guard("plan"), readiness.guard("identity"));
        assert_eq!(readiness.pending(), ["identity", "plan"]);
        drop(plan);
        assert_eq!((get("/readyz"), readiness.pending()), (503, vec!["identity"]));
        drop(identity);
        assert_eq!((get("/readyz"), get("/healthz"), get("/metrics"), get("/")), (200, 200, 200, 404));
        assert_eq!(get("/status"), 404);
    }

    #[tokio::test]
    async fn the_status_is_shown_to_whoever_is_here_and_to_nobody_else() {
        let local = || "127.0.0.1:0".parse().unwrap();
        let readiness = Readiness::default();
        let _plan = readiness.guard("plan");
        let bound = Server::bind(
            local(),
            Metrics::default(),
            readiness,
            Arc::default(),
            Sightings::default(),
            Standing::default(),
        )
        .await;
        let (admin, _) = bound.unwrap().0.admin(local()).await.unwrap();
        let ask =
            |host: &str, path: &str| admin.view.admin(&Request::get(path).header(header::HOST, host).body(()).unwrap());
        for (host, path, expected) in [
            ("127.0.0.1:2113", "/status", 200),
            ("[::1]:2113", "/status", 200),
            ("localhost:2113", "/status", 200),
            ("evil.example:2113", "/status", 421),
            ("localhost.evil.example", "/status", 421),
            ("127.0.0.1:2113", "/metrics", 404),
        ] {
            assert_eq!(ask(host, path).status().as_u16(), expected, "{host} {path}");
        }
        let body = ask("localhost", "/status").into_body().collect().await.unwrap().to_bytes();
        let status: Status = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            (status.pending, status.runtime, status.answered_seconds_ago),
            (vec!["plan".to_owned()], None, None)
        );
    }
}
