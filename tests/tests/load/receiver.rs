//! Load tests of the receiver with many agents.

use std::time::Duration;

use anyhow::{Context as _, Result};
use kube::{Api, api::ListParams};
use tidewatch_api::Manifest;
use tidewatch_testing::{
    load::{EnrolmentEndpoint, SimulatedFleet, until_within},
    product::metric,
};

use crate::{ExclusiveLandscape, assert_flat};

const DEADLINE: Duration = Duration::from_secs(300);
const MODULE: &str = "template-operator";
/// Events of all agents in one round.
const EVENTS: u64 = 100_000;

#[tokio::test(flavor = "multi_thread")]
async fn memory_is_flat_with_many_connected_agents() -> Result<()> {
    const AGENTS: usize = 2_000;
    /// Agents that send events. The others are connected and send heartbeats; their runtimes are paused, since
    /// otherwise reconciles would outweigh the events.
    const SENDERS: usize = 100;
    let setup = ExclusiveLandscape::start("fleet-memory", 15).await?;
    let mut fleet = SimulatedFleet::new(setup.landscape.clone()).await?;
    fleet.grow(SENDERS).await?;
    fleet.grow_paused(AGENTS).await?;
    fleet.start();
    fleet.at_rest(DEADLINE).await?;
    until_within("all agents to be connected", DEADLINE, async || {
        let (_, page) = setup.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
        Ok((metric(&page, "tidewatch_gateway_connections") == Some(AGENTS as f64)).then_some(()))
    })
    .await?;
    let mut memory = Vec::new();
    for _ in 0..3 {
        let until = fleet.counters().events() + EVENTS;
        let sending = || fleet.members().iter().take(SENDERS);
        sending().for_each(|member| member.handle().saturate(100));
        until_within("the events to be accepted", DEADLINE, async || {
            Ok((fleet.counters().events() >= until).then_some(()))
        })
        .await?;
        sending().for_each(|member| member.handle().saturate(0));
        fleet.at_rest(DEADLINE).await?;
        memory.push(setup.landscape.with_receiver(async |receiver| receiver.memory()).await??.pss_kib);
    }
    let (_, page) = setup.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
    // Agents whose connection reached its maximum age reconnect with their next heartbeat.
    let open = metric(&page, "tidewatch_gateway_connections").context("connections")?;
    assert!(open >= AGENTS as f64 * 0.9, "only {open} agents are connected");
    assert_flat("the receiver", memory[1], memory[2]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_receiver_recovers_changes_made_during_its_downtime() -> Result<()> {
    const AGENTS: usize = 100;
    let setup = ExclusiveLandscape::start("fleet-restart", 5).await?;
    setup.landscape.write_module(MODULE, "1.0.0", "1.1.0").await?;
    let mut fleet = SimulatedFleet::new(setup.landscape.clone()).await?;
    fleet.grow(AGENTS).await?;
    fleet.start();
    fleet.at_rest(DEADLINE).await?;
    setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    let changed: Vec<_> = fleet.members().iter().step_by(10).collect();
    changed.iter().for_each(|member| member.select(&[MODULE]));
    setup.landscape.start_receiver().await?;
    until_within("every change to appear in its runtime", DEADLINE, async || {
        Ok(changed.iter().all(|member| member.status_modules().is_some_and(|shown| shown == [MODULE])).then_some(()))
    })
    .await?;
    fleet.at_rest(DEADLINE).await?;
    let kcp = setup.landscape.kcp().client().await?;
    let manifests = Api::<Manifest>::namespaced(kcp, setup.landscape.namespace());
    assert_eq!(
        manifests.list(&ListParams::default()).await?.items.len(),
        changed.len(),
        "one Manifest per changed runtime"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_that_enrol_at_once_all_get_usable_certificates() -> Result<()> {
    const AGENTS: usize = 200;
    const ISSUED: &str = "tidewatch_enrolment_certificates_issued_total{by=\"enrolment\"}";
    let setup = ExclusiveLandscape::issuing("fleet-enrolment").await?;
    let mut fleet = SimulatedFleet::new(setup.landscape.clone()).await?;
    fleet.grow(AGENTS).await?;
    fleet.served(DEADLINE).await?;
    let address = setup.landscape.agents_enrolment().context("a receiver that issues")?;
    let endpoint = EnrolmentEndpoint::new(address, setup.landscape.ca().trust_bundle().store()?)?;
    fleet.enrol(&endpoint);
    // The certificates of the registration come from a CA that the receiver does not trust, so only enrolled agents get
    // through.
    fleet.at_rest(DEADLINE).await?;
    assert_eq!(fleet.counters().enrolments(), AGENTS as u64);
    fleet.enrol_again(&endpoint);
    until_within("all agents to get a second certificate", DEADLINE, async || {
        Ok((fleet.counters().enrolments() == 2 * AGENTS as u64).then_some(()))
    })
    .await?;
    let (_, page) = setup.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
    assert!(
        metric(&page, ISSUED).is_some_and(|issued| issued >= 2.0 * AGENTS as f64),
        "too few certificates were issued"
    );
    Ok(())
}
