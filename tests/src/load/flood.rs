//! A runtime that floods: so many requests a second whatever it is told, over HTTP/2 by hand. It spends next to nothing on each, and
//! lives on a thread of its own, so that what it takes from the machine can be told from what it makes others spend.

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
use tidewatch_shared::{
    exchange::EVENTS_PATH,
    identity::Epoch,
    signature::{self, Nonce},
};
use tokio::{
    io::{self, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    runtime,
    time::{MissedTickBehavior, interval, sleep, timeout},
};

use super::{Agent, Voice};
use crate::product::cpu_by_thread;

/// Connections: as many as one runtime may have.
const TAPS: u32 = 4;
/// How often each of them sends what has come due.
const TICK: Duration = Duration::from_millis(5);
/// What came due longer ago, while nothing could be sent, is not made up for.
const MEMORY: Duration = Duration::from_millis(100);
/// A connection that takes nothing for so long is given up, and another one opened.
const STUCK: Duration = Duration::from_millis(100);
/// After a connection that could not be opened.
const REOPEN: Duration = Duration::from_millis(10);
/// The name of its thread.
const THREAD: &str = "flood";
const CONTENT_TYPE: &str = "application/cloudevents-batch+json";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// Length of a frame's head (RFC 9113, section 4.1).
const HEAD: usize = 9;

/// See the module.
pub struct Flooder {
    voice: Arc<Voice>,
    request: Arc<Request>,
}

/// What became of a flood.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    /// How long it was.
    pub seconds: f64,
    /// Requests that came due.
    pub offered: u64,
    /// Those that a connection took. The others came due while none was open, or none took anything.
    pub sent: u64,
    /// Answers.
    pub answered: u64,
    /// Requests that were refused without an answer, one by one (`RST_STREAM`).
    pub reset: u64,
    /// Connections that were opened, handshake included.
    pub opened: u64,
    /// Connections that could not be opened.
    pub unopened: u64,
    /// Connections that the other side ended.
    pub closed: u64,
    /// Connections that took nothing any more and were given up.
    pub stuck: u64,
    /// CPU time of the flood itself, in seconds.
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

/// A flood that is under way; it ends when dropped.
pub struct Flood {
    counts: Arc<Counts>,
    begun: Instant,
    runtime: Option<runtime::Runtime>,
}

impl Flooder {
    /// The request is signed once: what makes a flood is that nobody spends anything on it.
    ///
    /// # Errors
    /// When it cannot be signed.
    pub fn new(agent: Agent) -> Result<Self> {
        let voice = agent.into_voice();
        let request = Request::new(&voice)?;
        Ok(Self { voice: Arc::new(voice), request: Arc::new(request) })
    }

    /// Begins to flood somebody with so many requests a second.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn open(&self, address: SocketAddr, per_second: u32) -> Result<Flood> {
        let mut builder = runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).thread_name(THREAD).enable_all().build().context("a thread")?;
        let counts = Arc::<Counts>::default();
        for _ in 0..TAPS {
            let (voice, request, counts) = (self.voice.clone(), self.request.clone(), counts.clone());
            let mut due = Due::new(f64::from(per_second) / f64::from(TAPS));
            runtime.spawn(async move {
                loop {
                    let Ok(stream) = voice.stream_to(address).await else {
                        counts.unopened.fetch_add(1, Relaxed);
                        sleep(REOPEN).await;
                        continue;
                    };
                    counts.opened.fetch_add(1, Relaxed);
                    let (read, write) = io::split(stream);
                    let how = tokio::select! {
                        () = hear(read, &counts) => &counts.closed,
                        is_stuck = pour(write, &request, &mut due, &counts) => {
                            if is_stuck { &counts.stuck } else { &counts.closed }
                        }
                    };
                    how.fetch_add(1, Relaxed);
                }
            });
        }
        Ok(Flood { counts, begun: Instant::now(), runtime: Some(runtime) })
    }
}

impl Flood {
    /// Ends it.
    ///
    /// # Errors
    /// When the CPU time cannot be read.
    pub fn end(self) -> Result<Sum> {
        let cpu = cpu_by_thread(process::id())?;
        let Counts { offered, sent, answered, reset, opened, unopened, closed, stuck } = &*self.counts;
        let [offered, sent, answered, reset, opened, unopened, closed, stuck] =
            [offered, sent, answered, reset, opened, unopened, closed, stuck].map(|count| count.load(Relaxed));
        let seconds = self.begun.elapsed().as_secs_f64();
        let cpu = cpu.get(THREAD).copied().unwrap_or_default().as_secs_f64();
        Ok(Sum { seconds, offered, sent, answered, reset, opened, unopened, closed, stuck, cpu })
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // To wait for threads is not allowed inside a task.
            runtime.shutdown_background();
        }
    }
}

/// How many requests have come due.
struct Due {
    begun: Instant,
    per_second: f64,
    told: u64,
}

impl Due {
    fn new(per_second: f64) -> Self {
        Self { begun: Instant::now(), per_second, told: 0 }
    }

    /// Those since the last time, and how many of them are new enough to be sent.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of requests")]
    fn take(&mut self) -> (u64, u64) {
        let all = (self.begun.elapsed().as_secs_f64() * self.per_second) as u64;
        let due = all - self.told;
        self.told = all;
        (due, due.min((MEMORY.as_secs_f64() * self.per_second) as u64))
    }
}

/// Sends what comes due until the connection breaks, or is stuck, which is told.
async fn pour(mut write: impl AsyncWrite + Unpin, request: &Request, due: &mut Due, counts: &Counts) -> bool {
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut bytes, mut stream) = (greeting(), 1);
    loop {
        ticks.tick().await;
        let (offered, sending) = due.take();
        counts.offered.fetch_add(offered, Relaxed);
        (0..sending).for_each(|_| stream = request.write(stream, &mut bytes));
        let sent = async {
            write.write_all(&bytes).await?;
            write.flush().await
        };
        match timeout(STUCK, sent).await {
            Ok(Ok(())) => counts.sent.fetch_add(sending, Relaxed),
            Ok(Err(_)) => return false,
            Err(_) => return true,
        };
        bytes.clear();
    }
}

/// Counts answers until the connection ends.
async fn hear(mut read: impl AsyncRead + Unpin, counts: &Counts) {
    let mut buffer = vec![0; 64 << 10];
    let (mut head, mut have, mut skip) = ([0; HEAD], 0, 0);
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

/// A request as it is on the wire, for any stream.
struct Request {
    bytes: Vec<u8>,
    /// Where the number of the stream stands.
    streams: [usize; 2],
}

impl Request {
    fn new(voice: &Voice) -> Result<Self> {
        let nonce = Nonce { epoch: Epoch::new(1), counter: 1 };
        let body = Bytes::from_static(b"[]");
        let signed = voice.signed(EVENTS_PATH, CONTENT_TYPE, body.clone(), nonce)?;
        let header = |name: &'static str| {
            Ok::<_, anyhow::Error>((name, signed.headers().get(name).context("a header")?.to_str()?))
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
            // A literal without indexing and with a new name (RFC 7541, section 6.2.2).
            block.push(0);
            string(name, &mut block);
            string(value, &mut block);
        }
        let mut bytes = frame(HEADERS, END_HEADERS, &block);
        let streams = [5, bytes.len() + 5];
        bytes.extend(frame(DATA, END_STREAM, &body));
        Ok(Self { bytes, streams })
    }

    /// Appends it, and tells which stream is next.
    fn write(&self, stream: u32, to: &mut Vec<u8>) -> u32 {
        let begin = to.len();
        to.extend_from_slice(&self.bytes);
        for at in self.streams {
            to[begin + at..begin + at + 4].copy_from_slice(&stream.to_be_bytes());
        }
        stream + 2
    }
}

/// Preface, settings, and room for whatever is answered.
fn greeting() -> Vec<u8> {
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

/// A string as it is (RFC 7541, section 5.2): its length, with seven bits in the first byte, and its bytes.
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
