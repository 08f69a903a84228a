//! Memory of three replicas together, and the time until they accept events.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::{
    super::{
        Figure,
        figure::{mebibytes, millis, quantile},
        fleet_setup::{FleetSetup, WAIT_LIMIT},
    },
    Settings,
    setup::ReplicaSetup,
};
use crate::{
    load::{ProtocolState, SimulatedFleet, until_within},
    progress::Step,
};

/// Idle connections to runtimes close after a minute, and each agent has sent heartbeats by then.
const REST: Duration = Duration::from_secs(100);
/// Number of agents for which the bar is defined.
const TARGET: u32 = 20_000;
/// Most memory of all replicas, in MiB.
const BAR: f64 = 1_228.8;
/// Number of agents of the one receiver with which the times are compared.
const COMPARED: usize = 5_000;
/// Changes of all agents together, one after the other.
const CHANGES: usize = 3_000;
const INTERVAL: Duration = Duration::from_millis(20);
/// Distance of two agents that change in succession: a prime, so that all of them do.
const STRIDE: usize = 7_919;

/// Times until events are accepted, in milliseconds.
#[derive(Clone, Copy)]
struct Accepted {
    p50: f64,
    p99: f64,
}

impl Accepted {
    /// Lets agents of a fleet change an object at a steady rate.
    async fn measure(fleet: &SimulatedFleet) -> Result<Self> {
        let members = fleet.members();
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
        let mut times: Vec<_> = fleet.counters().take_times().into_iter().map(millis).collect();
        ensure!(times.len() >= CHANGES, "{} requests were accepted for {CHANGES} changes", times.len());
        Ok(Self { p50: quantile(&mut times, 0.5), p99: quantile(&mut times, 0.99) })
    }
}

pub(super) async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let agents = settings.memory_agents;
    let (single, floor) = single(agents).await?;
    let mut setup = ReplicaSetup::start(&["a", "b", "c"], agents, settings.lease).await?;
    // Not through the load balancer of this process, which needs two open files for each.
    let addresses: Vec<_> = setup.running.values().map(|replica| replica.events).collect();
    setup.fleet.start_at(&addresses);
    let unsettled = setup.unsettled(WAIT_LIMIT).await;
    ensure!(unsettled == 0, "{unsettled} events are not settled");
    let accepted = Accepted::measure(&setup.fleet).await?;
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
    emit(&Figure::new("replicas_memory_accepted_p50", accepted.p50, "ms").with_floor(floor.p50));
    let p99 = Figure::new("replicas_memory_accepted_p99", accepted.p99, "ms");
    emit(&p99.ratio_at_most(floor.p99, accepted.p99 / floor.p99, 1.5));
    Ok(())
}

/// Memory of one receiver without shards, in MiB, and its times with [`COMPARED`] agents.
async fn single(agents: u32) -> Result<(f64, Accepted)> {
    let (mut setup, agents) = (FleetSetup::start(&[]).await?, usize::try_from(agents)?);
    setup.grow(agents.min(COMPARED)).await?;
    let accepted = Accepted::measure(&setup.fleet).await?;
    setup.grow(agents).await?;
    let step = Step::begin(format!("idle with {agents} agents and one receiver"));
    sleep(REST).await;
    step.done();
    Ok((mebibytes(setup.receiver_memory().await?.pss_kib), accepted))
}
