//! HTTP over a single connection that is opened on demand and reopened after a failure.
//!
//! The server selects the protocol by ALPN: the receiver HTTP/1.1, the API server HTTP/2. HTTP/2 uses `h2` directly: a
//! request and its body leave in one write, without a task and a pool per connection.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures::future::BoxFuture;
use h2::{Ping, PingPong, Reason, RecvStream, client as http2};
use http::{HeaderMap, HeaderValue, Request, Response, Uri, header};
use http_body::Frame;
use http_body_util::Full;
use hyper::{body::Incoming, client::conn::http1, rt, service::Service};
use hyper_rustls::HttpsConnector;
use hyper_util::{
    client::legacy::connect::{self, HttpConnector},
    rt::TokioIo,
    service::TowerToHyperService,
};
use thiserror::Error;
use tokio::{
    sync::{Mutex, Notify},
    time::{sleep, timeout},
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit of a response's header fields, in bytes.
const HEADER_BYTES: u32 = 16 << 10;

/// Any transport error.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A connected byte stream with its negotiated protocol.
pub(crate) trait Stream: rt::Read + rt::Write + connect::Connection + Unpin + Send + 'static {}

impl<S: rt::Read + rt::Write + connect::Connection + Unpin + Send + 'static> Stream for S {}

/// Opens streams to the host of a URI.
pub(crate) type Connector = Arc<dyn Fn(Uri) -> BoxFuture<'static, Result<Box<dyn Stream>, BoxError>> + Send + Sync>;

/// Settings of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionSettings {
    /// Receive window of a stream, in bytes.
    pub(crate) stream_window: u32,
    /// Receive window of the connection, in bytes.
    pub(crate) connection_window: u32,
    /// Interval of PINGs.
    pub(crate) ping: Duration,
    /// Timeout of a PING, after which the connection is closed.
    pub(crate) ping_answer: Duration,
}

/// Errors of a request without a response.
#[derive(Debug, Error)]
pub(crate) enum ExchangeError {
    #[error("failed to open a connection")]
    Connect(#[source] BoxError),
    #[error("the connection failed during the request")]
    Broken(#[source] BoxError),
}

/// A reusable connection.
pub(crate) struct Connection {
    /// TLS over TCP: that of `Dialer::tcp` to the receiver, that of `Https` to the API server. Tests have others.
    connector: Connector,
    settings: ConnectionSettings,
    pooled: Mutex<Option<Sender>>,
    /// Notified when a connection ends.
    ended: Arc<Notify>,
    /// The last HTTP/1.1 response announced the end of its connection.
    is_end_announced: AtomicBool,
}

/// Sending half of a connection.
enum Sender {
    Http2(http2::SendRequest<Bytes>),
    Http1(http1::SendRequest<Full<Bytes>>),
}

/// Body of a response.
pub(crate) enum Body {
    /// HTTP/2 stream.
    Http2(RecvStream),
    /// Body of an HTTP/1.1 response.
    Http1(Incoming),
}

/// A connector over TCP with keepalive probes after this idle time.
pub(crate) fn tcp_connector(keepalive: Duration) -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.enforce_http(false);
    connector.set_nodelay(true);
    connector.set_keepalive(Some(keepalive));
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    connector
}

/// Adapts an HTTPS connector.
pub(crate) fn tls_connector<C>(connector: HttpsConnector<C>) -> Connector
where
    TowerToHyperService<HttpsConnector<C>>:
        Service<Uri, Error = BoxError, Response: Stream, Future: Send + 'static> + Send + Sync + 'static,
{
    let connector = TowerToHyperService::new(connector);
    Arc::new(move |uri| {
        let opened = connector.call(uri);
        Box::pin(async move { Ok(Box::new(opened.await?) as Box<dyn Stream>) })
    })
}

impl Connection {
    /// A connection that is not opened yet.
    pub(crate) fn new(connector: Connector, settings: ConnectionSettings) -> Self {
        let (pooled, ended, is_end_announced) = Default::default();
        Self { connector, settings, pooled, ended, is_end_announced }
    }

    /// Another connection of the same kind, which is not opened yet.
    pub(crate) fn another(&self) -> Self {
        Self::new(self.connector.clone(), self.settings)
    }

    /// Completes when a connection has ended that no response announced, as when the server is killed; also if that was
    /// before the call. For a user that calls it between its requests. Cancel safe.
    pub(crate) async fn lost(&self) {
        loop {
            self.ended.notified().await;
            if !self.is_end_announced.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    /// Sends a request to an absolute URI and returns the response once its head has arrived. Dropping the future
    /// cancels the request; over HTTP/1.1 this closes the connection, over HTTP/2 only the stream.
    pub(crate) async fn send(&self, mut request: Request<Bytes>) -> Result<Response<Body>, ExchangeError> {
        match self.sender(request.uri()).await? {
            Sender::Http2(mut sender) => {
                let (mut head, body) = request.into_parts();
                let is_empty = body.is_empty();
                if !is_empty {
                    head.headers.insert(header::CONTENT_LENGTH, body.len().into());
                }
                let head = Request::from_parts(head, ());
                let (response, mut stream) = sender.send_request(head, is_empty).map_err(broken)?;
                if !is_empty {
                    // Sent before the connection task can run, so head and body leave together.
                    stream.send_data(body, true).map_err(broken)?;
                }
                Ok(response.await.map_err(broken)?.map(Body::Http2))
            }
            Sender::Http1(mut sender) => {
                origin_form(&mut request)?;
                let response = sender.send_request(request.map(Full::new)).await.map_err(broken)?;
                self.is_end_announced.store(announces_end(response.headers()), Ordering::Relaxed);
                // The connection takes no request while a response is read; a concurrent request opens another
                // connection.
                *self.pooled.lock().await = Some(Sender::Http1(sender));
                Ok(response.map(Body::Http1))
            }
        }
    }

    /// The open connection if it accepts requests, or else a new one.
    async fn sender(&self, uri: &Uri) -> Result<Sender, ExchangeError> {
        let mut pooled = self.pooled.lock().await;
        match pooled.take() {
            Some(Sender::Http2(sender)) => {
                if let Ok(ready) = sender.clone().ready().await {
                    *pooled = Some(Sender::Http2(sender));
                    return Ok(Sender::Http2(ready));
                }
            }
            Some(Sender::Http1(sender)) if sender.is_ready() => return Ok(Sender::Http1(sender)),
            Some(Sender::Http1(_)) | None => {}
        }
        let stream = (self.connector)(uri.clone()).await.map_err(ExchangeError::Connect)?;
        if !stream.connected().is_negotiated_h2() {
            let (sender, connection) = http1::Builder::new()
                .max_buf_size(self.settings.stream_window as usize)
                .handshake(stream)
                .await
                .map_err(broken)?;
            let ended = self.ended.clone();
            tokio::spawn(async move {
                log_end(connection.await);
                ended.notify_one();
            });
            return Ok(Sender::Http1(sender));
        }
        let sender = self.http2(stream).await.map_err(broken)?;
        *pooled = Some(Sender::Http2(sender.clone()));
        Ok(Sender::Http2(sender))
    }

    async fn http2(&self, stream: Box<dyn Stream>) -> Result<http2::SendRequest<Bytes>, h2::Error> {
        let ConnectionSettings { stream_window, connection_window, ping, ping_answer } = self.settings;
        let (sender, mut connection) = http2::Builder::new()
            .initial_window_size(stream_window)
            .initial_connection_window_size(connection_window)
            .max_header_list_size(HEADER_BYTES)
            .enable_push(false)
            .handshake(TokioIo::new(stream))
            .await?;
        let pings = connection.ping_pong();
        let ended = self.ended.clone();
        // Ends when all senders are dropped and the last response has been read.
        tokio::spawn(async move {
            tokio::select! {
                end = connection => log_end(end),
                () = ping_timeout(pings, ping, ping_answer) => tracing::warn!("Closing a connection after a PING timeout"),
            }
            ended.notify_one();
        });
        Ok(sender)
    }
}

/// Completes when a PING times out.
async fn ping_timeout(pings: Option<PingPong>, interval: Duration, response: Duration) {
    let Some(mut pings) = pings else { return std::future::pending().await };
    loop {
        sleep(interval).await;
        match timeout(response, pings.ping(Ping::opaque())).await {
            Ok(Ok(_)) => {}
            // The connection has ended and reports its own error.
            Ok(Err(_)) => return std::future::pending().await,
            Err(_) => return,
        }
    }
}

fn log_end<E: std::error::Error>(end: Result<(), E>) {
    if let Err(error) = end {
        tracing::debug!(%error, "Connection closed with an error");
    }
}

/// Returns whether the connection ends with this HTTP/1.1 response.
fn announces_end(fields: &HeaderMap) -> bool {
    let values = fields.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|option| option.trim().eq_ignore_ascii_case("close"))
}

fn broken(error: impl Into<BoxError>) -> ExchangeError {
    ExchangeError::Broken(error.into())
}

/// Converts to origin form with a `Host` field, as HTTP/1.1 requires (RFC 9112, section 3.2).
fn origin_form(request: &mut Request<Bytes>) -> Result<(), ExchangeError> {
    let authority = request.uri().authority().map_or("", |authority| authority.as_str());
    let host = HeaderValue::from_str(authority).map_err(broken)?;
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let path = path.parse().map_err(broken)?;
    request.headers_mut().insert(header::HOST, host);
    *request.uri_mut() = path;
    Ok(())
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.get_mut() {
            Self::Http1(body) => Pin::new(body).poll_frame(cx).map_err(Into::into),
            Self::Http2(stream) => Poll::Ready(match ready!(stream.poll_data(cx)) {
                Some(Ok(data)) => {
                    let released = stream.flow_control().release_capacity(data.len());
                    Some(released.map(|()| Frame::data(data)).map_err(Into::into))
                }
                // The server has finished early, or the stream was cancelled (RFC 9113, section 8.1).
                Some(Err(error)) if matches!(error.reason(), Some(Reason::NO_ERROR | Reason::CANCEL)) => None,
                Some(Err(error)) => Some(Err(error.into())),
                // Trailers are ignored.
                None => None,
            }),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Http1(body) => body.is_end_stream(),
            Self::Http2(stream) => stream.is_end_stream(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
