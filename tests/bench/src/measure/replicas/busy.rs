//! Requests with one event each at a high rate, relayed beside direct ones.
//!
//! Every runtime answers so slowly that hardly a reconcile runs: the figures cover the way of a request to the enqueued Kyma,
//! in replicas whose caches the requests keep warm.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result};
use tidewatch_testing::{load::RequestOutcome, progress::Step};
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval_at, sleep},
};

use super::{
    super::{
        Figure,
        figure::{median, millis, quantile},
    },
    Settings, hop, number,
    relay::{Route, Runtime, alternate, emit_beside_direct},
    setup::ReplicaSetup,
};

/// Delay of each response of a runtime.
const SLOW: Duration = Duration::from_secs(5);

/// One run.
#[derive(Default)]
struct Run {
    /// Times until requests to the holder were accepted, in milliseconds.
    direct: Vec<f64>,
    /// The same for requests to the other replica.
    relayed: Vec<f64>,
    /// CPU time of both replicas per request, in milliseconds.
    cpu: f64,
    refused: usize,
}

pub(super) async fn measure(
    settings: &Settings,
    setup: &ReplicaSetup,
    (runtimes, first): (&mut Vec<Runtime>, SocketAddr),
    emit: &mut impl FnMut(&Figure),
) -> Result<()> {
    setup.fleet.fake().set_delay(SLOW);
    let (through_first, to_holders) =
        alternate(settings.runs, "busy run", async |route| run(settings, setup, runtimes, (route, first)).await)
            .await?;
    setup.fleet.fake().set_delay(Duration::ZERO);
    let step = Step::begin("exchanges between bare processes");
    let pause = Duration::from_secs(1) / settings.busy_rate.max(1);
    let hop = hop::measure(setup, pause, Duration::from_secs(settings.seconds.into())).await?;
    step.done();
    for (q, name) in [(0.5, "replicas_relay_busy_accepted_p50"), (0.99, "replicas_relay_busy_accepted_p99")] {
        let of = |times: &[f64]| quantile(&mut times.to_vec(), q);
        let pairs: Vec<_> = through_first.iter().map(|run| (of(&run.relayed), of(&run.direct))).collect();
        emit_beside_direct((name, q), &pairs, emit);
    }
    let cpu = |runs: &[Run]| median(runs.iter().map(|run| run.cpu).collect());
    let relayed = cpu(&through_first);
    let floor = cpu(&to_holders);
    emit(&Figure::new("replicas_relay_busy_cpu_per_request", relayed, "ms").with_floor(floor));
    emit(&Figure::new("replicas_relay_busy_cpu_more_per_request", relayed - floor, "ms").at_most(0.15));
    // The least that a relayed request can take is a direct one and the hop.
    emit(&Figure::new("replicas_relay_bare_hop_p50", median(hop.times), "ms"));
    emit(&Figure::new("replicas_relay_bare_hop_server_cpu", hop.server, "ms"));
    let all = || through_first.iter().chain(&to_holders);
    let refused = all().map(|run| run.refused).sum();
    emit(&Figure::new("replicas_relay_busy_refused", number(refused), "requests"));
    Ok(())
}

/// Lets all agents send at their share of the rate.
async fn run(
    settings: &Settings,
    setup: &ReplicaSetup,
    runtimes: &mut Vec<Runtime>,
    (route, first): (Route, SocketAddr),
) -> Result<Run> {
    for runtime in runtimes.iter_mut() {
        runtime.connect(route, first).await?;
    }
    let pause = Duration::from_secs(settings.agents.into()) / settings.busy_rate.max(1);
    let begin = Instant::now();
    let end = begin + Duration::from_secs(settings.seconds.into());
    let offset = pause / settings.agents.max(1);
    let cpu = setup.cpu()?;
    let mut agents = JoinSet::new();
    for (place, mut runtime) in (0_u32..).zip(runtimes.drain(..)) {
        agents.spawn(async move {
            let mut accepted = Vec::new();
            let mut refused = 0;
            let mut ticks = interval_at(begin + offset * place, pause);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            while ticks.tick().await < end {
                runtime.agent.handle().mark(1);
                let sent = Instant::now();
                match runtime.agent.send().await {
                    Ok(Some(RequestOutcome::Accepted(_))) => accepted.push(millis(sent.elapsed())),
                    _ => refused += 1,
                }
            }
            (place, runtime, accepted, refused)
        });
    }
    let mut run = Run::default();
    let mut done = Vec::new();
    while let Some(ended) = agents.join_next().await {
        let (place, runtime, accepted, refused) = ended.context("an agent ended early")?;
        let times = if runtime.is_relayed { &mut run.relayed } else { &mut run.direct };
        times.extend(accepted);
        run.refused += refused;
        done.push((place, runtime));
    }
    run.cpu = (setup.cpu()? - cpu) * 1e3 / number(run.direct.len() + run.relayed.len()).max(1.0);
    done.sort_by_key(|(place, _)| *place);
    runtimes.extend(done.into_iter().map(|(_, runtime)| runtime));
    // What is running ends, so that it is not part of the next run.
    sleep(SLOW).await;
    Ok(run)
}
