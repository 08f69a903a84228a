//! The receiver with many agents.

use std::time::Duration;

use anyhow::{Context as _, Result};
use kube::{Api, api::ListParams};
use tidewatch_shared::api::Manifest;
use tidewatch_tests::load::{Crowd, Office, until_within};

use crate::{Alone, assert_flat};

const PATIENCE: Duration = Duration::from_secs(300);
const MODULE: &str = "template-operator";
/// Events of one round, of all agents together.
const EVENTS: u64 = 100_000;

/// The value of a metric by its name, with its labels if it has any.
fn metric(page: &str, name: &str) -> Option<f64> {
    page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_is_flat_with_many_connected_agents_however_many_events_they_send() -> Result<()> {
    const AGENTS: usize = 2_000;
    /// Those that send events; the others are connected and prove that they are alive, and their runtimes are paused, or there would be
    /// more to do in runtimes than to hear from them.
    const SENDING: usize = 100;
    let alone = Alone::start("crowd-memory", 15).await?;
    let mut crowd = Crowd::new(alone.landscape.clone()).await?;
    crowd.grow(SENDING).await?;
    crowd.grow_paused(AGENTS).await?;
    crowd.start();
    crowd.at_rest(PATIENCE).await?;
    until_within("all agents to be connected", PATIENCE, async || {
        let (_, page) = alone.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
        Ok((metric(&page, "tidewatch_gateway_connections") == Some(AGENTS as f64)).then_some(()))
    })
    .await?;
    let mut memory = Vec::new();
    for _ in 0..3 {
        let until = crowd.tally().events() + EVENTS;
        let sending = || crowd.members().iter().take(SENDING);
        sending().for_each(|member| member.memory().hammer(100));
        until_within("the events to be taken", PATIENCE, async || Ok((crowd.tally().events() >= until).then_some(())))
            .await?;
        sending().for_each(|member| member.memory().hammer(0));
        crowd.at_rest(PATIENCE).await?;
        memory.push(alone.landscape.with_receiver(async |receiver| receiver.memory()).await??.pss_kib);
    }
    let (_, page) = alone.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
    // Those whose connection was old come again with their next heartbeat.
    let open = metric(&page, "tidewatch_gateway_connections").context("connections")?;
    assert!(open >= AGENTS as f64 * 0.9, "{open} are connected");
    assert_flat("the receiver", memory[1], memory[2]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_receiver_finds_every_change_that_was_made_while_it_was_away() -> Result<()> {
    const AGENTS: usize = 100;
    let alone = Alone::start("crowd-restart", 5).await?;
    alone.landscape.write_module(MODULE, "1.0.0", "1.1.0").await?;
    let mut crowd = Crowd::new(alone.landscape.clone()).await?;
    crowd.grow(AGENTS).await?;
    crowd.start();
    crowd.at_rest(PATIENCE).await?;
    alone.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    let changed: Vec<_> = crowd.members().iter().step_by(10).collect();
    changed.iter().for_each(|member| member.select(&[MODULE]));
    alone.landscape.start_receiver().await?;
    until_within("every change to show in its runtime", PATIENCE, async || {
        Ok(changed.iter().all(|member| member.shown().is_some_and(|shown| shown == [MODULE])).then_some(()))
    })
    .await?;
    crowd.at_rest(PATIENCE).await?;
    let kcp = alone.landscape.kcp().client().await?;
    let manifests = Api::<Manifest>::namespaced(kcp, alone.landscape.namespace());
    assert_eq!(manifests.list(&ListParams::default()).await?.items.len(), changed.len(), "one each, and nobody else's");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_that_all_enrol_in_one_moment_all_get_a_certificate_and_speak_with_it() -> Result<()> {
    const AGENTS: usize = 200;
    const ISSUED: &str = "tidewatch_enrolment_certificates_issued_total{by=\"enrolment\"}";
    let alone = Alone::issuing("crowd-enrolment").await?;
    let mut crowd = Crowd::new(alone.landscape.clone()).await?;
    crowd.grow(AGENTS).await?;
    crowd.served(PATIENCE).await?;
    let port = alone.landscape.enrolment_port().context("a receiver that issues")?;
    let office = Office::new(([127, 0, 0, 1], port).into(), alone.landscape.ca().trust_bundle().store()?)?;
    crowd.enrol(&office);
    // What was registered is no certificate of the CA that the receiver has, so nobody else could be heard.
    crowd.at_rest(PATIENCE).await?;
    assert_eq!(crowd.tally().enrolments(), AGENTS as u64);
    crowd.enrol_again(&office);
    until_within("everybody to have another one", PATIENCE, async || {
        Ok((crowd.tally().enrolments() == 2 * AGENTS as u64).then_some(()))
    })
    .await?;
    let (_, page) = alone.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
    assert!(metric(&page, ISSUED).is_some_and(|issued| issued >= 2.0 * AGENTS as f64), "each was issued");
    Ok(())
}
