//! Memory of three replicas together.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::sleep;

use super::{
    super::{
        Figure,
        figure::mebibytes,
        fleet_setup::{FleetSetup, WAIT_LIMIT},
    },
    Settings,
    setup::ReplicaSetup,
};
use crate::progress::Step;

/// Idle connections to runtimes close after a minute, and each agent has sent heartbeats by then.
const REST: Duration = Duration::from_secs(100);
/// Number of agents for which the bar is defined.
const TARGET: u32 = 20_000;
/// Most memory of all replicas, in MiB.
const BAR: f64 = 1_228.8;

pub(super) async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let agents = settings.memory_agents;
    let single = single(agents).await?;
    let mut setup = ReplicaSetup::start(&["a", "b", "c"], agents, settings.lease).await?;
    // Not through the load balancer of this process, which needs two open files for each.
    let addresses: Vec<_> = setup.running.values().map(|replica| replica.events).collect();
    setup.fleet.start_at(&addresses);
    let unsettled = setup.unsettled(WAIT_LIMIT).await;
    ensure!(unsettled == 0, "{unsettled} events are not settled");
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
    Ok(())
}

/// Memory of one receiver without shards, in MiB.
async fn single(agents: u32) -> Result<f64> {
    let mut setup = FleetSetup::start(&[]).await?;
    setup.grow(usize::try_from(agents)?).await?;
    let step = Step::begin(format!("idle with {agents} agents and one receiver"));
    sleep(REST).await;
    step.done();
    Ok(mebibytes(setup.receiver_memory().await?.pss_kib))
}
