//! Requests to the receiver: responses buffered up to a limit, and request errors.

use std::{error::Error as StdError, iter::successors, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use rustls::ClientConfig;
use thiserror::Error;
use tidewatch_contract::{enrolment, signature::SignError};
use tokio::time::timeout;

use super::{Dialer, Endpoint};
use crate::{
    connection::{BoxError, Connection, ExchangeError},
    telemetry::RequestOutcome,
};

/// Deadline of an enrolment request and its response. Longer than for other requests, because the receiver reviews the
/// token with this runtime's API server.
const ENROLMENT_DEADLINE: Duration = Duration::from_secs(30);
/// Limit of a response in bytes, above the settled watermarks of 500 watches with the longest names.
const ANSWER_BYTES: usize = 256 << 10;
/// Prefix of rustls' error for a fatal alert, and the alerts that concern the client certificate; `DecryptError` is
/// sent for a certificate of another CA with the same name. Matched as text, because HTTP/2 passes on only the message.
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

/// Errors of a request without a usable response.
#[derive(Debug, Error)]
pub(crate) enum RequestError {
    #[error("failed to sign the request")]
    Sign(#[from] SignError),
    #[error("failed to build the request")]
    Request(#[from] http::Error),
    #[error("failed to send the request to the receiver")]
    Send(#[source] ExchangeError),
    #[error("failed to read the receiver's response, or it is too large")]
    Body(#[source] BoxError),
    #[error("the receiver did not respond in time")]
    Deadline,
    #[error("failed to parse the receiver's response")]
    Unreadable(#[source] serde_json::Error),
}

impl RequestError {
    /// Reports whether no connection could be opened.
    pub(crate) fn is_connect(&self) -> bool {
        matches!(self, Self::Send(ExchangeError::Connect(_)))
    }

    /// Reports whether the peer aborted the handshake because of the client certificate.
    pub(crate) fn is_about_certificate(&self) -> bool {
        let is_about_certificate = |alert: &str| ABOUT_CERTIFICATES.iter().any(|known| alert.starts_with(known));
        successors(self.source(), |&cause| cause.source())
            .any(|cause| cause.to_string().split_once(ALERT).is_some_and(|(_, alert)| is_about_certificate(alert)))
    }
}

/// A completely read response.
#[derive(Debug)]
pub struct BufferedResponse {
    /// Status code.
    pub status: StatusCode,
    /// Header fields.
    pub headers: HeaderMap,
    /// Complete body.
    pub body: Bytes,
}

/// Requests a certificate with an `Authorization` value, on a connection of its own without a client certificate.
/// Nothing is sent unless `tls` trusts the server.
pub(crate) async fn enrol(
    dial: &Dialer,
    tls: ClientConfig,
    endpoint: &Endpoint,
    authorization: HeaderValue,
    body: Bytes,
) -> Result<BufferedResponse, RequestError> {
    let request = Request::builder()
        .method(Method::POST)
        .uri(endpoint.uri(enrolment::CERTIFICATES_PATH)?)
        .header(header::CONTENT_TYPE, enrolment::CONTENT_TYPE)
        .header(header::AUTHORIZATION, authorization)
        .body(body)?;
    exchange(&dial.client(tls), request, ENROLMENT_DEADLINE).await
}

/// Sends a request and reads the complete response within a deadline, connecting included.
pub(crate) async fn exchange(
    http: &Connection,
    request: Request<Bytes>,
    deadline: Duration,
) -> Result<BufferedResponse, RequestError> {
    let exchanged = async {
        let (head, body) = http.send(request).await.map_err(RequestError::Send)?.into_parts();
        let body = Limited::new(body, ANSWER_BYTES).collect().await.map_err(RequestError::Body)?.to_bytes();
        Ok(BufferedResponse { status: head.status, headers: head.headers, body })
    };
    timeout(deadline, exchanged).await.map_err(|_| RequestError::Deadline)?
}

impl RequestOutcome {
    /// Outcome of a request for the metrics.
    pub(crate) fn of(response: &Result<BufferedResponse, RequestError>) -> Self {
        match response {
            Ok(response) if response.status.is_success() => Self::Accepted,
            Ok(response) => Self::Refused(response.status),
            Err(error) if error.is_connect() => Self::Connect,
            Err(RequestError::Sign(_) | RequestError::Request(_)) => Self::Setup,
            Err(_) => Self::NoResponse,
        }
    }
}
