//! One simulated agent: the requests that it sends, and their schedule.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use http::StatusCode;
use parking_lot::{Mutex, MutexGuard};
use serde::de::DeserializeOwned;
use tidewatch_contract::{
    exchange::{EVENTS_PATH, EventsResponse, HEARTBEAT_PATH, HeartbeatResponse},
    heartbeat::aligned,
    problem::{Kind, Problem},
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use super::{
    BufferedResponse, FleetCounters, IssuedIdentity, ProtocolState, RequestError, SignedClient, protocol::Batch,
};

/// Events per request, the batch size of agents.
pub(super) const EVENTS_PER_REQUEST: usize = 250;
const CONNECT_CAP: Duration = Duration::from_secs(5);
const ERROR_CAP: Duration = Duration::from_secs(60);
const BACKOFF: Duration = Duration::from_millis(500);
/// Time over which agents reconnect after the loss of a connection, each at random, with a heartbeat.
const RECONNECT: Duration = Duration::from_secs(3);
/// Number of heartbeats before their time, in a row; each regular one admits one more.
const BURST: u32 = 4;

/// Result of a request that was answered.
#[derive(Debug)]
pub enum RequestOutcome {
    /// The request was accepted, with so many events.
    Accepted(usize),
    /// The request was refused, with this status and `Retry-After`.
    Refused(StatusCode, Option<Duration>),
}

/// A simulated agent. Its owner decides when it sends; [`Agent::run`] keeps the schedule of real agents.
pub struct Agent {
    client: SignedClient,
    handle: AgentHandle,
    counters: Arc<FleetCounters>,
    heartbeat: Duration,
}

/// Shared access to a simulated agent while it runs. Clones refer to the same agent.
#[derive(Clone)]
pub struct AgentHandle(Arc<Inner>);

struct Inner {
    state: Mutex<ProtocolState>,
    changed: Notify,
    /// Objects to mark as changed before each request; 0 for none.
    refill: std::sync::atomic::AtomicU32,
}

impl AgentHandle {
    /// Reads or changes the protocol state, and wakes the agent.
    pub fn update<T>(&self, step: impl FnOnce(&mut ProtocolState) -> T) -> T {
        let result = step(&mut self.lock());
        self.0.changed.notify_one();
        result
    }

    /// Reads the protocol state.
    pub fn read<T>(&self, step: impl FnOnce(&ProtocolState) -> T) -> T {
        step(&self.lock())
    }

    /// Marks so many objects of the watch `kyma` as changed before each request from now on, so the agent never runs
    /// out of events; 0 ends it.
    pub fn saturate(&self, objects: u32) {
        self.0.refill.store(objects, std::sync::atomic::Ordering::Relaxed);
        self.0.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, ProtocolState> {
        self.0.state.lock()
    }

    /// Marks so many objects of the watch `kyma` as changed now.
    pub fn mark(&self, objects: u32) {
        let mut state = self.lock();
        (0..objects).for_each(|object| state.mark("kyma", object));
    }

    fn refill(&self) {
        let objects = self.0.refill.load(std::sync::atomic::Ordering::Relaxed);
        if objects > 0 {
            self.mark(objects);
        }
    }
}

impl Agent {
    /// An agent that has sent nothing yet.
    pub fn new(client: SignedClient, state: ProtocolState, counters: Arc<FleetCounters>) -> Self {
        let inner = Inner { state: Mutex::new(state), changed: Notify::new(), refill: 0.into() };
        Self { client, handle: AgentHandle(Arc::new(inner)), counters, heartbeat: Duration::from_secs(30) }
    }

    /// Shared access to this agent.
    pub fn handle(&self) -> AgentHandle {
        self.handle.clone()
    }

    /// The connection alone, to send requests that the contract does not allow.
    pub fn into_client(self) -> SignedClient {
        self.client
    }

    /// Replaces the identity; the next request opens a new connection with it.
    ///
    /// # Errors
    /// When the identity is not usable.
    pub fn set_identity(&mut self, enrolled: IssuedIdentity) -> anyhow::Result<()> {
        self.client.set_identity(enrolled)
    }

    /// Connects to another address from the next request on. The authority, which each request signs, stays.
    pub fn connect_to(&mut self, address: SocketAddr) {
        self.client.connect_to(address);
    }

    /// Sends the pending events; `None` when there are none.
    ///
    /// # Errors
    /// [`RequestError`].
    pub async fn send(&mut self) -> Result<Option<RequestOutcome>, RequestError> {
        let Some(batch) = self.handle.lock().request(EVENTS_PER_REQUEST) else { return Ok(None) };
        let (Batch { epoch, nonce, body, events }, sent) = (batch, Instant::now());
        let response = self.client.post(EVENTS_PATH, "application/cloudevents-batch+json", body, nonce).await;
        let answer = response.inspect_err(|_| self.counters.failed())?;
        if answer.status != StatusCode::ACCEPTED {
            return Ok(Some(self.refused(&answer)));
        }
        let answer: EventsResponse = read(&answer)?;
        self.counters.accepted(events, sent.elapsed());
        self.heartbeat = Duration::from_secs(answer.heartbeat_seconds.into());
        self.handle.lock().events_answered(epoch, &answer);
        Ok(Some(RequestOutcome::Accepted(events)))
    }

    /// Sends a heartbeat.
    ///
    /// # Errors
    /// [`RequestError`].
    pub async fn send_heartbeat(&mut self) -> Result<RequestOutcome, RequestError> {
        let (heartbeat, nonce) = self.handle.lock().heartbeat(self.client.certificate());
        let body = serde_json::to_vec(&heartbeat).map_err(RequestError::Decode)?.into();
        let response = self.client.post(HEARTBEAT_PATH, "application/json", body, nonce).await;
        let answer = response.inspect_err(|_| self.counters.failed())?;
        if answer.status != StatusCode::OK {
            return Ok(self.refused(&answer));
        }
        let answer: HeartbeatResponse = read(&answer)?;
        self.counters.heartbeat_accepted();
        self.heartbeat = Duration::from_secs(answer.heartbeat_seconds.into());
        self.handle.lock().heartbeat_answered(heartbeat.epoch, &answer);
        Ok(RequestOutcome::Accepted(0))
    }

    fn refused(&self, answer: &BufferedResponse) -> RequestOutcome {
        self.counters.refused(answer.status);
        let kind = || serde_json::from_slice::<Problem>(&answer.body).map_or(Kind::Other, |problem| problem.kind());
        if answer.status == StatusCode::UNAUTHORIZED && matches!(kind(), Kind::Replay | Kind::Signature) {
            self.handle.lock().begin_epoch();
        }
        RequestOutcome::Refused(answer.status, answer.retry_after)
    }

    /// Runs the schedule of real agents, for ever: pending events at once and one request after the other, heartbeats
    /// at the interval that the receiver sets and after the loss of a connection, and backoff after refusals and faults.
    pub async fn run(mut self) {
        let mut random = jitter_source(&self.handle);
        let mut events = Backoff::default();
        let mut beats = Backoff::default();
        // Spread over a second, like all later heartbeats: thousands of agents start at once.
        let mut regular = Instant::now() + Duration::from_secs(1).mul_f64(random());
        let mut reconnect = None::<Instant>;
        let mut budget = BURST;
        let handle = self.handle.clone();
        let ended = self.client.ended();
        loop {
            handle.refill();
            let now = Instant::now();
            let due = reconnect.filter(|_| budget > 0).map_or(regular, |at| regular.min(at));
            if handle.lock().has_pending() && events.is_open(now) {
                let sent = self.send().await;
                if let Ok(Some(RequestOutcome::Accepted(_))) = sent {
                    reconnect = None;
                }
                events.record(sent.map(|sent| sent.unwrap_or(RequestOutcome::Accepted(0))), &mut random);
            } else if due.max(beats.next_attempt()) <= now {
                let beaten = self.send_heartbeat().await;
                if let Ok(RequestOutcome::Accepted(_)) = beaten {
                    reconnect = None;
                    budget = if now < regular { budget - 1 } else { (budget + 1).min(BURST) };
                    let pause = self.heartbeat.mul_f64(0.9 + 0.2 * random());
                    let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                    regular = Instant::now() + aligned(pause, unix);
                }
                beats.record(beaten, &mut random);
            } else {
                let waits = handle.lock().has_pending();
                let beat = due.max(beats.next_attempt());
                let at = if waits { events.next_attempt().min(beat) } else { beat };
                tokio::select! {
                    () = sleep_until(at) => {}
                    () = handle.0.changed.notified() => {}
                    () = ended.notified() => {
                        if !self.client.is_end_announced() {
                            reconnect.get_or_insert_with(|| Instant::now() + RECONNECT.mul_f64(random()));
                        }
                    }
                }
            }
        }
    }
}

fn read<T: DeserializeOwned>(answer: &BufferedResponse) -> Result<T, RequestError> {
    serde_json::from_slice(&answer.body).map_err(RequestError::Decode)
}

/// Random fractions from 0 to 1, from the agent's own seed.
pub(super) fn jitter_source(handle: &AgentHandle) -> impl FnMut() -> f64 + Send + use<> {
    let handle = handle.clone();
    move || f64::from(u32::try_from(handle.lock().draw() >> 32).unwrap_or_default()) / f64::from(u32::MAX)
}

/// Backoff of one kind of request.
pub(super) struct Backoff {
    until: Instant,
    failures: u32,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { until: Instant::now(), failures: 0 }
    }
}

impl Backoff {
    /// The state after hours without a receiver: the next attempt is anywhere within the longest pause.
    pub(super) fn exhausted(random: &mut impl FnMut() -> f64) -> Self {
        Self { until: Instant::now() + CONNECT_CAP.mul_f64(random()), failures: 16 }
    }

    fn is_open(&self, now: Instant) -> bool {
        self.until <= now
    }

    pub(super) fn next_attempt(&self) -> Instant {
        self.until
    }

    /// Records a result: full jitter under a doubling cap, or the receiver's `Retry-After` exactly.
    pub(super) fn record(&mut self, ended: Result<RequestOutcome, RequestError>, random: &mut impl FnMut() -> f64) {
        let cap = match ended {
            Ok(RequestOutcome::Accepted(_)) => {
                self.failures = 0;
                return;
            }
            Ok(RequestOutcome::Refused(_, Some(wait))) => {
                self.until = Instant::now() + wait;
                return;
            }
            Ok(RequestOutcome::Refused(_, None)) => ERROR_CAP,
            Err(_) => CONNECT_CAP,
        };
        let ceiling = cap.min(BACKOFF * 2u32.saturating_pow(self.failures.min(16)));
        self.failures += 1;
        self.until = Instant::now() + ceiling.mul_f64(random());
    }
}
