//! The HTTP client: one connection with one identity, signed requests, a deadline, and a limit on what is read.

use std::{error::Error as StdError, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use rustls::ClientConfig;
use thiserror::Error;
use tidewatch_shared::{
    enrolment,
    signature::{CONTENT_DIGEST, Headers, Message, Nonce, SIGNATURE, SIGNATURE_INPUT, Sign},
    v2,
};
use tokio::time::timeout;

use super::{Dial, Endpoint};
use crate::{
    connection::{BoxError, Connection, Speak},
    identity::Credentials,
};

/// For a request and its whole answer, connecting included.
const DEADLINE: Duration = Duration::from_secs(15);
/// The same for a certificate that is asked for with a token: the receiver asks this runtime's own API server meanwhile.
const ENROLMENT_DEADLINE: Duration = Duration::from_secs(30);
/// Bytes of an answer: a settled mark for each of 500 watches with the longest names stays below.
const ANSWER_BYTES: usize = 256 << 10;
/// What rustls says of an alert, and the alerts that are about our certificate; `DecryptError` is what is said of one that another CA of
/// the same name has signed. HTTP/2 passes on only the words.
const ALERT: &str = "received fatal alert: ";
const ABOUT_CERTIFICATES: &[&str] = &[
    "BadCertificate",
    "UnsupportedCertificate",
    "CertificateRevoked",
    "CertificateExpired",
    "CertificateUnknown",
    "UnknownCA",
    "AccessDenied",
    "DecryptError",
];

/// Why there is no answer.
#[derive(Debug, Error)]
pub(crate) enum Fault {
    #[error("the request could not be signed")]
    Sign(#[from] Sign),
    #[error("the request could not be written")]
    Request(#[from] http::Error),
    #[error("the receiver could not be reached")]
    Send(#[source] Speak),
    #[error("the receiver's answer broke off or is too large")]
    Body(#[source] BoxError),
    #[error("the receiver did not answer in time")]
    Deadline,
    #[error("the receiver's answer is not readable")]
    Unreadable(#[source] serde_json::Error),
}

impl Fault {
    /// There was no connection.
    pub(crate) fn is_connect(&self) -> bool {
        matches!(self, Self::Send(Speak::Open(_)))
    }

    /// The other side has ended the handshake because of our certificate.
    pub(crate) fn is_about_certificate(&self) -> bool {
        let mut cause = self.source();
        while let Some(error) = cause {
            let text = error.to_string();
            if text
                .split_once(ALERT)
                .is_some_and(|(_, alert)| ABOUT_CERTIFICATES.iter().any(|known| alert.starts_with(known)))
            {
                return true;
            }
            cause = error.source();
        }
        false
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
pub struct Answer {
    /// Of the answer.
    pub status: StatusCode,
    /// All of them.
    pub headers: HeaderMap,
    /// Whole.
    pub body: Bytes,
}

/// Lives as long as its credentials do: connection and signatures never name two certificates.
pub(super) struct Client {
    credentials: Arc<Credentials>,
    http: Connection,
}

/// Asks for a certificate with the value of `Authorization`, on a connection of its own that shows no certificate. Nothing is sent
/// to whoever the configuration does not trust.
pub(crate) async fn enrol(
    dial: &Dial,
    tls: ClientConfig,
    endpoint: &Endpoint,
    authorization: HeaderValue,
    body: Bytes,
) -> Result<Answer, Fault> {
    let request = Request::builder()
        .method(Method::POST)
        .uri(endpoint.uri(enrolment::CERTIFICATES_PATH)?)
        .header(header::CONTENT_TYPE, enrolment::CONTENT_TYPE)
        .header(header::AUTHORIZATION, authorization)
        .body(body)?;
    let http = dial.client(tls);
    timeout(ENROLMENT_DEADLINE, exchange(&http, request)).await.map_err(|_| Fault::Deadline)?
}

async fn exchange(http: &Connection, request: Request<Bytes>) -> Result<Answer, Fault> {
    let (head, body) = http.send(request).await.map_err(Fault::Send)?.into_parts();
    let body = Limited::new(body, ANSWER_BYTES).collect().await.map_err(Fault::Body)?.to_bytes();
    Ok(Answer { status: head.status, headers: head.headers, body })
}

impl Client {
    /// Nothing is connected yet.
    pub(super) fn new(dial: &Dial, credentials: Arc<Credentials>) -> Self {
        let http = dial.client(credentials.tls.clone());
        Self { credentials, http }
    }

    /// The same identity, on a connection of its own.
    pub(super) fn another(&self, dial: &Dial) -> Self {
        Self::new(dial, self.credentials.clone())
    }

    /// As whom it speaks.
    pub(super) fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// Signs a request at a time in Unix seconds, sends it and reads the answer.
    pub(super) async fn post(&self, post: Post, now: i64) -> Result<Answer, Fault> {
        let Post { path, content_type, body, nonce } = post;
        let message = Message { method: "POST", authority: self.credentials.receiver.authority(), path, content_type };
        let signer = self.credentials.signer.as_ref().ok_or(Sign::Key)?;
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
        timeout(DEADLINE, exchange(&self.http, request)).await.map_err(|_| Fault::Deadline)?
    }

    /// Sends a request of contract v2, which nothing signs, and reads the answer.
    pub(super) async fn post_plain(&self, path: &str, body: Bytes) -> Result<Answer, Fault> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(self.credentials.receiver.uri(path)?)
            .header(header::CONTENT_TYPE, v2::CONTENT_TYPE)
            .body(body)?;
        timeout(DEADLINE, exchange(&self.http, request)).await.map_err(|_| Fault::Deadline)?
    }
}
