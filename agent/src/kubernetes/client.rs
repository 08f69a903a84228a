//! Requests to the API server: a client with deadlines and limits, over HTTPS with one connection, tokens read for each
//! request, and a new connection when the trust bundle changes.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderMap, Method, Request, Response, Uri, header, uri::PathAndQuery};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper_rustls::{FixedServerNameResolver, HttpsConnectorBuilder};
use parking_lot::Mutex;
use tokio::time::timeout;

use super::{
    Accept, ApiError, WATCHES_PER_CLIENT,
    access::{Access, ClientSetupError, Content},
};
use crate::{
    connection::{self, BoxError, Connection, ConnectionSettings},
    telemetry::error_chain,
};

/// Deadline for the head of a response.
const HEAD_DEADLINE: Duration = Duration::from_secs(20);
/// Deadline for the body of a buffered response.
const BODY_DEADLINE: Duration = Duration::from_secs(30);
/// Limit of the response to a write, in bytes.
const WRITE_ANSWER: usize = 256 << 10;

const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// Receive window of a stream: the bytes a peer may send before they are read, and so the memory it may occupy. A page
/// of a list takes one round trip for each 32 KiB.
const STREAM_WINDOW: u32 = 32 << 10;
/// Streams of a connection besides those of planned watches: the agent's own watches, and lists.
const OTHER_STREAMS: u32 = 8;
/// Receive window of a connection: a full one for each stream, 2.25 MiB. A watch that waits for its turn to read a
/// large line leaves its own window full; with less, a few of them would block all other streams, and so those whose
/// turn it is. To cancel such a watch and open it again would cost the API server more than this costs the agent.
const CONNECTION_WINDOW: u32 = STREAM_WINDOW * (WATCHES_PER_CLIENT as u32 + OTHER_STREAMS);
/// Settings of the connections to the API server.
pub(crate) const CONNECTION_SETTINGS: ConnectionSettings = ConnectionSettings {
    stream_window: STREAM_WINDOW,
    connection_window: CONNECTION_WINDOW,
    ping: KEEP_ALIVE,
    ping_answer: Duration::from_secs(KEEP_ALIVE.as_secs() / 2),
};

/// Body of a streamed response.
pub(crate) type Body = UnsyncBoxBody<Bytes, BoxError>;

/// Transport of requests: HTTPS, or a script in tests.
pub(crate) trait Transport: Send + Sync {
    /// Sends a request whose URI is a path, and returns the response once its head has arrived.
    fn send(&self, request: Request<Full<Bytes>>) -> BoxFuture<'static, Result<Response<Body>, BoxError>>;
}

/// Client with deadlines and limits; clones share its connection.
#[derive(Clone)]
pub(crate) struct ApiClient(Arc<dyn Transport>);

impl ApiClient {
    /// A client over a transport without deadlines of its own.
    pub(crate) fn new(transport: impl Transport + 'static) -> Self {
        Self(Arc::new(transport))
    }

    /// Reads a complete response of at most `limit` bytes.
    pub(crate) async fn get(&self, path: &str, accept: Accept, limit: usize) -> Result<Vec<u8>, ApiError> {
        let body = self.open(path, accept).await?;
        read(body, limit).await
    }

    /// Opens a streamed response.
    pub(crate) async fn open(&self, path: &str, accept: Accept) -> Result<Body, ApiError> {
        let request = Self::request(Method::GET, path, accept).body(Full::default()).map_err(ApiError::Request)?;
        Ok(self.send(request).await?.into_body())
    }

    /// Applies a merge patch (RFC 7396); the response is the object's metadata.
    pub(crate) async fn merge_patch(&self, path: &str, patch: Vec<u8>) -> Result<Vec<u8>, ApiError> {
        let request = Self::request(Method::PATCH, path, Accept::Metadata)
            .header(header::CONTENT_TYPE, "application/merge-patch+json")
            .body(Full::from(patch))
            .map_err(ApiError::Request)?;
        let response = self.send(request).await?;
        read(response.into_body(), WRITE_ANSWER).await
    }

    fn request(method: Method, path: &str, accept: Accept) -> http::request::Builder {
        Request::builder()
            .method(method)
            .uri(path)
            .header(header::ACCEPT, accept.header())
            // Since 1.37, watch events are compressed one by one unless the client rules out compression.
            .header(header::ACCEPT_ENCODING, "identity")
            .header(header::USER_AGENT, concat!("tidewatch-agent/", env!("CARGO_PKG_VERSION")))
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<Body>, ApiError> {
        let sent = timeout(HEAD_DEADLINE, self.0.send(request)).await.map_err(|_| ApiError::Deadline)?;
        let response = sent.map_err(ApiError::Send)?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        Err(ApiError::Status { status, retry_after: retry_after(response.headers()) })
    }
}

async fn read(mut body: Body, limit: usize) -> Result<Vec<u8>, ApiError> {
    let collect = async {
        let mut bytes = Vec::new();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(ApiError::Body)?.into_data() else { continue };
            if bytes.len() + data.len() > limit {
                return Err(ApiError::TooLarge { limit });
            }
            bytes.extend_from_slice(&data);
        }
        Ok(bytes)
    };
    timeout(BODY_DEADLINE, collect).await.map_err(|_| ApiError::Deadline)?
}

/// `Retry-After` in seconds, the only form that API servers send.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    headers.get(header::RETRY_AFTER)?.to_str().ok()?.parse().ok().map(Duration::from_secs)
}

/// HTTPS transport.
pub(super) struct Https {
    access: Arc<Access>,
    current: Mutex<Current>,
}

/// A client, and the trust bundle it was created with.
struct Current {
    bundle: Arc<[u8]>,
    http: Arc<Connection>,
}

impl Https {
    /// A transport that is not connected yet.
    pub(super) fn new(access: Access) -> Result<Self, ClientSetupError> {
        let bundle: Arc<[u8]> = access.bundle.read()?.into();
        let http = client(&access, &bundle)?;
        Ok(Self { access: Arc::new(access), current: Mutex::new(Current { bundle, http }) })
    }

    /// A transport to the same server with a connection of its own.
    pub(super) fn another(&self) -> Self {
        let current = self.current.lock();
        let bundle = current.bundle.clone();
        let http = Arc::new(current.http.another());
        Self { access: self.access.clone(), current: Mutex::new(Current { bundle, http }) }
    }

    /// The client for the current trust bundle. An invalid bundle leaves the previous client in place.
    fn http(&self) -> Arc<Connection> {
        let mut current = self.current.lock();
        if matches!(self.access.bundle, Content::File(_)) {
            match self.access.bundle.read() {
                Ok(bundle) if *bundle != *current.bundle => match client(&self.access, &bundle) {
                    Ok(http) => *current = Current { bundle: bundle.into(), http },
                    Err(error) => {
                        tracing::error!(error = error_chain(&error), "Trust bundle of the API server refused")
                    }
                },
                Ok(_) => {}
                Err(error) => {
                    tracing::error!(error = error_chain(&error), "Failed to read the trust bundle of the API server");
                }
            }
        }
        current.http.clone()
    }

    fn prepare(&self, request: Request<Full<Bytes>>) -> Result<Request<Bytes>, BoxError> {
        let mut request = request.map(|body| body.into_inner().unwrap_or_default());
        let mut address = self.access.server.clone().into_parts();
        let prefix = self.access.server.path().trim_end_matches('/');
        let path = request.uri().path_and_query().map_or("/", PathAndQuery::as_str);
        address.path_and_query = Some(format!("{prefix}{path}").parse()?);
        *request.uri_mut() = Uri::from_parts(address)?;
        if let Some(authorization) = self.access.authorization()? {
            request.headers_mut().insert(header::AUTHORIZATION, authorization);
        }
        Ok(request)
    }
}

impl Transport for Https {
    fn send(&self, request: Request<Full<Bytes>>) -> BoxFuture<'static, Result<Response<Body>, BoxError>> {
        let request = self.prepare(request);
        let http = self.http();
        Box::pin(async move {
            let response = http.send(request?).await?;
            Ok(response.map(BodyExt::boxed_unsync))
        })
    }
}

fn client(access: &Access, bundle: &[u8]) -> Result<Arc<Connection>, ClientSetupError> {
    let builder = HttpsConnectorBuilder::new().with_tls_config(access.tls(bundle)?).https_only();
    let builder = match access.server_name()? {
        Some(name) => builder.with_server_name_resolver(FixedServerNameResolver::new(name)),
        None => builder,
    };
    let https = builder.enable_all_versions().wrap_connector(connection::tcp_connector(KEEP_ALIVE));
    Ok(Arc::new(Connection::new(connection::tls_connector(https), CONNECTION_SETTINGS)))
}
