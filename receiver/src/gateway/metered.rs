//! A connection's bytes, with two limits that HTTP libraries leave open: what is written must be taken within a deadline, and
//! HTTP/2 frames have a rate (`frames`).

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};

use super::frames::Meter;

/// The reason when frames came too fast.
pub(super) const FLOOD: &str = "flood";

/// Which limit ended the connection, as metrics name it.
#[derive(Clone, Default)]
pub(super) struct Fault(Arc<OnceLock<&'static str>>);

impl Fault {
    pub(super) fn reason(&self) -> Option<&'static str> {
        self.0.get().copied()
    }

    fn error(&self, reason: &'static str, kind: io::ErrorKind) -> io::Error {
        let _ = self.0.set(reason);
        io::Error::new(kind, reason)
    }
}

/// See the module.
pub(super) struct Metered<T> {
    io: T,
    meter: Option<Meter>,
    deadline: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
    fault: Fault,
}

impl<T> Metered<T> {
    /// Whatever is written must be taken within `deadline`; the meter is for HTTP/2.
    pub(super) fn new(io: T, meter: Option<Meter>, deadline: Duration) -> (Self, Fault) {
        let fault = Fault::default();
        (Self { io, meter, deadline, stalled: None, fault: fault.clone() }, fault)
    }

    /// Passes on what a write came to, and ends the connection when it has come to nothing for too long.
    fn written<R>(&mut self, result: Poll<io::Result<R>>, context: &mut Context<'_>) -> Poll<io::Result<R>> {
        if result.is_ready() {
            self.stalled = None;
            return result;
        }
        let deadline = self.deadline;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(deadline)));
        ready!(stalled.as_mut().poll(context));
        Poll::Ready(Err(self.fault.error("slow-reader", io::ErrorKind::TimedOut)))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Metered<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(context, buffer))?;
        let read = &buffer.filled()[before..];
        if let Some(meter) = &mut self.meter
            && !meter.allows(read, Instant::now())
        {
            return Poll::Ready(Err(self.fault.error(FLOOD, io::ErrorKind::InvalidData)));
        }
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Metered<T> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write(context, bytes);
        self.written(result, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write_vectored(context, slices);
        self.written(result, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.io).poll_flush(context);
        self.written(result, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.io).poll_shutdown(context);
        self.written(result, context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_takes_nothing_ends_the_connection_and_who_takes_slowly_does_not() {
        let (ours, mut theirs) = duplex(10);
        let (mut metered, fault) = Metered::new(ours, None, Duration::from_secs(10));
        let reader = tokio::spawn(async move {
            let mut bytes = [0; 5];
            for _ in 0..4 {
                tokio::time::sleep(Duration::from_secs(9)).await;
                theirs.read_exact(&mut bytes).await.unwrap();
            }
            theirs
        });
        metered.write_all(&[7; 25]).await.unwrap();
        let _theirs = reader.await.unwrap();
        let error = metered.write_all(&[7; 25]).await.unwrap_err();
        assert_eq!((error.kind(), fault.reason()), (io::ErrorKind::TimedOut, Some("slow-reader")));
    }

    #[tokio::test]
    async fn frames_end_the_connection_once_they_are_too_many() {
        let (ours, mut theirs) = duplex(1 << 16);
        let (mut metered, fault) = Metered::new(ours, Some(Meter::new(1)), Duration::from_secs(10));
        theirs.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        theirs.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0].repeat(3)).await.unwrap();
        let error = metered.read_exact(&mut [0; 51]).await.unwrap_err();
        assert_eq!((error.kind(), fault.reason()), (io::ErrorKind::InvalidData, Some("flood")));
    }
}
