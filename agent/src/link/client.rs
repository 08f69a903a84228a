//! The HTTP client: one connection with one identity, signed requests, a deadline, and a limit on what is read.

use std::{error::Error as StdError, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Error as HyperError;
use thiserror::Error;
use tidewatch_shared::{
    signature::{CONTENT_DIGEST, Headers, Message, Nonce, SIGNATURE, SIGNATURE_INPUT, Sign},
    v2,
};
use tokio::time::timeout;

use super::{
    Endpoint,
    dial::{Dial, Exchange},
};
use crate::identity::Credentials;

/// For a request and its whole answer, connecting included.
const DEADLINE: Duration = Duration::from_secs(15);
/// Bytes of an answer: a settled mark for each of 500 watches with the longest names stays below.
const ANSWER_BYTES: usize = 256 << 10;

/// Why there is no answer.
#[derive(Debug, Error)]
pub(super) enum Fault {
    #[error("the request could not be signed")]
    Sign(#[from] Sign),
    #[error("the request could not be written")]
    Request(#[from] http::Error),
    #[error("the receiver could not be reached")]
    Send(#[source] HyperError),
    #[error("the receiver's answer broke off or is too large")]
    Body(#[source] Box<dyn StdError + Send + Sync>),
    #[error("the receiver did not answer in time")]
    Deadline,
    #[error("the receiver's answer is not readable")]
    Unreadable(#[source] serde_json::Error),
}

impl Fault {
    /// There was no connection.
    pub(super) fn is_connect(&self) -> bool {
        matches!(self, Self::Send(error) if error.is_connect())
    }
}

/// A request to send.
#[derive(Debug)]
pub(super) struct Post {
    pub(super) path: &'static str,
    pub(super) content_type: &'static str,
    pub(super) body: Bytes,
    pub(super) nonce: Nonce,
}

/// An answer, read whole.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

/// Lives as long as its credentials do: connection and signatures never name two certificates.
pub(super) struct Client {
    endpoint: Endpoint,
    credentials: Arc<Credentials>,
    http: Exchange,
}

impl Client {
    /// Nothing is connected yet.
    pub(super) fn new(endpoint: &Endpoint, dial: &Dial, credentials: Arc<Credentials>) -> Self {
        let http = dial.client(credentials.tls.clone());
        Self { endpoint: endpoint.clone(), credentials, http }
    }

    /// As whom it speaks.
    pub(super) fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// Signs a request at a time in Unix seconds, sends it and reads the answer.
    pub(super) async fn post(&self, post: Post, now: i64) -> Result<Answer, Fault> {
        let Post { path, content_type, body, nonce } = post;
        let message = Message { method: "POST", authority: self.endpoint.authority(), path, content_type };
        let signer = self.credentials.signer.as_ref().ok_or(Sign::Key)?;
        let signed = signer.sign(&message, &body, nonce, now)?;
        let Headers { content_digest, signature_input, signature } = signed;
        let request = Request::builder()
            .method(Method::POST)
            .uri(self.endpoint.uri(path)?)
            .header(header::CONTENT_TYPE, content_type)
            .header(CONTENT_DIGEST, content_digest)
            .header(SIGNATURE_INPUT, signature_input)
            .header(SIGNATURE, signature)
            .body(Full::new(body))?;
        timeout(DEADLINE, self.exchange(request)).await.map_err(|_| Fault::Deadline)?
    }

    /// Sends a request of contract v2, which nothing signs, and reads the answer.
    pub(super) async fn post_plain(&self, path: &str, body: Bytes) -> Result<Answer, Fault> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(self.endpoint.uri(path)?)
            .header(header::CONTENT_TYPE, v2::CONTENT_TYPE)
            .body(Full::new(body))?;
        timeout(DEADLINE, self.exchange(request)).await.map_err(|_| Fault::Deadline)?
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Answer, Fault> {
        let (head, body) = (self.http)(request).await.map_err(Fault::Send)?.into_parts();
        let body = Limited::new(body, ANSWER_BYTES).collect().await.map_err(Fault::Body)?.to_bytes();
        Ok(Answer { status: head.status, headers: head.headers, body })
    }
}
