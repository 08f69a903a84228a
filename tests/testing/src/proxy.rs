//! A TCP proxy on loopback that injects network faults.

use std::{
    fs, io,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::{mpsc, watch},
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep_until},
};

/// Most bytes of one read.
const CHUNK: usize = 64 << 10;
/// Chunks in transit at which the sender is blocked.
const IN_TRANSIT: usize = 64;

/// Fault mode of the connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// No fault.
    Pass,
    /// Delays every chunk, in each direction.
    Delay(Duration),
    /// Delivers nothing; connections stay open and new ones are accepted. Held bytes are delivered afterwards, as after
    /// a partition that TCP survives.
    BlackHole,
    /// Breaks all connections, and new ones at once.
    Cut,
    /// Adds noise after every chunk of the server's, so that the TLS stream breaks in its midst.
    Noise,
    /// Breaks all connections, and answers new ones in plain HTTP, as another server at the address would.
    Plain,
}

impl Mode {
    /// Returns true if connections to the server are broken.
    const fn breaks(self) -> bool {
        matches!(self, Self::Cut | Self::Plain)
    }
}

/// Noise: no record of TLS has this type, and no frame of HTTP/2 this length.
const NOISE: &[u8] = &[0xff; 64];
/// Response of [`Mode::Plain`].
const PLAIN: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}";

/// State that both directions of a connection follow.
#[derive(Debug, Clone)]
struct Faults {
    mode: watch::Receiver<Mode>,
    /// Number of calls of [`Proxy::drop_established`]; a connection older than the latest call delivers nothing.
    dropped: watch::Receiver<u64>,
    /// The process of [`Proxy::cut_off`].
    cut_off: watch::Receiver<Option<u32>>,
}

impl Faults {
    /// Returns true if the process that opened this connection is cut off now.
    fn is_cut_off(&self, ports: Ports) -> bool {
        self.cut_off.borrow().is_some_and(|process| has_opened(process, ports))
    }
}

/// Ports of a connection over loopback: that of its client, and that of the proxy. The first one alone may belong to several
/// connections, each to another server.
type Ports = (u16, u16);

/// A proxy in front of one address. Belongs to the tokio executor that started it, and ends when dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    mode: watch::Sender<Mode>,
    dropped: watch::Sender<u64>,
    cut_off: watch::Sender<Option<u32>>,
    task: AbortHandle,
}

impl Proxy {
    /// Listens on a free port of 127.0.0.1 and passes everything on to `target`.
    ///
    /// # Errors
    /// If no port can be bound.
    pub async fn start(target: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let (mode, mode_receiver) = watch::channel(Mode::Pass);
        let (dropped, dropped_receiver) = watch::channel(0);
        let (cut_off, cut_off_receiver) = watch::channel(None);
        let faults = Faults { mode: mode_receiver, dropped: dropped_receiver, cut_off: cut_off_receiver };
        let task = tokio::spawn(accept((listener, address), target, faults)).abort_handle();
        Ok(Self { address, mode, dropped, cut_off, task })
    }

    /// Address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Breaks all connections; new ones are broken at once.
    pub fn cut(&self) {
        self.set(Mode::Cut);
    }

    /// Delivers nothing, and breaks nothing.
    pub fn black_hole(&self) {
        self.set(Mode::BlackHole);
    }

    /// Delays each direction.
    pub fn delay(&self, by: Duration) {
        self.set(Mode::Delay(by));
    }

    /// Passes everything again.
    pub fn resume(&self) {
        self.set(Mode::Pass);
    }

    /// Delivers nothing any more on the current connections, for ever and without breaking them, like a firewall that
    /// lost its connection table. New connections follow the mode.
    pub fn drop_established(&self) {
        self.dropped.send_modify(|count| *count += 1);
    }

    /// Breaks all connections of one process of this machine, and new ones of it at once, until [`Proxy::readmit`].
    /// Connections of other processes follow the mode.
    pub fn cut_off(&self, process: u32) {
        self.cut_off.send_replace(Some(process));
    }

    /// Ends [`Proxy::cut_off`].
    pub fn readmit(&self) {
        self.cut_off.send_replace(None);
    }

    /// Sets the mode.
    pub fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Accepts connections until it is aborted, which ends theirs too.
async fn accept((listener, address): (TcpListener, SocketAddr), target: SocketAddr, faults: Faults) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((client, from)) = accepted else { continue };
                let ports = (from.port(), address.port());
                let mode = *faults.mode.borrow();
                match mode {
                    Mode::Cut => {}
                    _ if faults.is_cut_off(ports) => {}
                    Mode::Plain => drop(connections.spawn(plain(client))),
                    _ => drop(connections.spawn(connection((client, ports), target, faults.clone()))),
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Answers the first bytes, and closes.
async fn plain(mut client: TcpStream) {
    let mut first = BytesMut::with_capacity(CHUNK);
    if let Ok(1..) = client.read_buf(&mut first).await {
        let _ = client.write_all(PLAIN).await;
        let _ = client.shutdown().await;
    }
}

async fn connection((client, ports): (TcpStream, Ports), target: SocketAddr, mut faults: Faults) {
    faults.dropped.mark_unchanged();
    let mut cut_off = faults.cut_off.clone();
    let Ok(server) = TcpStream::connect(target).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let both = async {
        tokio::join!(
            direction(from_client, to_server, faults.clone(), b""),
            direction(from_server, to_client, faults.clone(), NOISE),
        )
    };
    let mut cut = faults.mode.clone();
    tokio::select! {
        _ = both => {}
        _ = cut.wait_for(|mode| mode.breaks()) => {}
        _ = cut_off.wait_for(|process| process.is_some_and(|process| has_opened(process, ports))) => {}
    }
}

/// Returns true if a process has the client's socket of a connection (proc(5): `net/tcp` and `fd`).
fn has_opened(process: u32, (from, to): Ports) -> bool {
    let table = fs::read_to_string(format!("/proc/{process}/net/tcp")).unwrap_or_default();
    let from = format!(":{from:04X}");
    let to = format!(":{to:04X}");
    let sockets = table.lines().skip(1).filter_map(|line| {
        let mut fields = line.split_whitespace();
        let local = fields.nth(1)?;
        let remote = fields.next()?;
        let inode = fields.nth(6)?;
        (local.ends_with(&from) && remote.ends_with(&to)).then(|| format!("socket:[{inode}]"))
    });
    let sockets: Vec<_> = sockets.collect();
    let open = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    let mut links = open.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.any(|link| sockets.iter().any(|socket| link.as_os_str() == socket.as_str()))
}

/// Copies one direction until its end, which is passed on too; `noise` is added by [`Mode::Noise`].
async fn direction<R, W>(mut from: R, mut to: W, faults: Faults, noise: &'static [u8])
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let Faults { mut mode, dropped, .. } = faults;
    let (sender, mut arriving) = mpsc::channel::<(Instant, Bytes)>(IN_TRANSIT);
    let read_mode = mode.clone();
    let read = async move {
        let mut buffer = BytesMut::with_capacity(CHUNK);
        while let Ok(1..) = from.read_buf(&mut buffer).await {
            let delay = if let Mode::Delay(by) = *read_mode.borrow() { by } else { Duration::ZERO };
            if sender.send((Instant::now() + delay, buffer.split().freeze())).await.is_err() {
                return;
            }
            buffer.reserve(CHUNK);
        }
    };
    let write = async move {
        while let Some((due, chunk)) = arriving.recv().await {
            sleep_until(due).await;
            let Ok(now) = mode.wait_for(|mode| *mode != Mode::BlackHole).await.map(|mode| *mode) else { return };
            if dropped.has_changed().unwrap_or(true) {
                // Held until one of the ends breaks the connection.
                continue;
            }
            let noise = if now == Mode::Noise { noise } else { b"" };
            if to.write_all(&chunk).await.is_err() || to.write_all(noise).await.is_err() {
                return;
            }
        }
        let _ = to.shutdown().await;
    };
    tokio::join!(read, write);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An echo server, and a connection to it through a proxy.
    async fn echo() -> (Proxy, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("bound");
        let target = listener.local_addr().expect("an address");
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut from, mut to) = stream.split();
                    let _ = tokio::io::copy(&mut from, &mut to).await;
                });
            }
        });
        let proxy = Proxy::start(target).await.expect("started");
        let stream = TcpStream::connect(proxy.address()).await.expect("connected");
        (proxy, stream)
    }

    async fn round_trip(stream: &mut TcpStream, text: &str) -> io::Result<()> {
        stream.write_all(text.as_bytes()).await?;
        let mut back = vec![0; text.len()];
        stream.read_exact(&mut back).await?;
        assert_eq!(back, text.as_bytes());
        Ok(())
    }

    #[tokio::test]
    async fn bytes_and_end_of_stream_pass_through() {
        let (_proxy, mut stream) = echo().await;
        round_trip(&mut stream, "hello").await.expect("passed");
        stream.shutdown().await.expect("shut down");
        assert_eq!(stream.read(&mut [0; 8]).await.expect("an end"), 0);
    }

    #[tokio::test]
    async fn cut_breaks_old_and_new_connections_until_resumed() {
        let (proxy, mut stream) = echo().await;
        round_trip(&mut stream, "hello").await.expect("passed");
        proxy.cut();
        assert!(!matches!(stream.read(&mut [0; 8]).await, Ok(1..)));
        let mut new = TcpStream::connect(proxy.address()).await.expect("the kernel takes it");
        assert!(round_trip(&mut new, "hello").await.is_err());
        proxy.resume();
        let mut new = TcpStream::connect(proxy.address()).await.expect("connected");
        round_trip(&mut new, "again").await.expect("passed");
    }

    #[tokio::test]
    async fn one_process_is_cut_off_until_it_is_readmitted() {
        let (proxy, mut stream) = echo().await;
        proxy.cut_off(std::os::unix::process::parent_id());
        round_trip(&mut stream, "hello").await.expect("another process is meant");
        proxy.cut_off(std::process::id());
        assert!(!matches!(stream.read(&mut [0; 8]).await, Ok(1..)));
        let mut new = TcpStream::connect(proxy.address()).await.expect("the kernel takes it");
        assert!(round_trip(&mut new, "hello").await.is_err());
        proxy.readmit();
        let mut new = TcpStream::connect(proxy.address()).await.expect("connected");
        round_trip(&mut new, "again").await.expect("passed");
    }

    #[tokio::test]
    async fn port_of_a_client_alone_does_not_make_a_connection_its_own() {
        let (proxy, stream) = echo().await;
        let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("bound");
        let [from, to] = [stream.local_addr(), other.local_addr()].map(|address| address.expect("an address").port());
        assert!(has_opened(std::process::id(), (from, proxy.address().port())));
        assert!(!has_opened(std::process::id(), (from, to)));
    }

    #[tokio::test]
    async fn black_hole_holds_bytes_until_resumed() {
        let (proxy, mut stream) = echo().await;
        round_trip(&mut stream, "hello").await.expect("passed");
        proxy.black_hole();
        stream.write_all(b"held").await.expect("taken");
        let mut back = [0; 4];
        let silence = tokio::time::timeout(Duration::from_millis(200), stream.read_exact(&mut back)).await;
        assert!(silence.is_err(), "nothing comes through");
        proxy.resume();
        stream.read_exact(&mut back).await.expect("it comes through");
        assert_eq!(&back, b"held");
    }

    #[tokio::test]
    async fn dropped_connections_are_silent_and_new_ones_pass() {
        let (proxy, mut stream) = echo().await;
        round_trip(&mut stream, "hello").await.expect("passed");
        proxy.drop_established();
        stream.write_all(b"lost").await.expect("taken");
        let silence = tokio::time::timeout(Duration::from_millis(200), stream.read(&mut [0; 4])).await;
        assert!(silence.is_err(), "nothing comes through, and nothing breaks");
        let mut new = TcpStream::connect(proxy.address()).await.expect("connected");
        round_trip(&mut new, "again").await.expect("passed");
    }

    #[tokio::test]
    async fn noise_follows_the_servers_bytes() {
        let (proxy, mut stream) = echo().await;
        proxy.set(Mode::Noise);
        round_trip(&mut stream, "hello").await.expect("passed");
        let mut noise = [0; NOISE.len()];
        stream.read_exact(&mut noise).await.expect("noise");
        assert_eq!(noise, NOISE);
    }

    #[tokio::test]
    async fn plain_http_answers_in_place_of_the_server() {
        let (proxy, mut stream) = echo().await;
        round_trip(&mut stream, "hello").await.expect("passed");
        proxy.set(Mode::Plain);
        assert!(!matches!(stream.read(&mut [0; 8]).await, Ok(1..)), "the old connection is broken");
        let mut new = TcpStream::connect(proxy.address()).await.expect("connected");
        new.write_all(b"client hello").await.expect("taken");
        let mut answer = Vec::new();
        new.read_to_end(&mut answer).await.expect("an answer and an end");
        assert_eq!(answer, PLAIN);
    }

    #[tokio::test]
    async fn a_delay_holds_each_direction() {
        let (proxy, mut stream) = echo().await;
        proxy.delay(Duration::from_millis(100));
        let began = Instant::now();
        round_trip(&mut stream, "hello").await.expect("passed");
        assert!(began.elapsed() >= Duration::from_millis(200));
    }
}
