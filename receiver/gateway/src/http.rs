//! Small HTTP/1.1 servers: a bounded number of connections, one request per connection, deadlines, TLS on request.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use bytes::Bytes;
use futures::{FutureExt as _, future::BoxFuture};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use thiserror::Error;
use tidewatch_kit::bind::bind;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// Deadline of the TLS handshake, and from then on of the request's head.
pub(super) const HEAD_DEADLINE: Duration = Duration::from_secs(5);
/// Maximum size of a request's head, in bytes.
const MAX_HEAD: usize = 16 << 10;
/// Delay after a failed accept, for example when the process has no free file descriptor.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Content type of plain text.
pub(super) const TEXT: &str = "text/plain; charset=utf-8";

/// Maps a request to its response.
type Handler = Arc<dyn Fn(Request<Incoming>) -> BoxFuture<'static, HttpResponse> + Send + Sync>;
/// Response of these servers; its body may be streamed.
pub(super) type HttpResponse = Response<UnsyncBoxBody<Bytes, Infallible>>;

/// Failure to listen.
#[derive(Debug, Error)]
#[error("could not listen on {address}")]
pub struct ListenError {
    /// Address that was to be bound.
    pub address: SocketAddr,
    source: std::io::Error,
}

/// Bounds of a server.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Concurrent connections; further ones wait in the listener's backlog.
    pub(super) connections: usize,
    /// Deadline of a connection, from accept to the last byte of the response.
    pub(super) deadline: Duration,
}

/// A bound server that does not accept connections yet.
pub struct HttpServer {
    listener: TcpListener,
    address: SocketAddr,
    limits: Limits,
    pub(super) tls: Option<Arc<ArcSwap<ServerConfig>>>,
    handler: Handler,
}

impl HttpServer {
    /// Binds the address, with port 0 any free port. Serves TLS with `tls`, plain HTTP without.
    pub(super) async fn bind<F>(
        address: SocketAddr,
        limits: Limits,
        tls: Option<Arc<ArcSwap<ServerConfig>>>,
        handler: impl Fn(Request<Incoming>) -> F + Send + Sync + 'static,
    ) -> Result<Self, ListenError>
    where
        F: Future<Output = HttpResponse> + Send + 'static,
    {
        let (listener, address) = listen(address)?;
        Ok(Self { listener, address, limits, tls, handler: Arc::new(move |request| Box::pin(handler(request))) })
    }

    /// Bound address.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown`, then drains: open connections keep the rest of their deadline. Dropping the future
    /// closes them at once.
    pub async fn run(self, shutdown: CancellationToken) {
        let mut connections = JoinSet::new();
        let accept = async {
            loop {
                while connections.try_join_next().is_some() {}
                if connections.len() >= self.limits.connections {
                    connections.join_next().await;
                }
                let Ok((tcp, _)) = self.listener.accept().await else {
                    sleep(ACCEPT_RETRY).await;
                    continue;
                };
                let connection = connection(tcp, self.tls.clone(), self.handler.clone());
                connections.spawn(timeout(self.limits.deadline, connection));
            }
        };
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = accept => {}
        }
        drop(self.listener);
        while connections.join_next().await.is_some() {}
    }
}

/// Binds the address, with port 0 any free port, and returns the listener with the bound address.
pub(super) fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), ListenError> {
    let failed = |source| ListenError { address, source };
    let listener = bind(address).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

async fn connection(tcp: TcpStream, tls: Option<Arc<ArcSwap<ServerConfig>>>, handler: Handler) {
    let Some(tls) = tls else { return serve(tcp, handler).await };
    let handshake = TlsAcceptor::from(tls.load_full()).accept(tcp);
    if let Ok(Ok(stream)) = timeout(HEAD_DEADLINE, handshake).await {
        serve(stream, handler).await;
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, handler: Handler) {
    let service = service_fn(|request| handler(request).map(Ok::<_, Infallible>));
    // The client notices an error of its connection by itself.
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .max_buf_size(MAX_HEAD)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

/// Makes a response.
pub(super) fn response<B>(status: StatusCode, content_type: &'static str, body: B) -> Response<B> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Makes a response with a body of one piece.
pub(super) fn with_body(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> HttpResponse {
    response(status, content_type, Full::new(body.into()).boxed_unsync())
}

/// Returns the value of a field that occurs once; `None` if it is missing, repeated, or not text.
pub(super) fn single_value<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(value)
}

/// Makes a 405 response; `allow` lists the methods of the resource.
pub(super) fn method_not_allowed(allow: &'static str) -> HttpResponse {
    let mut response = with_body(StatusCode::METHOD_NOT_ALLOWED, TEXT, "method not allowed\n");
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allow));
    response
}
