//! What one CPU second of the receiver takes: signed requests with one event each, and events in full batches, over real TLS.
//!
//! The queue is steady: every runtime answers so slowly that all of them stay wanted and hardly one is worked on, so what is
//! measured is what a request costs, from its bytes to the record of what it wants. All of the receiver's threads count. The floor is a
//! server with the same TLS, HTTP and bodies that hashes each body, verifies one P-256 signature, and does nothing else.

use std::{
    collections::BTreeMap,
    process,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use tidewatch_shared::{exchange::EVENTS_PATH, identity::Epoch, signature::Nonce};
use tokio::{task::JoinSet, time::sleep};

use super::{Figure, crowded::Crowded};
use crate::{
    landscape::now,
    load::{Contract, Crowd, Plain, THREADS, Voice, Work, queue},
    product::cpu_by_thread,
    progress::Step,
};

/// The delay of each answer of a runtime while something is measured.
const SLOW: Duration = Duration::from_secs(5);
/// What is cold at the beginning is no part of it.
const WARM: Duration = Duration::from_secs(3);

/// How much is measured.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Settings {
    /// Agents that send.
    #[arg(long, default_value_t = 100)]
    pub agents: usize,
    /// Events of a batch; 250 is what agents send.
    #[arg(long, default_value_t = 250, value_parser = clap::value_parser!(u32).range(2..=250))]
    pub batch: u32,
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 20)]
    pub seconds: u32,
}

/// Runs the measurement and tells each figure.
///
/// # Errors
/// When the setting does not stand.
pub async fn measure(settings: &Settings, tell: &mut impl FnMut(&Figure)) -> Result<()> {
    let mut crowded = Crowded::start(&[]).await?;
    crowded.grow(settings.agents).await?;
    crowded.crowd.fake().set_delay(SLOW);
    for (events, bar, [name, gateway, queued]) in [
        (1, 5_000.0, ["receiver_requests_per_cpu_second", "gateway_requests_per_cpu_second", "queue_growth_requests"]),
        (
            settings.batch,
            50_000.0,
            ["receiver_events_per_cpu_second", "gateway_events_per_cpu_second", "queue_growth_events"],
        ),
    ] {
        let step = Step::begin(format!("{} agents send {events} events at a time", settings.agents));
        let run = receiver(&crowded, settings, events).await?;
        step.done();
        let step = Step::begin("the same for a server that only verifies");
        let floor = floor(&crowded, settings, events).await?;
        step.done();
        tell(&Figure::new(name, run.per_second, "1/s").beside(floor).at_least(bar));
        tell(&Figure::new(gateway, run.per_gateway_second, "1/s"));
        tell(&Figure::new(queued, run.queue_growth, "Kymas"));
    }
    Ok(())
}

struct Run {
    per_second: f64,
    per_gateway_second: f64,
    queue_growth: f64,
}

/// What stands at one instant.
struct Stand {
    events: u64,
    cpu: BTreeMap<String, Duration>,
    queue: f64,
}

impl Stand {
    async fn now(crowded: &Crowded) -> Result<Self> {
        let receiver = async |receiver: &crate::product::ProductProcess| {
            let (_, page) = receiver.get("/metrics").await?;
            Ok::<_, anyhow::Error>((receiver.cpu_by_thread()?, queue(&page)))
        };
        let (cpu, queue) = crowded.landscape.with_receiver(receiver).await??;
        Ok(Self { events: crowded.crowd.tally().events(), cpu, queue })
    }

    fn spent(&self, since: &Self, name: &str) -> f64 {
        seconds(&self.cpu, name) - seconds(&since.cpu, name)
    }
}

async fn receiver(crowded: &Crowded, settings: &Settings, events: u32) -> Result<Run> {
    let hammer = |objects| crowded.crowd.members().iter().for_each(|member| member.memory().hammer(objects));
    hammer(events);
    sleep(WARM).await;
    let before = Stand::now(crowded).await?;
    sleep(Duration::from_secs(settings.seconds.into())).await;
    let after = Stand::now(crowded).await?;
    hammer(0);
    ensure!(before.queue > 0.0 && after.queue > 0.0, "nothing is wanted, so nothing was measured");
    let sent = count(after.events - before.events);
    Ok(Run {
        per_second: sent / after.spent(&before, ""),
        per_gateway_second: sent / after.spent(&before, "gateway"),
        queue_growth: after.queue - before.queue,
    })
}

/// Events per CPU second of the floor.
async fn floor(crowded: &Crowded, settings: &Settings, events: u32) -> Result<f64> {
    let plain = Plain::start(&crowded.landscape, ([127, 0, 0, 1], 0).into(), Work::Verify)?;
    let taken = Arc::new(AtomicU64::new(0));
    let mut senders = JoinSet::new();
    for number in 0..settings.agents {
        let (mut voice, body) = speaker(&crowded.crowd, crowded, number, events, &plain)?;
        let taken = taken.clone();
        senders.spawn(async move {
            let kind = "application/cloudevents-batch+json";
            for counter in 1.. {
                let nonce = Nonce { epoch: Epoch::new(1), counter };
                if voice.post(EVENTS_PATH, kind, body.clone(), nonce).await.is_ok_and(|a| a.status.is_success()) {
                    taken.fetch_add(u64::from(events), Ordering::Relaxed);
                }
            }
        });
    }
    sleep(WARM).await;
    let stand = || Ok::<_, anyhow::Error>((taken.load(Ordering::Relaxed), cpu_by_thread(process::id())?));
    let before = stand()?;
    sleep(Duration::from_secs(settings.seconds.into())).await;
    let after = stand()?;
    Ok(count(after.0 - before.0) / (seconds(&after.1, THREADS) - seconds(&before.1, THREADS)))
}

/// A voice for the floor, and what it says: a body as its agent would send it.
fn speaker(crowd: &Crowd, crowded: &Crowded, number: usize, events: u32, plain: &Plain) -> Result<(Voice, Bytes)> {
    let member = crowd.members().get(number).context("a member")?;
    let ca = crowded.landscape.ca();
    let validity = tidewatch_receiver::pki::RUNTIME_VALIDITY;
    let identity = ca.make_runtime(member.id(), crowded.landscape.trust_domain(), now(), validity)?.identity()?;
    let voice = Voice::new(&identity, ca.trust_bundle().store()?, plain.address())?;
    Ok((voice, Contract::sample(member.id().clone(), crowd.plan(), events)))
}

fn seconds(cpu: &BTreeMap<String, Duration>, name: &str) -> f64 {
    cpu.iter().filter(|(thread, _)| thread.starts_with(name)).map(|(_, spent)| spent.as_secs_f64()).sum()
}

fn count(number: u64) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX))
}
