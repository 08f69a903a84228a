//! Processes that die, freeze and come back during a load of changes: nothing is lost, and both sides end in sync.

use std::time::Duration;

use anyhow::Result;
use tidewatch_tests::landscape::until;

use crate::{
    load::{KEDA, Load, watch_objects},
    support::{Ground, One, Tested, quick},
    sync::Counts,
};

const PAUSE: Duration = Duration::from_millis(20);
/// How long something is frozen: longer than a request usually takes, shorter than what makes anybody give up.
const FROZEN: Duration = Duration::from_secs(2);

/// Both sides count alike since then, and a small load that nothing disturbs besides, one for one.
async fn counts_agree(one: &One, before: Counts) -> Result<()> {
    one.counts_agree_since(before).await?;
    let before = one.counts().await?;
    Load::run(one, 24, PAUSE).await?;
    one.counts_agree_since(before).await
}

/// Who freezes goes on counting. The count of who is killed dies with it; see [`One::kill_agent`] and [`One::kill_receiver`] for what holds
/// nevertheless.
#[tokio::test]
async fn a_load_outlives_agent_and_receiver_that_die_and_freeze() -> Tested {
    let one = One::to_harm(Ground::Shared, "storm-ours", &[KEDA], quick()).await?;
    watch_objects(&one).await?;
    one.in_sync().await?;
    let before = one.counts().await?;
    let mut load = Load::start(&one, PAUSE);

    load.goes_on(20).await?;
    let before = one.kill_agent(before).await?;
    load.goes_on(20).await?;
    one.runtime.start_agent().await?;

    load.goes_on(20).await?;
    one.runtime.with_agent(async |agent| agent.sigstop()).await??;
    load.goes_on(40).await?;
    one.runtime.with_agent(async |agent| agent.sigcont()).await??;

    load.goes_on(20).await?;
    one.landscape.with_receiver(async |receiver| receiver.sigstop()).await??;
    load.goes_on(40).await?;
    one.landscape.with_receiver(async |receiver| receiver.sigcont()).await??;

    load.goes_on(20).await?;
    let before = one.kill_receiver(before).await?;
    load.goes_on(20).await?;
    one.landscape.start_receiver().await?;

    load.goes_on(20).await?;
    load.arrives(&one).await?;
    counts_agree(&one, before).await?;
    Ok(())
}

#[tokio::test]
async fn a_load_outlives_an_api_server_and_an_etcd_that_die_and_freeze() -> Tested {
    let one = One::to_harm(Ground::OwnStore, "storm-theirs", &[KEDA], quick()).await?;
    watch_objects(&one).await?;
    let server = one.runtime.cluster().server();
    let store = one.runtime.cluster().store().unwrap();
    one.in_sync().await?;
    let before = one.counts().await?;
    let mut load = Load::start(&one, PAUSE);

    load.goes_on(20).await?;
    server.freeze()?;
    tokio::time::sleep(FROZEN).await;
    server.thaw()?;

    load.goes_on(20).await?;
    server.restart().await?;

    load.goes_on(20).await?;
    store.freeze()?;
    tokio::time::sleep(FROZEN).await;
    store.thaw()?;

    load.goes_on(20).await?;
    store.restart().await?;

    load.goes_on(20).await?;
    server.kill();
    store.restart().await?;
    server.restart().await?;

    load.goes_on(20).await?;
    load.arrives(&one).await?;
    // Neither of ours was told to give up what it had, and both have counted all the while.
    one.agent_counts("tidewatch_agent_watches_reopened_total", &[], 1).await?;
    one.counts_agree_since(before).await?;
    Ok(())
}

/// What KCP does is nothing to the counts, unless the receiver could not renew its Lease in time; see [`One::without_receiver`].
#[tokio::test]
async fn a_load_outlives_a_control_plane_that_dies_and_freezes() -> Tested {
    let one = One::to_harm(Ground::OwnKcp, "storm-kcp", &[KEDA], quick()).await?;
    watch_objects(&one).await?;
    let kcp = one.landscape.kcp();
    one.in_sync().await?;
    let before = one.counts().await?;
    let mut load = Load::start(&one, PAUSE);

    load.goes_on(20).await?;
    kcp.server().freeze()?;
    tokio::time::sleep(FROZEN).await;
    kcp.server().thaw()?;

    load.goes_on(20).await?;
    let answered = one.counts_agree_so_far(before).await?;
    kcp.server().restart().await?;
    let before = alive_again(&one, before, answered).await?;

    let store = kcp.store().unwrap();
    load.goes_on(20).await?;
    store.freeze()?;
    tokio::time::sleep(FROZEN).await;
    store.thaw()?;

    load.goes_on(20).await?;
    let answered = one.counts_agree_so_far(before).await?;
    store.restart().await?;
    let before = alive_again(&one, before, answered).await?;

    load.goes_on(20).await?;
    load.arrives(&one).await?;
    counts_agree(&one, before).await?;
    Ok(())
}

/// A receiver that could not renew its Lease in time has ended, and whoever runs it starts it again. Returns from where the counts go on.
async fn alive_again(one: &One, before: Counts, answered: u64) -> Result<Counts> {
    let ended = one.landscape.with_receiver(async |receiver| receiver.process().status()).await??;
    if ended.is_none() {
        return Ok(before);
    }
    let before = one.without_receiver(answered).await?;
    until("KCP to answer", async || Ok(Some(one.runtime.kcp_kyma().await?))).await?;
    one.landscape.start_receiver().await?;
    Ok(before)
}
