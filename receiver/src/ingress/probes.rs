//! `/metrics`, `/healthz` and `/readyz` over plain HTTP.

use std::{future, net::SocketAddr, time::Duration};

use http::{Method, StatusCode};

use crate::{
    ingress::http::{HttpResponse, HttpServer, Limits, ListenError, TEXT, method_not_allowed, with_body},
    telemetry::{MetricsPage, Readiness},
};

/// Enough for a few scrapers and the kubelet; Prometheus gives up a scrape after 10 s by default.
const LIMITS: Limits = Limits { connections: 32, deadline: Duration::from_secs(10) };
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

struct State {
    metrics: MetricsPage,
    readiness: Readiness,
}

/// Binds the server of metrics and probes, with port 0 to any free port.
///
/// # Errors
/// [`ListenError`].
pub async fn bind(address: SocketAddr, metrics: MetricsPage, readiness: Readiness) -> Result<HttpServer, ListenError> {
    let state = State { metrics, readiness };
    HttpServer::bind(address, LIMITS, None, move |request| {
        future::ready(state.respond(request.method(), request.uri().path()))
    })
    .await
}

impl State {
    fn respond(&self, method: &Method, path: &str) -> HttpResponse {
        if !matches!(path, "/metrics" | "/healthz" | "/readyz") {
            return with_body(StatusCode::NOT_FOUND, TEXT, "not found\n");
        }
        if !matches!(*method, Method::GET | Method::HEAD) {
            return method_not_allowed("GET, HEAD");
        }
        match path {
            "/metrics" => match self.metrics.load().encode() {
                Some(metrics) => with_body(StatusCode::OK, OPEN_METRICS, metrics),
                None => with_body(StatusCode::INTERNAL_SERVER_ERROR, TEXT, "could not encode the metrics\n"),
            },
            "/readyz" => match self.readiness.missing() {
                missing if missing.is_empty() => with_body(StatusCode::OK, TEXT, "ready\n"),
                missing => {
                    with_body(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("not ready: {}\n", missing.join(", ")))
                }
            },
            _ => with_body(StatusCode::OK, TEXT, "ok\n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use arc_swap::ArcSwap;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::telemetry::Metrics;

    async fn send(address: SocketAddr, request: &str) -> String {
        let mut tcp = TcpStream::connect(address).await.unwrap();
        tcp.write_all(format!("{request} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await.unwrap();
        let mut response = String::new();
        tcp.read_to_string(&mut response).await.unwrap();
        response
    }

    #[tokio::test]
    async fn readiness_lists_pending_conditions_and_metrics_are_in_open_metrics_format() {
        let (readiness, shutdown) = (Readiness::default(), CancellationToken::new());
        let pending = [readiness.pending("kcp caches"), readiness.pending("tls")];
        let metrics = MetricsPage::new(ArcSwap::from_pointee(Metrics::new()));
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
}
