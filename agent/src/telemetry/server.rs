//! Metrics and probes on a port of their own: `/metrics`, `/healthz`, `/readyz`.

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
use prometheus_client::registry::Registry;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::{Metrics, Readiness, metrics::text};
use crate::{canary::Sightings, core::Core};

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
}

/// What is shown.
struct View {
    registry: Registry,
    metrics: Metrics,
    readiness: Readiness,
    /// Empty until an identity tells which runtime this is.
    core: Arc<OnceLock<Core>>,
    sightings: Sightings,
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
    ) -> io::Result<(Self, SocketAddr)> {
        let listener = TcpListener::bind(address).await?;
        let bound = listener.local_addr()?;
        let mut registry = Registry::with_prefix("tidewatch_agent");
        metrics.register(&mut registry);
        let view = Arc::new(View { registry, metrics, readiness, core, sightings });
        Ok((Self { listener, view }, bound))
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
                    let view = self.view.clone();
                    connections.spawn(async move {
                        serve(stream, view).await;
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

async fn serve(stream: TcpStream, view: Arc<View>) {
    let service = service_fn(|request| std::future::ready(Ok::<_, Infallible>(view.answer(&request))));
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
                self.metrics.observe(figures, age);
                let openmetrics = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                let broken = || respond(StatusCode::INTERNAL_SERVER_ERROR, plain, String::new());
                text(&self.registry).map_or_else(broken, |text| respond(StatusCode::OK, openmetrics, text))
            }
            _ => respond(StatusCode::NOT_FOUND, plain, String::new()),
        }
    }

    fn ready(&self) -> Response<Full<Bytes>> {
        let watches =
            self.core.get().map(|core| core.untried(NAMED)).into_iter().flatten().map(|name| format!("watch {name}"));
        let pending: Vec<String> = self.readiness.pending().into_iter().map(str::to_owned).chain(watches).collect();
        let (status, text) = if pending.is_empty() {
            (StatusCode::OK, "ready\n".to_owned())
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, format!("pending: {}\n", pending.join(", ")))
        };
        respond(status, "text/plain; charset=utf-8", text)
    }
}

fn respond(status: StatusCode, content_type: &'static str, text: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn readiness_says_what_is_pending() {
        let (metrics, readiness) = (Metrics::default(), Readiness::default());
        let address = "127.0.0.1:0".parse().unwrap();
        let bound = Server::bind(address, metrics, readiness.clone(), Arc::default(), Sightings::default()).await;
        let view = bound.unwrap().0.view;
        let get = |path: &str| view.answer(&Request::get(path).body(()).unwrap()).status().as_u16();
        let (plan, identity) = (readiness.guard("plan"), readiness.guard("identity"));
        assert_eq!(readiness.pending(), ["identity", "plan"]);
        drop(plan);
        assert_eq!((get("/readyz"), readiness.pending()), (503, vec!["identity"]));
        drop(identity);
        assert_eq!((get("/readyz"), get("/healthz"), get("/metrics"), get("/")), (200, 200, 200, 404));
    }
}
