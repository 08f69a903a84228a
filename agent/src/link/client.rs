//! HTTP client with one connection and one identity: signs requests and bounds their time.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderName, Method, Request, header};
use tidewatch_shared::{
    signature::{CONTENT_DIGEST, Headers, Message, Nonce, SIGNATURE, SIGNATURE_INPUT, SignError},
    v2,
};
use tokio::time::timeout;

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
    credentials: Arc<Credentials>,
    http: Connection,
}

impl Client {
    /// A client that is not connected yet.
    pub(super) fn new(dial: &Dialer, credentials: Arc<Credentials>) -> Self {
        let http = dial.client(credentials.tls.clone());
        Self { credentials, http }
    }

    /// A client of the same identity with a connection of its own.
    pub(super) fn reconnected(&self, dial: &Dialer) -> Self {
        Self::new(dial, self.credentials.clone())
    }

    /// The identity of this client.
    pub(super) fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// Signs a request at `now`, in Unix seconds, sends it and reads the response.
    pub(super) async fn post(&self, post: PostRequest, now: i64) -> Result<BufferedResponse, RequestError> {
        let PostRequest { path, content_type, body, nonce } = post;
        let message = Message { method: "POST", authority: self.credentials.receiver.authority(), path, content_type };
        let signer = self.credentials.signer.as_ref().ok_or(SignError::Key)?;
        let signed = signer.sign(&message, &body, nonce, now)?;
        let Headers { content_digest, signature_input, signature } = signed;
        let request = Request::builder()
            .method(Method::POST)
            .uri(self.credentials.receiver.uri(path)?)
            .header(header::CONTENT_TYPE, content_type)
            .header(const { HeaderName::from_static(CONTENT_DIGEST) }, content_digest)
            .header(const { HeaderName::from_static(SIGNATURE_INPUT) }, signature_input)
            .header(const { HeaderName::from_static(SIGNATURE) }, signature)
            .body(body)?;
        timeout(DEADLINE, exchange(&self.http, request)).await.map_err(|_| RequestError::Deadline)?
    }

    /// Sends an unsigned request of contract v2 and reads the response.
    pub(super) async fn post_plain(&self, path: &str, body: Bytes) -> Result<BufferedResponse, RequestError> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(self.credentials.receiver.uri(path)?)
            .header(header::CONTENT_TYPE, v2::CONTENT_TYPE)
            .body(body)?;
        timeout(DEADLINE, exchange(&self.http, request)).await.map_err(|_| RequestError::Deadline)?
    }
}
