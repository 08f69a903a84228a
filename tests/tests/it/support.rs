//! Fixtures and helpers shared by the tests of whole landscapes.

use std::{
    fmt,
    process::{Output, Stdio},
    sync::Arc,
};

use anyhow::{Context as _, Result};
use futures::future::join_all;
use k8s_openapi::api::core::v1::{Pod, ResourceQuota};
use kube::{
    Api, Client,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tidewatch_api::{
    Condition, Kyma, KymaStatus, Manifest, ModuleStatus,
    names::{SKR_NAMESPACE, label},
};
use tidewatch_kit::variant::VariantName as _;
use tidewatch_testing::{
    bed::{self, TestBed},
    control_plane::{Cluster, audit::Write},
    kubelet::{self, Kubelet, PodState},
    landscape::{DEADLINE, Landscape, Options, Runtime, until},
    product::build_binaries,
};
use tokio::{
    io::AsyncWriteExt as _,
    process::Command,
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};

/// Runs one of our programs as an operator would.
pub(crate) async fn run(binary: &str, arguments: &[&str]) -> Result<Output> {
    let binaries = build_binaries().await?;
    let command = Command::new(binaries.get(binary)?).args(arguments).stdin(Stdio::null()).kill_on_drop(true).output();
    timeout(DEADLINE, command)
        .await
        .with_context(|| format!("{binary} does not exit"))?
        .with_context(|| format!("run {binary}"))
}

/// Like [`run`], with text on the standard input.
pub(crate) async fn run_with_input(binary: &str, arguments: &[&str], input: &str) -> Result<Output> {
    let binaries = build_binaries().await?;
    let mut command = Command::new(binaries.get(binary)?);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().with_context(|| format!("run {binary}"))?;
    let mut stdin = child.stdin.take().context("its standard input")?;
    let fed = async {
        stdin.write_all(input.as_bytes()).await?;
        // The program exits at the end of its input.
        drop(stdin);
        child.wait_with_output().await
    };
    timeout(DEADLINE, fed)
        .await
        .with_context(|| format!("{binary} does not exit"))?
        .with_context(|| format!("run {binary}"))
}

/// The output of a program as text.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A landscape with one runtime and its agent, which runs as a process of the test.
pub(crate) struct SingleRuntime {
    pub(crate) runtime: Runtime,
    pub(crate) landscape: Arc<Landscape>,
    bed: &'static TestBed,
    own_kcp: Option<String>,
    _slot: SemaphorePermit<'static>,
}

/// The parts of a landscape that belong to one test, so that it may break them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isolation {
    /// The runtime's API server alone.
    Shared,
    /// The runtime's API server, with a kubelet of the test that runs its pods.
    Kubelet,
    /// The runtime's API server and etcd.
    OwnEtcd,
    /// The runtime's API server, and KCP with its etcd.
    OwnKcp,
}

/// A landscape in which the receiver installs and enrols every agent: each runtime has a kubelet that runs its pods.
pub(crate) struct Fleet {
    pub(crate) members: Vec<Member>,
    pub(crate) landscape: Arc<Landscape>,
    bed: &'static TestBed,
    _slot: SemaphorePermit<'static>,
}

/// One runtime of [`Fleet`].
pub(crate) struct Member {
    pub(crate) runtime: Runtime,
    pub(crate) kubelet: Kubelet,
}

/// Result of a test: an error keeps the logs, as a panic does.
pub(crate) type TestResult = std::result::Result<(), TestError>;

/// The error of [`TestResult`]. It does not implement `Error`, so that every error converts into it.
pub(crate) struct TestError(anyhow::Error);

impl<E: Into<anyhow::Error>> From<E> for TestError {
    fn from(error: E) -> Self {
        let error = error.into();
        bed::test_failed(&error);
        Self(error)
    }
}

impl fmt::Debug for TestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// Limits the landscapes that run at the same time: each is three processes and an API server, and the machine may have
/// two cores.
pub(crate) static SLOTS: Semaphore = Semaphore::const_new(3);

/// Options with a heartbeat per second, so that tests which await one are fast.
pub(crate) fn quick_options() -> Options {
    Options {
        heartbeat_seconds: 1,
        stamps: true,
        log: "info,kube_client=error,tidewatch=debug".into(),
        ..Options::default()
    }
}

impl Fleet {
    /// Starts the receiver, and so many clusters that are not yet registered.
    pub(crate) async fn prepare(name: &str, runtimes: usize, options: Options) -> Result<(Self, Vec<Arc<Cluster>>)> {
        tidewatch_testing::install_crypto();
        let turn = SLOTS.acquire().await?;
        let bed = bed::shared().await?;
        let names =
            (1..=runtimes).map(|number| if runtimes == 1 { name.to_owned() } else { format!("{name}-{number}") });
        let clusters = names.map(async |name| bed.runtime_for_kubelet(&name).await);
        let (clusters, kcp) = tokio::join!(join_all(clusters), bed.kcp());
        let clusters = clusters.into_iter().collect::<Result<_, _>>()?;
        let landscape = Arc::new(Landscape::prepare_issuing(kcp?, name, options).await?);
        landscape.write_module("keda", "1.0.0", "1.1.0").await?;
        landscape.start_receiver().await?;
        Ok((Self { members: Vec::new(), landscape, bed, _slot: turn }, clusters))
    }

    /// Starts the receiver and one runtime, and waits until its path is proven.
    pub(crate) async fn with_one_runtime(name: &str, options: Options) -> Result<Self> {
        let (mut this, clusters) = Self::prepare(name, 1, options).await?;
        this.register(clusters).await?;
        this.only().path_proven().await?;
        Ok(this)
    }

    /// Registers the runtimes concurrently, and starts a kubelet for each.
    pub(crate) async fn register(&mut self, clusters: Vec<Arc<Cluster>>) -> Result<()> {
        let members = clusters.into_iter().map(async |cluster| {
            let kubelet = self.kubelet(&cluster).await?;
            let runtime = self.landscape.register(cluster).await?;
            anyhow::Ok(Member { runtime, kubelet })
        });
        let members = join_all(members).await.into_iter().collect::<Result<Vec<_>>>()?;
        self.members.extend(members);
        Ok(())
    }

    /// Starts kubelets for runtimes of which KCP knows nothing yet.
    pub(crate) async fn prepare_members(&mut self, clusters: Vec<Arc<Cluster>>) -> Result<()> {
        for cluster in clusters {
            let kubelet = self.kubelet(&cluster).await?;
            let runtime = self.landscape.prepare_runtime(cluster).await?;
            self.members.push(Member { runtime, kubelet });
        }
        Ok(())
    }

    async fn kubelet(&self, cluster: &Cluster) -> Result<Kubelet> {
        let authority = self.landscape.agents_authority();
        let (_, port) = authority.rsplit_once(':').context("a port")?;
        let enrolment = self.landscape.agents_enrolment().map(|address| address.port());
        let policies: Vec<_> = [port.parse()?].into_iter().chain(enrolment).collect();
        let options = kubelet::Options { policies: Some(policies), ..kubelet::Options::default() };
        Ok(Kubelet::start(cluster, options).await?)
    }

    /// The single runtime.
    pub(crate) fn only(&self) -> &Member {
        self.members.first().unwrap()
    }
}

impl Member {
    /// Waits for an agent that runs and is ready, in a process other than `before`.
    pub(crate) async fn agent(&self, before: Option<u32>) -> Result<PodState> {
        until(&format!("an agent in {} that is ready", self.runtime.name()), async || {
            let running = self.kubelet.running("tidewatch-agent");
            Ok(running.into_iter().find(|agent| agent.ready && agent.pid() != before))
        })
        .await
    }

    /// Waits until the event path is proven.
    pub(crate) async fn path_proven(&self) -> Result<()> {
        self.condition_becomes("EventPath", "True", "Proven").await.map(drop)
    }

    /// Waits until a condition of the Kyma in KCP has this status and reason, and returns its message.
    pub(crate) async fn condition_becomes(&self, kind: &str, status: &str, reason: &str) -> Result<String> {
        until(&format!("{kind} of {} to be {status} ({reason})", self.runtime.name()), async || {
            let seen = self.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status);
            let condition = seen.and_then(|status| status.condition(kind).cloned());
            let holds = |condition: &Condition| condition.status.as_str() == status && condition.reason == reason;
            Ok(condition.filter(holds).map(|condition| condition.message))
        })
        .await
    }

    /// Proves the path by using it: selects modules as the user, and waits until the status has them. They must differ
    /// from the selected ones.
    pub(crate) async fn delivers(&self, modules: &[&str]) -> Result<()> {
        self.runtime.select(modules).await?;
        until(&format!("the modules {modules:?} in {}", self.runtime.name()), async || {
            let Some(status) = self.runtime.skr_kyma().await?.and_then(|kyma| kyma.status) else { return Ok(None) };
            let names: Vec<_> = status.modules().iter().map(|module| module.name.as_str()).collect();
            Ok((names == modules).then_some(()))
        })
        .await
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for Member { runtime, kubelet } in self.members.drain(..) {
            drop(kubelet);
            self.bed.stop(runtime.name());
        }
    }
}

impl Drop for SingleRuntime {
    fn drop(&mut self) {
        self.bed.stop(self.runtime.name());
        if let Some(kcp) = &self.own_kcp {
            self.bed.stop(kcp);
        }
    }
}

impl SingleRuntime {
    /// Starts receiver and agent; the name is that of the namespace in KCP and of the runtime.
    pub(crate) async fn start(name: &str, modules: &[(&str, &str, &str)]) -> Result<Self> {
        let this = Self::without_agent(name, modules).await?;
        this.runtime.start_agent().await?;
        until("the Kyma in the runtime", async || this.runtime.skr_kyma().await).await?;
        Ok(this)
    }

    /// Starts the receiver alone.
    pub(crate) async fn without_agent(name: &str, modules: &[(&str, &str, &str)]) -> Result<Self> {
        Self::with_options(name, modules, quick_options()).await
    }

    /// Starts the receiver alone, with options.
    pub(crate) async fn with_options(name: &str, modules: &[(&str, &str, &str)], options: Options) -> Result<Self> {
        Self::isolated_without_agent(Isolation::Shared, name, modules, options).await
    }

    /// Starts receiver and agent with parts of the landscape of their own, so that the test may break these.
    pub(crate) async fn isolated(
        isolation: Isolation,
        name: &str,
        modules: &[(&str, &str, &str)],
        options: Options,
    ) -> Result<Self> {
        let this = Self::isolated_without_agent(isolation, name, modules, options).await?;
        this.runtime.start_agent().await?;
        until("the Kyma in the runtime", async || this.runtime.skr_kyma().await).await?;
        Ok(this)
    }

    /// Starts the receiver alone, with parts of the landscape of its own.
    pub(crate) async fn isolated_without_agent(
        isolation: Isolation,
        name: &str,
        modules: &[(&str, &str, &str)],
        options: Options,
    ) -> Result<Self> {
        tidewatch_testing::install_crypto();
        let turn = SLOTS.acquire().await?;
        let bed = bed::shared().await?;
        let own_kcp = (isolation == Isolation::OwnKcp).then(|| format!("{name}-kcp"));
        let kcp = async {
            match &own_kcp {
                Some(kcp) => bed.runtime_with_store(kcp).await,
                None => bed.kcp().await,
            }
        };
        let cluster = async {
            match isolation {
                Isolation::Shared | Isolation::OwnKcp => bed.runtime(name).await,
                Isolation::Kubelet => bed.runtime_for_kubelet(name).await,
                Isolation::OwnEtcd => bed.runtime_with_store(name).await,
            }
        };
        let (kcp, cluster) = tokio::try_join!(kcp, cluster)?;
        let landscape = Arc::new(Landscape::prepare(kcp, name, options).await?);
        for (module, regular, fast) in modules {
            landscape.write_module(module, regular, fast).await?;
        }
        landscape.start_receiver().await?;
        let runtime = landscape.register(cluster).await?;
        Ok(Self { runtime, landscape, bed, own_kcp, _slot: turn })
    }

    /// Waits until the status of the runtime's Kyma is as expected, and returns it.
    pub(crate) async fn skr_status(
        &self,
        description: &str,
        expected: impl Fn(&KymaStatus) -> bool,
    ) -> Result<KymaStatus> {
        until(&format!("{description} in the runtime"), async || {
            Ok(self.runtime.skr_kyma().await?.and_then(|kyma| kyma.status).filter(&expected))
        })
        .await
    }

    /// Waits until the status of the KCP Kyma is as expected, and returns it.
    pub(crate) async fn kcp_status(
        &self,
        description: &str,
        expected: impl Fn(&KymaStatus) -> bool,
    ) -> Result<KymaStatus> {
        until(&format!("{description} in KCP"), async || {
            Ok(self.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status).filter(&expected))
        })
        .await
    }

    /// The Manifests of the runtime in KCP.
    pub(crate) async fn manifests(&self) -> Result<Vec<Manifest>> {
        let api = Api::<Manifest>::namespaced(self.landscape.kcp().client().await?, self.landscape.namespace());
        let mine = ListParams::default().labels(&format!("{}={}", label::KYMA_NAME, self.runtime.name()));
        Ok(api.list(&mine).await?.items)
    }

    /// Waits for the only Manifest of the runtime: a new module waits for its component descriptor first.
    pub(crate) async fn manifest(&self) -> Result<Manifest> {
        until("one Manifest", async || {
            let mut manifests = self.manifests().await?;
            Ok(if manifests.len() == 1 { manifests.pop() } else { None })
        })
        .await
    }

    /// The API of this landscape's Kymas in KCP, as an administrator.
    pub(crate) async fn kcp_kymas(&self) -> Result<Api<Kyma>> {
        Ok(Api::namespaced(self.landscape.kcp().client().await?, self.landscape.namespace()))
    }

    /// Waits until the landscape is idle: no write of ours in the runtime between two successive canaries, other than
    /// these.
    pub(crate) async fn becomes_idle(&self) -> Result<()> {
        until("the runtime to be quiet", async || {
            let mark = self.runtime.cluster().audit_mark()?;
            let writes = self.after_canaries(mark, 3).await?;
            Ok(writes.iter().all(is_canary).then_some(()))
        })
        .await
    }

    /// Waits for so many canaries, which prove that the agent is alive, and returns all writes of ours to the runtime
    /// since the mark.
    pub(crate) async fn after_canaries(
        &self,
        mark: tidewatch_testing::control_plane::audit::Mark,
        canaries: usize,
    ) -> Result<Vec<Write>> {
        until("the agent's canary", async || {
            let writes: Vec<_> = self.runtime.cluster().writes_since(mark)?;
            let writes: Vec<_> = writes.into_iter().filter(|write| !write.is_kubernetes_own()).collect();
            Ok((writes.iter().filter(|write| is_canary(write)).count() >= canaries).then_some(writes))
        })
        .await
    }
}

/// Returns true for the agent's renewal of its Lease, the canary.
pub(crate) fn is_canary(write: &Write) -> bool {
    write.resource == "leases" && write.name == "tidewatch-agent"
}

/// Returns true for a receiver's renewal of its membership.
pub(crate) fn is_renewal(write: &Write) -> bool {
    write.resource == "leases" && write.name.starts_with("tidewatch-replica-")
}

/// The status of one module.
pub(crate) fn module<'a>(status: &'a KymaStatus, name: &str) -> Option<&'a ModuleStatus> {
    status.modules().iter().find(|module| module.name == name)
}

/// Returns status and message of a condition; true stands for status True.
pub(crate) fn condition(status: &KymaStatus, type_: &str) -> Result<(bool, String)> {
    let condition = status.condition(type_).with_context(|| format!("the condition {type_}"))?;
    Ok((condition.is_true(), condition.message.clone()))
}

/// Refuses all pods in the namespace of the modules by a ResourceQuota, until it is deleted.
pub(crate) async fn refuse_pods(client: &Client) -> Result<Api<ResourceQuota>> {
    let quotas = Api::<ResourceQuota>::namespaced(client.clone(), SKR_NAMESPACE);
    let pods = Api::<Pod>::namespaced(client.clone(), SKR_NAMESPACE);
    let none = json!({"pods": "0"});
    let quota = serde_json::from_value(json!({"metadata": {"name": QUOTA}, "spec": {"hard": none}}))?;
    quotas.create(&PostParams::default(), &quota).await?;
    // No quota controller runs here.
    let counted = Patch::Merge(json!({"status": {"hard": none, "used": none}}));
    quotas.patch_status(QUOTA, &PatchParams::default(), &counted).await?;
    let probe = json!({"metadata": {"name": "probe"}, "spec": {"containers": [{"name": "probe", "image": "probe"}]}});
    let probe = serde_json::from_value(probe)?;
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    until("the quota to hold", async || {
        let refused = pods.create(&dry, &probe).await.err();
        Ok(refused.filter(|error| error.to_string().contains("exceeded quota")).map(drop))
    })
    .await?;
    Ok(quotas)
}

/// Name of the ResourceQuota of [`refuse_pods`].
pub(crate) const QUOTA: &str = "none";
