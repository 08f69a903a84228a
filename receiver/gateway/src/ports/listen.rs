//! Sources of connections: TCP, or the network of a simulation.

use std::{io, net::SocketAddr};

use socket2::{SockRef, TcpKeepalive};
use tidewatch_cluster::limits::{CONNECTION_LOST_AFTER, KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
};

/// A connection before TLS.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for S {}

/// A listener that accepts connections.
pub trait Listen: Send + 'static {
    /// Accepted connection.
    type Stream: Stream;

    /// Accepts the next connection. Cancel safe.
    ///
    /// # Errors
    /// The system's error; the next call may succeed.
    fn next(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;

    /// Returns the client's address, if known.
    fn source(_: &Self::Stream) -> Option<SocketAddr> {
        None
    }
}

impl Listen for TcpListener {
    type Stream = TcpStream;

    async fn next(&self) -> io::Result<TcpStream> {
        let (stream, _) = self.accept().await?;
        // Responses are small; Nagle's algorithm would only delay them.
        let _ = stream.set_nodelay(true);
        // The kernel detects a lost peer as far as its own TCP connection reaches: a load balancer in between answers
        // the probes, and only the missing heartbeat reveals the loss.
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_IDLE)
            .with_interval(KEEPALIVE_INTERVAL)
            .with_retries(KEEPALIVE_PROBES);
        let socket = SockRef::from(&stream);
        let _ = socket.set_tcp_keepalive(&keepalive);
        // There are no probes while a response is unacknowledged.
        #[cfg(target_os = "linux")]
        let _ = socket.set_tcp_user_timeout(Some(CONNECTION_LOST_AFTER));
        Ok(stream)
    }

    fn source(stream: &TcpStream) -> Option<SocketAddr> {
        stream.peer_addr().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn accepted_socket_has_keepalive_and_a_user_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (_dialled, stream) =
            tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), Listen::next(&listener));
        let stream = stream.unwrap();
        let socket = SockRef::from(&stream);
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        let probes = (socket.tcp_keepalive_time(), socket.tcp_keepalive_interval(), socket.tcp_keepalive_retries());
        assert_eq!(
            (probes.0.unwrap(), probes.1.unwrap(), probes.2.unwrap()),
            (KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES)
        );
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(CONNECTION_LOST_AFTER));
    }
}
