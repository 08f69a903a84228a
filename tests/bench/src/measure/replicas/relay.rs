//! Relayed events beside direct ones.

use std::{collections::BTreeSet, net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use tidewatch_testing::{
    load::{Agent, ChangeTimes, FleetMember, Pace, switch_channel},
    progress::Step,
};
use tokio::{task::JoinSet, time::sleep};

use super::{
    super::{
        Figure,
        figure::{median, millis, quantile},
    },
    Settings, busy, number,
    setup::{ReplicaSetup, shard_of},
};

/// The replica to which all agents connect, and the other one.
const REPLICAS: [&str; 2] = ["a", "b"];

/// Replica to which the agents connect.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    First,
    Holder,
}

/// A runtime, and its agent with the addresses to which it may connect.
pub(super) struct Runtime {
    member: FleetMember,
    pub(super) agent: Agent,
    holder: SocketAddr,
    /// The replica to which all agents connect does not hold it.
    pub(super) is_relayed: bool,
}

impl Runtime {
    /// Connects the agent, and keeps the path proven.
    pub(super) async fn connect(&mut self, route: Route, first: SocketAddr) -> Result<()> {
        self.agent.connect_to(if route == Route::First { first } else { self.holder });
        let _ = self.agent.send_heartbeat().await.context("connect an agent")?;
        Ok(())
    }
}

/// One run.
#[derive(Default)]
struct Run {
    direct: ChangeTimes,
    relayed: ChangeTimes,
    /// CPU time of both replicas per event, in milliseconds.
    cpu: f64,
}

pub(super) async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let mut setup = ReplicaSetup::start(&REPLICAS, settings.agents, settings).await?;
    let first = setup.running[REPLICAS[0]].events;
    let held = setup.shards_of(REPLICAS[0]).await?;
    let mut runtimes = runtimes(&mut setup, &held)?;
    let pace = Pace {
        changes: (settings.rate * settings.seconds).div_ceil(settings.agents.max(1)),
        pause: Duration::from_secs(settings.agents.into()) / settings.rate.max(1),
    };
    // Connections between the replicas, caches and clients of the runtimes are not part of the path.
    let step = Step::begin("warming up");
    let warm = Pace { changes: 1, ..pace };
    for route in [Route::Holder, Route::First] {
        run(&setup, &mut runtimes, (route, first), warm).await?;
    }
    step.done();
    let (through_first, to_holders) =
        alternate(settings.runs, "run", async |route| run(&setup, &mut runtimes, (route, first), pace).await).await?;
    ensure!(setup.shards_of(REPLICAS[0]).await? == held, "shards have moved during the measurement");
    report(&through_first, &to_holders, emit);
    busy::measure(settings, &setup, (&mut runtimes, first), emit).await?;
    ensure!(setup.shards_of(REPLICAS[0]).await? == held, "shards have moved during the measurement");
    Ok(())
}

/// Runs a load so many times each way, in turns.
pub(super) async fn alternate<R>(
    runs: u32,
    name: &str,
    mut run: impl AsyncFnMut(Route) -> Result<R>,
) -> Result<(Vec<R>, Vec<R>)> {
    let mut through_first = Vec::new();
    let mut to_holders = Vec::new();
    for number in 1..=runs {
        let step = Step::begin(format!("{name} {number} of {runs}, through one replica"));
        through_first.push(run(Route::First).await?);
        step.done();
        let step = Step::begin(format!("{name} {number} of {runs}, to the holders"));
        to_holders.push(run(Route::Holder).await?);
        step.done();
    }
    Ok((through_first, to_holders))
}

fn runtimes(setup: &mut ReplicaSetup, held: &BTreeSet<u16>) -> Result<Vec<Runtime>> {
    let [first, second] = REPLICAS.map(|name| setup.running[name].events);
    let runtimes = setup.fleet.members_mut().iter_mut().map(|member| {
        let is_relayed = !held.contains(&shard_of(member));
        let agent = member.take_agent().context("an agent runs")?;
        let holder = if is_relayed { second } else { first };
        Ok(Runtime { member: member.without_agent(), agent, holder, is_relayed })
    });
    runtimes.collect()
}

/// Lets all users make their changes, and waits until each is shown.
async fn run(
    setup: &ReplicaSetup,
    runtimes: &mut Vec<Runtime>,
    (route, first): (Route, SocketAddr),
    pace: Pace,
) -> Result<Run> {
    let offset = pace.pause / u32::try_from(runtimes.len().max(1))?;
    for runtime in runtimes.iter_mut() {
        runtime.connect(route, first).await?;
    }
    let cpu = setup.cpu()?;
    let events = setup.fleet.counters().events();
    let mut users = JoinSet::new();
    for (number, mut runtime) in (0_u32..).zip(runtimes.drain(..)) {
        users.spawn(async move {
            sleep(offset * number).await;
            let times = switch_channel(&runtime.member, &mut runtime.agent, pace).await;
            (number, runtime, times)
        });
    }
    let mut done = users.join_all().await;
    done.sort_by_key(|(number, ..)| *number);
    let cpu = setup.cpu()? - cpu;
    let events = setup.fleet.counters().events() - events;
    let mut run = Run { cpu: cpu * 1e3 / number(usize::try_from(events)?).max(1.0), ..Run::default() };
    for (_, runtime, times) in done {
        let half = if runtime.is_relayed { &mut run.relayed } else { &mut run.direct };
        half.extend(times?);
        runtimes.push(runtime);
    }
    Ok(run)
}

/// Emits a quantile of relayed times beside that of direct ones, in milliseconds; a pair for each run. The median has a bar.
pub(super) fn emit_beside_direct((name, q): (&'static str, f64), pairs: &[(f64, f64)], emit: &mut impl FnMut(&Figure)) {
    let of = |pick: fn(&(f64, f64)) -> f64| median(pairs.iter().map(pick).collect());
    let direct = of(|(_, direct)| *direct);
    let figure = Figure::new(name, of(|(relayed, _)| *relayed), "ms");
    let ratio = of(|(relayed, direct)| relayed / direct);
    emit(&if q == 0.5 { figure.ratio_at_most(direct, ratio, 1.3) } else { figure.with_floor(direct) });
}

fn report(through_first: &[Run], to_holders: &[Run], emit: &mut impl FnMut(&Figure)) {
    for (place, names) in [
        ["replicas_relay_accepted_p50", "replicas_relay_accepted_p99"],
        ["replicas_relay_settled_p50", "replicas_relay_settled_p99"],
    ]
    .into_iter()
    .enumerate()
    {
        for (q, name) in [0.5, 0.99].into_iter().zip(names) {
            let of = |times: &ChangeTimes| {
                let times = if place == 0 { &times.accepted } else { &times.shown };
                quantile(&mut times.iter().copied().map(millis).collect::<Vec<_>>(), q)
            };
            let pairs: Vec<_> = through_first.iter().map(|run| (of(&run.relayed), of(&run.direct))).collect();
            emit_beside_direct((name, q), &pairs, emit);
        }
    }
    let cpu = |runs: &[Run]| median(runs.iter().map(|run| run.cpu).collect());
    let relayed = cpu(through_first);
    let floor = cpu(to_holders);
    emit(&Figure::new("replicas_relay_cpu_per_event", relayed, "ms").with_floor(floor));
    emit(&Figure::new("replicas_relay_cpu_more_per_event", relayed - floor, "ms").at_most(0.15));
    let runs = || through_first.iter().chain(to_holders);
    let [direct, through] = [|run: &Run| run.direct.shown.len(), |run: &Run| run.relayed.shown.len()]
        .map(|of| number(through_first.iter().map(of).sum()));
    emit(&Figure::new("replicas_relay_events_relayed", through / (direct + through).max(1.0), "of all"));
    let repeated = runs().map(|run| run.direct.repeated + run.relayed.repeated).sum::<u64>();
    emit(&Figure::new("replicas_relay_repeated", number(usize::try_from(repeated).unwrap_or(usize::MAX)), "requests"));
}
