//! A flooding runtime: a fixed number of requests per second regardless of the answers, over a minimal HTTP/2 client.
//! It spends next to nothing on each request, and has a thread of its own, so that its CPU time can be separated from
//! the CPU time that it causes.

use std::{
    net::SocketAddr,
    process,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use rustix::process::setpriority_process;
use tidewatch_api::identity::Epoch;
use tidewatch_contract::{
    exchange::EVENTS_PATH,
    signature::{self, Nonce},
};
use tokio::{
    io::{self, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    runtime,
    time::{MissedTickBehavior, interval, sleep, timeout},
};

use super::{Agent, SignedClient};
use crate::product::cpu_by_thread;

/// Concurrent connections, the most that one runtime may have.
const CONNECTIONS: u32 = 4;
/// Shortest interval at which each connection sends the requests that are due.
const TICK: Duration = Duration::from_millis(5);
/// Longest such interval, for low rates: a thread that wakes up for each single request costs more than the requests.
const LONG_TICK: Duration = Duration::from_millis(200);
/// Requests that each interval has at least, below the longest one.
const TICK_REQUESTS: f64 = 20.0;
/// Requests that became due this long before the last interval, while the connection was blocked, are not made up for.
const CATCH_UP: Duration = Duration::from_millis(95);
/// A connection that takes no bytes for so long is replaced by a new one.
const WRITE_TIMEOUT: Duration = Duration::from_millis(100);
/// Pause after a connection that could not be opened.
const RECONNECT_PAUSE: Duration = Duration::from_millis(10);
/// Name of its thread.
const THREAD: &str = "flood";
/// Nice value (setpriority(2)).
const LOWEST_PRIORITY: i32 = 19;
const CONTENT_TYPE: &str = "application/cloudevents-batch+json";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// Length of a frame header in bytes (RFC 9113, section 4.1).
const HEAD: usize = 9;

/// See the module.
pub struct Flooder {
    client: Arc<SignedClient>,
    request: Arc<Request>,
}

/// Counters of a flood that has ended.
#[derive(Clone, Copy, Debug, Default)]
pub struct FloodReport {
    /// Duration in seconds.
    pub seconds: f64,
    /// Requests that became due.
    pub offered: u64,
    /// Requests that were written to a connection. The others became due while no connection was open or writable.
    pub sent: u64,
    /// Responses.
    pub answered: u64,
    /// Requests that were refused one by one without a response (`RST_STREAM`).
    pub reset: u64,
    /// Connections that were opened, handshake included.
    pub opened: u64,
    /// Connections that could not be opened.
    pub unopened: u64,
    /// Connections that the server closed.
    pub closed: u64,
    /// Connections that stopped taking bytes and were given up.
    pub stuck: u64,
    /// CPU time of the flooding thread, in seconds.
    pub cpu: f64,
}

#[derive(Default)]
struct Counts {
    offered: AtomicU64,
    sent: AtomicU64,
    answered: AtomicU64,
    reset: AtomicU64,
    opened: AtomicU64,
    unopened: AtomicU64,
    closed: AtomicU64,
    stuck: AtomicU64,
}

/// A running flood; dropping it ends it.
pub struct Flood {
    counts: Arc<Counts>,
    begun: Instant,
    runtime: Option<runtime::Runtime>,
}

impl Flooder {
    /// Signs the request once; the flood repeats it, so that sending costs next to nothing.
    ///
    /// # Errors
    /// When it cannot be signed.
    pub fn new(agent: Agent) -> Result<Self> {
        let client = agent.into_client();
        let request = Request::new(&client)?;
        Ok(Self { client: Arc::new(client), request: Arc::new(request) })
    }

    /// Begins to send so many requests per second to this address.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn open(&self, address: SocketAddr, per_second: u32) -> Result<Flood> {
        self.open_at(address, per_second, 0)
    }

    /// As [`Flooder::open`], in the time that all other processes leave: many flooding clients would otherwise measure the
    /// machine that they share with the receiver.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn open_in_background(&self, address: SocketAddr, per_second: u32) -> Result<Flood> {
        self.open_at(address, per_second, LOWEST_PRIORITY)
    }

    fn open_at(&self, address: SocketAddr, per_second: u32, nice: i32) -> Result<Flood> {
        let mut builder = runtime::Builder::new_multi_thread();
        let runtime = builder
            .worker_threads(1)
            .thread_name(THREAD)
            .on_thread_start(move || {
                // On Linux that of the calling thread alone. Lowering it needs no privilege.
                let _ = setpriority_process(None, nice);
            })
            .enable_all()
            .build()
            .context("start the thread of the flood")?;
        let counts = Arc::<Counts>::default();
        for _ in 0..CONNECTIONS {
            let client = self.client.clone();
            let request = self.request.clone();
            let counts = counts.clone();
            let mut due = RequestClock::new(f64::from(per_second) / f64::from(CONNECTIONS));
            runtime.spawn(async move {
                loop {
                    let Ok(stream) = client.connect_http2(address).await else {
                        counts.unopened.fetch_add(1, Relaxed);
                        sleep(RECONNECT_PAUSE).await;
                        continue;
                    };
                    counts.opened.fetch_add(1, Relaxed);
                    let (read, write) = io::split(stream);
                    let ended_as = tokio::select! {
                        () = count_responses(read, &counts) => &counts.closed,
                        is_stuck = send_requests(write, &request, &mut due, &counts) => {
                            if is_stuck { &counts.stuck } else { &counts.closed }
                        }
                    };
                    ended_as.fetch_add(1, Relaxed);
                }
            });
        }
        Ok(Flood { counts, begun: Instant::now(), runtime: Some(runtime) })
    }
}

impl Flood {
    /// Ends it and returns the counters.
    ///
    /// # Errors
    /// When the CPU time cannot be read.
    pub fn end(self) -> Result<FloodReport> {
        let cpu = cpu_by_thread(process::id())?;
        let Counts { offered, sent, answered, reset, opened, unopened, closed, stuck } = &*self.counts;
        let [offered, sent, answered, reset, opened, unopened, closed, stuck] =
            [offered, sent, answered, reset, opened, unopened, closed, stuck].map(|count| count.load(Relaxed));
        let seconds = self.begun.elapsed().as_secs_f64();
        let cpu = cpu.get(THREAD).copied().unwrap_or_default().as_secs_f64();
        Ok(FloodReport { seconds, offered, sent, answered, reset, opened, unopened, closed, stuck, cpu })
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Waiting for threads is not allowed inside a task.
            runtime.shutdown_background();
        }
    }
}

/// Counts the requests that become due.
struct RequestClock {
    begun: Instant,
    per_second: f64,
    counted: u64,
}

impl RequestClock {
    fn new(per_second: f64) -> Self {
        Self { begun: Instant::now(), per_second, counted: 0 }
    }

    /// Interval of the calls.
    fn tick(&self) -> Duration {
        Duration::from_secs_f64(TICK_REQUESTS / self.per_second.max(1.0)).clamp(TICK, LONG_TICK)
    }

    /// Requests since the last call, and how many of them are recent enough to be sent.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of requests")]
    fn take(&mut self) -> (u64, u64) {
        let all = (self.begun.elapsed().as_secs_f64() * self.per_second) as u64;
        let due = all - self.counted;
        self.counted = all;
        (due, due.min(((self.tick() + CATCH_UP).as_secs_f64() * self.per_second) as u64))
    }
}

/// Sends the requests that become due until the connection breaks (false) or blocks (true).
async fn send_requests(
    mut write: impl AsyncWrite + Unpin,
    request: &Request,
    due: &mut RequestClock,
    counts: &Counts,
) -> bool {
    let mut ticks = interval(due.tick());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut bytes = preface();
    let mut stream = 1;
    loop {
        ticks.tick().await;
        let (offered, sending) = due.take();
        counts.offered.fetch_add(offered, Relaxed);
        (0..sending).for_each(|_| stream = request.write(stream, &mut bytes));
        let sent = async {
            write.write_all(&bytes).await?;
            write.flush().await
        };
        match timeout(WRITE_TIMEOUT, sent).await {
            Ok(Ok(())) => counts.sent.fetch_add(sending, Relaxed),
            Ok(Err(_)) => return false,
            Err(_) => return true,
        };
        bytes.clear();
    }
}

/// Counts responses until the connection ends.
async fn count_responses(mut read: impl AsyncRead + Unpin, counts: &Counts) {
    let mut buffer = vec![0; 64 << 10];
    let mut head = [0; HEAD];
    let mut have = 0;
    let mut skip = 0;
    while let Ok(length @ 1..) = read.read(&mut buffer).await {
        let mut bytes = &buffer[..length];
        while !bytes.is_empty() {
            let skipped = bytes.len().min(skip);
            skip -= skipped;
            bytes = &bytes[skipped..];
            let taken = bytes.len().min(HEAD - have);
            head[have..have + taken].copy_from_slice(&bytes[..taken]);
            have += taken;
            bytes = &bytes[taken..];
            if have == HEAD {
                let [a, b, c, kind, ..] = head;
                (have, skip) = (0, u32::from_be_bytes([0, a, b, c]) as usize);
                match kind {
                    HEADERS => counts.answered.fetch_add(1, Relaxed),
                    RST_STREAM => counts.reset.fetch_add(1, Relaxed),
                    _ => 0,
                };
            }
        }
    }
}

/// The bytes of a request, for any stream.
struct Request {
    bytes: Vec<u8>,
    /// Offsets of the stream identifier.
    streams: [usize; 2],
}

impl Request {
    fn new(client: &SignedClient) -> Result<Self> {
        let nonce = Nonce { epoch: Epoch::new(1), counter: 1 };
        let body = Bytes::from_static(b"[]");
        let signed = client.sign(EVENTS_PATH, CONTENT_TYPE, body.clone(), nonce)?;
        let header = |name: &'static str| {
            Ok::<_, anyhow::Error>((name, signed.headers().get(name).context("read a signed header field")?.to_str()?))
        };
        let mut block = Vec::new();
        for (name, value) in [
            (":method", "POST"),
            (":scheme", "https"),
            (":authority", header("host")?.1),
            (":path", EVENTS_PATH),
            header("content-type")?,
            header(signature::CONTENT_DIGEST)?,
            header(signature::SIGNATURE_INPUT)?,
            header(signature::SIGNATURE)?,
        ] {
            // A literal header field without indexing, with a new name (RFC 7541, section 6.2.2).
            block.push(0);
            string(name, &mut block);
            string(value, &mut block);
        }
        let mut bytes = frame(HEADERS, END_HEADERS, &block);
        let streams = [5, bytes.len() + 5];
        bytes.extend(frame(DATA, END_STREAM, &body));
        Ok(Self { bytes, streams })
    }

    /// Appends the request for this stream, and returns the next stream identifier.
    fn write(&self, stream: u32, to: &mut Vec<u8>) -> u32 {
        let begin = to.len();
        to.extend_from_slice(&self.bytes);
        for at in self.streams {
            to[begin + at..begin + at + 4].copy_from_slice(&stream.to_be_bytes());
        }
        stream + 2
    }
}

/// Connection preface, SETTINGS, and a window large enough for all responses.
fn preface() -> Vec<u8> {
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(SETTINGS, 0, &[]));
    bytes.extend(frame(WINDOW_UPDATE, 0, &(u32::MAX >> 2).to_be_bytes()));
    bytes
}

/// A frame of stream 0.
fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let [_, a, b, c] = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&[a, b, c, kind, flags, 0, 0, 0, 0], payload].concat()
}

/// A string literal without Huffman coding (RFC 7541, section 5.2): its length with a 7-bit prefix, and its bytes.
fn string(text: &str, to: &mut Vec<u8>) {
    match text.len() {
        length @ 0..127 => to.push(length as u8),
        length => {
            to.push(127);
            let mut rest = length - 127;
            while rest >= 128 {
                to.push((rest % 128) as u8 | 128);
                rest /= 128;
            }
            to.push(rest as u8);
        }
    }
    to.extend(text.bytes());
}
