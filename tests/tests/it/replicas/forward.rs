//! The status of a Watcher shows the forwarding of all replicas.

use anyhow::Context as _;
use tidewatch_api::{State, leases::Unit, shard::ShardCount};
use tidewatch_testing::landscape::Options;

use super::{Replicas, short_lease};
use crate::{
    forward::{Behavior, Manager, watcher_becomes, write_map},
    support::TestResult,
};

/// Only a replica without the fleet role, which writes no status, has events for the manager.
#[tokio::test]
async fn a_watcher_shows_that_another_replica_cannot_reach_its_service() -> TestResult {
    let manager = Manager::start(Behavior::Unavailable).await?;
    let flags = ["--forward-url-template", "http://127.0.0.1:{port}"];
    let options = Options { receiver: flags.map(str::to_owned).to_vec(), ..short_lease() };
    let mut replicas = Replicas::start("replicas-forward", &["a", "b"], 0, options).await?;
    replicas.share_equally().await?;
    let landscape = replicas.landscape.clone();
    landscape.write_watcher(&manager.watcher("other")).await?;
    watcher_becomes(&landscape, "other", State::Ready, "team/other:").await?;

    let mut holders = replicas.holders().await?;
    let with_role = holders.remove(&Unit::Fleet).context("a holder of the fleet role")?;
    let of_other = |name: &String| {
        let shard = landscape.runtime_id(name).map(|id| ShardCount::default().of_runtime(&id));
        shard.is_ok_and(|shard| holders.get(&Unit::Shard(shard)).is_some_and(|holder| *holder != with_role))
    };
    let mut names = (1..=100).map(|number| format!("replicas-forward-{number}"));
    let name = names.find(of_other).context("a name in a shard of the other replica")?;
    let member = replicas.add(&name).await?.clone();
    member.runtime.grant_agent("", "configmaps").await?;
    member.path_proven().await?;
    write_map(&member.runtime, "first", "other").await?;
    watcher_becomes(&landscape, "other", State::Warning, "cannot be reached").await?;
    manager.behavior.send_replace(Behavior::Accepts);
    watcher_becomes(&landscape, "other", State::Ready, "team/other:").await?;

    let holders = replicas.holders().await?;
    assert_eq!(holders.get(&Unit::Fleet), Some(&with_role), "the role stays");
    assert_ne!(replicas.holder_of(&member).await?, with_role, "the runtime stays");
    Ok(())
}
