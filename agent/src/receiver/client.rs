//! Requests to the receiver: its address, connections with TLS over a pluggable transport, responses buffered up to a limit,
//! and request errors.

use std::{error::Error as StdError, iter::successors, str::FromStr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Uri, header, uri::Authority};
use http_body_util::{BodyExt, Limited};
use hyper::{rt, service::Service};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::connect::{self, HttpConnector},
    service::TowerToHyperService,
};
use rustls::ClientConfig;
use thiserror::Error;
use tidewatch_contract::{enrolment, signature::SignError};
use tokio::time::timeout;

use crate::{
    connection::{self, BoxError, Connection, ConnectionSettings, Connector, ExchangeError},
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

/// Interval of PINGs. A dead peer is detected after a PING and its timeout, well within the half minute in which a
/// disconnected agent must be back.
const PING: Duration = Duration::from_secs(15);
const PING_ANSWER: Duration = Duration::from_secs(5);
/// Unanswered TCP keepalive probes before an HTTP/1.1 connection is closed, since HTTP/1.1 has no PINGs. A proxy that
/// terminates TCP answers them itself; a dead peer behind it is detected by the deadline of the next request.
const PROBES: u32 = 2;
/// TCP user timeout: no keepalive probes are sent while data is unacknowledged, so this bounds it to the same time.
#[cfg(target_os = "linux")]
const ACKNOWLEDGED: Duration = Duration::from_secs(PING.as_secs() + PING_ANSWER.as_secs() * PROBES as u64);
const WINDOW: u32 = 64 << 10;

/// The text is not an endpoint.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("the receiver's address does not have the form https://host:port")]
pub struct ParseEndpointError;

/// Host and port in lower case; the default port is omitted, as in `:authority`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint(Authority);

impl Endpoint {
    /// The authority, as used in requests and signatures.
    pub fn authority(&self) -> &str {
        self.0.as_str()
    }

    /// The URI of a path.
    ///
    /// # Errors
    /// The path is invalid.
    pub(crate) fn uri(&self, path: &str) -> Result<Uri, http::Error> {
        Uri::builder().scheme("https").authority(self.0.clone()).path_and_query(path).build()
    }
}

impl FromStr for Endpoint {
    type Err = ParseEndpointError;

    fn from_str(text: &str) -> Result<Self, ParseEndpointError> {
        let uri: Uri = text.to_ascii_lowercase().parse().map_err(|_| ParseEndpointError)?;
        let authority = uri.authority().ok_or(ParseEndpointError)?;
        let plain = uri.scheme_str() == Some("https")
            && matches!(uri.path(), "" | "/")
            && uri.query().is_none()
            && !authority.as_str().contains('@')
            && !authority.host().is_empty();
        let text = authority.as_str();
        let text = if authority.port_u16() == Some(443) { text.trim_end_matches(":443") } else { text };
        plain.then(|| text.parse().ok()).flatten().map(Self).ok_or(ParseEndpointError)
    }
}

/// Opens one connection per identity.
#[derive(Clone)]
pub struct Dialer(Arc<dyn Fn(ClientConfig) -> Connector + Send + Sync>);

impl Dialer {
    /// A dialer over TCP.
    pub fn tcp() -> Self {
        Self::over(connector())
    }

    /// A dialer over the streams of `connector`, with TLS on top.
    pub fn over<C>(connector: C) -> Self
    where
        C: Clone + Send + Sync + 'static,
        TowerToHyperService<HttpsConnector<C>>: Service<
                Uri,
                Error = BoxError,
                Response: rt::Read + rt::Write + connect::Connection + Unpin + Send + 'static,
                Future: Send + 'static,
            > + Send
            + Sync
            + 'static,
    {
        Self(Arc::new(move |tls| {
            connection::tls_connector(
                HttpsConnectorBuilder::new()
                    .with_tls_config(tls)
                    .https_only()
                    .enable_all_versions()
                    .wrap_connector(connector.clone()),
            )
        }))
    }

    /// A connection that is not opened yet.
    pub(crate) fn client(&self, tls: ClientConfig) -> Connection {
        let settings = ConnectionSettings {
            stream_window: WINDOW,
            connection_window: WINDOW,
            ping: PING,
            ping_answer: PING_ANSWER,
        };
        Connection::new((self.0)(tls), settings)
    }
}

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

fn connector() -> HttpConnector {
    let mut connector = connection::tcp_connector(PING);
    connector.set_keepalive_interval(Some(PING_ANSWER));
    connector.set_keepalive_retries(Some(PROBES));
    #[cfg(target_os = "linux")]
    connector.set_tcp_user_timeout(Some(ACKNOWLEDGED));
    connector
}

#[cfg(test)]
mod tests {
    use socket2::SockRef;
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn only_a_plain_https_address_is_an_endpoint() {
        for (text, authority) in [
            ("https://KCP.example:8443", "kcp.example:8443"),
            ("https://kcp.example/", "kcp.example"),
            ("https://kcp.example:443", "kcp.example"),
            ("https://[::1]:1", "[::1]:1"),
        ] {
            let endpoint: Endpoint = text.parse().unwrap();
            assert_eq!(endpoint.authority(), authority);
            assert_eq!(endpoint.uri("/v3/events").unwrap().to_string(), format!("https://{authority}/v3/events"));
        }
        for bad in
            ["", "kcp.example", "http://kcp.example", "https://a@kcp", "https://kcp/x", "https://kcp?x", "https://"]
        {
            assert_eq!(bad.parse::<Endpoint>(), Err(ParseEndpointError), "{bad}");
        }
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn dialled_socket_has_keepalive_and_user_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("https://{}", listener.local_addr().unwrap()).parse().unwrap();
        let stream = TowerToHyperService::new(connector()).call(address).await.unwrap().into_inner();
        let socket = SockRef::from(&stream);
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        let probes = (socket.tcp_keepalive_time(), socket.tcp_keepalive_interval(), socket.tcp_keepalive_retries());
        assert_eq!((probes.0.unwrap(), probes.1.unwrap(), probes.2.unwrap()), (PING, PING_ANSWER, PROBES));
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(ACKNOWLEDGED));
    }
}
