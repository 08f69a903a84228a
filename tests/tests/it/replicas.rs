//! Several active replicas: they share the runtimes, relay requests to each other, and take over from each other.

mod forward;
mod rings;
mod scaling;

use std::{collections::BTreeMap, net::SocketAddr, process::Stdio, sync::Arc};

use anyhow::{Context as _, Result, ensure};
use futures::future::join_all;
use k8s_openapi::{
    ByteString,
    api::{
        apps::v1::Deployment,
        core::v1::{ConfigMap, Secret},
    },
    jiff::Timestamp,
};
use kube::{Api, api::PostParams};
use serde_json::json;
use tidewatch_api::{
    leases::Unit,
    names::{AGENT_DEPLOYMENT, AGENT_OBJECT, CHAIN_KEY, IDENTITY_SECRET, SKR_NAMESPACE, TRUST_BUNDLE_KEY},
    shard::ShardCount,
};
use tidewatch_gateway::enrolment;
use tidewatch_testing::{
    balancer::Balancer,
    bed::{self, TestBed},
    kubelet::{self, Kubelet},
    landscape::{DEADLINE, Landscape, Options, Replica, until},
    ports,
    product::build_binaries,
};
use tokio::{process::Command, sync::SemaphorePermit, time::timeout};

use crate::support::{Member, SLOTS, TestResult, quick_options};

/// Replicas of one landscape behind load balancers, and its runtimes.
struct Replicas {
    running: BTreeMap<String, Replica>,
    members: Vec<Arc<Member>>,
    events: Balancer,
    enrolments: Balancer,
    landscape: Arc<Landscape>,
    bed: &'static TestBed,
    _slot: SemaphorePermit<'static>,
}

impl Replicas {
    /// Starts the replicas, and runtimes whose paths are proven.
    async fn start(name: &str, replicas: &[&str], runtimes: usize, options: Options) -> Result<Self> {
        let mut this = Self::prepare(name, options).await?;
        for replica in replicas {
            this.launch(replica).await?;
        }
        this.are_ready().await?;
        this.register(name, runtimes).await?;
        Ok(this)
    }

    /// Prepares KCP and the load balancers.
    async fn prepare(name: &str, options: Options) -> Result<Self> {
        tidewatch_testing::install_crypto();
        let turn = SLOTS.acquire().await?;
        let bed = bed::shared().await?;
        let events = Balancer::start(ports::free()?).await?;
        let options = Options { agents_port: Some(events.address().port()), ..options };
        let landscape = Arc::new(Landscape::prepare_issuing(bed.kcp().await?, name, options).await?);
        landscape.write_module("keda", "1.0.0", "1.1.0").await?;
        let enrolments = Balancer::start(landscape.enrolment_port().context("an enrolment port")?).await?;
        let running = BTreeMap::new();
        let members = Vec::new();
        Ok(Self { running, members, events, enrolments, landscape, bed, _slot: turn })
    }

    /// Starts a replica, which gets connections at once.
    async fn launch(&mut self, name: &str) -> Result<()> {
        let replica = self.landscape.start_replica(name).await?;
        self.running.insert(name.to_owned(), replica);
        self.balance();
        Ok(())
    }

    /// Takes a replica out of the load balancers, and ends it in order: none of its shards is left to expire.
    async fn end(&mut self, name: &str) -> Result<()> {
        ensure_success(self.remove(name)?.process.sigterm(DEADLINE).await?)?;
        let holders = self.holders().await?;
        ensure!(holders.values().all(|holder| holder != name), "{name} ended: {holders:?}");
        Ok(())
    }

    /// Takes a replica out of the load balancers.
    fn remove(&mut self, name: &str) -> Result<Replica> {
        let replica = self.running.remove(name).context("a running replica")?;
        self.balance();
        Ok(replica)
    }

    fn balance(&self) {
        let targets = |of: fn(&Replica) -> Option<SocketAddr>| self.running.values().filter_map(of).collect();
        self.events.set_targets(targets(|replica| Some(replica.events)));
        self.enrolments.set_targets(targets(|replica| replica.enrolment));
    }

    async fn are_ready(&self) -> Result<()> {
        for ready in join_all(self.running.values().map(|replica| replica.process.ready(DEADLINE))).await {
            ready?;
        }
        Ok(())
    }

    async fn register(&mut self, name: &str, runtimes: usize) -> Result<()> {
        for number in 1..=runtimes {
            self.add(&format!("{name}-{number}")).await?;
        }
        for member in &self.members {
            member.path_proven().await?;
        }
        Ok(())
    }

    /// Starts and registers a runtime.
    async fn add(&mut self, name: &str) -> Result<&Arc<Member>> {
        let enrolment = self.landscape.agents_enrolment().context("an enrolment port")?;
        let ports = [self.events.address().port(), enrolment.port()];
        let cluster = self.bed.runtime_for_kubelet(name).await?;
        let options = kubelet::Options { policies: Some(ports.into()), ..kubelet::Options::default() };
        let kubelet = Kubelet::start(&cluster, options).await?;
        let runtime = self.landscape.register(cluster).await?;
        self.members.push(Arc::new(Member { runtime, kubelet }));
        self.members.last().context("the member")
    }

    /// Holder of each shard and of the fleet role, by the Leases.
    async fn holders(&self) -> Result<BTreeMap<Unit, String>> {
        self.landscape.holders().await
    }

    /// Waits until the running replicas share all shards equally.
    async fn share_equally(&self) -> Result<()> {
        until("equal shares of the replicas", async || {
            let holders = self.holders().await?;
            let of = |name: &String| holders.values().filter(|holder| *holder == name).count();
            let shares: Vec<_> = self.running.keys().map(of).collect();
            let is_fair = shares.iter().max().zip(shares.iter().min()).is_some_and(|(most, least)| most - least <= 1);
            Ok((shares.iter().sum::<usize>() == 25 && is_fair).then_some(()))
        })
        .await
    }

    /// Holder of the shard of a runtime. Between equal shares, a shard that moves has none for a moment.
    async fn holder_of(&self, member: &Member) -> Result<String> {
        let unit = Unit::Shard(ShardCount::default().of_runtime(member.runtime.id()));
        until("a holder", async || Ok(self.holders().await?.remove(&unit))).await
    }

    /// The trust bundle in the ConfigMap of each runtime's agent.
    async fn trust_bundles(&self) -> Result<Vec<String>> {
        let mut bundles = Vec::new();
        for member in &self.members {
            let maps = Api::<ConfigMap>::namespaced(member.runtime.cluster().client().await?, SKR_NAMESPACE);
            let data = maps.get(AGENT_OBJECT).await?.data.context("data")?;
            bundles.push(data.get(TRUST_BUNDLE_KEY).cloned().context("a trust bundle")?);
        }
        Ok(bundles)
    }

    /// Every runtime's change reaches the modules in its Kyma.
    async fn deliver(&self, modules: &[&str]) -> Result<()> {
        for delivered in join_all(self.members.iter().map(|member| member.delivers(modules))).await {
            delivered?;
        }
        Ok(())
    }
}

impl Drop for Replicas {
    fn drop(&mut self) {
        for member in self.members.drain(..) {
            let name = member.runtime.name().to_owned();
            drop(member);
            self.bed.stop(&name);
        }
    }
}

/// Options with a Lease short enough to await its expiry, and long enough for a busy machine to renew it in time.
fn short_lease() -> Options {
    Options { lease_seconds: 8, ..quick_options() }
}

#[tokio::test]
async fn replicas_share_runtimes_and_take_over_from_each_other() -> TestResult {
    let mut replicas = Replicas::start("replicas", &["a", "b", "c"], 2, short_lease()).await?;
    replicas.share_equally().await?;
    replicas.deliver(&["keda"]).await?;

    // Killed: the others take its shards when its membership has lapsed.
    let killed = replicas.holder_of(&replicas.members[0]).await?;
    replicas.remove(&killed)?.process.kill9();
    replicas.deliver(&[]).await?;
    replicas.share_equally().await?;
    replicas.launch(&killed).await?;
    replicas.are_ready().await?;
    replicas.share_equally().await?;
    replicas.deliver(&["keda"]).await?;

    // A rolling restart: each hands its shards over before it ends.
    for (name, modules) in ["a", "b", "c"].into_iter().zip([&[][..], &["keda"], &[]]) {
        replicas.end(name).await?;
        replicas.deliver(modules).await?;
        replicas.launch(name).await?;
        replicas.are_ready().await?;
    }
    replicas.share_equally().await?;
    Ok(())
}

fn ensure_success(ended: std::process::ExitStatus) -> Result<()> {
    ensure!(ended.success(), "{ended}");
    Ok(())
}

/// A replica that is frozen, or cut off from the control plane, loses its shards alone: the process lives on, and takes its
/// share again.
#[tokio::test]
async fn frozen_and_partitioned_replicas_lose_their_shards_and_return() -> TestResult {
    let options = Options { proxied: true, ..short_lease() };
    let mut replicas = Replicas::start("replicas-cut", &["a", "b", "c"], 2, options).await?;
    replicas.share_equally().await?;
    replicas.deliver(&["keda"]).await?;

    let frozen = replicas.holder_of(&replicas.members[0]).await?;
    let replica = replicas.remove(&frozen)?;
    let pid = replica.process.process().pid();
    replica.process.sigstop()?;
    // Its agents' connections are lost without notice.
    replicas.deliver(&[]).await?;
    replicas.share_equally().await?;
    replica.process.sigcont()?;
    replicas.running.insert(frozen, replica);
    replicas.balance();
    replicas.are_ready().await?;
    replicas.share_equally().await?;
    replicas.deliver(&["keda"]).await?;

    // Agents still connect to it, and it relays to the others what it knows not to hold.
    let cut = replicas.holder_of(&replicas.members[1]).await?;
    let process = replicas.running[&cut].process.process().pid();
    let proxy = replicas.landscape.kcp_proxy().context("the proxy before KCP")?;
    proxy.cut_off(process);
    replicas.deliver(&[]).await?;
    proxy.readmit();
    replicas.share_equally().await?;
    replicas.deliver(&["keda"]).await?;
    let running: Vec<_> = replicas.running.values().map(|replica| replica.process.process().pid()).collect();
    assert!(running.contains(&pid) && running.contains(&process), "no process was started anew");
    Ok(())
}

/// A receiver without a relay, which has one shard, and replicas exclude each other in both directions.
#[tokio::test]
async fn receiver_without_a_relay_and_replicas_exclude_each_other() -> TestResult {
    let mut replicas = Replicas::prepare("replicas-single", short_lease()).await?;
    let landscape = replicas.landscape.clone();
    let single = landscape.start_single("single").await?;
    replicas.running.insert("single".to_owned(), single);
    replicas.balance();
    replicas.are_ready().await?;
    replicas.register("replicas-single", 1).await?;
    replicas.deliver(&["keda"]).await?;

    // The replica takes no shard while the other one is active.
    let replica = landscape.start_replica("a").await?;
    until("a replica that waits", async || {
        let (_, page) = replica.process.get("/metrics").await?;
        Ok(page.lines().any(|line| line == r#"tidewatch_shards_refused{reason="other-count"} 1"#).then_some(()))
    })
    .await?;
    assert!(replicas.holders().await?.values().all(|holder| holder == "single"));
    let single = replicas.remove("single")?;
    ensure_success(single.process.sigterm(DEADLINE).await?)?;
    replicas.running.insert("a".to_owned(), replica);
    replicas.balance();
    replicas.are_ready().await?;
    replicas.share_equally().await?;
    replicas.deliver(&[]).await?;

    // The way back: the single one waits until the replicas have ended.
    let standby = landscape.start_single("single").await?;
    until("a receiver that stands by", async || {
        Ok((standby.process.get("/readyz").await?.1 == "not ready: shards\n").then_some(()))
    })
    .await?;
    replicas.deliver(&["keda"]).await?;
    let replica = replicas.remove("a")?;
    ensure_success(replica.process.sigterm(DEADLINE).await?)?;
    replicas.running.insert("single".to_owned(), standby);
    replicas.balance();
    replicas.are_ready().await?;
    assert!(replicas.holders().await?.values().all(|holder| holder == "single"));
    replicas.deliver(&[]).await?;
    Ok(())
}

/// The rotation of the CA, asked for at a replica without the fleet role, and an upgrade of the agents, end although the replica
/// with the role restarts in the middle of both; and an agent whose certificates are revoked enrols again although the replica
/// that holds its runtime ends.
#[tokio::test]
async fn tasks_of_the_whole_fleet_go_on_while_shards_move() -> TestResult {
    let options = Options {
        receiver: vec!["--agent-upgrade-stages=1%,100%".to_owned(), "--agent-upgrade-pause-seconds=0".to_owned()],
        ..short_lease()
    };
    let mut replicas = Replicas::start("replicas-tasks", &["a", "b", "c"], 2, options).await?;
    replicas.share_equally().await?;
    let before = replicas.trust_bundles().await?;
    let holder = replicas.holders().await?.remove(&Unit::Fleet).context("a holder of the fleet role")?;
    let asked = replicas.running.iter().find(|(name, _)| **name != holder).context("another replica")?.1;
    let url = format!("http://{}", asked.process.admin().context("its admin listener")?);
    let rotation = Command::new(build_binaries().await?.cli()?)
        .args(["rotate-ca", "--admin-url", &url])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let rotation = tokio::spawn(timeout(DEADLINE * 4, rotation));
    until("a rotation in progress", async || Ok((replicas.trust_bundles().await? != before).then_some(()))).await?;
    ensure_success(replicas.remove(&holder)?.process.sigterm(DEADLINE).await?)?;
    let rotated = rotation.await?.context("rotate-ca does not exit")??;
    assert!(rotated.status.success(), "{}", String::from_utf8_lossy(&rotated.stderr));
    replicas.launch(&holder).await?;
    replicas.are_ready().await?;
    replicas.deliver(&["keda"]).await?;

    // Another image, by a rolling restart: for a time the replicas have different ones.
    const IMAGE: &str = "example.test/tidewatch-agent:2";
    for name in ["a", "b", "c"] {
        ensure_success(replicas.remove(name)?.process.sigterm(DEADLINE).await?)?;
        let replica = replicas.landscape.start_replica_with(name, IMAGE).await?;
        replicas.running.insert(name.to_owned(), replica);
        replicas.balance();
        replicas.are_ready().await?;
    }
    let holder = replicas.holders().await?.remove(&Unit::Fleet).context("a holder of the fleet role")?;
    ensure_success(replicas.remove(&holder)?.process.sigterm(DEADLINE).await?)?;
    until("the new image in every runtime", async || {
        let mut images = Vec::new();
        for member in &replicas.members {
            let api: Api<Deployment> = Api::namespaced(member.runtime.user(), SKR_NAMESPACE);
            let pod = api.get(AGENT_DEPLOYMENT).await?.spec.context("a spec")?.template.spec.context("a pod")?;
            images.extend(pod.containers.into_iter().filter_map(|container| container.image));
        }
        Ok(images.iter().all(|image| image == IMAGE).then_some(()))
    })
    .await?;

    // A revocation of all certificates of a runtime, whose shard moves meanwhile: its agent enrols again.
    let revoked = replicas.members[0].clone();
    let before = certificate(&revoked).await?;
    let maps = Api::<ConfigMap>::namespaced(replicas.landscape.operator(), replicas.landscape.namespace());
    let data = json!({revoked.runtime.id().as_str(): format!("issued-before={}", Timestamp::now())});
    let map = json!({"metadata": {"name": enrolment::CONFIG_MAP}, "data": data});
    maps.create(&PostParams::default(), &serde_json::from_value(map)?).await?;
    let holder = replicas.holder_of(&revoked).await?;
    replicas.end(&holder).await?;
    until("another certificate", async || Ok((certificate(&revoked).await? != before).then_some(()))).await?;
    for member in &replicas.members {
        member.path_proven().await?;
    }
    replicas.deliver(&[]).await?;
    Ok(())
}

/// The certificate chain of a runtime's agent.
async fn certificate(member: &Member) -> Result<ByteString> {
    let secrets = Api::<Secret>::namespaced(member.runtime.cluster().client().await?, SKR_NAMESPACE);
    secrets.get(IDENTITY_SECRET).await?.data.and_then(|mut data| data.remove(CHAIN_KEY)).context("a certificate")
}
