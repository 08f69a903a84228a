//! Simulated connections for the connector and listener interfaces of the product.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures::future::BoxFuture;
use http::Uri;
use hyper_util::{
    client::legacy::connect::{Connected, Connection},
    rt::TokioIo,
};
use tidewatch_gateway::ports::Listen;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::timeout,
};
use turmoil::net::{TcpListener, TcpStream};

/// Same connect timeout as over TCP.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// One end of a simulated connection.
pub(crate) struct SimulatedStream(pub(crate) TcpStream);

impl AsyncRead for SimulatedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for SimulatedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

impl Connection for SimulatedStream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

/// Connects to the host that currently serves the receiver's name.
#[derive(Clone)]
pub(crate) struct Connector {
    pub(crate) hosts: &'static [&'static str],
    pub(crate) current: Arc<AtomicUsize>,
}

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<SimulatedStream>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let host = self.hosts[self.current.load(Ordering::Relaxed) % self.hosts.len()];
        let port = uri.port_u16().unwrap_or(443);
        Box::pin(async move {
            let connected = timeout(CONNECT_TIMEOUT, TcpStream::connect((host, port))).await;
            Ok(TokioIo::new(SimulatedStream(connected.map_err(|_| io::ErrorKind::TimedOut)??)))
        })
    }
}

/// A simulated listening socket.
pub(crate) struct SimulatedListener(pub(crate) TcpListener);

impl Listen for SimulatedListener {
    type Stream = SimulatedStream;

    async fn next(&self) -> io::Result<SimulatedStream> {
        self.0.accept().await.map(|(stream, _)| SimulatedStream(stream))
    }
}
