//! HTTP client with one connection and one identity: signs requests and bounds their time.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderName, Method, Request, header, request::Builder};
use tidewatch_contract::signature::{CONTENT_DIGEST, Headers, Message, Nonce, SIGNATURE, SIGNATURE_INPUT};
use tokio::time::Instant;

use super::Credentials;
use crate::{
    clock,
    connection::Connection,
    receiver::{BufferedResponse, Dialer, RequestError, exchange},
    telemetry::{Metrics, RequestOutcome, Route},
};

/// Deadline of a request and its response, connecting included.
const DEADLINE: Duration = Duration::from_secs(15);

/// A request to sign and send.
#[derive(Debug)]
pub(crate) struct PostRequest {
    pub(crate) path: &'static str,
    pub(crate) content_type: &'static str,
    pub(crate) body: Bytes,
    pub(crate) nonce: Nonce,
}

/// Client that lives as long as its credentials, so connection and signatures always name the same certificate.
pub(crate) struct Client {
    pub(crate) credentials: Arc<Credentials>,
    http: Connection,
}

impl Client {
    /// A client that is not connected yet.
    pub(crate) fn new(dial: &Dialer, credentials: Arc<Credentials>) -> Self {
        let http = dial.client(credentials.tls.clone());
        Self { credentials, http }
    }

    /// Signs a request at the receiver's time as far as it is known, sends it, reads the response, and records the outcome.
    pub(crate) async fn post(
        &self,
        metrics: &Metrics,
        route: Route,
        post: PostRequest,
    ) -> Result<BufferedResponse, RequestError> {
        let begun = Instant::now();
        let response = self.exchange(post, clock::unix_seconds() + metrics.clock_offset.get()).await;
        metrics.requested(route, RequestOutcome::of(&response), begun.elapsed());
        response
    }

    async fn exchange(&self, post: PostRequest, now: i64) -> Result<BufferedResponse, RequestError> {
        let PostRequest { path, content_type, body, nonce } = post;
        let message = Message { method: "POST", authority: self.credentials.receiver.authority(), path, content_type };
        let signed = self.credentials.signer.sign(&message, &body, nonce, now)?;
        let Headers { content_digest, signature_input, signature } = signed;
        let request = self
            .request(path, content_type)?
            .header(const { HeaderName::from_static(CONTENT_DIGEST) }, content_digest)
            .header(const { HeaderName::from_static(SIGNATURE_INPUT) }, signature_input)
            .header(const { HeaderName::from_static(SIGNATURE) }, signature)
            .body(body)?;
        exchange(&self.http, request, DEADLINE).await
    }

    /// Completes when the connection has ended without an announcement; see [`Connection::lost`].
    pub(crate) async fn lost(&self) {
        self.http.lost().await;
    }

    fn request(&self, path: &str, content_type: &str) -> Result<Builder, http::Error> {
        let uri = self.credentials.receiver.uri(path)?;
        Ok(Request::builder().method(Method::POST).uri(uri).header(header::CONTENT_TYPE, content_type))
    }
}

/// Stores the offset of the receiver's clock, by which signatures and the validity of certificates are judged, in the metric.
pub(crate) fn correct_clock(metrics: &Metrics, offset: i64) {
    tracing::warn!(offset, "Correcting the clock for signatures");
    metrics.clock_offset.set(offset);
}
