//! Crashes, freezes and restarts of processes during a load of changes: no event is lost, and both sides end in sync.

use std::time::Duration;

use anyhow::Result;
use tidewatch_testing::landscape::until;

use crate::{
    load::{KEDA, Load, watch_objects},
    support::{Isolation, SingleRuntime, TestResult, quick_options},
    sync::Counts,
};

const PAUSE: Duration = Duration::from_millis(20);
/// Duration of a freeze: longer than a request usually takes, shorter than any timeout that gives up.
const FREEZE_DURATION: Duration = Duration::from_secs(2);

/// Checks that both sides have counted the same since `before`, and agree exactly over a small load without faults.
async fn counts_agree(setup: &SingleRuntime, before: Counts) -> Result<()> {
    setup.counts_agree_since(before).await?;
    let before = setup.counts().await?;
    Load::run(setup, 24, PAUSE).await?;
    setup.counts_agree_since(before).await
}

/// A frozen process keeps its counts. A killed one loses them; see [`SingleRuntime::kill_agent`] and [`SingleRuntime::kill_receiver`] for
/// the remaining invariants.
#[tokio::test]
async fn a_load_survives_crashes_and_freezes_of_agent_and_receiver() -> TestResult {
    let setup = SingleRuntime::isolated(Isolation::Shared, "storm-ours", &[KEDA], quick_options()).await?;
    watch_objects(&setup).await?;
    setup.in_sync().await?;
    let before = setup.counts().await?;
    let mut load = Load::start(&setup, PAUSE);

    load.advance(20).await?;
    let before = setup.kill_agent(before).await?;
    load.advance(20).await?;
    setup.runtime.start_agent().await?;

    load.advance(20).await?;
    setup.runtime.with_agent(async |agent| agent.sigstop()).await??;
    load.advance(40).await?;
    setup.runtime.with_agent(async |agent| agent.sigcont()).await??;

    load.advance(20).await?;
    setup.landscape.with_receiver(async |receiver| receiver.sigstop()).await??;
    load.advance(40).await?;
    setup.landscape.with_receiver(async |receiver| receiver.sigcont()).await??;

    load.advance(20).await?;
    let before = setup.kill_receiver(before).await?;
    load.advance(20).await?;
    setup.landscape.start_receiver().await?;

    load.advance(20).await?;
    load.finish(&setup).await?;
    counts_agree(&setup, before).await?;
    Ok(())
}

#[tokio::test]
async fn a_load_survives_crashes_and_freezes_of_api_server_and_etcd() -> TestResult {
    let setup = SingleRuntime::isolated(Isolation::OwnEtcd, "storm-theirs", &[KEDA], quick_options()).await?;
    watch_objects(&setup).await?;
    let server = setup.runtime.cluster().server();
    let store = setup.runtime.cluster().store().unwrap();
    setup.in_sync().await?;
    let before = setup.counts().await?;
    let mut load = Load::start(&setup, PAUSE);

    load.advance(20).await?;
    server.freeze()?;
    tokio::time::sleep(FREEZE_DURATION).await;
    server.thaw()?;

    load.advance(20).await?;
    server.restart().await?;

    load.advance(20).await?;
    store.freeze()?;
    tokio::time::sleep(FREEZE_DURATION).await;
    store.thaw()?;

    load.advance(20).await?;
    store.restart().await?;

    load.advance(20).await?;
    server.kill();
    store.restart().await?;
    server.restart().await?;

    load.advance(20).await?;
    load.finish(&setup).await?;
    // Neither agent nor receiver was restarted, and both have counted throughout.
    setup.agent_metric_reaches("tidewatch_agent_watches_reopened_total", &[], 1).await?;
    setup.counts_agree_since(before).await?;
    Ok(())
}

/// Faults of KCP do not affect the counts, unless the receiver could not renew its Lease in time; see
/// [`SingleRuntime::baseline_after_receiver`].
#[tokio::test]
async fn a_load_survives_crashes_and_freezes_of_the_control_plane() -> TestResult {
    let setup = SingleRuntime::isolated(Isolation::OwnKcp, "storm-kcp", &[KEDA], quick_options()).await?;
    watch_objects(&setup).await?;
    let kcp = setup.landscape.kcp();
    setup.in_sync().await?;
    let before = setup.counts().await?;
    let mut load = Load::start(&setup, PAUSE);

    load.advance(20).await?;
    kcp.server().freeze()?;
    tokio::time::sleep(FREEZE_DURATION).await;
    kcp.server().thaw()?;

    load.advance(20).await?;
    let answered = setup.counts_agree_so_far(before).await?;
    kcp.server().restart().await?;
    let before = restart_if_exited(&setup, before, answered).await?;

    let store = kcp.store().unwrap();
    load.advance(20).await?;
    store.freeze()?;
    tokio::time::sleep(FREEZE_DURATION).await;
    store.thaw()?;

    load.advance(20).await?;
    let answered = setup.counts_agree_so_far(before).await?;
    store.restart().await?;
    let before = restart_if_exited(&setup, before, answered).await?;

    load.advance(20).await?;
    load.finish(&setup).await?;
    counts_agree(&setup, before).await?;
    Ok(())
}

/// Restarts a receiver that exited because it could not renew its Lease in time, as a kubelet would. Returns the counts
/// from which to compare.
async fn restart_if_exited(setup: &SingleRuntime, before: Counts, answered: u64) -> Result<Counts> {
    let ended = setup.landscape.with_receiver(async |receiver| receiver.process().status()).await??;
    if ended.is_none() {
        return Ok(before);
    }
    let before = setup.baseline_after_receiver(answered).await?;
    until("KCP to answer", async || Ok(Some(setup.runtime.kcp_kyma().await?))).await?;
    setup.landscape.start_receiver().await?;
    Ok(before)
}
