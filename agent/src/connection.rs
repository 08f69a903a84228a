//! HTTP over one connection, which is opened when it is needed and again when it broke.
//!
//! The server chooses what is spoken: our receiver HTTP/1.1, the API server HTTP/2. HTTP/2 is spoken with `h2` itself: a request leaves in
//! one write, together with its body, and costs no task and no pool of its own.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures::future::BoxFuture;
use h2::{Ping, PingPong, Reason, RecvStream, client as http2};
use http::{HeaderValue, Request, Response, Uri, header};
use http_body::Frame;
use http_body_util::Full;
use hyper::{body::Incoming, client::conn::http1, rt, service::Service};
use hyper_rustls::HttpsConnector;
use hyper_util::{client::legacy::connect, rt::TokioIo, service::TowerToHyperService};
use thiserror::Error;
use tokio::{
    sync::Mutex,
    time::{sleep, timeout},
};

/// Bytes of all header fields of an answer.
const HEADER_BYTES: u32 = 16 << 10;

/// Any error of what carries requests.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What a connector opens: bytes in both directions, and what was agreed on for them.
pub(crate) trait Stream: rt::Read + rt::Write + connect::Connection + Unpin + Send + 'static {}

impl<S: rt::Read + rt::Write + connect::Connection + Unpin + Send + 'static> Stream for S {}

/// Opens connections to the host of an address.
pub(crate) type Open = Arc<dyn Fn(Uri) -> BoxFuture<'static, Result<Box<dyn Stream>, BoxError>> + Send + Sync>;

/// How a connection is used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// Bytes of one answer that a server may send before we read them.
    pub(crate) stream_window: u32,
    /// The same of all answers.
    pub(crate) connection_window: u32,
    /// Between two PINGs.
    pub(crate) ping: Duration,
    /// A connection whose PING is not answered for so long is given up.
    pub(crate) ping_answer: Duration,
}

/// Why there is no answer.
#[derive(Debug, Error)]
pub(crate) enum Speak {
    #[error("no connection could be opened")]
    Open(#[source] BoxError),
    #[error("the connection broke, or does not take the request")]
    Exchange(#[source] BoxError),
}

/// See the module.
pub(crate) struct Connection {
    open: Open,
    terms: Terms,
    kept: Mutex<Option<Sender>>,
}

/// The end of a connection that takes requests.
enum Sender {
    Http2(http2::SendRequest<Bytes>),
    Http1(http1::SendRequest<Full<Bytes>>),
}

/// The body of an answer.
pub(crate) enum Body {
    /// A stream of HTTP/2.
    Http2(RecvStream),
    /// The rest of an answer of HTTP/1.1.
    Http1(Incoming),
}

/// Opens connections with a connector.
pub(crate) fn over<C>(connector: HttpsConnector<C>) -> Open
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
    /// Nothing is opened yet.
    pub(crate) fn new(open: Open, terms: Terms) -> Self {
        Self { open, terms, kept: Mutex::default() }
    }

    /// Sends a request to an absolute address, and waits for the head of its answer. Whoever gives up waiting ends the request; over HTTP/1.1
    /// the connection as well, over HTTP/2 not.
    pub(crate) async fn send(&self, mut request: Request<Bytes>) -> Result<Response<Body>, Speak> {
        match self.sender(request.uri()).await? {
            Sender::Http2(mut sender) => {
                let (mut head, body) = request.into_parts();
                let is_empty = body.is_empty();
                if !is_empty {
                    head.headers.insert(header::CONTENT_LENGTH, body.len().into());
                }
                let head = Request::from_parts(head, ());
                let (answer, mut stream) = sender.send_request(head, is_empty).map_err(broken)?;
                if !is_empty {
                    // Before anybody else can run, so that both leave together.
                    stream.send_data(body, true).map_err(broken)?;
                }
                Ok(answer.await.map_err(broken)?.map(Body::Http2))
            }
            Sender::Http1(mut sender) => {
                origin_form(&mut request)?;
                let answer = sender.send_request(request.map(Full::new)).await.map_err(broken)?;
                // While the answer is being read it takes no request; whoever comes then opens another connection.
                *self.kept.lock().await = Some(Sender::Http1(sender));
                Ok(answer.map(Body::Http1))
            }
        }
    }

    /// The kept connection if it takes a request, or else another one.
    async fn sender(&self, uri: &Uri) -> Result<Sender, Speak> {
        let mut kept = self.kept.lock().await;
        match kept.take() {
            Some(Sender::Http2(sender)) => {
                if let Ok(ready) = sender.clone().ready().await {
                    *kept = Some(Sender::Http2(sender));
                    return Ok(Sender::Http2(ready));
                }
            }
            Some(Sender::Http1(sender)) if sender.is_ready() => return Ok(Sender::Http1(sender)),
            Some(Sender::Http1(_)) | None => {}
        }
        let stream = (self.open)(uri.clone()).await.map_err(Speak::Open)?;
        if !stream.connected().is_negotiated_h2() {
            let (sender, connection) = http1::Builder::new()
                .max_buf_size(self.terms.stream_window as usize)
                .handshake(stream)
                .await
                .map_err(broken)?;
            tokio::spawn(async { ended(connection.await) });
            return Ok(Sender::Http1(sender));
        }
        let sender = self.http2(stream).await.map_err(broken)?;
        *kept = Some(Sender::Http2(sender.clone()));
        Ok(Sender::Http2(sender))
    }

    async fn http2(&self, stream: Box<dyn Stream>) -> Result<http2::SendRequest<Bytes>, h2::Error> {
        let Terms { stream_window, connection_window, ping, ping_answer } = self.terms;
        let (sender, mut connection) = http2::Builder::new()
            .initial_window_size(stream_window)
            .initial_connection_window_size(connection_window)
            .max_header_list_size(HEADER_BYTES)
            .enable_push(false)
            .handshake(TokioIo::new(stream))
            .await?;
        let pings = connection.ping_pong();
        // It ends when nobody can send requests any more and the last answer was read.
        tokio::spawn(async move {
            tokio::select! {
                end = connection => ended(end),
                () = silence(pings, ping, ping_answer) => tracing::warn!("A connection is given up: no PING comes back"),
            }
        });
        Ok(sender)
    }
}

/// Until a PING is not answered.
async fn silence(pings: Option<PingPong>, interval: Duration, answer: Duration) {
    let Some(mut pings) = pings else { return std::future::pending().await };
    loop {
        sleep(interval).await;
        match timeout(answer, pings.ping(Ping::opaque())).await {
            Ok(Ok(_)) => {}
            // The connection has ended, and says why by itself.
            Ok(Err(_)) => return std::future::pending().await,
            Err(_) => return,
        }
    }
}

fn ended<E: std::error::Error>(end: Result<(), E>) {
    if let Err(error) = end {
        tracing::debug!(%error, "A connection has ended");
    }
}

fn broken(error: impl Into<BoxError>) -> Speak {
    Speak::Exchange(error.into())
}

/// HTTP/1.1 has the host in a header field (RFC 9112, section 3.2).
fn origin_form(request: &mut Request<Bytes>) -> Result<(), Speak> {
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
                // The server is through with us, or was told that we are (RFC 9113, section 8.1).
                Some(Err(error)) if matches!(error.reason(), Some(Reason::NO_ERROR | Reason::CANCEL)) => None,
                Some(Err(error)) => Some(Err(error.into())),
                // What may come behind the data is of no use here.
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
mod tests;
