//! Connections of replicas over the simulated network, which stand still while their host is stopped, and the load balancer.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::atomic::Ordering,
    task::{Context, Poll, ready},
};

use futures::{FutureExt as _, future::BoxFuture};
use http::Uri;
use hyper_util::rt::TokioIo;
use tidewatch_gateway::{
    ports::{Listen, Stream},
    relay::Connect,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use turmoil::net::{TcpListener, TcpStream};

use super::gate::Gate;
use crate::simulation::transport::{Connector, SimulatedStream};

/// One end of a connection, at a replica.
pub(crate) struct GatedStream {
    gate: Gate,
    stream: SimulatedStream,
}

impl AsyncRead for GatedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        ready!(self.gate.poll_open(cx));
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for GatedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.gate.poll_open(cx));
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.gate.poll_open(cx));
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.gate.poll_open(cx));
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Listening socket of a replica.
pub(crate) struct GatedListener {
    pub(crate) gate: Gate,
    pub(crate) listener: TcpListener,
}

impl Listen for GatedListener {
    type Stream = GatedStream;

    async fn next(&self) -> io::Result<GatedStream> {
        let (stream, _) = self.gate.run(self.listener.accept()).await?;
        Ok(GatedStream { gate: self.gate.clone(), stream: SimulatedStream(stream) })
    }
}

/// Connects a replica to the relay ports of others.
pub(crate) struct RelayNetwork(pub(crate) Gate);

impl Connect for RelayNetwork {
    fn connect(&self, address: SocketAddr) -> BoxFuture<'static, io::Result<Box<dyn Stream>>> {
        let gate = self.0.clone();
        async move {
            let stream = SimulatedStream(gate.run(TcpStream::connect(address)).await?);
            Ok(Box::new(GatedStream { gate, stream }) as Box<dyn Stream>)
        }
        .boxed()
    }
}

/// A load balancer without health checks: each connection goes to the next replica.
#[derive(Clone)]
pub(crate) struct Balancer(pub(crate) Connector);

impl tower::Service<Uri> for Balancer {
    type Response = TokioIo<SimulatedStream>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        self.0.current.fetch_add(1, Ordering::Relaxed);
        self.0.call(uri)
    }
}
