//! The receiver with many agents.

use std::time::Duration;

use anyhow::Result;
use kube::{Api, api::ListParams};
use tidewatch_shared::api::Manifest;
use tidewatch_tests::load::{Crowd, until_within};

use crate::{Alone, assert_flat};

const PATIENCE: Duration = Duration::from_secs(300);
const MODULE: &str = "template-operator";
/// Events of one round, of all agents together.
const EVENTS: u64 = 100_000;

/// The value of a metric without labels.
fn metric(page: &str, name: &str) -> Option<f64> {
    page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_is_flat_with_many_connected_agents_however_many_events_they_send() -> Result<()> {
    const AGENTS: usize = 500;
    let alone = Alone::start("crowd-memory").await?;
    let mut crowd = Crowd::new(alone.landscape.clone()).await?;
    crowd.grow(AGENTS).await?;
    crowd.start();
    crowd.at_rest(PATIENCE).await?;
    let mut memory = Vec::new();
    for _ in 0..3 {
        let until = crowd.tally().events() + EVENTS;
        crowd.members().iter().for_each(|member| member.memory().hammer(20));
        until_within("the events to be taken", PATIENCE, async || Ok((crowd.tally().events() >= until).then_some(())))
            .await?;
        crowd.members().iter().for_each(|member| member.memory().hammer(0));
        crowd.at_rest(PATIENCE).await?;
        memory.push(alone.landscape.with_receiver(async |receiver| receiver.memory()).await??.pss_kib);
    }
    let (_, page) = alone.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
    assert_eq!(metric(&page, "tidewatch_gateway_connections"), Some(AGENTS as f64), "all are connected");
    assert_flat("the receiver", memory[1], memory[2]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_receiver_finds_every_change_that_was_made_while_it_was_away() -> Result<()> {
    const AGENTS: usize = 100;
    let alone = Alone::start("crowd-restart").await?;
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
