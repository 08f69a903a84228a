//! One connection through a proxy.

use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
    sync::mpsc,
    time::{Instant, sleep, sleep_until},
};

use super::{
    CHUNK, Faults, Mode,
    conditions::{Direction, Link},
    process::{Ports, has_opened},
};

/// Chunks in transit at which the sender is blocked.
const IN_TRANSIT: usize = 1_024;
/// Noise: no record of TLS has this type, and no frame of HTTP/2 this length.
pub(super) const NOISE: &[u8] = &[0xff; 64];

/// Bytes on their way.
struct Chunk {
    arrives: Instant,
    bytes: Bytes,
}

/// Passes everything between a client and the target until one of them ends the connection, or a fault does.
pub(super) async fn pass(mut client: TcpStream, ports: Ports, target: SocketAddr, mut faults: Faults, link: Link) {
    faults.dropped.mark_unchanged();
    let mut cut_off = faults.cut_off.clone();
    let mut mode = faults.mode.clone();
    // The client's connection exists already: its bytes wait as long as the handshake over this distance takes.
    sleep(link.conditions().round_trip).await;
    let Ok(mut server) = TcpStream::connect(target).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let last = Mutex::new(Instant::now());
    let is_idle = {
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        let to_server = Way { direction: Direction::ToServer, faults: &faults, link: &link, last: &last, noise: b"" }
            .copy(from_client, to_server);
        let to_client = Way { direction: Direction::ToClient, faults: &faults, link: &link, last: &last, noise: NOISE }
            .copy(from_server, to_client);
        tokio::select! {
            _ = async { tokio::join!(to_server, to_client) } => false,
            _ = mode.wait_for(|mode| mode.breaks()) => false,
            _ = cut_off.wait_for(|process| process.is_some_and(|process| has_opened(process, ports))) => false,
            () = link.clone().idle(|| *last.lock()) => true,
        }
    };
    if is_idle {
        // Closing then sends a reset.
        let _ = (client.set_zero_linger(), server.set_zero_linger());
    }
}

/// One direction of a connection.
struct Way<'a> {
    direction: Direction,
    faults: &'a Faults,
    link: &'a Link,
    /// When the latest byte of the connection passed.
    last: &'a Mutex<Instant>,
    /// Added by [`Mode::Noise`].
    noise: &'static [u8],
}

impl Way<'_> {
    /// Copies until the end of the stream, which is passed on too.
    async fn copy<R, W>(self, mut from: R, mut to: W)
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let Self { direction, faults, link, last, noise } = self;
        let mut mode = faults.mode.clone();
        let (sender, mut arriving) = mpsc::channel(IN_TRANSIT);
        let read = async move {
            let mut buffer = BytesMut::with_capacity(CHUNK);
            while let Ok(1..) = from.read_buf(&mut buffer).await {
                let now = Instant::now();
                *last.lock() = now;
                let chunk =
                    Chunk { arrives: link.arrival(direction, buffer.len(), now), bytes: buffer.split().freeze() };
                if sender.send(chunk).await.is_err() {
                    return;
                }
                buffer.reserve(CHUNK);
            }
        };
        let write = async move {
            while let Some(Chunk { arrives, bytes }) = arriving.recv().await {
                sleep_until(arrives).await;
                let Ok(now) = mode.wait_for(|mode| !mode.holds()).await.map(|mode| *mode) else { return };
                if faults.dropped.has_changed().unwrap_or(true) {
                    // Held until one of the ends breaks the connection.
                    continue;
                }
                let noise = if now == Mode::Noise { noise } else { b"" };
                if to.write_all(&bytes).await.is_err() || to.write_all(noise).await.is_err() {
                    return;
                }
            }
            let _ = to.shutdown().await;
        };
        tokio::join!(read, write);
    }
}
