//! HTTP servers: metrics and probes (`/metrics`, `/healthz`, `/readyz`) on one port, and the status on the loopback
//! admin listener.

use std::{convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{
    body::{Bytes, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use jiff::Timestamp;
use tidewatch_contract::admin::agent::{STATUS_PATH, Status};
use tidewatch_kit::{bind::bind, metrics::Registry};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, SetOnce},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::{
    canary::CanaryState,
    clock,
    core::Core,
    identity::IdentityStatus,
    telemetry::{Metrics, Readiness},
};

/// Concurrent connections: a scraper, two probes, and some spare ones for operators.
const CONNECTIONS: usize = 8;
/// Deadline for the head of a request.
const HEAD: Duration = Duration::from_secs(5);
/// Maximum lifetime of a connection.
const CONNECTION: Duration = Duration::from_secs(60);
/// Watches that a readiness response names.
const NAMED: usize = 20;
/// Content type of all responses without a format of their own.
const PLAIN: &str = "text/plain; charset=utf-8";

/// A bound server.
pub(crate) struct Server {
    listener: TcpListener,
    state: Arc<ServerState>,
    endpoints: Endpoints,
}

/// Endpoints that a server exposes: [`ServerState::probes`] or [`ServerState::admin`].
type Endpoints = fn(&ServerState, &Request<Incoming>) -> Response<Full<Bytes>>;

/// Data sources of all endpoints.
struct ServerState {
    registry: Registry,
    metrics: Metrics,
    readiness: Readiness,
    /// Empty until the runtime ID is known.
    core: Arc<SetOnce<Core>>,
    canary_state: CanaryState,
    identity_status: IdentityStatus,
}

impl Server {
    /// Binds the server for metrics and probes; port 0 selects a free port.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub(crate) async fn bind(
        address: SocketAddr,
        metrics: Metrics,
        readiness: Readiness,
        core: Arc<SetOnce<Core>>,
        canary_state: CanaryState,
        identity_status: IdentityStatus,
    ) -> io::Result<(Self, SocketAddr)> {
        let listener = bind(address)?;
        let bound = listener.local_addr()?;
        let registry = metrics.registry();
        let state = Arc::new(ServerState { registry, metrics, readiness, core, canary_state, identity_status });
        Ok((Self { listener, state, endpoints: ServerState::probes }, bound))
    }

    /// Binds the admin server, with the same data sources.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub(crate) async fn admin(&self, address: SocketAddr) -> io::Result<(Self, SocketAddr)> {
        let listener = bind(address)?;
        let bound = listener.local_addr()?;
        Ok((Self { listener, state: self.state.clone(), endpoints: ServerState::admin }, bound))
    }

    /// Serves connections until dropped.
    pub(crate) async fn run(self) {
        let permits = Arc::new(Semaphore::new(CONNECTIONS));
        let mut connections = JoinSet::new();
        loop {
            // The semaphore is never closed.
            let Ok(permit) = permits.clone().acquire_owned().await else { return };
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let state = self.state.clone();
                    let endpoints = self.endpoints;
                    connections.spawn(async move {
                        serve(stream, state, endpoints).await;
                        drop(permit);
                    });
                }
                // File descriptors are exhausted, or the peer has disconnected: an immediate retry would not help.
                Err(_) => sleep(Duration::from_millis(100)).await,
            }
            while connections.try_join_next().is_some() {}
        }
    }
}

async fn serve(stream: TcpStream, state: Arc<ServerState>, endpoints: Endpoints) {
    let service = service_fn(|request| std::future::ready(Ok::<_, Infallible>(endpoints(&state, &request))));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(16 << 10)
        .serve_connection(TokioIo::new(stream), service);
    // A peer that disconnects early, or holds the connection to the deadline, is not an error.
    let _ = timeout(CONNECTION, connection).await;
}

impl ServerState {
    fn probes<B>(&self, request: &Request<B>) -> Response<Full<Bytes>> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return respond(StatusCode::METHOD_NOT_ALLOWED, PLAIN, String::new());
        }
        match request.uri().path() {
            "/healthz" => respond(StatusCode::OK, PLAIN, "ok\n".to_owned()),
            "/readyz" => self.ready(),
            "/metrics" => {
                let age = self.canary_state.canary(Instant::now()).map(|canary| canary.age_seconds);
                let figures = self.core.get().map(Core::figures).unwrap_or_default();
                let objects = self.core.get().map(Core::objects).unwrap_or_default();
                self.metrics.observe(figures, objects, age);
                let openmetrics = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                let broken = || respond(StatusCode::INTERNAL_SERVER_ERROR, PLAIN, String::new());
                self.registry.encode().map_or_else(broken, |text| respond(StatusCode::OK, openmetrics, text))
            }
            _ => respond(StatusCode::NOT_FOUND, PLAIN, String::new()),
        }
    }

    fn admin<B>(&self, request: &Request<B>) -> Response<Full<Bytes>> {
        if !is_local(request) {
            return respond(StatusCode::MISDIRECTED_REQUEST, PLAIN, String::new());
        }
        match (request.method(), request.uri().path()) {
            (&Method::GET, STATUS_PATH) => {
                let status = serde_json::to_string(&self.status()).expect("strings and numbers have a JSON form");
                respond(StatusCode::OK, "application/json", status + "\n")
            }
            (_, STATUS_PATH) => respond(StatusCode::METHOD_NOT_ALLOWED, PLAIN, String::new()),
            _ => respond(StatusCode::NOT_FOUND, PLAIN, String::new()),
        }
    }

    fn status(&self) -> Status {
        let now = Instant::now();
        // A gauge is zero until it is set.
        let set = |seconds: i64| (seconds != 0).then_some(seconds);
        let ago = |at: i64| u64::try_from(clock::unix_seconds() - at).unwrap_or(0);
        let not_after = set(self.metrics.certificate_not_after.get()).and_then(|at| Timestamp::from_second(at).ok());
        let canary_age_seconds = self.canary_state.canary(now).map(|canary| canary.age_seconds);
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pending: self.pending(),
            answered_seconds_ago: set(self.metrics.answered.get()).map(ago),
            canary_age_seconds,
            certificate_not_after: not_after.map(|at| at.to_string()),
            identity: self.identity_status.report(),
            clock_offset_seconds: self.metrics.clock_offset.get(),
            runtime: self.core.get().map(|core| core.snapshot(now, canary_age_seconds)),
        }
    }

    fn pending(&self) -> Vec<String> {
        let watches = self.core.get().map(|core| core.unattempted(NAMED)).unwrap_or_default();
        let watches = watches.into_iter().map(|name| format!("watch {name}"));
        self.readiness.missing().into_iter().map(str::to_owned).chain(watches).collect()
    }

    fn ready(&self) -> Response<Full<Bytes>> {
        let pending = self.pending();
        let (status, text) = if pending.is_empty() {
            (StatusCode::OK, "ready\n".to_owned())
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, format!("pending: {}\n", pending.join(", ")))
        };
        respond(status, PLAIN, text)
    }
}

/// Reports whether `Host` is a loopback address. Protects against DNS rebinding: a web page can send requests under a
/// name of its own, and must not be able to read the responses.
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
    async fn readiness_lists_pending_conditions() {
        let metrics = Metrics::default();
        let readiness = Readiness::default();
        let address = "127.0.0.1:0".parse().unwrap();
        let bound = Server::bind(
            address,
            metrics,
            readiness.clone(),
            Arc::default(),
            CanaryState::default(),
            IdentityStatus::default(),
        )
        .await;
        let state = bound.unwrap().0.state;
        let get = |path: &str| state.probes(&Request::get(path).body(()).unwrap()).status().as_u16();
        let plan = readiness.pending("plan");
        let identity = readiness.pending("identity");
        assert_eq!(readiness.missing(), ["identity", "plan"]);
        drop(plan);
        assert_eq!((get("/readyz"), readiness.missing()), (503, vec!["identity"]));
        drop(identity);
        assert_eq!((get("/readyz"), get("/healthz"), get("/metrics"), get("/")), (200, 200, 200, 404));
        assert_eq!(get("/status"), 404);
    }

    #[tokio::test]
    async fn status_is_served_to_loopback_hosts_only() {
        let local = || "127.0.0.1:0".parse().unwrap();
        let readiness = Readiness::default();
        let _plan = readiness.pending("plan");
        let bound = Server::bind(
            local(),
            Metrics::default(),
            readiness,
            Arc::default(),
            CanaryState::default(),
            IdentityStatus::default(),
        )
        .await;
        let (admin, _) = bound.unwrap().0.admin(local()).await.unwrap();
        let get = |host: &str, path: &str| {
            admin.state.admin(&Request::get(path).header(header::HOST, host).body(()).unwrap())
        };
        for (host, path, expected) in [
            ("127.0.0.1:2113", "/status", 200),
            ("[::1]:2113", "/status", 200),
            ("localhost:2113", "/status", 200),
            ("evil.example:2113", "/status", 421),
            ("localhost.evil.example", "/status", 421),
            ("127.0.0.1:2113", "/metrics", 404),
        ] {
            assert_eq!(get(host, path).status().as_u16(), expected, "{host} {path}");
        }
        let body = get("localhost", "/status").into_body().collect().await.unwrap().to_bytes();
        let status: Status = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            (status.pending, status.runtime, status.answered_seconds_ago),
            (vec!["plan".to_owned()], None, None)
        );
    }
}
