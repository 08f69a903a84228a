//! HTTP client with one connection and one identity: signs requests and bounds their time.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderName, Method, Request, header, request::Builder};
use tidewatch_contract::signature::{CONTENT_DIGEST, Headers, Message, Nonce, SIGNATURE, SIGNATURE_INPUT};

use crate::{
    connection::Connection,
    identity::Credentials,
    receiver::{BufferedResponse, Dialer, RequestError, exchange},
};

/// Deadline of a request and its response, connecting included.
const DEADLINE: Duration = Duration::from_secs(15);

/// A request to sign and send.
#[derive(Debug)]
pub(super) struct PostRequest {
    pub(super) path: &'static str,
    pub(super) content_type: &'static str,
    pub(super) body: Bytes,
    pub(super) nonce: Nonce,
}

/// Client that lives as long as its credentials, so connection and signatures always name the same certificate.
pub(super) struct Client {
    pub(super) credentials: Arc<Credentials>,
    http: Connection,
}

impl Client {
    /// A client that is not connected yet.
    pub(super) fn new(dial: &Dialer, credentials: Arc<Credentials>) -> Self {
        let http = dial.client(credentials.tls.clone());
        Self { credentials, http }
    }

    /// Signs a request at `now`, in Unix seconds, sends it and reads the response.
    pub(super) async fn post(&self, post: PostRequest, now: i64) -> Result<BufferedResponse, RequestError> {
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
    pub(super) async fn lost(&self) {
        self.http.lost().await;
    }

    fn request(&self, path: &str, content_type: &str) -> Result<Builder, http::Error> {
        let uri = self.credentials.receiver.uri(path)?;
        Ok(Request::builder().method(Method::POST).uri(uri).header(header::CONTENT_TYPE, content_type))
    }
}
