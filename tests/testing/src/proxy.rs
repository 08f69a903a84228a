//! A TCP proxy on loopback with the conditions of a real network, which injects faults.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use bytes::BytesMut;
use socket2::SockRef;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::{AbortHandle, JoinSet},
    time::timeout,
};

mod conditions;
mod connection;
mod process;

pub use conditions::Conditions;
use conditions::Link;
use process::{Ports, has_opened};

/// Most bytes of one read.
const CHUNK: usize = 64 << 10;
/// Connections that wait for the proxy to accept them, at most.
const BACKLOG: i32 = 1_024;
/// A connection over loopback that takes longer was swallowed.
const CONNECT_LIMIT: Duration = Duration::from_millis(100);

/// Fault mode of the connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// No fault.
    Pass,
    /// Delivers nothing; connections stay open and new ones are accepted. Held bytes are delivered afterwards, as after
    /// a partition that TCP survives.
    BlackHole,
    /// As [`Mode::BlackHole`], and new connections get no answer, as from the address of a machine that sleeps.
    Swallow,
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

    /// Returns true if bytes are held.
    const fn holds(self) -> bool {
        matches!(self, Self::BlackHole | Self::Swallow)
    }
}

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

/// A proxy in front of one address. Belongs to the tokio executor that started it, and ends when dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    mode: watch::Sender<Mode>,
    conditions: watch::Sender<Conditions>,
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
        let (conditions, conditions_receiver) = watch::channel(Conditions::default());
        let (dropped, dropped_receiver) = watch::channel(0);
        let (cut_off, cut_off_receiver) = watch::channel(None);
        let faults = Faults { mode: mode_receiver, dropped: dropped_receiver, cut_off: cut_off_receiver };
        let link = Link::new(conditions_receiver);
        let task = tokio::spawn(Listening { listener, address, target, faults, link }.accept()).abort_handle();
        Ok(Self { address, mode, conditions, dropped, cut_off, task })
    }

    /// Address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the conditions of the network, for the connections that are open as well.
    pub fn set_conditions(&self, conditions: Conditions) {
        self.conditions.send_replace(conditions);
    }

    /// Sets the round-trip time alone.
    pub fn set_round_trip(&self, round_trip: Duration) {
        self.conditions.send_modify(|conditions| conditions.round_trip = round_trip);
    }

    /// Breaks all connections; new ones are broken at once.
    pub fn cut(&self) {
        self.set(Mode::Cut);
    }

    /// Delivers nothing, and breaks nothing.
    pub fn black_hole(&self) {
        self.set(Mode::BlackHole);
    }

    /// Ends the fault.
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

/// The task of a proxy.
struct Listening {
    listener: TcpListener,
    address: SocketAddr,
    target: SocketAddr,
    faults: Faults,
    link: Link,
}

impl Listening {
    /// Accepts connections until it is aborted, which ends theirs too.
    async fn accept(mut self) {
        let mut connections = JoinSet::new();
        loop {
            if *self.faults.mode.borrow_and_update() == Mode::Swallow {
                self.swallow().await;
                continue;
            }
            tokio::select! {
                accepted = self.listener.accept() => {
                    let Ok((client, from)) = accepted else { continue };
                    let ports = Ports { from: from.port(), to: self.address.port() };
                    let mode = *self.faults.mode.borrow();
                    match mode {
                        Mode::Cut => {}
                        _ if self.faults.is_cut_off(ports) => {}
                        Mode::Plain => drop(connections.spawn(plain(client))),
                        _ => {
                            let faults = self.faults.clone();
                            drop(connections.spawn(connection::pass(client, ports, self.target, faults, self.link.clone())));
                        }
                    }
                }
                Some(_) = connections.join_next() => {}
                Ok(()) = self.faults.mode.changed() => {}
            }
        }
    }

    /// Leaves new connections without an answer until the mode changes: Linux drops the packet that opens a connection
    /// while the queue of those to be accepted is full (listen(2)). The queue is made short, and filled.
    async fn swallow(&mut self) {
        let _ = SockRef::from(&self.listener).listen(0);
        let mut fillers = Vec::new();
        while let Ok(Ok(filler)) = timeout(CONNECT_LIMIT, TcpStream::connect(self.address)).await {
            fillers.push(filler);
        }
        let _ = self.faults.mode.wait_for(|mode| *mode != Mode::Swallow).await;
        let _ = SockRef::from(&self.listener).listen(BACKLOG);
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

#[cfg(test)]
mod tests;
