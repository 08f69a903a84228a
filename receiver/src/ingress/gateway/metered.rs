//! A connection's bytes, with limits that HTTP libraries leave open: what is written must be taken within a deadline, HTTP/2 frames
//! have a rate (`frames`), and a head of HTTP/1.1 has a deadline of its own (`heads`).

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

use super::{frames::Meter, heads::Heads};

/// The reason when frames came too fast.
pub(super) const FLOOD: &str = "flood";

/// The reason when a head came too slowly, and when the system found that nobody is there any more: the two are nothing that is held
/// against anybody.
const TIMEOUT: &str = "timeout";

/// What limits what is read.
pub(super) enum Limit {
    /// HTTP/2.
    Frames(Meter),
    /// HTTP/1.1.
    Heads(Heads),
}

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

    /// Passes on the system's error. Probes and bytes that nobody acknowledged end a connection like PINGs that nobody answered.
    fn noted(&self, error: io::Error) -> io::Error {
        use io::ErrorKind as K;
        if matches!(error.kind(), K::TimedOut | K::HostUnreachable | K::NetworkUnreachable) {
            let _ = self.0.set(TIMEOUT);
        }
        error
    }
}

/// See the module.
pub(super) struct Metered<T> {
    io: T,
    limit: Limit,
    deadline: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
    fault: Fault,
}

impl<T> Metered<T> {
    /// Whatever is written must be taken within `deadline`.
    pub(super) fn new(io: T, limit: Limit, deadline: Duration) -> (Self, Fault) {
        let fault = Fault::default();
        (Self { io, limit, deadline, stalled: None, fault: fault.clone() }, fault)
    }

    /// Passes on what a write came to, and ends the connection when it has come to nothing for too long.
    fn written<R>(&mut self, result: Poll<io::Result<R>>, context: &mut Context<'_>) -> Poll<io::Result<R>> {
        if result.is_ready() {
            self.stalled = None;
            return result.map_err(|error| self.fault.noted(error));
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
        let Self { io, limit, fault, .. } = &mut *self;
        let before = buffer.filled().len();
        let result = Pin::new(io).poll_read(context, buffer).map_err(|error| fault.noted(error))?;
        let read = &buffer.filled()[before..];
        let broken = match limit {
            Limit::Frames(meter) => !meter.allows(read, Instant::now()),
            Limit::Heads(heads) if result.is_ready() => {
                heads.read(read);
                false
            }
            Limit::Heads(heads) => heads.poll_late(context).is_ready(),
        };
        match (broken, limit) {
            (false, _) => result.map(Ok),
            (true, Limit::Frames(_)) => Poll::Ready(Err(fault.error(FLOOD, io::ErrorKind::InvalidData))),
            (true, Limit::Heads(_)) => Poll::Ready(Err(fault.error(TIMEOUT, io::ErrorKind::TimedOut))),
        }
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
    use std::task::Waker;

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, duplex},
        time::timeout,
    };

    use super::*;
    use crate::ingress::gateway::{life::Life, tests::testing::settings};

    #[tokio::test(start_paused = true)]
    async fn who_takes_nothing_ends_the_connection_and_who_takes_slowly_does_not() {
        let (ours, mut theirs) = duplex(10);
        let limit = Limit::Frames(Meter::new(1));
        let (mut metered, fault) = Metered::new(ours, limit, Duration::from_secs(10));
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
        let (mut metered, fault) = Metered::new(ours, Limit::Frames(Meter::new(1)), Duration::from_secs(10));
        theirs.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        theirs.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0].repeat(3)).await.unwrap();
        let error = metered.read_exact(&mut [0; 51]).await.unwrap_err();
        assert_eq!((error.kind(), fault.reason()), (io::ErrorKind::InvalidData, Some("flood")));
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_has_a_deadline_from_its_first_byte_and_the_rest_between_requests_has_none() {
        let life = Arc::new(Life::new(&settings(), false, Instant::now(), 0));
        let (ours, mut theirs) = duplex(100);
        let limit = Limit::Heads(Heads::new(life.clone(), Duration::from_secs(10)));
        let (mut metered, fault) = Metered::new(ours, limit, Duration::from_secs(10));
        let mut byte = [0];
        let hour = Duration::from_secs(3_600);
        timeout(hour, metered.read_exact(&mut byte)).await.unwrap_err();

        theirs.write_all(b"hb").await.unwrap();
        metered.read_exact(&mut byte).await.unwrap();
        let busy = life.begin(Instant::now());
        metered.read_exact(&mut byte).await.unwrap();
        timeout(hour, metered.read_exact(&mut byte)).await.unwrap_err();
        drop(busy);
        timeout(hour, metered.read_exact(&mut byte)).await.unwrap_err();

        // Each byte in time, all of them too late.
        let begun = Instant::now();
        let drip = tokio::spawn(async move {
            while theirs.write_all(b"h").await.is_ok() {
                tokio::time::sleep(Duration::from_secs(3)).await;
            }
        });
        let error = metered.read_to_end(&mut Vec::new()).await.unwrap_err();
        assert_eq!((error.kind(), fault.reason()), (io::ErrorKind::TimedOut, Some("timeout")));
        assert!(begun.elapsed() < Duration::from_secs(12));
        drop(metered);
        drip.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn each_head_has_a_time_of_its_own() {
        let life = Arc::new(Life::new(&settings(), false, Instant::now(), 0));
        let mut heads = Heads::new(life.clone(), Duration::from_secs(10));
        let late = |heads: &mut Heads| heads.poll_late(&mut Context::from_waker(Waker::noop())).is_ready();
        heads.read(b"h");
        assert!(!late(&mut heads), "its time begins");
        tokio::time::advance(Duration::from_secs(9)).await;
        heads.read(b"b");
        drop(life.begin(Instant::now()));
        // The next one begins before anybody has looked at the time of the first.
        heads.read(b"h");
        tokio::time::advance(Duration::from_secs(9)).await;
        assert!(!late(&mut heads), "the first was in time, and so is the second");
        tokio::time::advance(Duration::from_secs(11)).await;
        assert!(late(&mut heads));
    }

    /// The other end's machine is gone.
    struct Gone(io::ErrorKind);

    impl AsyncRead for Gone {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Err(self.0.into()))
        }
    }

    impl AsyncWrite for Gone {
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
    async fn whom_the_system_gives_up_has_timed_out_and_broken_nothing() {
        use io::ErrorKind as K;
        for (kind, reason) in [
            (K::TimedOut, Some("timeout")),
            (K::HostUnreachable, Some("timeout")),
            (K::NetworkUnreachable, Some("timeout")),
            (K::ConnectionReset, None),
        ] {
            let metered = || Metered::new(Gone(kind), Limit::Frames(Meter::new(1)), Duration::from_secs(10));
            let ((mut read, of_reads), (mut written, of_writes)) = (metered(), metered());
            assert_eq!(read.read_u8().await.unwrap_err().kind(), kind);
            assert_eq!(written.write_u8(1).await.unwrap_err().kind(), kind);
            assert_eq!((of_reads.reason(), of_writes.reason()), (reason, reason), "{kind}");
        }
    }
}
