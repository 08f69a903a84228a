//! `/metrics`, `/healthz` and `/readyz` over plain HTTP. The probes can have a listener of their own, so that no number of
//! scrapers keeps the kubelet from them.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{Method, StatusCode};
use tidewatch_kit::{metrics::Registry, readiness::Readiness};
use tokio::{
    sync::Mutex,
    task::spawn_blocking,
    time::{Instant, sleep_until},
};

use crate::http::{HttpResponse, HttpServer, Limits, ListenError, TEXT, method_not_allowed, with_body};

/// Enough for a few scrapers and the kubelet; Prometheus gives up a scrape after 10 s by default.
const LIMITS: Limits = Limits { connections: 32, deadline: Duration::from_secs(10) };
/// Part of one core's time that the encoding of metrics may take: a fleet of thousands has hundreds of thousands of
/// series.
const ENCODING_SHARE: u32 = 10;
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Registry that `/metrics` serves: first that of a candidate, later that of the active receiver.
pub type MetricsPage = Arc<ArcSwap<Registry>>;

/// Creates the registry of a process, with `tidewatch_build_info`. All metrics are registered at start; afterwards it is only read.
pub fn registry() -> Registry {
    let mut registry = Registry::default();
    registry.sub_registry_with_prefix("tidewatch").register_build_info(env!("CARGO_PKG_VERSION"));
    registry
}

#[derive(Clone)]
struct State {
    /// `None` where only the probes are served.
    metrics: Option<Arc<MetricsText>>,
    readiness: Readiness,
}

/// Binds the server of metrics and probes, with port 0 to any free port.
///
/// # Errors
/// [`ListenError`].
pub async fn bind(address: SocketAddr, metrics: MetricsPage, readiness: Readiness) -> Result<HttpServer, ListenError> {
    let metrics = MetricsText { page: metrics, last: Mutex::default() };
    serve(address, State { metrics: Some(metrics.into()), readiness }).await
}

/// Binds a server of the probes alone.
///
/// # Errors
/// [`ListenError`].
pub async fn bind_probes(address: SocketAddr, readiness: Readiness) -> Result<HttpServer, ListenError> {
    serve(address, State { metrics: None, readiness }).await
}

async fn serve(address: SocketAddr, state: State) -> Result<HttpServer, ListenError> {
    HttpServer::bind(address, LIMITS, None, move |request| {
        let state = state.clone();
        let method = request.method().clone();
        let path = request.uri().path().to_owned();
        async move { state.respond(&method, &path).await }
    })
    .await
}

/// Text of the metrics. Concurrent requests share one encoding, which began after each of them arrived; readers that
/// do not read hold no copy of their own.
struct MetricsText {
    page: MetricsPage,
    last: Mutex<Option<Encoding>>,
}

struct Encoding {
    began: Instant,
    ended: Instant,
    text: Bytes,
}

impl MetricsText {
    /// Encodes the metrics on a thread for blocking work, or shares an encoding; `None` if they cannot be encoded.
    async fn encode(&self) -> Option<Bytes> {
        let arrived = Instant::now();
        let mut last = self.last.lock().await;
        if let Some(Encoding { began, ended, text }) = &*last {
            if *began >= arrived {
                return Some(text.clone());
            }
            sleep_until(*ended + (*ended - *began) * (ENCODING_SHARE - 1)).await;
        }
        let metrics = self.page.load_full();
        let began = Instant::now();
        let text = Bytes::from(spawn_blocking(move || metrics.encode()).await.ok()??);
        *last = Some(Encoding { began, ended: Instant::now(), text: text.clone() });
        Some(text)
    }
}

impl State {
    async fn respond(&self, method: &Method, path: &str) -> HttpResponse {
        let metrics = self.metrics.as_ref().filter(|_| path == "/metrics");
        if metrics.is_none() && !matches!(path, "/healthz" | "/readyz") {
            return with_body(StatusCode::NOT_FOUND, TEXT, "not found\n");
        }
        if !matches!(*method, Method::GET | Method::HEAD) {
            return method_not_allowed("GET, HEAD");
        }
        match (metrics, path) {
            (Some(metrics), _) => match metrics.encode().await {
                Some(metrics) => with_body(StatusCode::OK, OPEN_METRICS, metrics),
                None => with_body(StatusCode::INTERNAL_SERVER_ERROR, TEXT, "could not encode the metrics\n"),
            },
            (None, "/readyz") => match self.readiness.missing() {
                missing if missing.is_empty() => with_body(StatusCode::OK, TEXT, "ready\n"),
                missing => {
                    with_body(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("not ready: {}\n", missing.join(", ")))
                }
            },
            (None, _) => with_body(StatusCode::OK, TEXT, "ok\n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };
    use tokio_util::sync::CancellationToken;

    use super::*;

    async fn send(address: SocketAddr, request: &str) -> String {
        let mut tcp = TcpStream::connect(address).await.unwrap();
        tcp.write_all(format!("{request} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await.unwrap();
        let mut response = String::new();
        tcp.read_to_string(&mut response).await.unwrap();
        response
    }

    #[tokio::test]
    async fn readiness_lists_pending_conditions_and_metrics_are_in_open_metrics_format() {
        let readiness = Readiness::default();
        let shutdown = CancellationToken::new();
        let pending = [readiness.pending("kcp caches"), readiness.pending("tls")];
        let metrics = MetricsPage::new(ArcSwap::from_pointee(registry()));
        let probes = bind("127.0.0.1:0".parse().unwrap(), metrics, readiness).await.unwrap();
        let address = probes.address();
        let served = tokio::spawn(probes.run(shutdown.clone()));

        let response = send(address, "GET /readyz").await;
        assert!(
            response.starts_with("HTTP/1.1 503 ") && response.ends_with("not ready: kcp caches, tls\n"),
            "{response}"
        );
        drop(pending);
        assert!(send(address, "GET /readyz").await.starts_with("HTTP/1.1 200 "));
        assert!(send(address, "GET /healthz").await.ends_with("ok\n"));
        let metrics = send(address, "GET /metrics").await;
        assert!(metrics.contains("tidewatch_build_info{") && metrics.ends_with("# EOF\n"), "{metrics}");
        assert!(metrics.contains(OPEN_METRICS));
        assert!(send(address, "GET /other").await.starts_with("HTTP/1.1 404 "));
        let refused = send(address, "POST /readyz").await;
        assert!(refused.starts_with("HTTP/1.1 405 ") && refused.contains("allow: GET, HEAD"), "{refused}");

        shutdown.cancel();
        served.await.unwrap();
    }

    #[tokio::test]
    async fn listener_of_the_probes_serves_no_metrics_and_is_reached_while_scrapers_hold_the_other() {
        let readiness = Readiness::default();
        let shutdown = CancellationToken::new();
        let metrics = MetricsPage::new(ArcSwap::from_pointee(registry()));
        let any = "127.0.0.1:0".parse().unwrap();
        let page = bind(any, metrics, readiness.clone()).await.unwrap();
        let probes = bind_probes(any, readiness).await.unwrap();
        let page_address = page.address();
        let address = probes.address();
        let served = [page, probes].map(|server| tokio::spawn(server.run(shutdown.clone())));
        let mut silent = Vec::new();
        for _ in 0..LIMITS.connections {
            silent.push(TcpStream::connect(page_address).await.unwrap());
        }
        assert!(send(address, "GET /healthz").await.ends_with("ok\n"));
        assert!(send(address, "GET /metrics").await.starts_with("HTTP/1.1 404 "));
        drop(silent);
        shutdown.cancel();
        for served in served {
            served.await.unwrap();
        }
    }

    #[tokio::test]
    async fn concurrent_scrapes_share_an_encoding_that_began_after_they_arrived() {
        let page = MetricsPage::new(ArcSwap::from_pointee(registry()));
        let metrics = MetricsText { page, last: Mutex::default() };
        let texts = futures::future::join_all((0..100).map(|_| metrics.encode())).await;
        let distinct: std::collections::HashSet<_> = texts.iter().map(|text| text.as_ref().unwrap().as_ptr()).collect();
        assert!(distinct.len() <= 2, "{}", distinct.len());
        let before = Instant::now();
        metrics.encode().await.unwrap();
        assert!(metrics.last.lock().await.as_ref().unwrap().began >= before, "never older than its request");
    }
}
