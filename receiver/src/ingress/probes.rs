//! `/metrics`, `/healthz`, `/readyz` over plain HTTP/1.1. One request per connection, few connections, short deadlines.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use thiserror::Error;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::telemetry::{Page, Readiness};

/// Connections: a few scrapers and the kubelet.
const CONNECTIONS: usize = 32;
/// From accept to the last byte of the answer; scrapers give up after ten seconds by default.
const DEADLINE: Duration = Duration::from_secs(10);
/// From accept to the end of the request's head.
const HEAD_DEADLINE: Duration = Duration::from_secs(5);
/// When the system cannot hand over a connection, the next try comes after this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const TEXT: &str = "text/plain; charset=utf-8";
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Why the probes do not listen.
#[derive(Debug, Error)]
#[error("could not listen on {address}")]
pub struct Bind {
    /// Where.
    pub address: SocketAddr,
    source: std::io::Error,
}

/// The server of metrics and probes; it listens and does not serve yet.
pub struct Probes {
    listener: TcpListener,
    address: SocketAddr,
    view: Arc<View>,
}

struct View {
    metrics: Page,
    readiness: Readiness,
}

impl Probes {
    /// Listens; port 0 for any.
    ///
    /// # Errors
    /// [`Bind`].
    pub async fn bind(address: SocketAddr, metrics: Page, readiness: Readiness) -> Result<Self, Bind> {
        let failed = |source| Bind { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address, view: Arc::new(View { metrics, readiness }) })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown`; what is being answered then gets the rest of its deadline.
    pub async fn run(self, shutdown: CancellationToken) {
        let room = Arc::new(Semaphore::new(CONNECTIONS));
        let connections = TaskTracker::new();
        let accept = async {
            loop {
                let Ok(permit) = room.clone().acquire_owned().await else { return };
                let Ok((tcp, _)) = self.listener.accept().await else {
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                };
                let view = self.view.clone();
                connections.spawn(async move {
                    let _permit = permit;
                    // Whatever ends it is the scraper's to notice.
                    let _ = timeout(DEADLINE, serve(tcp, view)).await;
                });
            }
        };
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = accept => {}
        }
        connections.close();
        connections.wait().await;
    }
}

async fn serve(tcp: TcpStream, view: Arc<View>) -> hyper::Result<()> {
    let service = service_fn(move |request: Request<hyper::body::Incoming>| {
        let answer = view.answer(request.method(), request.uri().path());
        async move { Ok::<_, Infallible>(answer) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .keep_alive(false)
        .serve_connection(TokioIo::new(tcp), service)
        .await
}

impl View {
    fn answer(&self, method: &Method, path: &str) -> Response<Full<Bytes>> {
        if !matches!(path, "/metrics" | "/healthz" | "/readyz") {
            return text(StatusCode::NOT_FOUND, TEXT, "not found\n");
        }
        if !matches!(*method, Method::GET | Method::HEAD) {
            let mut answer = text(StatusCode::METHOD_NOT_ALLOWED, TEXT, "method not allowed\n");
            answer.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
            return answer;
        }
        match path {
            "/metrics" => match self.metrics.load().encode() {
                Some(metrics) => text(StatusCode::OK, OPEN_METRICS, metrics),
                None => text(StatusCode::INTERNAL_SERVER_ERROR, TEXT, "the metrics could not be written\n"),
            },
            "/readyz" => match self.readiness.missing() {
                missing if missing.is_empty() => text(StatusCode::OK, TEXT, "ready\n"),
                missing => text(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("not ready: {}\n", missing.join(", "))),
            },
            _ => text(StatusCode::OK, TEXT, "ok\n"),
        }
    }
}

fn text(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer
}

#[cfg(test)]
mod tests {
    use arc_swap::ArcSwap;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::telemetry::Metrics;

    async fn ask(address: SocketAddr, request: &str) -> String {
        let mut tcp = TcpStream::connect(address).await.unwrap();
        tcp.write_all(format!("{request} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        tcp.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn probes_tell_what_is_pending_and_metrics_are_open_metrics() {
        let (readiness, shutdown) = (Readiness::default(), CancellationToken::new());
        let pending = [readiness.pending("kcp caches"), readiness.pending("tls")];
        let metrics = Page::new(ArcSwap::from_pointee(Metrics::new()));
        let probes = Probes::bind("127.0.0.1:0".parse().unwrap(), metrics, readiness).await.unwrap();
        let address = probes.address();
        let served = tokio::spawn(probes.run(shutdown.clone()));

        let answer = ask(address, "GET /readyz").await;
        assert!(answer.starts_with("HTTP/1.1 503 ") && answer.ends_with("not ready: kcp caches, tls\n"), "{answer}");
        drop(pending);
        assert!(ask(address, "GET /readyz").await.starts_with("HTTP/1.1 200 "));
        assert!(ask(address, "GET /healthz").await.ends_with("ok\n"));
        let metrics = ask(address, "GET /metrics").await;
        assert!(metrics.contains("tidewatch_build_info{") && metrics.ends_with("# EOF\n"), "{metrics}");
        assert!(metrics.contains(OPEN_METRICS));
        assert!(ask(address, "GET /other").await.starts_with("HTTP/1.1 404 "));
        let refused = ask(address, "POST /readyz").await;
        assert!(refused.starts_with("HTTP/1.1 405 ") && refused.contains("allow: GET, HEAD"), "{refused}");

        shutdown.cancel();
        served.await.unwrap();
    }
}
