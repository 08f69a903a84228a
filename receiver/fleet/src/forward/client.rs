//! HTTP client for the managers' services.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use rustls_pki_types::CertificateDer;
use tidewatch_contract::{
    forwarded::FORWARDED_CLIENT_CERT,
    v2::{CONTENT_TYPE, Event, forwarded_header},
};
use tokio::time::timeout;

use super::{DeliveryOutcome, Target, UrlTemplate};

/// Limit from name resolution to the established connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Limit from the start of a request to the head of its response, connection setup included.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit of reading a response's body.
const BODY_TIMEOUT: Duration = Duration::from_secs(1);
/// Lifetime of an idle pooled connection.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of a response body that are read and discarded so that the connection can be reused.
const MAX_RESPONSE_BYTES: usize = 16 << 10;

/// Sends events in contract v2 over plain HTTP, as lifecycle-manager's listeners behind their mesh expect them. Clones
/// share connections.
#[derive(Clone)]
pub struct Client {
    http: legacy::Client<HttpConnector, Full<Bytes>>,
    template: Arc<UrlTemplate>,
}

impl Client {
    /// Creates a client that resolves services with this template.
    pub fn new(template: UrlTemplate) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_nodelay(true);
        let http = legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(POOL_IDLE_TIMEOUT)
            .pool_max_idle_per_host(4)
            .build(connector);
        Self { http, template: Arc::new(template) }
    }

    /// Sends one event with the certificate of its runtime.
    pub async fn send(&self, target: &Target, leaf: &CertificateDer<'_>, event: &Event) -> DeliveryOutcome {
        let Some(request) = self.request(target, leaf, event) else { return DeliveryOutcome::Failed(None) };
        let Ok(Ok(response)) = timeout(REQUEST_TIMEOUT, self.http.request(request)).await else {
            return DeliveryOutcome::Failed(None);
        };
        let status = response.status();
        let retry_after = retry_after(&response);
        // Draining the body makes the connection reusable. The status is the result, with or without it.
        let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES);
        let _ = timeout(BODY_TIMEOUT, body.collect()).await;
        classify(status, retry_after)
    }

    fn request(&self, target: &Target, leaf: &CertificateDer<'_>, event: &Event) -> Option<Request<Full<Bytes>>> {
        let url = self.template.url(target).ok()?;
        let mut forwarded = HeaderValue::try_from(forwarded_header(leaf)).ok()?;
        // Sensitive headers stay out of the connection's header compression table.
        forwarded.set_sensitive(true);
        Request::post(url)
            .header(header::CONTENT_TYPE, CONTENT_TYPE)
            .header(FORWARDED_CLIENT_CERT, forwarded)
            .body(Full::new(Bytes::from(event.to_body())))
            .ok()
    }
}

fn classify(status: StatusCode, retry_after: Option<Duration>) -> DeliveryOutcome {
    match status {
        status if status.is_success() => DeliveryOutcome::Delivered,
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => DeliveryOutcome::Failed(retry_after),
        status if status.is_client_error() || status.is_redirection() => DeliveryOutcome::Refused(status.as_u16()),
        _ => DeliveryOutcome::Failed(retry_after),
    }
}

/// Reads `Retry-After` in seconds (RFC 9110, section 10.2.3); the date form is ignored.
fn retry_after(response: &Response<Incoming>) -> Option<Duration> {
    response.headers().get(header::RETRY_AFTER)?.to_str().ok()?.parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;
    use crate::forward::Service;

    #[tokio::test]
    async fn status_counts_although_the_body_does_not_end() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = tokio::spawn(async move {
            let (mut connection, _) = listener.accept().await.unwrap();
            let mut request = [0; 4_096];
            let _ = connection.read(&mut request).await.unwrap();
            connection.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n").await.unwrap();
            // The client ends the connection.
            while connection.read(&mut request).await.is_ok_and(|read| read > 0) {}
        });
        let template = "http://127.0.0.1:{port}".parse().unwrap();
        let target = Target::new("m", Service::new("s", "n", port).unwrap()).unwrap();
        let outcome = Client::new(template).send(&target, &vec![0x30].into(), &Event::default()).await;
        assert_eq!(outcome, DeliveryOutcome::Delivered);
        server.await.unwrap();
    }

    #[test]
    fn retryable_statuses_are_distinguished_from_refusals() {
        let retry_after = Some(Duration::from_secs(7));
        for (status, outcome) in [
            (200, DeliveryOutcome::Delivered),
            (204, DeliveryOutcome::Delivered),
            (302, DeliveryOutcome::Refused(302)),
            (400, DeliveryOutcome::Refused(400)),
            (401, DeliveryOutcome::Refused(401)),
            (404, DeliveryOutcome::Refused(404)),
            (408, DeliveryOutcome::Failed(retry_after)),
            (429, DeliveryOutcome::Failed(retry_after)),
            (500, DeliveryOutcome::Failed(retry_after)),
            (503, DeliveryOutcome::Failed(retry_after)),
        ] {
            assert_eq!(classify(StatusCode::from_u16(status).unwrap(), retry_after), outcome, "{status}");
        }
    }
}
