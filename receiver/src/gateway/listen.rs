//! Where connections come from: TCP, or what a simulation has instead.

use std::{io, net::SocketAddr, time::Duration};

use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
};

/// A connection is probed when nothing came for so long,
const QUIET: Duration = Duration::from_secs(30);
/// then at this interval,
const PROBE: Duration = Duration::from_secs(5);
/// and given up when so many probes in a row go unanswered.
const PROBES: u32 = 2;

/// A connection, before TLS.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for S {}

/// Hands over connections, one by one.
pub trait Listen: Send + 'static {
    /// What it hands over.
    type Stream: Stream;

    /// The next connection. Dropping the future loses none.
    ///
    /// # Errors
    /// The system's; the next call may succeed.
    fn next(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;

    /// From where a connection comes, where that is known.
    fn source(_: &Self::Stream) -> Option<SocketAddr> {
        None
    }
}

impl Listen for TcpListener {
    type Stream = TcpStream;

    async fn next(&self) -> io::Result<TcpStream> {
        let (stream, _) = self.accept().await?;
        // Answers are small; waiting for more to send only delays them.
        let _ = stream.set_nodelay(true);
        // A peer that is gone without a word is noticed by the system, whatever is spoken.
        let keepalive = TcpKeepalive::new().with_time(QUIET).with_interval(PROBE).with_retries(PROBES);
        let _ = SockRef::from(&stream).set_tcp_keepalive(&keepalive);
        Ok(stream)
    }

    fn source(stream: &TcpStream) -> Option<SocketAddr> {
        stream.peer_addr().ok()
    }
}
