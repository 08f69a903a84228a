//! One simulated agent: what it says, and when.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use http::StatusCode;
use serde::de::DeserializeOwned;
use tidewatch_shared::{
    exchange::{EVENTS_PATH, EventsAnswer, HEARTBEAT_PATH, HeartbeatAnswer},
    problem::{Kind, Problem},
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use super::{Answer, Contract, Enrolled, Fault, Tally, Voice, contract::Batch};

/// Events of one request, as agents send them.
pub(super) const EVENTS_PER_REQUEST: usize = 250;
const CONNECT_CAP: Duration = Duration::from_secs(15);
const ERROR_CAP: Duration = Duration::from_secs(60);
const BACKOFF: Duration = Duration::from_millis(500);

/// What became of a request.
#[derive(Debug)]
pub enum Outcome {
    /// It was taken, with so many events.
    Taken(usize),
    /// It was refused.
    Refused(StatusCode, Option<Duration>),
}

/// A simulated agent. Whoever holds it decides when it speaks; [`Agent::run`] decides as agents do.
pub struct Agent {
    voice: Voice,
    memory: Memory,
    tally: Arc<Tally>,
    heartbeat: Duration,
}

/// What others may do to a simulated agent while it runs. Clones are the same agent.
#[derive(Clone)]
pub struct Memory(Arc<Inner>);

struct Inner {
    contract: Mutex<Contract>,
    news: Notify,
    /// Objects that are marked anew before each request; 0 for none.
    hammer: std::sync::atomic::AtomicU32,
}

impl Memory {
    /// Reads or changes the contract; the agent looks at it afterwards.
    pub fn with<T>(&self, step: impl FnOnce(&mut Contract) -> T) -> T {
        let result = step(&mut self.lock());
        self.0.news.notify_one();
        result
    }

    /// Reads the contract.
    pub fn look<T>(&self, step: impl FnOnce(&Contract) -> T) -> T {
        step(&self.lock())
    }

    /// From now on the agent changes so many objects of the watch `kyma` before each request, and so never rests; 0 ends it.
    pub fn hammer(&self, objects: u32) {
        self.0.hammer.store(objects, std::sync::atomic::Ordering::Relaxed);
        self.0.news.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Contract> {
        // Each step leaves it whole.
        self.0.contract.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pound(&self) {
        let objects = self.0.hammer.load(std::sync::atomic::Ordering::Relaxed);
        if objects > 0 {
            let mut contract = self.lock();
            (0..objects).for_each(|object| contract.mark("kyma", object));
        }
    }
}

impl Agent {
    /// An agent that has said nothing yet.
    #[must_use]
    pub fn new(voice: Voice, contract: Contract, tally: Arc<Tally>) -> Self {
        let inner = Inner { contract: Mutex::new(contract), news: Notify::new(), hammer: 0.into() };
        Self { voice, memory: Memory(Arc::new(inner)), tally, heartbeat: Duration::from_secs(30) }
    }

    /// What others may do to it.
    #[must_use]
    pub fn memory(&self) -> Memory {
        self.memory.clone()
    }

    /// Its voice alone, to say what the contract does not.
    #[must_use]
    pub fn into_voice(self) -> Voice {
        self.voice
    }

    /// Speaks with another identity from now on.
    ///
    /// # Errors
    /// When the identity is not usable.
    pub fn adopt(&mut self, enrolled: Enrolled) -> anyhow::Result<()> {
        self.voice.adopt(enrolled)
    }

    /// Sends what waits; `None` when there is nothing.
    ///
    /// # Errors
    /// [`Fault`].
    pub async fn send(&mut self) -> Result<Option<Outcome>, Fault> {
        let Some(batch) = self.memory.lock().request(EVENTS_PER_REQUEST) else { return Ok(None) };
        let Batch { epoch, nonce, body, events } = batch;
        let said = self.voice.post(EVENTS_PATH, "application/cloudevents-batch+json", body, nonce).await;
        let answer = said.inspect_err(|_| self.tally.fault())?;
        if answer.status != StatusCode::ACCEPTED {
            return Ok(Some(self.refused(&answer)));
        }
        let answer: EventsAnswer = read(&answer)?;
        self.tally.taken(events);
        self.heartbeat = Duration::from_secs(answer.heartbeat_seconds.into());
        self.memory.lock().answered(epoch, &answer);
        Ok(Some(Outcome::Taken(events)))
    }

    /// Sends a heartbeat.
    ///
    /// # Errors
    /// [`Fault`].
    pub async fn beat(&mut self) -> Result<Outcome, Fault> {
        let (heartbeat, nonce) = self.memory.lock().heartbeat(self.voice.certificate());
        let body = serde_json::to_vec(&heartbeat).map_err(Fault::Unreadable)?.into();
        let said = self.voice.post(HEARTBEAT_PATH, "application/json", body, nonce).await;
        let answer = said.inspect_err(|_| self.tally.fault())?;
        if answer.status != StatusCode::OK {
            return Ok(self.refused(&answer));
        }
        let answer: HeartbeatAnswer = read(&answer)?;
        self.tally.beaten();
        self.heartbeat = Duration::from_secs(answer.heartbeat_seconds.into());
        self.memory.lock().beaten(heartbeat.epoch, &answer);
        Ok(Outcome::Taken(0))
    }

    fn refused(&self, answer: &Answer) -> Outcome {
        self.tally.refused(answer.status);
        let kind = || serde_json::from_slice::<Problem>(&answer.body).map_or(Kind::Other, |problem| problem.kind());
        if answer.status == StatusCode::UNAUTHORIZED && matches!(kind(), Kind::Replay | Kind::Signature) {
            self.memory.lock().renew();
        }
        Outcome::Refused(answer.status, answer.retry_after)
    }

    /// Speaks as agents do, for ever: what is new at once and one request after the other, heartbeats at the interval that the
    /// receiver names, and waits after refusals and faults.
    pub async fn run(mut self) {
        let mut random = fastrand(&self.memory);
        let (mut events, mut beats) = (Gate::default(), Gate::default());
        // The first heartbeats of thousands are spread like all later ones.
        let mut due = Instant::now() + Duration::from_secs(1).mul_f64(random());
        let memory = self.memory.clone();
        loop {
            memory.pound();
            let now = Instant::now();
            if memory.lock().has_news() && events.is_open(now) {
                let sent = self.send().await;
                events.after(sent.map(|sent| sent.unwrap_or(Outcome::Taken(0))), &mut random);
            } else if due.max(beats.until()) <= now {
                let beaten = self.beat().await;
                if let Ok(Outcome::Taken(_)) = beaten {
                    due = Instant::now() + self.heartbeat.mul_f64(0.9 + 0.2 * random());
                }
                beats.after(beaten, &mut random);
            } else {
                let waits = memory.lock().has_news();
                let beat = due.max(beats.until());
                let at = if waits { events.until().min(beat) } else { beat };
                tokio::select! {
                    () = sleep_until(at) => {}
                    () = memory.0.news.notified() => {}
                }
            }
        }
    }
}

fn read<T: DeserializeOwned>(answer: &Answer) -> Result<T, Fault> {
    serde_json::from_slice(&answer.body).map_err(Fault::Unreadable)
}

/// Numbers from 0 to 1, unlike for each agent.
pub(super) fn fastrand(memory: &Memory) -> impl FnMut() -> f64 + Send + use<> {
    let memory = memory.clone();
    move || f64::from(u32::try_from(memory.lock().draw() >> 32).unwrap_or_default()) / f64::from(u32::MAX)
}

/// When one kind of request may be tried again.
pub(super) struct Gate {
    until: Instant,
    failures: u32,
}

impl Default for Gate {
    fn default() -> Self {
        Self { until: Instant::now(), failures: 0 }
    }
}

impl Gate {
    /// As after hours without a receiver: the next try is as far away as any.
    pub(super) fn after_long(random: &mut impl FnMut() -> f64) -> Self {
        Self { until: Instant::now() + CONNECT_CAP.mul_f64(random()), failures: 16 }
    }

    fn is_open(&self, now: Instant) -> bool {
        self.until <= now
    }

    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// Full jitter under a doubling cap; what the receiver tells is obeyed to the letter.
    pub(super) fn after(&mut self, ended: Result<Outcome, Fault>, random: &mut impl FnMut() -> f64) {
        let cap = match ended {
            Ok(Outcome::Taken(_)) => {
                self.failures = 0;
                return;
            }
            Ok(Outcome::Refused(_, Some(told))) => {
                self.until = Instant::now() + told;
                return;
            }
            Ok(Outcome::Refused(_, None)) => ERROR_CAP,
            Err(_) => CONNECT_CAP,
        };
        let ceiling = cap.min(BACKOFF * 2u32.saturating_pow(self.failures.min(16)));
        self.failures += 1;
        self.until = Instant::now() + ceiling.mul_f64(random());
    }
}
