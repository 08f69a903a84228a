//! One request to a manager.

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
use tidewatch_shared::{
    forwarded::FORWARDED_CLIENT_CERT,
    v2::{CONTENT_TYPE, Event, forward},
};
use tokio::time::timeout;

use super::{Outcome, Target, UrlTemplate};

/// From the name to the connection.
const CONNECT: Duration = Duration::from_secs(3);
/// From the first byte to the whole answer.
const DEADLINE: Duration = Duration::from_secs(10);
/// Connections that wait for the next request are kept for so long.
const IDLE: Duration = Duration::from_secs(60);
/// Bytes of an answer that are read so that the connection can be used again; nobody looks at them.
const ANSWER: usize = 16 << 10;

/// Sends events in contract v2, in plain HTTP, as the incumbent's listeners behind their mesh take them. Clones share connections.
#[derive(Clone)]
pub struct Client {
    http: legacy::Client<HttpConnector, Full<Bytes>>,
    template: Arc<UrlTemplate>,
}

impl Client {
    /// A client that finds services by this template.
    #[must_use]
    pub fn new(template: UrlTemplate) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT));
        connector.set_nodelay(true);
        let http = legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(4)
            .build(connector);
        Self { http, template: Arc::new(template) }
    }

    /// Sends one event with the certificate of the runtime that it is from.
    pub async fn send(&self, target: &Target, leaf: &CertificateDer<'_>, event: &Event) -> Outcome {
        let Some(request) = self.request(target, leaf, event) else { return Outcome::Failed(None) };
        let exchange = async {
            let answer = self.http.request(request).await.ok()?;
            let (status, wait) = (answer.status(), retry_after(&answer));
            // Only so that the connection can be used again.
            let _ = Limited::new(answer.into_body(), ANSWER).collect().await;
            Some(judge(status, wait))
        };
        timeout(DEADLINE, exchange).await.ok().flatten().unwrap_or(Outcome::Failed(None))
    }

    fn request(&self, target: &Target, leaf: &CertificateDer<'_>, event: &Event) -> Option<Request<Full<Bytes>>> {
        let url = self.template.url(target).ok()?;
        let mut forwarded = HeaderValue::try_from(forward(leaf)).ok()?;
        // It would fill tables that are kept per connection.
        forwarded.set_sensitive(true);
        Request::post(url)
            .header(header::CONTENT_TYPE, CONTENT_TYPE)
            .header(FORWARDED_CLIENT_CERT, forwarded)
            .body(Full::new(Bytes::from(event.to_body())))
            .ok()
    }
}

fn judge(status: StatusCode, wait: Option<Duration>) -> Outcome {
    match status {
        status if status.is_success() => Outcome::Delivered,
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => Outcome::Failed(wait),
        status if status.is_client_error() || status.is_redirection() => Outcome::Refused(status.as_u16()),
        _ => Outcome::Failed(wait),
    }
}

/// In seconds; the form with a date is not worth a calendar.
fn retry_after(answer: &Response<Incoming>) -> Option<Duration> {
    answer.headers().get(header::RETRY_AFTER)?.to_str().ok()?.parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_succeed_later_is_told_from_what_is_refused() {
        let wait = Some(Duration::from_secs(7));
        for (status, outcome) in [
            (200, Outcome::Delivered),
            (204, Outcome::Delivered),
            (302, Outcome::Refused(302)),
            (400, Outcome::Refused(400)),
            (401, Outcome::Refused(401)),
            (404, Outcome::Refused(404)),
            (408, Outcome::Failed(wait)),
            (429, Outcome::Failed(wait)),
            (500, Outcome::Failed(wait)),
            (503, Outcome::Failed(wait)),
        ] {
            assert_eq!(judge(StatusCode::from_u16(status).unwrap(), wait), outcome, "{status}");
        }
    }
}
