//! Memory of three replicas together, and the time until they accept events.

use std::time::Duration;

use anyhow::{Result, ensure};
use futures::future::try_join;
use tidewatch_testing::{
    load::{FleetMember, ProtocolState, SimulatedFleet, until_within},
    progress::Step,
};
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::{
    super::{
        Figure, Network,
        figure::{mebibytes, millis, quantile},
        fleet_setup::{FleetSetup, WAIT_LIMIT},
    },
    Settings, hop,
    setup::{ReplicaSetup, shard_of},
};

/// Idle connections to runtimes close after a minute.
const REST: Duration = Duration::from_secs(100);
/// Number of agents for which the bar is defined.
const TARGET: u32 = 20_000;
/// Most memory of all replicas, in MiB.
const BAR: f64 = 1_228.8;
/// Number of agents of the one receiver with which the times are compared.
const COMPARED: usize = 5_000;
/// Changes of all agents together, one after the other.
const CHANGES: usize = 3_000;
/// Time between two changes. Agents send heartbeats at quarters of a second, which it does not divide: the changes fall on
/// all times between two bursts of heartbeats equally.
const INTERVAL: Duration = Duration::from_millis(21);
/// Distance of two agents that change in succession: a prime, so that all of them do.
const STRIDE: usize = 7_919;

/// Lets agents change an object at a steady rate, in turns. Returns the times until the events are accepted, in milliseconds.
async fn accepted(fleet: &SimulatedFleet, members: &[&FleetMember]) -> Result<Vec<f64>> {
    let step = Step::begin(format!("{CHANGES} changes of {} agents", members.len()));
    fleet.counters().record_times();
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for change in 0..CHANGES {
        ticks.tick().await;
        members[change * STRIDE % members.len()].handle().update(|state| state.mark("kyma", 0));
    }
    until_within("every change to be settled", WAIT_LIMIT, async || {
        let pending = members.iter().filter(|member| member.handle().read(ProtocolState::has_pending)).count();
        ensure!(pending == 0, "{pending} agents have pending events");
        Ok(Some(()))
    })
    .await?;
    step.done();
    let times: Vec<_> = fleet.counters().take_times().into_iter().map(millis).collect();
    ensure!(times.len() >= CHANGES, "{} requests were accepted for {CHANGES} changes", times.len());
    Ok(times)
}

pub(super) async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let agents = settings.memory_agents;
    let (single, mut floor) = single(agents, settings.network).await?;
    let mut setup = ReplicaSetup::start(&["a", "b", "c"], agents, settings).await?;
    // Not through the load balancer of this process, which needs two open files for each.
    let addresses: Vec<_> = setup.running.values().map(|replica| replica.events).collect();
    setup.fleet.start_at(&addresses);
    let unsettled = setup.unsettled(WAIT_LIMIT).await;
    ensure!(unsettled == 0, "{unsettled} events are not settled");
    let mut times = accepted(&setup.fleet, &setup.fleet.members().iter().collect::<Vec<_>>()).await?;
    let (mut direct, hops) = parts(&setup).await?;
    let step = Step::begin(format!("idle with {agents} agents and three replicas"));
    sleep(REST).await;
    step.done();
    let mut all = 0.0;
    for replica in setup.running.values() {
        all += mebibytes(replica.process.memory()?.pss_kib);
    }
    let figure = Figure::new("replicas_pss", all, "MiB").with_floor(single);
    emit(&Figure::new("replicas_memory_agents", agents.into(), "agents"));
    emit(&if agents >= TARGET { figure.at_most(BAR) } else { figure });
    let mut beside_one = |names: [&'static str; 2], times: &mut [f64]| {
        let [half, most] = [0.5, 0.99].map(|q| (quantile(times, q), quantile(&mut floor, q)));
        emit(&Figure::new(names[0], half.0, "ms").with_floor(half.1));
        emit(&Figure::new(names[1], most.0, "ms").ratio_at_most(most.1, most.0 / most.1, 1.5));
    };
    beside_one(["replicas_memory_accepted_p50", "replicas_memory_accepted_p99"], &mut times);
    // The same without the relay, and with its least.
    let mut with_hops = least(&direct, &hops);
    beside_one(["replicas_memory_direct_p50", "replicas_memory_direct_p99"], &mut direct);
    beside_one(["replicas_memory_least_p50", "replicas_memory_least_p99"], &mut with_hops);
    Ok(())
}

/// Times of the agents that are connected to the holders of their runtimes, and those of as many exchanges between bare processes
/// meanwhile.
async fn parts(setup: &ReplicaSetup) -> Result<(Vec<f64>, Vec<f64>)> {
    let mut shards = Vec::new();
    for name in setup.running.keys() {
        shards.push(setup.shards_of(name).await?);
    }
    // As `start_at` connects them.
    let members = setup.fleet.members().iter().zip(shards.iter().cycle());
    let direct: Vec<_> =
        members.filter(|(member, held)| held.contains(&shard_of(member))).map(|(one, _)| one).collect();
    let duration = INTERVAL * u32::try_from(CHANGES)?;
    let (times, hop) = try_join(accepted(&setup.fleet, &direct), hop::measure(setup, INTERVAL, duration)).await?;
    Ok((times, hop.times))
}

/// The least times of requests of which two thirds are relayed: those take a direct request and a hop. The times of both are
/// paired as if they were independent; a burst of other requests delays both, so the sums are rather larger.
fn least(direct: &[f64], hops: &[f64]) -> Vec<f64> {
    let delayed = hops.iter().cycle().skip(hops.len() / 2);
    direct
        .iter()
        .zip(delayed)
        .enumerate()
        .map(|(at, (direct, hop))| if at % 3 == 0 { *direct } else { direct + hop })
        .collect()
}

/// Memory of one receiver without a relay, in MiB, and its times with [`COMPARED`] agents.
async fn single(agents: u32, network: Network) -> Result<(f64, Vec<f64>)> {
    let mut setup = FleetSetup::start(network, &[]).await?;
    let agents = usize::try_from(agents)?;
    setup.grow(agents.min(COMPARED)).await?;
    let times = accepted(&setup.fleet, &setup.fleet.members().iter().collect::<Vec<_>>()).await?;
    setup.grow(agents).await?;
    let step = Step::begin(format!("idle with {agents} agents and one receiver"));
    sleep(REST).await;
    step.done();
    Ok((mebibytes(setup.receiver_memory().await?.pss_kib), times))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_three_requests_two_take_a_hop() {
        assert_eq!(least(&[1.0, 2.0, 3.0], &[0.1, 0.2, 0.3]), [1.0, 2.3, 3.1]);
    }
}
