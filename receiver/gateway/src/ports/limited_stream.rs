//! A byte stream with limits that HTTP libraries leave open: written bytes must be taken within a deadline, HTTP/2
//! frames have a rate ([`FrameLimiter`]), and an HTTP/1.1 head has a deadline (`head_deadline`).

use std::{
    io::{self, IoSlice},
    mem,
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use tidewatch_kit::frame_limiter::FrameLimiter;
use tokio::{
    io::{AsyncBufRead, AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};

use super::head_deadline::HeadDeadline;

/// Label of too many frames.
pub(super) const FLOOD: &str = "flood";

/// Label of a slow head, and of a peer that the kernel found unreachable. Neither counts towards a block.
const TIMEOUT: &str = "timeout";

/// Limit of received bytes.
pub(super) enum ReadLimit {
    /// HTTP/2.
    Frames(FrameLimiter),
    /// HTTP/1.1.
    Head(HeadDeadline),
}

/// State that a stream shares with the owner of its connection. Clones share one state.
#[derive(Clone, Default)]
pub(super) struct StreamState(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// Limit that ended the connection, as metrics label it.
    fault: OnceLock<&'static str>,
    /// Bytes were written, or a shutdown began, since the last flush ended.
    is_unflushed: AtomicBool,
}

impl StreamState {
    /// Limit that ended the connection, as metrics label it.
    pub(super) fn fault(&self) -> Option<&'static str> {
        self.0.fault.get().copied()
    }

    /// True if the network has taken all bytes written so far.
    pub(super) fn is_flushed(&self) -> bool {
        !self.0.is_unflushed.load(Ordering::Relaxed)
    }

    fn set_unflushed(&self, is_unflushed: bool) {
        self.0.is_unflushed.store(is_unflushed, Ordering::Relaxed);
    }

    fn error(&self, reason: &'static str, kind: io::ErrorKind) -> io::Error {
        let _ = self.0.fault.set(reason);
        io::Error::new(kind, reason)
    }

    /// Passes an I/O error on. Unanswered keepalive probes and unacknowledged bytes count as a timeout, like unanswered
    /// PINGs.
    fn classify(&self, error: io::Error) -> io::Error {
        use io::ErrorKind as K;
        if matches!(error.kind(), K::TimedOut | K::HostUnreachable | K::NetworkUnreachable) {
            let _ = self.0.fault.set(TIMEOUT);
        }
        error
    }
}

/// A stream with these limits.
pub(super) struct LimitedStream<T> {
    io: T,
    limit: ReadLimit,
    deadline: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
    /// Bytes that the next read returns again.
    unread: Bytes,
    /// Error that the next read returns.
    error: Option<io::Error>,
    state: StreamState,
}

impl<T> LimitedStream<T> {
    /// `deadline` is the time for a write to make progress.
    pub(super) fn new(io: T, limit: ReadLimit, deadline: Duration) -> (Self, StreamState) {
        let state = StreamState::default();
        (Self { io, limit, deadline, stalled: None, unread: Bytes::new(), error: None, state: state.clone() }, state)
    }

    /// Puts bytes back that were read and not used; the next read returns them again.
    pub(super) fn unread(&mut self, bytes: Bytes) {
        self.unread = match (bytes.is_empty(), self.unread.is_empty()) {
            // Empty bytes would keep the buffer alive that they are a part of.
            (true, _) => return,
            (false, true) => bytes,
            (false, false) => [bytes, mem::take(&mut self.unread)].concat().into(),
        };
    }

    /// True if it keeps a buffer alive.
    #[cfg(test)]
    pub(super) fn has_buffer(&self) -> bool {
        self.unread.is_unique()
    }

    pub(super) const fn state(&self) -> &StreamState {
        &self.state
    }

    /// Passes the result of a write on, or fails when it has been pending past the deadline.
    fn written<R>(&mut self, result: Poll<io::Result<R>>, context: &mut Context<'_>) -> Poll<io::Result<R>> {
        if result.is_ready() {
            self.stalled = None;
            return result.map_err(|error| self.state.classify(error));
        }
        let deadline = self.deadline;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(deadline)));
        ready!(stalled.as_mut().poll(context));
        Poll::Ready(Err(self.state.error("slow-reader", io::ErrorKind::TimedOut)))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for LimitedStream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.unread.is_empty() {
            let length = self.unread.len().min(buffer.remaining());
            buffer.put_slice(&self.unread.split_to(length));
            if self.unread.is_empty() {
                self.unread = Bytes::new();
            }
            return Poll::Ready(Ok(()));
        }
        if let Some(error) = self.error.take() {
            return Poll::Ready(Err(self.state.classify(error)));
        }
        let Self { io, limit, state, .. } = &mut *self;
        let before = buffer.filled().len();
        let result = Pin::new(io).poll_read(context, buffer).map_err(|error| state.classify(error))?;
        let read = &buffer.filled()[before..];
        let exceeded = match limit {
            ReadLimit::Frames(limiter) => {
                (!limiter.admits(read, Instant::now())).then_some((FLOOD, io::ErrorKind::InvalidData))
            }
            ReadLimit::Head(head) if result.is_ready() => {
                head.read(read);
                None
            }
            ReadLimit::Head(head) => {
                head.poll_elapsed(context).is_ready().then_some((TIMEOUT, io::ErrorKind::TimedOut))
            }
        };
        match exceeded {
            Some((reason, kind)) => Poll::Ready(Err(state.error(reason, kind))),
            None => result.map(Ok),
        }
    }
}

impl<T: AsyncBufRead + Unpin> LimitedStream<T> {
    /// Waits until a read would not wait: for bytes, for the end of the stream, or for an error. Needs no buffer.
    pub(super) fn poll_readable(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.unread.is_empty()
            && let Err(error) = ready!(Pin::new(&mut self.io).poll_fill_buf(context))
        {
            // The network reports an error once.
            self.error = Some(error);
        }
        Poll::Ready(())
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for LimitedStream<T> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.state.set_unflushed(true);
        let result = Pin::new(&mut self.io).poll_write(context, bytes);
        self.written(result, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.state.set_unflushed(true);
        let result = Pin::new(&mut self.io).poll_write_vectored(context, slices);
        self.written(result, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.io).poll_flush(context);
        if result.is_ready() {
            self.state.set_unflushed(false);
        }
        self.written(result, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.state.set_unflushed(true);
        let result = Pin::new(&mut self.io).poll_shutdown(context);
        self.written(result, context)
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, duplex},
        time::timeout,
    };

    use super::*;
    use crate::ports::{lifecycle::ConnectionLifecycle, tests::testing::settings};

    #[tokio::test(start_paused = true)]
    async fn stalled_reader_ends_the_connection_and_a_slow_one_does_not() {
        let (ours, mut theirs) = duplex(10);
        let limit = ReadLimit::Frames(FrameLimiter::of_client(1));
        let (mut stream, state) = LimitedStream::new(ours, limit, Duration::from_secs(10));
        let reader = tokio::spawn(async move {
            let mut bytes = [0; 5];
            for _ in 0..4 {
                tokio::time::sleep(Duration::from_secs(9)).await;
                theirs.read_exact(&mut bytes).await.unwrap();
            }
            theirs
        });
        stream.write_all(&[7; 25]).await.unwrap();
        let _theirs = reader.await.unwrap();
        let error = stream.write_all(&[7; 25]).await.unwrap_err();
        assert_eq!((error.kind(), state.fault()), (io::ErrorKind::TimedOut, Some("slow-reader")));
    }

    #[tokio::test]
    async fn too_many_frames_end_the_connection() {
        let (ours, mut theirs) = duplex(1 << 16);
        let (mut stream, state) =
            LimitedStream::new(ours, ReadLimit::Frames(FrameLimiter::of_client(1)), Duration::from_secs(10));
        theirs.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        theirs.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0].repeat(3)).await.unwrap();
        let error = stream.read_exact(&mut [0; 51]).await.unwrap_err();
        assert_eq!((error.kind(), state.fault()), (io::ErrorKind::InvalidData, Some("flood")));
    }

    #[tokio::test(start_paused = true)]
    async fn head_has_a_deadline_from_its_first_byte_and_idle_time_has_none() {
        let lifecycle = Arc::new(ConnectionLifecycle::new(&settings(), false, Instant::now(), 0));
        let (ours, mut theirs) = duplex(100);
        let limit = ReadLimit::Head(HeadDeadline::new(lifecycle.clone(), Duration::from_secs(10)));
        let (mut stream, state) = LimitedStream::new(ours, limit, Duration::from_secs(10));
        let mut byte = [0];
        let hour = Duration::from_secs(3_600);
        timeout(hour, stream.read_exact(&mut byte)).await.unwrap_err();

        theirs.write_all(b"hb").await.unwrap();
        stream.read_exact(&mut byte).await.unwrap();
        let request = lifecycle.begin(Instant::now());
        stream.read_exact(&mut byte).await.unwrap();
        timeout(hour, stream.read_exact(&mut byte)).await.unwrap_err();
        drop(request);
        timeout(hour, stream.read_exact(&mut byte)).await.unwrap_err();

        // Each byte is in time, and the head as a whole is late.
        let begun = Instant::now();
        let drip = tokio::spawn(async move {
            while theirs.write_all(b"h").await.is_ok() {
                tokio::time::sleep(Duration::from_secs(3)).await;
            }
        });
        let error = stream.read_to_end(&mut Vec::new()).await.unwrap_err();
        assert_eq!((error.kind(), state.fault()), (io::ErrorKind::TimedOut, Some("timeout")));
        assert!(begun.elapsed() < Duration::from_secs(12));
        drop(stream);
        drip.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn each_head_has_its_own_deadline() {
        let lifecycle = Arc::new(ConnectionLifecycle::new(&settings(), false, Instant::now(), 0));
        let mut head = HeadDeadline::new(lifecycle.clone(), Duration::from_secs(10));
        let late = |head: &mut HeadDeadline| head.poll_elapsed(&mut Context::from_waker(Waker::noop())).is_ready();
        head.read(b"h");
        assert!(!late(&mut head), "the deadline starts");
        tokio::time::advance(Duration::from_secs(9)).await;
        head.read(b"b");
        drop(lifecycle.begin(Instant::now()));
        // The next head begins before the deadline of the first was polled.
        head.read(b"h");
        tokio::time::advance(Duration::from_secs(9)).await;
        assert!(!late(&mut head), "the first head was in time, and so is the second");
        tokio::time::advance(Duration::from_secs(11)).await;
        assert!(late(&mut head));
    }

    /// A stream that fails every read and write with this error.
    struct Failing(io::ErrorKind);

    impl AsyncRead for Failing {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Err(self.0.into()))
        }
    }

    impl AsyncWrite for Failing {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Ready(Err(self.0.into()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn unreachable_peer_counts_as_timeout_and_a_reset_as_no_fault() {
        use io::ErrorKind as K;
        for (kind, reason) in [
            (K::TimedOut, Some("timeout")),
            (K::HostUnreachable, Some("timeout")),
            (K::NetworkUnreachable, Some("timeout")),
            (K::ConnectionReset, None),
        ] {
            let stream = || {
                LimitedStream::new(
                    Failing(kind),
                    ReadLimit::Frames(FrameLimiter::of_client(1)),
                    Duration::from_secs(10),
                )
            };
            let ((mut read, of_reads), (mut written, of_writes)) = (stream(), stream());
            assert_eq!(read.read_u8().await.unwrap_err().kind(), kind);
            assert_eq!(written.write_u8(1).await.unwrap_err().kind(), kind);
            assert_eq!((of_reads.fault(), of_writes.fault()), (reason, reason), "{kind}");
        }
    }
}
