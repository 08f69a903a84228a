//! What an etcd can do to a watch: history that is compacted away, and a state that was restored from a copy.

use std::time::{Duration, SystemTime};

use anyhow::Result;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, api::DeleteParams};
use tidewatch_tests::landscape::{until, watchers::watcher};

use crate::{
    load::{KEDA, Load, OBJECTS, STATES, watch_objects},
    support::{Ground, One, Tested, module, quick},
    sync::sum,
};

const PAUSE: Duration = Duration::from_millis(10);
const SLOWLY: Duration = Duration::from_millis(100);

#[tokio::test]
async fn compacted_history_makes_an_agent_list_again_and_no_more() -> Tested {
    let one = One::to_harm(Ground::OwnStore, "compacted", &[KEDA], quick()).await?;
    watch_objects(&one).await?;
    one.in_sync().await?;
    let (server, store) = (one.runtime.cluster().server(), one.runtime.cluster().store().unwrap());
    let lists = async || Ok::<_, anyhow::Error>(sum(&one.agent_page().await?, "tidewatch_agent_lists_total", &[]));
    let (before, counts) = (lists().await?, one.counts().await?);

    let mut load = Load::start(&one, PAUSE);
    load.goes_on(2 * OBJECTS).await?;
    one.runtime.with_agent(async |agent| agent.sigstop()).await??;
    let frozen = SystemTime::now();
    // Its connections end, or what is written now would wait there until it looks.
    server.restart().await?;
    // Some of what it has seen goes; then what it saw last is compacted away, and the API server remembers nothing either.
    load.goes_on((STATES + 1) * OBJECTS).await?;
    store.compact().await?;
    server.restart().await?;
    one.runtime.with_agent(async |agent| agent.sigcont()).await??;
    load.arrives(&one).await?;
    one.counts_agree_since(counts).await?;
    one.agent_counts("tidewatch_agent_lists_total", &["\"gone\""], 1).await?;
    one.listed(&one.landscape.watch_of("load"), frozen).await?;
    // Each watch listed a few times at most (it may have met the API server while that was starting), and then no more.
    let after = until("the last list", async || {
        let (so_far, mark) = (lists().await?, one.runtime.cluster().audit_mark()?);
        one.after_canaries(mark, 2).await?;
        Ok((lists().await? == so_far).then_some(so_far))
    })
    .await?;
    let watches = sum(&one.agent_page().await?, "tidewatch_agent_watches", &[]) + 2;
    assert!(after - before <= 3 * watches, "{} lists of {watches} watches", after - before);
    let counts = one.counts().await?;
    Load::run(&one, 24, PAUSE).await?;
    one.counts_agree_since(counts).await?;
    assert_eq!(lists().await?, after, "what works is not listed again");
    Ok(())
}

/// Neither of ours is touched: what the agent gives goes on from where it was, whatever became of the state that it tells of.
#[tokio::test]
async fn an_etcd_that_was_restored_is_noticed_and_its_state_is_the_truth() -> Tested {
    let one = One::to_harm(Ground::OwnStore, "restored", &[KEDA], quick()).await?;
    watch_objects(&one).await?;
    let (server, store) = (one.runtime.cluster().server(), one.runtime.cluster().store().unwrap());
    one.runtime.select(&["keda"]).await?;
    one.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    one.in_sync().await?;

    server.kill();
    let backup = store.back_up()?;
    store.restart().await?;
    server.restart().await?;
    // All of this never was: changes, an object, a watch of the plan.
    Load::run(&one, 61, PAUSE).await?;
    one.runtime.select(&[]).await?;
    one.skr_status("no module", |status| status.modules().is_empty()).await?;
    one.landscape.write_watcher(&watcher("later", ("", "v1", "configmaps"), "spec")).await?;
    one.listed(&one.landscape.watch_of("later"), SystemTime::UNIX_EPOCH).await?;
    one.in_sync().await?;
    assert!(one.manifests().await?.is_empty());
    let (rebuilds, counts) = (rebuilds(&one).await?, one.counts().await?);

    let restored = SystemTime::now();
    server.kill();
    store.bring_back(backup)?;
    store.restart().await?;
    server.restart().await?;
    one.agent_counts("tidewatch_agent_rebuilds_total", &[], rebuilds + 1).await?;
    // Not only because a canary did not come back.
    until("the agent to see that versions went back", async || {
        let log = one.runtime.with_agent(async |agent| agent.log_text()).await??;
        Ok(log.contains("Resource versions went back").then_some(()))
    })
    .await?;
    for watch in ["kyma", "crds", &one.landscape.watch_of("load"), &one.landscape.watch_of("later")] {
        one.listed(watch, restored).await?;
    }
    // The user's choice is again what it was then, and KCP follows.
    one.skr_status("the module again", |status| module(status, "keda").is_some()).await?;
    until("the Manifest again", async || Ok((one.manifests().await?.len() == 1).then_some(()))).await?;
    let maps = Api::<ConfigMap>::namespaced(one.runtime.cluster().client().await?, "default");
    assert!(
        maps.list(&Default::default()).await?.items.iter().all(|map| map.metadata.labels.is_none()),
        "never written"
    );
    one.in_sync().await?;
    one.counts_agree_since(counts).await?;

    let counts = one.counts().await?;
    Load::run(&one, 24, PAUSE).await?;
    one.counts_agree_since(counts).await?;
    let _ = maps.delete_collection(&DeleteParams::default(), &Default::default()).await?;
    one.in_sync().await?;
    one.nothing_was_odd().await?;
    Ok(())
}

/// Of what the load had written before nothing is left. In the end each of its objects was written again, and that state is told; and
/// each event that ever got a sequence was recorded, also those of what never was.
///
/// It goes on so slowly that what is written anew does not overtake what was undone before the agent looks again: it is told by resource
/// versions that went back, and they go forward with every write.
#[tokio::test]
async fn a_load_outlives_an_etcd_that_is_restored_in_its_midst() -> Tested {
    let one = One::to_harm(Ground::OwnStore, "restored-load", &[KEDA], quick()).await?;
    watch_objects(&one).await?;
    one.in_sync().await?;
    let (server, store) = (one.runtime.cluster().server(), one.runtime.cluster().store().unwrap());
    server.kill();
    let backup = store.back_up()?;
    store.restart().await?;
    server.restart().await?;
    one.in_sync().await?;
    let (rebuilds_before, counts) = (rebuilds(&one).await?, one.counts().await?);

    let mut load = Load::start(&one, SLOWLY);
    load.goes_on(60).await?;
    server.kill();
    store.bring_back(backup)?;
    store.restart().await?;
    server.restart().await?;
    load.goes_on(2 * OBJECTS).await?;
    one.agent_counts("tidewatch_agent_rebuilds_total", &[], rebuilds_before + 1).await?;
    load.arrives(&one).await?;
    one.counts_agree_since(counts).await?;
    Ok(())
}

async fn rebuilds(one: &One) -> Result<u64> {
    Ok(sum(&one.agent_page().await?, "tidewatch_agent_rebuilds_total", &[]))
}
