//! One runtime sends as many requests as it can: what the others notice.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use futures::future::{join_all, try_join_all};
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2;
use tidewatch_shared::{exchange::EVENTS_PATH, identity::Epoch, signature::Nonce};
use tokio::{
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep},
};

use super::{
    Figure,
    crowded::Crowded,
    figure::{median, millis, quantile},
};
use crate::{
    load::{Agent, Member, Outcome, Plain, Voice, Work},
    progress::Step,
};

/// Connections of the runtime that floods.
const TAPS: usize = 4;
/// Requests under way on each of them.
const STREAMS: usize = 16;
/// After a connection was ended.
const REOPEN: Duration = Duration::from_millis(10);

/// How much is measured.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Settings {
    /// Runtimes that do not flood.
    #[arg(long, default_value_t = 20)]
    pub others: usize,
    /// Requests per second of each of them.
    #[arg(long, default_value_t = 20)]
    pub rate: u32,
    /// Seconds of each round.
    #[arg(long, default_value_t = 10)]
    pub seconds: u32,
    /// Rounds, each with and without the flood.
    #[arg(long, default_value_t = 3)]
    pub rounds: u32,
}

/// What is flooded while the others are measured.
enum Flooded {
    Nobody,
    Receiver,
    /// A server of our own beside it, which shares the machine's cores and nothing else.
    Another,
}

/// Runs the measurement and tells each figure.
///
/// # Errors
/// When the setting does not stand.
pub async fn measure(settings: &Settings, tell: &mut impl FnMut(&Figure)) -> Result<()> {
    let mut crowded = Crowded::start(&[]).await?;
    crowded.crowd.grow(settings.others + 1).await?;
    let mut agents: Vec<_> = crowded.crowd.members_mut().iter_mut().filter_map(Member::take_agent).collect();
    let flooder = agents.pop().context("a runtime that floods")?;
    for agent in &mut agents {
        agent.send().await?;
    }
    let plain = Plain::start(
        &crowded.landscape,
        ([127, 0, 0, 1], 0).into(),
        Work::Refuse(http::StatusCode::TOO_MANY_REQUESTS),
    )?;
    let receiver = crowded.landscape.authority().parse()?;
    let flooder = Flooder::new(flooder)?;
    let [mut calm, mut flooded, mut beside] = <[Vec<f64>; 3]>::default();
    let mut reached = Vec::new();
    for number in 1..=settings.rounds {
        let step = Step::begin(format!("flood, round {number} of {}", settings.rounds));
        for what in [Flooded::Nobody, Flooded::Receiver, Flooded::Another] {
            let flood = match what {
                Flooded::Nobody => None,
                Flooded::Receiver => Some(flooder.open(receiver)),
                Flooded::Another => Some(flooder.open(plain.address())),
            };
            let p99 = others(&mut agents, settings).await?;
            let rate = flood.map_or(0.0, |flood| flood.rate());
            match what {
                Flooded::Nobody => calm.push(p99),
                Flooded::Receiver => {
                    flooded.push(p99);
                    reached.push(rate);
                }
                Flooded::Another => beside.push(p99),
            }
        }
        step.done();
    }
    let ratio = |of: &[f64]| median(of.iter().zip(&calm).map(|(with, without)| with / without).collect());
    let floor = median(calm.clone());
    tell(&Figure::new("flood_requests_per_second", median(reached), "requests/s"));
    tell(&Figure::new("flood_others_p99_machine_busy", median(beside.clone()), "ms").beside(floor));
    tell(&Figure::new("flood_others_p99", median(flooded.clone()), "ms").over(floor, ratio(&flooded), 1.5));
    Ok(())
}

/// The runtime that floods: the same signed request again and again, on some connections at once.
struct Flooder {
    voice: Arc<Voice>,
    request: Request<Full<Bytes>>,
}

/// A flood under way; it ends when dropped.
struct Flood {
    answered: Arc<AtomicU64>,
    begun: Instant,
    _taps: JoinSet<()>,
}

impl Flooder {
    fn new(agent: Agent) -> Result<Self> {
        let voice = agent.into_voice();
        // Signed once: what makes a flood is that nobody spends anything on it.
        let nonce = Nonce { epoch: Epoch::new(1), counter: 1 };
        let body = Bytes::from_static(b"[]");
        let request = voice.signed(EVENTS_PATH, "application/cloudevents-batch+json", body, nonce)?;
        Ok(Self { voice: Arc::new(voice), request })
    }

    fn open(&self, address: SocketAddr) -> Flood {
        let answered = Arc::new(AtomicU64::new(0));
        let mut taps = JoinSet::new();
        for _ in 0..TAPS {
            let (voice, request, answered) = (self.voice.clone(), self.request.clone(), answered.clone());
            taps.spawn(async move {
                loop {
                    if let Ok(sender) = voice.connect_to(address).await {
                        join_all((0..STREAMS).map(|_| pour(sender.clone(), &request, &answered))).await;
                    }
                    sleep(REOPEN).await;
                }
            });
        }
        Flood { answered, begun: Instant::now(), _taps: taps }
    }
}

impl Flood {
    /// Answers per second so far.
    fn rate(&self) -> f64 {
        let answered = u32::try_from(self.answered.load(Ordering::Relaxed)).unwrap_or(u32::MAX);
        f64::from(answered) / self.begun.elapsed().as_secs_f64()
    }
}

/// One request after the other, until the connection ends.
async fn pour(mut sender: http2::SendRequest<Full<Bytes>>, request: &Request<Full<Bytes>>, answered: &AtomicU64) {
    while sender.ready().await.is_ok() {
        let Ok(answer) = sender.send_request(request.clone()).await else { return };
        if answer.into_body().collect().await.is_err() {
            return;
        }
        answered.fetch_add(1, Ordering::Relaxed);
    }
}

/// The 99th percentile over all requests of all others, in milliseconds.
async fn others(agents: &mut [Agent], settings: &Settings) -> Result<f64> {
    let taken = agents.iter_mut().map(|agent| one(agent, settings));
    let mut taken = try_join_all(taken).await?.concat();
    Ok(quantile(&mut taken, 0.99))
}

async fn one(agent: &mut Agent, settings: &Settings) -> Result<Vec<f64>> {
    let mut ticks = interval(Duration::from_secs(1) / settings.rate.max(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut taken = Vec::new();
    for _ in 0..settings.rate.saturating_mul(settings.seconds) {
        ticks.tick().await;
        agent.memory().with(|contract| contract.mark("kyma", 0));
        let begun = Instant::now();
        let outcome = agent.send().await?;
        anyhow::ensure!(matches!(outcome, Some(Outcome::Taken(_))), "an honest runtime was not served: {outcome:?}");
        taken.push(millis(begun.elapsed()));
    }
    Ok(taken)
}
