//! A byte stream with limits that HTTP libraries leave open: written bytes must be taken within a deadline, HTTP/2
//! frames have a rate ([`FrameLimiter`]), and an HTTP/1.1 head has a deadline.

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

use super::lifecycle::ConnectionLifecycle;

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

/// Deadline of an HTTP/1.1 request's head, from its first byte to its last. A head that arrives in one piece, as nearly all
/// do, costs no timer. The time between two requests is limited by `lifecycle`.
///
/// Bytes that arrive while a request is in flight belong to its body or to a pipelined head. The deadline of a
/// pipelined head starts with the first bytes after the response was read; if none arrive, the connection counts as
/// idle.
pub(super) struct HeadDeadline {
    lifecycle: Arc<ConnectionLifecycle>,
    deadline: Duration,
    /// Count of requests before the head of which bytes have arrived.
    partial: Option<u64>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl HeadDeadline {
    pub(super) const fn new(lifecycle: Arc<ConnectionLifecycle>, deadline: Duration) -> Self {
        Self { lifecycle, deadline, partial: None, timer: None }
    }

    /// Records received bytes, which belong to a head unless a request is in flight. End of stream has none.
    pub(super) fn read(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let head = self.lifecycle.requests_if_idle();
        if head != self.partial {
            // A running timer belongs to an earlier head.
            (self.partial, self.timer) = (head, None);
        }
    }

    /// Ready when the deadline of an incomplete head has passed. Must be polled when no more bytes are available.
    pub(super) fn poll_elapsed(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.partial.is_none() || self.partial != self.lifecycle.requests_if_idle() {
            (self.partial, self.timer) = (None, None);
            return Poll::Pending;
        }
        let deadline = self.deadline;
        self.timer.get_or_insert_with(|| Box::pin(sleep(deadline))).as_mut().poll(context)
    }
}

#[cfg(test)]
mod tests;
