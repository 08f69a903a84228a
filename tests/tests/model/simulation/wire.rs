//! Simulated connections, as the product's seams want them.

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
use tidewatch_receiver::gateway::Listen;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::timeout,
};
use turmoil::net::{TcpListener, TcpStream};

/// As over TCP.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// One end of a simulated connection.
pub(crate) struct Wire(TcpStream);

impl AsyncRead for Wire {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Wire {
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

impl Connection for Wire {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

/// Leads to whichever host stands behind the receiver's name just now.
#[derive(Clone)]
pub(crate) struct Connector {
    pub(crate) hosts: &'static [&'static str],
    pub(crate) current: Arc<AtomicUsize>,
}

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<Wire>;
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
            Ok(TokioIo::new(Wire(connected.map_err(|_| io::ErrorKind::TimedOut)??)))
        })
    }
}

/// A simulated port.
pub(crate) struct Port(pub(crate) TcpListener);

impl Listen for Port {
    type Stream = Wire;

    async fn next(&self) -> io::Result<Wire> {
        self.0.accept().await.map(|(stream, _)| Wire(stream))
    }
}
