//! Connection to a runtime's API server with a limited rate of HTTP/2 frames. Its bodies are limited elsewhere; frames
//! without a body would cost the receiver work without end.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
};

use hyper_rustls::MaybeHttpsStream;
use hyper_util::{
    client::legacy::connect::{Connected, Connection},
    rt::TokioIo,
};
use thiserror::Error;
use tidewatch_kit::{frame_limiter::FrameLimiter, metrics::ReasonLabel};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::Instant,
};

use super::Metrics;

/// Frames with few or no body bytes of one connection, per second, and twice as many in a burst. A response has two or
/// three, and at most eight requests are pending.
const FRAMES: u32 = 2_000;
/// Reason in the metric of refused responses.
const FLOOD: &str = "frames";

/// The API server of a runtime sends more frames than responses need.
#[derive(Clone, Copy, Debug, Error)]
#[error("the runtime's API server sends too many HTTP/2 frames")]
struct FrameFloodError;

/// A connection that fails when its peer exceeds the rate.
pub(super) struct LimitedStream {
    io: TokioIo<MaybeHttpsStream<TokioIo<TcpStream>>>,
    /// `None` over HTTP/1.1.
    limiter: Option<FrameLimiter>,
    metrics: Metrics,
}

impl LimitedStream {
    pub(super) fn new(stream: MaybeHttpsStream<TokioIo<TcpStream>>, metrics: Metrics) -> Self {
        let limiter = stream.connected().is_negotiated_h2().then(|| FrameLimiter::of_server(FRAMES));
        Self { io: TokioIo::new(stream), limiter, metrics }
    }
}

impl Connection for LimitedStream {
    fn connected(&self) -> Connected {
        self.io.inner().connected()
    }
}

impl AsyncRead for LimitedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { io, limiter, metrics } = &mut *self;
        let before = buffer.filled().len();
        ready!(Pin::new(io).poll_read(context, buffer))?;
        let read = &buffer.filled()[before..];
        if limiter.as_mut().is_none_or(|limiter| limiter.admits(read, Instant::now())) {
            return Poll::Ready(Ok(()));
        }
        metrics.refused.get_or_create(&ReasonLabel { reason: FLOOD }).inc();
        Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, FrameFloodError)))
    }
}

impl AsyncWrite for LimitedStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}
