//! Ownership of shards by real Leases, with no more rights than the ones listed for it.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, Result};
use k8s_openapi::api::{
    coordination::v1::Lease,
    rbac::v1::{Role, RoleBinding},
};
use kube::{Api, api::PostParams};
use serde_json::json;
use tidewatch_api::{
    identity::Instance,
    leases::{self, Unit},
    shard::ShardCount,
};
use tidewatch_cluster::leader::WriteFence;
use tidewatch_fleet::shards::{HoldersHandle, Metrics, Settings, ShardChange, ShardElector};
use tidewatch_testing::{bed, control_plane::Cluster, landscape::until};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::support::TestResult;

const NAMESPACE: &str = "shard-leases";
/// Short, and long enough for a busy machine to renew it in time.
const LEASE: Duration = Duration::from_secs(8);

/// Creates the Leases, and an account with the rights to them; returns its token.
async fn install(kcp: &Cluster, shards: ShardCount) -> Result<String> {
    kcp.ensure_service_account(NAMESPACE, "receiver").await?;
    let client = kcp.client().await?;
    let leases: Api<Lease> = Api::namespaced(client.clone(), NAMESPACE);
    for lease in leases::objects(NAMESPACE, shards) {
        leases.create(&PostParams::default(), &lease).await?;
    }
    let metadata = json!({"name": "receiver", "namespace": NAMESPACE});
    let role: Role = serde_json::from_value(json!({"metadata": metadata, "rules": leases::rules(shards)}))?;
    Api::namespaced(client.clone(), NAMESPACE).create(&PostParams::default(), &role).await?;
    let binding: RoleBinding = serde_json::from_value(json!({"metadata": metadata,
        "subjects": [{"kind": "ServiceAccount", "name": "receiver", "namespace": NAMESPACE}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "receiver"}}))?;
    Api::namespaced(client, NAMESPACE).create(&PostParams::default(), &binding).await?;
    Ok(kcp.service_account_token(NAMESPACE, "receiver").await?)
}

/// A replica that acknowledges each hand-over at once.
struct Replica {
    elector: JoinHandle<()>,
    held: tokio::sync::watch::Receiver<BTreeMap<Unit, WriteFence>>,
    stop: CancellationToken,
}

impl Replica {
    async fn start(kcp: &Cluster, token: &str, number: u64, shards: ShardCount) -> Result<Self> {
        let settings = Settings {
            name: format!("replica-{number}"),
            namespace: NAMESPACE.to_owned(),
            place: None,
            lease_duration: LEASE,
            shards,
            relay_address: Some(format!("replica-{number}.example.com:8443")),
        };
        let client = kcp.client_for_token(token).await?;
        let holders = HoldersHandle::default();
        let metrics = Metrics::default();
        let started = ShardElector::start(client, settings, Instance::new(number), holders, metrics);
        let (stop, (sender, held)) = (CancellationToken::new(), tokio::sync::watch::channel(BTreeMap::new()));
        let mut changes = started.changes;
        tokio::spawn(async move {
            while let Some(change) = changes.next().await {
                match change {
                    ShardChange::Acquired { unit, fence, .. } => {
                        sender.send_modify(|held| drop(held.insert(unit, fence)));
                    }
                    ShardChange::HandOver { unit, instance } => changes.stopped(unit, instance),
                    ShardChange::Lost { unit, .. } => sender.send_modify(|held| drop(held.remove(&unit))),
                }
            }
        });
        Ok(Self { elector: tokio::spawn(started.elector.run(stop.clone())), held, stop })
    }

    /// Shards that it may write for, and the fleet role.
    fn open(&self) -> Vec<Unit> {
        self.held.borrow().iter().filter(|(_, fence)| fence.is_open()).map(|(unit, _)| *unit).collect()
    }
}

/// Three replicas share the shards; one ends without a release, and its shards move when its membership has lapsed; one
/// ends in order, and its shards move at once.
#[tokio::test]
async fn replicas_share_shards_over_real_leases() -> TestResult {
    tidewatch_testing::install_crypto();
    let kcp = bed::shared().await?.kcp().await?;
    let shards = ShardCount::new(23).context("23 shards")?;
    let token = install(&kcp, shards).await?;
    let mut replicas = Vec::new();
    for number in 0..3 {
        replicas.push(Replica::start(&kcp, &token, number, shards).await?);
    }
    let shared = async |replicas: &[Replica], description: &str| {
        until(description, async || {
            let open: Vec<_> = replicas.iter().map(Replica::open).collect();
            let mut all: Vec<_> = open.iter().flatten().collect();
            all.sort_unstable();
            anyhow::ensure!(all.windows(2).all(|pair| pair[0] != pair[1]), "a shard with two holders: {open:?}");
            let share = 24 / replicas.len();
            Ok(open.iter().all(|open| open.len() == share).then_some(()))
        })
        .await
    };
    shared(&replicas, "equal shares of three replicas").await?;

    let killed = replicas.remove(0);
    let before = std::time::Instant::now();
    let lost = killed.open();
    killed.elector.abort();
    until("a shard of the killed replica with another holder", async || {
        let others: Vec<_> = replicas.iter().flat_map(Replica::open).collect();
        Ok(lost.iter().any(|shard| others.contains(shard)).then_some(()))
    })
    .await?;
    assert!(killed.open().is_empty(), "its fences end before another replica takes over");
    // The last renewal was at most a third of the duration ago.
    assert!(before.elapsed() > LEASE / 2, "{:?}", before.elapsed());
    shared(&replicas, "equal shares of two replicas").await?;

    let stopped = replicas.remove(0);
    stopped.stop.cancel();
    shared(&replicas, "one replica with all shards").await?;
    until("the orderly end of the replica", async || Ok(stopped.elector.is_finished().then_some(()))).await?;
    replicas[0].stop.cancel();
    until("the orderly end of the last replica", async || Ok(replicas[0].elector.is_finished().then_some(()))).await?;
    let leases: Api<Lease> = Api::namespaced(kcp.client().await?, NAMESPACE);
    let held = leases.list(&kube::api::ListParams::default()).await?.items;
    let holders: Vec<_> = held.into_iter().filter_map(|lease| lease.spec?.holder_identity).collect();
    // The membership of the killed replica was ended by another one.
    assert_eq!(holders, Vec::<String>::new());
    Ok(())
}
