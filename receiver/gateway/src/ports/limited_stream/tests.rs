use std::task::Waker;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, duplex},
    time::timeout,
};

use super::*;
use crate::ports::tests::testing::settings;

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
            LimitedStream::new(Failing(kind), ReadLimit::Frames(FrameLimiter::of_client(1)), Duration::from_secs(10))
        };
        let ((mut read, of_reads), (mut written, of_writes)) = (stream(), stream());
        assert_eq!(read.read_u8().await.unwrap_err().kind(), kind);
        assert_eq!(written.write_u8(1).await.unwrap_err().kind(), kind);
        assert_eq!((of_reads.fault(), of_writes.fault()), (reason, reason), "{kind}");
    }
}
