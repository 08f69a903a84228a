//! Faults of etcd that affect watches: compaction of the history, and a restore from a backup.

use std::time::{Duration, SystemTime};

use anyhow::Result;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, api::DeleteParams};
use tidewatch_testing::landscape::{until, watchers::watcher};

use crate::{
    load::{KEDA, Load, OBJECTS, STATES, watch_objects},
    support::{Isolation, SingleRuntime, TestResult, module, quick_options},
    sync::sum,
};

const PAUSE: Duration = Duration::from_millis(10);

#[tokio::test]
async fn a_compacted_history_leads_to_relists_and_nothing_more() -> TestResult {
    let setup = SingleRuntime::isolated(Isolation::OwnEtcd, "compacted", &[KEDA], quick_options()).await?;
    watch_objects(&setup).await?;
    setup.in_sync().await?;
    let server = setup.runtime.cluster().server();
    let store = setup.runtime.cluster().store().unwrap();
    // Without the first lists of watches on a module that the load enables.
    let lists = async || {
        let page = setup.agent_page().await?;
        let of = |labels| sum(&page, "tidewatch_agent_lists_total", labels);
        Ok::<_, anyhow::Error>(of(&[]) - of(&["\"start\""]))
    };
    let before = lists().await?;
    let counts = setup.counts().await?;

    let mut load = Load::start(&setup, PAUSE);
    load.advance(2 * OBJECTS).await?;
    setup.runtime.with_agent(async |agent| agent.sigstop()).await??;
    let frozen = SystemTime::now();
    // The restart ends the API server's connections; otherwise this write would wait until it notices.
    server.restart().await?;
    // Discard part of the observed history; then compact up to the last observed version, and restart the API server to
    // clear its watch cache.
    load.advance((STATES + 1) * OBJECTS).await?;
    store.compact().await?;
    server.restart().await?;
    setup.runtime.with_agent(async |agent| agent.sigcont()).await??;
    load.finish(&setup).await?;
    setup.counts_agree_since(counts).await?;
    setup.agent_metric_reaches("tidewatch_agent_lists_total", &["\"gone\""], 1).await?;
    setup.list_arrives(&setup.landscape.watch_of("load"), frozen).await?;
    // Each watch relists a few times at most, because it may meet an API server that is still starting, and then no
    // more.
    let after = until("the last list", async || {
        let so_far = lists().await?;
        let mark = setup.runtime.cluster().audit_mark()?;
        setup.after_canaries(mark, 2).await?;
        Ok((lists().await? == so_far).then_some(so_far))
    })
    .await?;
    let watches = sum(&setup.agent_page().await?, "tidewatch_agent_watches", &[]) + 2;
    assert!(after - before <= 3 * watches, "{} lists of {watches} watches", after - before);
    let counts = setup.counts().await?;
    Load::run(&setup, 24, PAUSE).await?;
    setup.counts_agree_since(counts).await?;
    assert_eq!(lists().await?, after, "a working watch is not listed again");
    Ok(())
}

/// Agent and receiver keep running: the agent's sequences continue although the state that its events describe was
/// undone.
#[tokio::test]
async fn a_restored_etcd_is_detected_and_its_state_is_adopted() -> TestResult {
    let setup = SingleRuntime::isolated(Isolation::OwnEtcd, "restored", &[KEDA], quick_options()).await?;
    watch_objects(&setup).await?;
    let server = setup.runtime.cluster().server();
    let store = setup.runtime.cluster().store().unwrap();
    setup.runtime.select(&["keda"]).await?;
    setup.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    setup.in_sync().await?;

    server.kill();
    let backup = store.back_up()?;
    store.restart().await?;
    server.restart().await?;
    // The restore will undo these changes: an object, a module selection, a watch of the plan.
    Load::run(&setup, 61, PAUSE).await?;
    setup.runtime.select(&[]).await?;
    setup.skr_status("no module", |status| status.modules().is_empty()).await?;
    setup.landscape.write_watcher(&watcher("later", ("", "v1", "configmaps"), "spec")).await?;
    setup.list_arrives(&setup.landscape.watch_of("later"), SystemTime::UNIX_EPOCH).await?;
    setup.in_sync().await?;
    assert!(setup.manifests().await?.is_empty());
    let rebuilds = rebuilds(&setup).await?;
    let counts = setup.counts().await?;

    let restored = SystemTime::now();
    server.kill();
    store.restore(backup)?;
    store.restart().await?;
    server.restart().await?;
    setup.agent_metric_reaches("tidewatch_agent_rebuilds_total", &[], rebuilds + 1).await?;
    // The agent must detect the restore by resource versions, not only by the missing canary.
    until("the agent to see that versions went back", async || {
        let log = setup.runtime.with_agent(async |agent| agent.log_text()).await??;
        Ok(log.contains("Resource versions went back").then_some(()))
    })
    .await?;
    for watch in ["kyma", "crds", &setup.landscape.watch_of("load"), &setup.landscape.watch_of("later")] {
        setup.list_arrives(watch, restored).await?;
    }
    // The user's selection is the restored one, and KCP follows.
    setup.skr_status("the module again", |status| module(status, "keda").is_some()).await?;
    until("the Manifest again", async || Ok((setup.manifests().await?.len() == 1).then_some(()))).await?;
    let maps = Api::<ConfigMap>::namespaced(setup.runtime.cluster().client().await?, "default");
    assert!(
        maps.list(&Default::default()).await?.items.iter().all(|map| map.metadata.labels.is_none()),
        "never written"
    );
    setup.in_sync().await?;
    setup.counts_agree_since(counts).await?;

    let counts = setup.counts().await?;
    Load::run(&setup, 24, PAUSE).await?;
    setup.counts_agree_since(counts).await?;
    let _ = maps.delete_collection(&DeleteParams::default(), &Default::default()).await?;
    setup.in_sync().await?;
    setup.logs_are_clean().await?;
    Ok(())
}

/// The restore discards all that the load wrote before. In the end each object was written again and the receiver has
/// an event of that state; and every event that got a sequence was recorded, including those of the discarded history.
///
/// The load is fast, so that the versions of new writes overtake the discarded ones before the agent renews its Lease again:
/// it detects the restore by the version of the Lease alone.
#[tokio::test]
async fn a_load_survives_a_restore_of_etcd() -> TestResult {
    let setup = SingleRuntime::isolated(Isolation::OwnEtcd, "restored-load", &[KEDA], quick_options()).await?;
    watch_objects(&setup).await?;
    setup.in_sync().await?;
    let server = setup.runtime.cluster().server();
    let store = setup.runtime.cluster().store().unwrap();
    server.kill();
    let backup = store.back_up()?;
    store.restart().await?;
    server.restart().await?;
    setup.in_sync().await?;
    let rebuilds_before = rebuilds(&setup).await?;
    let counts = setup.counts().await?;

    let mut load = Load::start(&setup, PAUSE);
    load.advance(60).await?;
    server.kill();
    store.restore(backup)?;
    store.restart().await?;
    server.restart().await?;
    load.advance(2 * OBJECTS).await?;
    setup.agent_metric_reaches("tidewatch_agent_rebuilds_total", &[], rebuilds_before + 1).await?;
    load.finish(&setup).await?;
    setup.counts_agree_since(counts).await?;
    Ok(())
}

async fn rebuilds(setup: &SingleRuntime) -> Result<u64> {
    Ok(sum(&setup.agent_page().await?, "tidewatch_agent_rebuilds_total", &[]))
}
