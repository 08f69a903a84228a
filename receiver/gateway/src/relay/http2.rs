//! Exchanges over an HTTP/2 connection. They use `h2` directly: the head and the body of a request leave in one write, and no
//! task is spawned for it.

use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use h2::{
    Ping, PingPong, Reason, RecvStream,
    client::{self, SendRequest},
};
use http::{Request, Response};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{sleep, timeout},
};
use tokio_util::task::AbortOnDropHandle;

use super::{RelayError, question::QuestionError};

/// HTTP/2 flow-control window of a connection for responses, in bytes; that of a stream is the protocol's default.
const WINDOW: u32 = 1 << 20;
/// Bytes of the head of a response at most.
const MAX_HEAD: u32 = 16 << 10;
/// Streams that are remembered after their clients left, above all that one connection can have: a response that is on its way
/// to an unknown stream counts as an error of the holder.
const MAX_RESETS: usize = 2_048;

/// An open connection. It lives as long as the pool, a request or the body of a response has a clone of it.
#[derive(Clone)]
pub(super) struct Http2Connection {
    sender: SendRequest<Bytes>,
    has_ended: Arc<AtomicBool>,
    has_answered: Arc<AtomicBool>,
    _task: Arc<AbortOnDropHandle<()>>,
}

/// Body of a response.
pub(super) struct ResponseBody {
    stream: RecvStream,
    _connection: Http2Connection,
}

impl Http2Connection {
    /// Sends the preface over a new connection. The current executor drives it, and closes it when a PING of this interval is
    /// not acknowledged before the next one.
    pub(super) async fn open(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        ping: Duration,
    ) -> Result<Self, h2::Error> {
        let (sender, mut connection) = client::Builder::new()
            .initial_connection_window_size(WINDOW)
            .max_header_list_size(MAX_HEAD)
            .enable_push(false)
            .max_concurrent_reset_streams(MAX_RESETS)
            // Clients that leave reset their streams here, which must not end the connection of all others.
            .max_local_error_reset_streams(None)
            .handshake(stream)
            .await?;
        let pings = connection.ping_pong();
        let has_ended = Arc::<AtomicBool>::default();
        let ended = has_ended.clone();
        let task = tokio::spawn(async move {
            tokio::select! {
                result = connection => if let Err(error) = result {
                    tracing::debug!(%error, "A connection to a replica ended");
                },
                () = missed_pong(pings, ping) => tracing::debug!("A connection to a replica is closed after a PING timeout"),
            }
            ended.store(true, Ordering::Relaxed);
        });
        let has_answered = Arc::default();
        Ok(Self { sender, has_ended, has_answered, _task: Arc::new(AbortOnDropHandle::new(task)) })
    }

    /// True if a response has arrived, and so the holder accepts the certificate of this replica. In TLS 1.3 the handshake of the
    /// client ends before the server has verified it (RFC 8446, section 2).
    pub(super) fn has_answered(&self) -> bool {
        self.has_answered.load(Ordering::Relaxed)
    }

    /// True if it takes no more requests.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }

    /// Sends a request, and waits for the head of its response. [`RelayError::Gone`] if the connection has ended, and certainly no
    /// byte of the request was sent; [`RelayError::Broken`] if the exchange failed after it began.
    pub(super) async fn send(&self, request: Request<Bytes>) -> Result<Response<ResponseBody>, RelayError> {
        let mut sender = self.sender.clone().ready().await.map_err(|_| self.end())?;
        let (parts, body) = request.into_parts();
        let sent = sender.send_request(Request::from_parts(parts, ()), body.is_empty());
        let (response, mut stream) = sent.map_err(|error| match error {
            error if error.is_io() || error.is_go_away() => self.end(),
            _ => RelayError::Broken,
        })?;
        if !body.is_empty() {
            stream.send_data(body, true).map_err(|_| RelayError::Broken)?;
        }
        let response = response.await.map_err(|_| RelayError::Broken)?;
        if !self.has_answered() {
            self.has_answered.store(true, Ordering::Relaxed);
        }
        Ok(response.map(|stream| ResponseBody { stream, _connection: self.clone() }))
    }

    fn end(&self) -> RelayError {
        self.has_ended.store(true, Ordering::Relaxed);
        RelayError::Gone
    }
}

impl ResponseBody {
    /// Reads the whole body. The caller sets the deadline. [`QuestionError::TooLarge`] beyond `limit` bytes,
    /// [`QuestionError::Broken`] if the body is incomplete.
    pub(super) async fn read(mut self, limit: usize) -> Result<Bytes, QuestionError> {
        let mut body = BytesMut::new();
        while let Some(part) = self.stream.data().await {
            let part = match part {
                Ok(part) => part,
                // The holder did not need the rest of the request (RFC 9113, section 8.1).
                Err(error) if error.reason() == Some(Reason::NO_ERROR) => break,
                Err(_) => return Err(QuestionError::Broken),
            };
            if part.len() > limit - body.len() {
                return Err(QuestionError::TooLarge);
            }
            body.extend_from_slice(&part);
            self.stream.flow_control().release_capacity(part.len()).map_err(|_| QuestionError::Broken)?;
        }
        Ok(body.freeze())
    }
}

/// Sends PINGs at this interval, and completes when one is not acknowledged within it.
async fn missed_pong(pings: Option<PingPong>, interval: Duration) {
    let Some(mut pings) = pings else { return pending().await };
    loop {
        sleep(interval).await;
        match timeout(interval, pings.ping(Ping::opaque())).await {
            Ok(Ok(_)) => {}
            // The connection has ended, which it reports itself.
            Ok(Err(_)) => return pending().await,
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        pin::Pin,
        sync::atomic::AtomicUsize,
        task::{Context, Poll},
    };

    use h2::server::{self, SendResponse};
    use tokio::{
        io::{DuplexStream, ReadBuf},
        task::JoinSet,
    };

    use super::*;

    const PING: Duration = Duration::from_secs(5);

    /// A stream that counts its writes, vectored as those of TLS.
    struct Counted(DuplexStream, Arc<AtomicUsize>);

    impl AsyncRead for Counted {
        fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_read(cx, into)
        }
    }

    impl AsyncWrite for Counted {
        fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            self.1.fetch_add(1, Ordering::Relaxed);
            Pin::new(&mut self.0).poll_write(cx, bytes)
        }

        fn poll_write_vectored(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            parts: &[io::IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            self.1.fetch_add(1, Ordering::Relaxed);
            Pin::new(&mut self.0).poll_write_vectored(cx, parts)
        }

        fn is_write_vectored(&self) -> bool {
            true
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_flush(cx)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_shutdown(cx)
        }
    }

    type Server = server::Connection<DuplexStream, Bytes>;

    async fn connect() -> (Http2Connection, Server, Arc<AtomicUsize>) {
        let ((near, far), writes) = (tokio::io::duplex(1 << 20), Arc::<AtomicUsize>::default());
        let opened = tokio::join!(Http2Connection::open(Counted(near, writes.clone()), PING), server::handshake(far));
        (opened.0.unwrap(), opened.1.unwrap(), writes)
    }

    fn request(body: Bytes) -> Request<Bytes> {
        Request::post("https://kcp.test/v3/events").body(body).unwrap()
    }

    /// Reads all requests, and answers each with this body.
    fn serve(mut server: Server, body: Bytes) -> AbortOnDropHandle<()> {
        let answer = |request: Request<RecvStream>, mut response: SendResponse<Bytes>, body| async move {
            let mut received = request.into_body();
            while let Some(part) = received.data().await {
                received.flow_control().release_capacity(part.unwrap().len()).unwrap();
            }
            response.send_response(Response::new(()), false).unwrap().send_data(body, true).unwrap();
        };
        AbortOnDropHandle::new(tokio::spawn(async move {
            let mut answers = JoinSet::new();
            while let Some(Ok((request, response))) = server.accept().await {
                answers.spawn(answer(request, response, body.clone()));
            }
        }))
    }

    #[tokio::test]
    async fn head_and_body_of_a_request_leave_in_one_write() {
        let (connection, server, writes) = connect().await;
        let _server = serve(server, Bytes::new());
        let exchange = || async {
            let sent = connection.send(request(Bytes::from_static(&[b'x'; 1_000]))).await;
            assert_eq!(sent.unwrap().status(), 200);
            writes.load(Ordering::Relaxed)
        };
        // With the settings of the connection.
        let first = exchange().await;
        for count in 1..4 {
            assert_eq!(exchange().await - first, count);
        }
    }

    #[tokio::test]
    async fn body_of_a_response_has_a_limit() {
        let (connection, server, _) = connect().await;
        let length = 1 << 20;
        let _server = serve(server, Bytes::from(vec![b'x'; length]));
        let body = |limit| {
            let sent = connection.send(request(Bytes::new()));
            async move { sent.await.unwrap().into_body().read(limit).await }
        };
        assert_eq!(body(length).await.unwrap().len(), length);
        assert_eq!(body(length - 1).await, Err(QuestionError::TooLarge));
        assert_eq!(body(length).await.unwrap().len(), length, "the rest of the other one takes no window");
    }

    #[tokio::test]
    async fn connection_that_the_holder_closes_takes_no_more_requests() {
        let (connection, mut server, _) = connect().await;
        server.graceful_shutdown();
        let _server = serve(server, Bytes::new());
        let unsent = async {
            // A request that was sent before the GOAWAY arrived may have any result.
            while !matches!(connection.send(request(Bytes::from_static(b"x"))).await, Err(RelayError::Gone)) {}
        };
        timeout(Duration::from_secs(60), unsent).await.unwrap();
        assert!(connection.has_ended());
    }

    #[tokio::test(start_paused = true)]
    async fn connection_of_a_silent_holder_ends_with_its_requests() {
        let (connection, _silent, _) = connect().await;
        let sent = connection.send(request(Bytes::from_static(b"x"))).await;
        assert_eq!(sent.err(), Some(RelayError::Broken));
        assert!(connection.has_ended());
    }
}
