//! Ring rollout of a module while shards and the fleet role move, with fake API servers of the runtimes.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use tidewatch_api::leases::Unit;
use tidewatch_testing::{
    landscape::{DEADLINE, Options, until},
    load::EnrolmentEndpoint,
};

use super::{Replicas, short_lease};
use crate::{module_rollout::Rollout, support::TestResult};

/// Ends the replica with the fleet role in order: the role and its shards move to those that remain.
async fn end_fleet_role(replicas: &mut Replicas) -> Result<()> {
    let holder = replicas.holders().await?.remove(&Unit::Fleet).context("a holder of the fleet role")?;
    replicas.end(&holder).await?;
    replicas.share_equally().await
}

/// A rollout goes on in its next ring, and a halted one stays halted, where the fleet role moves to; no runtime gets a version
/// that its ring does not have.
#[tokio::test]
async fn rollout_by_rings_goes_on_and_stays_halted_while_shards_move() -> TestResult {
    let flags = ["--module-rollout-rings=50%,100%", "--module-rollout-pause-seconds=5"];
    let options = Options { agent_image: String::new(), receiver: flags.map(str::to_owned).to_vec(), ..short_lease() };
    let mut replicas = Replicas::start("replicas-rings", &["a", "b", "c"], 0, options).await?;
    replicas.share_equally().await?;
    let landscape = replicas.landscape.clone();
    let mut rollout = Rollout::register(landscape.clone()).await?;
    let endpoint = EnrolmentEndpoint::new(replicas.enrolments.address(), landscape.ca().trust_bundle().store()?)?;
    rollout.fleet.certify(&endpoint).await?;
    rollout.install().await?;

    // Between the rings.
    rollout.move_to("1.1.0").await?;
    rollout.becomes([("Ready", "1.0.0"), ("Ready", "1.0.0"), ("Ready", "1.1.0"), ("Ready", "1.1.0")]).await?;
    end_fleet_role(&mut replicas).await?;
    rollout.event("ModuleRollout", "the rollout of 1.1.0 in the channel regular is in ring 2").await?;
    rollout.event("ModuleRollout", "every runtime gets 1.1.0 of the channel regular").await?;
    rollout.becomes([("Ready", "1.1.0"); 4]).await?;

    rollout.fleet.fake().refuse_pods(":1.2.0", 1);
    rollout.move_to("1.2.0").await?;
    rollout.event("ModuleRolloutHalted", "the rollout of 1.2.0 in the channel regular has halted").await?;
    let failed = rollout.with("1.2.0").await?;
    assert_eq!(failed.len(), 1);
    end_fleet_role(&mut replicas).await?;
    let (_, last) = replicas.running.first_key_value().context("the last replica")?;
    let shown = |page: &str| page.contains("tidewatch_module_rollouts{state=\"halted\"} 1\n").then_some(());
    last.process.metrics_until(DEADLINE, shown).await?;
    // A reconcile of each runtime at the replica that holds them all now.
    rollout.select();
    until("the runtimes to be reconciled", async || Ok((rollout.fleet.unsettled() == 0).then_some(()))).await?;
    assert_eq!(rollout.with("1.2.0").await?, failed);

    rollout.move_to("1.1.0").await?;
    rollout.becomes([("Ready", "1.1.0"); 4]).await?;
    assert_eq!(rollout.with("1.2.0").await?, BTreeSet::new());
    Ok(())
}
