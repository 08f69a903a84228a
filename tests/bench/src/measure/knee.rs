//! Requests and events per CPU second of the receiver: signed requests with one event each, and events in full batches,
//! over real TLS.
//!
//! The queue is steady: every runtime answers so slowly that all Kymas stay enqueued and hardly one is in progress, so
//! the measurement covers the cost of a request from its bytes to the enqueued Kyma. Together the agents may send more
//! than the receiver can process, so that it is never idle: a request that wakes an idle thread costs more. All of the
//! receiver's threads count. The floor is a server with the same TLS, HTTP and bodies that hashes each body, verifies one P-256 signature,
//! and does nothing else.

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
use tidewatch_api::identity::Epoch;
use tidewatch_contract::{exchange::EVENTS_PATH, signature::Nonce};
use tidewatch_testing::{
    landscape::now,
    load::{PlainServer, ProtocolState, ServerMode, SignedClient, SimulatedFleet, THREADS, queue},
    product::cpu_by_thread,
    progress::Step,
};
use tokio::{task::JoinSet, time::sleep};

use super::{Figure, Network, figure::time_of, fleet_setup::FleetSetup};

/// Delay of each response of a runtime during the measurement.
const SLOW: Duration = Duration::from_secs(5);
/// Warm-up before the measurement.
const WARM: Duration = Duration::from_secs(3);

/// Extent of the measurement.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Settings {
    /// Agents that send; with few of them the rate limit of each runtime refuses requests
    #[arg(long, default_value_t = 400)]
    pub agents: usize,
    /// Events per batch; agents send up to 250
    #[arg(long, default_value_t = 250, value_parser = clap::value_parser!(u32).range(2..=250))]
    pub batch: u32,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 20)]
    pub seconds: u32,
    #[command(flatten)]
    pub(super) network: Network,
}

/// Runs the measurement and emits each figure.
///
/// # Errors
/// When the setup cannot be started.
pub async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let mut setup = FleetSetup::start(settings.network, &[]).await?;
    setup.grow(settings.agents).await?;
    setup.fleet.fake().set_delay(SLOW);
    for (events, bar, [name, gateway, queued]) in [
        (1, 5_000.0, ["receiver_requests_per_cpu_second", "gateway_requests_per_cpu_second", "queue_growth_requests"]),
        (
            settings.batch,
            50_000.0,
            ["receiver_events_per_cpu_second", "gateway_events_per_cpu_second", "queue_growth_events"],
        ),
    ] {
        let step = Step::begin(format!("{} agents send {events} events at a time", settings.agents));
        let run = receiver(&setup, settings, events).await?;
        step.done();
        let step = Step::begin("the same with a server that only verifies");
        let floor = floor(&setup, settings, events).await?;
        step.done();
        emit(&Figure::new(name, run.per_second, "1/s").with_floor(floor).at_least(bar));
        emit(&Figure::new(gateway, run.per_gateway_second, "1/s"));
        emit(&Figure::new(queued, run.queue_growth, "Kymas"));
    }
    Ok(())
}

struct Run {
    per_second: f64,
    per_gateway_second: f64,
    queue_growth: f64,
}

/// Counters at one instant.
struct Counters {
    events: u64,
    refused: u64,
    cpu: BTreeMap<String, Duration>,
    queue: f64,
}

impl Counters {
    async fn now(setup: &FleetSetup) -> Result<Self> {
        let receiver = async |receiver: &tidewatch_testing::product::ProductProcess| {
            let (_, page) = receiver.get("/metrics").await?;
            Ok::<_, anyhow::Error>((receiver.cpu_by_thread()?, queue(&page)))
        };
        let (cpu, queue) = setup.landscape.with_receiver(receiver).await??;
        let counters = setup.fleet.counters();
        Ok(Self { events: counters.events(), refused: counters.refusals().values().sum(), cpu, queue })
    }

    fn spent(&self, since: &Self, name: &str) -> f64 {
        time_of(&self.cpu, name).as_secs_f64() - time_of(&since.cpu, name).as_secs_f64()
    }
}

async fn receiver(setup: &FleetSetup, settings: &Settings, events: u32) -> Result<Run> {
    let saturate = |objects| setup.fleet.members().iter().for_each(|member| member.handle().saturate(objects));
    saturate(events);
    sleep(WARM).await;
    let before = Counters::now(setup).await?;
    sleep(Duration::from_secs(settings.seconds.into())).await;
    let after = Counters::now(setup).await?;
    saturate(0);
    ensure!(before.queue > 0.0 && after.queue > 0.0, "the queue is empty, so the measurement is invalid");
    let sent = after.events - before.events;
    let refused = after.refused - before.refused;
    let requests = sent / u64::from(events);
    ensure!(
        refused * 100 <= requests,
        "{refused} requests were refused and {requests} accepted: more agents are needed"
    );
    let sent = count(sent);
    Ok(Run {
        per_second: sent / after.spent(&before, ""),
        per_gateway_second: sent / after.spent(&before, "gateway"),
        queue_growth: after.queue - before.queue,
    })
}

/// Events per CPU second of the floor.
async fn floor(setup: &FleetSetup, settings: &Settings, events: u32) -> Result<f64> {
    let plain = PlainServer::start(&setup.landscape, ([127, 0, 0, 1], 0).into(), ServerMode::Verify)?;
    let taken = Arc::new(AtomicU64::new(0));
    let mut senders = JoinSet::new();
    for number in 0..settings.agents {
        let (mut client, body) = client_and_body(&setup.fleet, setup, number, events, &plain)?;
        let taken = taken.clone();
        senders.spawn(async move {
            let kind = "application/cloudevents-batch+json";
            for counter in 1.. {
                let nonce = Nonce { epoch: Epoch::new(1), counter };
                if client.post(EVENTS_PATH, kind, body.clone(), nonce).await.is_ok_and(|a| a.status.is_success()) {
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
    let [before_cpu, after_cpu] = [&before.1, &after.1].map(|cpu| time_of(cpu, THREADS).as_secs_f64());
    Ok(count(after.0 - before.0) / (after_cpu - before_cpu))
}

/// A client of the floor, and its request body, as its agent would send it.
fn client_and_body(
    fleet: &SimulatedFleet,
    setup: &FleetSetup,
    number: usize,
    events: u32,
    plain: &PlainServer,
) -> Result<(SignedClient, Bytes)> {
    let member = fleet.members().get(number).context("no such member of the fleet")?;
    let ca = setup.landscape.ca();
    let validity = tidewatch_trust::RUNTIME_VALIDITY;
    let identity = ca.make_runtime(member.id(), setup.landscape.trust_domain(), now(), validity)?.identity()?;
    let client = SignedClient::new(&identity, ca.trust_bundle().store()?, plain.address())?;
    Ok((client, ProtocolState::sample_body(member.id().clone(), fleet.plan(), events)))
}

fn count(number: u64) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX))
}
