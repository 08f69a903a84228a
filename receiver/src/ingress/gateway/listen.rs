//! Where connections come from: TCP, or what a simulation has instead.

use std::{io, net::SocketAddr};

use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
};

use crate::base::limits::{CONNECTION_LOST_AFTER, KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES};

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
        // A peer that is gone without a word is noticed by the system, whatever is spoken, as far as its TCP reaches: what ends TCP in
        // between answers for it. Then the next heartbeat does not come.
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_IDLE)
            .with_interval(KEEPALIVE_INTERVAL)
            .with_retries(KEEPALIVE_PROBES);
        let socket = SockRef::from(&stream);
        let _ = socket.set_tcp_keepalive(&keepalive);
        // There are no probes while an answer waits to be acknowledged.
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
    async fn an_accepted_socket_notices_who_is_gone() {
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
