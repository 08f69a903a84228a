//! Latency of other runtimes while one runtime sends as many requests as it can.

use std::time::{Duration, Instant};

use anyhow::Result;
use futures::future::try_join_all;
use tidewatch_testing::{
    load::{Agent, FleetMember, Flood, FloodReport, Flooder, PlainServer, RequestOutcome, ServerMode},
    product::metric_sum,
    progress::Step,
};
use tokio::time::{MissedTickBehavior, interval};

use super::{
    Figure, Network,
    figure::{median, millis, quantile, time_of},
    fleet_setup::FleetSetup,
};

/// Reasons of the receiver's refusals that clients receive as 429.
const TOO_MANY: [&str; 3] = ["rate", "concurrency", "flood"];

/// Fraction of the flood that must have been sent to the receiver for a valid measurement.
const ENOUGH: f64 = 0.9;

/// Extent of the measurement.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Settings {
    /// Runtimes that do not flood
    #[arg(long, default_value_t = 20)]
    pub others: usize,
    /// Requests per second of each of them
    #[arg(long, default_value_t = 20)]
    pub rate: u32,
    /// Requests per second of the runtime that floods
    #[arg(long, default_value_t = 20_000)]
    pub flood: u32,
    /// Seconds of each round
    #[arg(long, default_value_t = 30)]
    pub seconds: u32,
    /// Rounds, each without the flood, with it, and with it directed at a server that only reads
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    #[command(flatten)]
    pub(super) network: Network,
}

/// Samples of the other runtimes and of the receiver in one of the three cases.
#[derive(Default)]
struct Runs {
    /// 99th percentiles of the other runtimes' latency, in milliseconds.
    p99: Vec<f64>,
    /// CPU seconds per second of the receiver's gateway.
    gateway: Vec<f64>,
    /// Requests per second that were refused with 429.
    too_many: Vec<f64>,
    floods: Vec<FloodReport>,
}

/// Runs the measurement and emits each figure.
///
/// # Errors
/// When the setup cannot be started.
pub async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let mut setup = FleetSetup::start(settings.network, &[]).await?;
    // The receiver excludes a flooding runtime for a while, so each round has its own.
    setup.register(settings.others + settings.rounds).await?;
    let mut agents: Vec<_> = setup.fleet.members_mut().iter_mut().filter_map(FleetMember::take_agent).collect();
    let flooders = agents.split_off(settings.others);
    for agent in &mut agents {
        agent.send().await?;
    }
    let sink = PlainServer::start(&setup.landscape, ([127, 0, 0, 1], 0).into(), ServerMode::Read)?;
    let receiver = setup.landscape.authority().parse()?;
    let [mut baseline, mut flooded, mut sink_runs] = <[Runs; 3]>::default();
    for (number, flooder) in flooders.into_iter().enumerate() {
        let step = Step::begin(format!("flood, round {} of {}", number + 1, settings.rounds));
        let flooder = Flooder::new(flooder)?;
        let targets = [(&mut baseline, None), (&mut sink_runs, Some(sink.address())), (&mut flooded, Some(receiver))];
        for (runs, target) in targets {
            let before = Counters::now(&setup).await?;
            let flood = target.map(|target| flooder.open(target, settings.flood)).transpose()?;
            runs.p99.push(others(&mut agents, settings).await?);
            runs.floods.extend(flood.map(Flood::end).transpose()?);
            let after = Counters::now(&setup).await?;
            runs.gateway.push((after.gateway - before.gateway) / f64::from(settings.seconds));
            runs.too_many.push((after.too_many - before.too_many) / f64::from(settings.seconds));
        }
        step.done();
    }
    report(settings, &baseline, &sink_runs, &flooded, emit);
    Ok(())
}

fn report(settings: &Settings, baseline: &Runs, sink_runs: &Runs, flooded: &Runs, emit: &mut impl FnMut(&Figure)) {
    let per_second = |of: fn(&FloodReport) -> u64| flooded.per_second(|sum| count(of(sum)));
    let rate = f64::from(settings.flood);
    emit(&Figure::new("flood_requests_offered", per_second(|sum| sum.offered), "requests/s"));
    let sent = Figure::new("flood_requests_sent", per_second(|sum| sum.sent), "requests/s");
    emit(&sent.at_least(rate * ENOUGH));
    emit(&Figure::new("flood_requests_answered", per_second(|sum| sum.answered), "requests/s"));
    emit(&Figure::new("flood_requests_told_429", median(flooded.too_many.clone()), "requests/s"));
    emit(&Figure::new("flood_requests_reset", per_second(|sum| sum.reset), "requests/s"));
    emit(&Figure::new("flood_connections_opened", per_second(|sum| sum.opened), "connections/s"));
    emit(&Figure::new("flood_connections_refused", per_second(|sum| sum.unopened), "connections/s"));
    emit(&Figure::new("flood_connections_ended", per_second(|sum| sum.closed), "connections/s"));
    emit(&Figure::new("flood_connections_stuck", per_second(|sum| sum.stuck), "connections/s"));
    let own = sink_runs.per_second(|sum| sum.cpu);
    emit(&Figure::new("flood_own_cpu", flooded.per_second(|sum| sum.cpu), "cores").with_floor(own));
    let gateway = median(baseline.gateway.clone());
    emit(&Figure::new("flood_gateway_cpu", median(flooded.gateway.clone()), "cores").with_floor(gateway));
    let floor = median(baseline.p99.clone());
    let machine = median(sink_runs.p99.clone());
    emit(&Figure::new("flood_others_p99_beside", machine, "ms").with_floor(floor));
    emit(&Figure::new("flood_others_p99", median(flooded.p99.clone()), "ms").ratio_at_most(
        floor,
        flooded.ratio(baseline),
        1.5,
    ));
}

impl Runs {
    fn per_second(&self, of: impl Fn(&FloodReport) -> f64) -> f64 {
        median(self.floods.iter().map(|sum| of(sum) / sum.seconds).collect())
    }

    /// Median ratio of the 99th percentiles, each to that of the same round.
    fn ratio(&self, floor: &Self) -> f64 {
        median(self.p99.iter().zip(&floor.p99).map(|(with, without)| with / without).collect())
    }
}

/// The receiver's counters at one instant.
struct Counters {
    /// CPU seconds of the gateway.
    gateway: f64,
    /// Requests that were refused with 429; the other runtimes' never are.
    too_many: f64,
}

impl Counters {
    async fn now(setup: &FleetSetup) -> Result<Self> {
        let (cpu, page) = setup
            .landscape
            .with_receiver(async |receiver| {
                let (_, page) = receiver.get("/metrics").await?;
                Ok::<_, anyhow::Error>((receiver.cpu_by_thread()?, page))
            })
            .await??;
        Ok(Self { gateway: time_of(&cpu, "gateway").as_secs_f64(), too_many: too_many(&page) })
    }
}

fn too_many(page: &str) -> f64 {
    let is_too_many = |labels: &str| TOO_MANY.iter().any(|reason| labels.contains(&format!("reason=\"{reason}\"")));
    metric_sum(page, "tidewatch_gateway_requests_refused_total", is_too_many)
}

fn count(number: u64) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX))
}

/// The 99th percentile over all requests of all other runtimes, in milliseconds.
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
        agent.handle().update(|state| state.mark("kyma", 0));
        let begun = Instant::now();
        let outcome = agent.send().await?;
        anyhow::ensure!(
            matches!(outcome, Some(RequestOutcome::Accepted(_))),
            "a request of another runtime was not accepted: {outcome:?}"
        );
        taken.push(millis(begun.elapsed()));
    }
    Ok(taken)
}
