//! Scaling under a load of changes: no change is lost, and no object is written more often than its changes require.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::{Context as _, Result};
use futures::future::try_join_all;
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use serde_json::json;
use tidewatch_api::{
    Kyma, State,
    leases::{self, Unit},
    shard::ShardCount,
};
use tidewatch_testing::{
    control_plane::audit::{Mark, Write},
    landscape::{Options, until},
};

use super::{Replicas, short_lease};
use crate::support::{Member, TestResult, is_canary};

/// Accounts of the replicas in KCP and in a runtime.
const ACCOUNTS: [&str; 2] = ["tidewatch-receiver", "tidewatch-control-plane"];
/// Writes of the Kyma in KCP that a change of the channel needs: its status, and the annotation with the inputs.
const WRITES_IN_KCP: usize = 2;
/// Long enough that a path stays proven while its shard moves and the agent connects anew on a busy machine.
const HEARTBEAT_SECONDS: u32 = 3;

/// Number of writes by object.
type Writes = BTreeMap<String, usize>;

/// Ends of the audit logs of KCP and of each runtime.
struct Marks(Mark, Vec<Mark>);

impl Marks {
    fn now(replicas: &Replicas) -> Result<Self> {
        let runtimes = replicas.members.iter().map(|member| member.runtime.cluster().audit_mark());
        Ok(Self(replicas.landscape.kcp().audit_mark()?, runtimes.collect::<Result<_, _>>()?))
    }

    /// Writes of the replicas since then in KCP, and in each runtime. Without the Leases.
    fn writes(&self, replicas: &Replicas) -> Result<(Writes, Vec<Writes>)> {
        let in_kcp = replicas.landscape.kcp().writes_since(self.0)?;
        let in_runtimes = replicas.members.iter().zip(&self.1).map(|(member, mark)| {
            let writes = member.runtime.cluster().writes_since(*mark)?;
            anyhow::Ok(by_object(&writes, "kube-system"))
        });
        Ok((by_object(&in_kcp, replicas.landscape.namespace()), in_runtimes.collect::<Result<_>>()?))
    }
}

/// Counts the writes of the replicas' accounts in a namespace, refused ones included.
fn by_object(writes: &[Write], namespace: &str) -> Writes {
    let accounts = ACCOUNTS.map(|account| format!("system:serviceaccount:{namespace}:{account}"));
    let mut count = Writes::new();
    for write in writes.iter().filter(|write| accounts.contains(&write.user) && write.resource != "leases") {
        let resource = write.resource.split('/').next().unwrap_or_default();
        *count.entry(format!("{resource}/{}", write.name)).or_default() += 1;
    }
    count
}

/// Waits until the replicas write nothing between two successive canaries of each runtime.
async fn becomes_quiet(replicas: &Replicas) -> Result<()> {
    until("the replicas to be quiet", async || {
        let marks = Marks::now(replicas)?;
        for (member, mark) in replicas.members.iter().zip(&marks.1) {
            until("the agent's canary", async || {
                let writes = member.runtime.cluster().writes_since(*mark)?;
                Ok((writes.iter().filter(|write| is_canary(write)).count() >= 2).then_some(()))
            })
            .await?;
        }
        let (in_kcp, in_runtimes) = marks.writes(replicas)?;
        Ok((in_kcp.is_empty() && in_runtimes.iter().all(Writes::is_empty)).then_some(()))
    })
    .await
}

/// Sets the channel of a runtime's Kyma as its user, and waits until the status of both Kymas shows it.
async fn change_channel(member: &Member, channel: &str) -> Result<()> {
    member.runtime.patch_kyma(&json!({"spec": {"channel": channel}})).await?;
    until(&format!("the channel {channel} in {}", member.runtime.name()), async || {
        let is_shown = |kyma: Option<Kyma>| {
            let status = kyma.and_then(|kyma| kyma.status);
            status.and_then(|status| status.active_channel).as_deref() == Some(channel)
        };
        Ok((is_shown(member.runtime.skr_kyma().await?) && is_shown(member.runtime.kcp_kyma().await?)).then_some(()))
    })
    .await
}

/// Makes one change after the other until the end; returns their number.
async fn change_until(member: &Member, end: &AtomicBool) -> Result<usize> {
    let mut changes = 0;
    for channel in ["fast", "regular"].into_iter().cycle() {
        if end.load(Ordering::Relaxed) {
            break;
        }
        change_channel(member, channel).await?;
        changes += 1;
    }
    Ok(changes)
}

/// Number of acquisitions so far of the shard of each runtime.
async fn acquisitions(replicas: &Replicas) -> Result<Vec<usize>> {
    let leases: Api<Lease> = Api::namespaced(replicas.landscape.operator(), replicas.landscape.namespace());
    let acquired = replicas.members.iter().map(async |member| {
        let unit = Unit::Shard(ShardCount::default().of_runtime(member.runtime.id()));
        let spec = leases.get(&leases::unit(unit)).await?.spec.context("a spec")?;
        Ok(usize::try_from(spec.lease_transitions.unwrap_or_default())?)
    });
    try_join_all(acquired).await
}

/// Selects a module that does not follow the Kyma's channel, and waits until it is ready: objects that no change concerns.
async fn install_module(member: &Member) -> Result<()> {
    member.runtime.patch_kyma(&json!({"spec": {"modules": [{"name": "keda", "channel": "regular"}]}})).await?;
    until(&format!("the module in {}", member.runtime.name()), async || {
        let status = member.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status);
        let is_ready = status.is_some_and(|status| status.modules().iter().any(|module| module.state == State::Ready));
        Ok(is_ready.then_some(()))
    })
    .await
}

/// From one replica to three and back by SIGTERM, while the users of the runtimes make changes, one after the other.
///
/// Each change takes effect. The objects of a runtime get exactly the writes that the changes need, as with one replica: a
/// replica hands a shard over when its reconciles have ended, and the next holder reconciles all runtimes of the shard anew,
/// reads their objects from the runtime, and writes only differences. It reads the Kyma in KCP from its cache, which may not
/// show the last write of the holder before: at most one write of that Kyma is repeated, or refused as a conflict, per
/// acquisition of its shard, and none if the shard stays. Objects that no change concerns (the module, its Manifest, the
/// catalog, the agent's) get no write at all.
#[tokio::test]
async fn scaling_loses_no_change_and_repeats_no_write() -> TestResult {
    let options = Options {
        heartbeat_seconds: HEARTBEAT_SECONDS,
        // The next holder verifies all runtimes of an acquired shard at once.
        receiver: vec!["--restart-spread-seconds=1".to_owned()],
        ..short_lease()
    };
    let mut replicas = Replicas::start("replicas-scale", &["a"], 2, options).await?;
    replicas.share_equally().await?;
    let members = replicas.members.clone();
    for member in &members {
        install_module(member).await?;
    }
    becomes_quiet(&replicas).await?;
    let marks = Marks::now(&replicas)?;
    let before = acquisitions(&replicas).await?;

    let end = AtomicBool::new(false);
    let scaling = async {
        for name in ["b", "c"] {
            replicas.launch(name).await?;
        }
        replicas.are_ready().await?;
        replicas.share_equally().await?;
        for _ in 0..2 {
            let holder = replicas.holder_of(&members[0]).await?;
            replicas.end(&holder).await?;
            replicas.share_equally().await?;
        }
        end.store(true, Ordering::Relaxed);
        Ok(())
    };
    let load = try_join_all(members.iter().map(|member: &Arc<Member>| change_until(member, &end)));
    let (changes, ()) = tokio::try_join!(load, scaling)?;
    becomes_quiet(&replicas).await?;

    let acquired: Vec<_> =
        acquisitions(&replicas).await?.iter().zip(before).map(|(after, before)| after - before).collect();
    assert!(acquired[0] >= 2, "its holder ended twice: {acquired:?}");
    let (mut in_kcp, in_runtimes) = marks.writes(&replicas)?;
    for (at, member) in members.iter().enumerate() {
        assert_eq!(in_runtimes[at], Writes::from([("kymas/default".to_owned(), changes[at])]));
        let writes = in_kcp.remove(&format!("kymas/{}", member.runtime.name())).unwrap_or_default();
        let needed = WRITES_IN_KCP * changes[at];
        let limit = needed + acquired[at];
        assert!(
            (needed..=limit).contains(&writes),
            "{writes} writes for {changes:?} changes, {acquired:?} acquisitions"
        );
    }
    assert_eq!(in_kcp, Writes::new(), "objects that no change concerns");
    Ok(())
}
