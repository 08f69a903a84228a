//! Connections to the relay ports of holders: over TCP, or the network of a simulation.

use std::{io, net::SocketAddr};

use futures::{FutureExt as _, future::BoxFuture};
use tokio::net::TcpStream;

use crate::ports::Stream;

/// Opens connections before TLS.
pub trait Connect: Send + Sync + 'static {
    /// Opens a connection to a relay port.
    fn connect(&self, address: SocketAddr) -> BoxFuture<'static, io::Result<Box<dyn Stream>>>;
}

/// TCP.
pub struct Tcp;

impl Connect for Tcp {
    fn connect(&self, address: SocketAddr) -> BoxFuture<'static, io::Result<Box<dyn Stream>>> {
        async move {
            let tcp = TcpStream::connect(address).await?;
            // Requests are small; Nagle's algorithm would only delay them.
            let _ = tcp.set_nodelay(true);
            Ok(Box::new(tcp) as Box<dyn Stream>)
        }
        .boxed()
    }
}
