//! What the tests of whole landscapes share.

use std::{
    fmt,
    process::{Output, Stdio},
    sync::Arc,
};

use anyhow::{Context as _, Result};
use futures::future::join_all;
use kube::{Api, api::ListParams};
use tidewatch_shared::{
    api::{Condition, Kyma, KymaStatus, Manifest, ModuleStatus},
    names::label,
};
use tidewatch_tests::{
    bed::{self, TestBed},
    control_plane::{Cluster, audit::Write},
    kubelet::{self, Kubelet, Played},
    landscape::{DEADLINE, Landscape, Options, Runtime, until},
    product::build_binaries,
};
use tokio::{
    io::AsyncWriteExt as _,
    process::Command,
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};

/// Runs a command line of ours, as an operator does.
pub(crate) async fn run(binary: &str, arguments: &[&str]) -> Result<Output> {
    let binaries = build_binaries().await?;
    let command = Command::new(binaries.get(binary)?).args(arguments).stdin(Stdio::null()).kill_on_drop(true).output();
    timeout(DEADLINE, command)
        .await
        .with_context(|| format!("{binary} does not end"))?
        .with_context(|| format!("run {binary}"))
}

/// The same with something on its standard input.
pub(crate) async fn run_fed(binary: &str, arguments: &[&str], input: &str) -> Result<Output> {
    let binaries = build_binaries().await?;
    let mut command = Command::new(binaries.get(binary)?);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().with_context(|| format!("run {binary}"))?;
    let mut stdin = child.stdin.take().context("its standard input")?;
    let fed = async {
        stdin.write_all(input.as_bytes()).await?;
        // It ends with the input.
        drop(stdin);
        child.wait_with_output().await
    };
    timeout(DEADLINE, fed)
        .await
        .with_context(|| format!("{binary} does not end"))?
        .with_context(|| format!("run {binary}"))
}

/// What a command has printed.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A landscape with one runtime and its agent.
pub(crate) struct One {
    pub(crate) runtime: Runtime,
    pub(crate) landscape: Arc<Landscape>,
    bed: &'static TestBed,
    own_kcp: Option<String>,
    _turn: SemaphorePermit<'static>,
}

/// What of a landscape is its own, so that it may be harmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ground {
    /// The runtime's API server alone.
    Shared,
    /// The runtime's API server, whose pods a kubelet of the test's plays.
    Pods,
    /// The runtime's etcd as well.
    OwnStore,
    /// KCP as well, with its etcd.
    OwnKcp,
}

/// A landscape in which the receiver has to install and enrol every agent: runtimes with somebody who runs their pods.
pub(crate) struct Nothing {
    pub(crate) members: Vec<Member>,
    pub(crate) landscape: Arc<Landscape>,
    bed: &'static TestBed,
    _turn: SemaphorePermit<'static>,
}

/// One runtime of [`Nothing`].
pub(crate) struct Member {
    pub(crate) runtime: Runtime,
    pub(crate) kubelet: Kubelet,
}

/// What a test returns: an error keeps the logs, as a panic does.
pub(crate) type Tested = std::result::Result<(), Failed>;

/// See [`Tested`]. No `Error` itself, so that every error can become one.
pub(crate) struct Failed(anyhow::Error);

impl<E: Into<anyhow::Error>> From<E> for Failed {
    fn from(error: E) -> Self {
        bed::keep_shared();
        Self(error.into())
    }
}

impl fmt::Debug for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// Landscapes that run at the same time: each is three processes and an API server, and the machine may have two cores.
static TURNS: Semaphore = Semaphore::const_new(3);

/// Heartbeats come every second, so that what waits for one does not take long.
pub(crate) fn quick() -> Options {
    Options {
        heartbeat_seconds: 1,
        stamps: true,
        log: "info,kube_client=error,tidewatch_receiver=debug,tidewatch_agent=debug".into(),
        ..Options::default()
    }
}

impl Nothing {
    /// The receiver, and so many runtimes that it does not know of yet.
    pub(crate) async fn prepare(name: &str, runtimes: usize, options: Options) -> Result<(Self, Vec<Arc<Cluster>>)> {
        tidewatch_tests::install_crypto();
        let turn = TURNS.acquire().await?;
        let bed = bed::shared().await?;
        let names =
            (1..=runtimes).map(|number| if runtimes == 1 { name.to_owned() } else { format!("{name}-{number}") });
        let clusters = names.map(async |name| bed.runtime_for_kubelet(&name).await);
        let (clusters, kcp) = tokio::join!(join_all(clusters), bed.kcp());
        let clusters = clusters.into_iter().collect::<Result<_, _>>()?;
        let landscape = Arc::new(Landscape::prepare_from_nothing(kcp?, name, options).await?);
        landscape.write_module("keda", "1.0.0", "1.1.0").await?;
        landscape.start_receiver().await?;
        Ok((Self { members: Vec::new(), landscape, bed, _turn: turn }, clusters))
    }

    /// The receiver and one runtime, whose path is proven.
    pub(crate) async fn one(name: &str, options: Options) -> Result<Self> {
        let (mut this, clusters) = Self::prepare(name, 1, options).await?;
        this.register(clusters).await?;
        this.only().proven().await?;
        Ok(this)
    }

    /// Registers the runtimes, all at once, and begins to run their pods.
    pub(crate) async fn register(&mut self, clusters: Vec<Arc<Cluster>>) -> Result<()> {
        let authority = self.landscape.agents_authority();
        let (_, port) = authority.rsplit_once(':').context("a port")?;
        let policies: Vec<_> = [port.parse()?].into_iter().chain(self.landscape.enrolment_port()).collect();
        let members = clusters.into_iter().map(async |cluster| {
            let options = kubelet::Options { policies: Some(policies.clone()), ..kubelet::Options::default() };
            let kubelet = Kubelet::start(&cluster, options).await?;
            let runtime = self.landscape.register(cluster).await?;
            anyhow::Ok(Member { runtime, kubelet })
        });
        let members = join_all(members).await.into_iter().collect::<Result<Vec<_>>>()?;
        self.members.extend(members);
        Ok(())
    }

    /// The one runtime.
    pub(crate) fn only(&self) -> &Member {
        self.members.first().unwrap()
    }
}

impl Member {
    /// The agent, once it runs and says that it is ready, by another process than `before`.
    pub(crate) async fn agent(&self, before: Option<u32>) -> Result<Played> {
        until(&format!("an agent in {} that is ready", self.runtime.name()), async || {
            let running = self.kubelet.running("tidewatch-agent");
            Ok(running.into_iter().find(|agent| agent.ready && agent.pid() != before))
        })
        .await
    }

    /// Waits until its event path is proven.
    pub(crate) async fn proven(&self) -> Result<()> {
        self.said("EventPath", "True", "Proven").await.map(drop)
    }

    /// Waits until a condition of its Kyma in KCP has this status and reason, and returns what it says.
    pub(crate) async fn said(&self, kind: &str, status: &str, reason: &str) -> Result<String> {
        until(&format!("{kind} of {} to be {status} ({reason})", self.runtime.name()), async || {
            let seen = self.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status);
            let condition = seen.and_then(|status| status.condition(kind).cloned());
            let holds = |condition: &Condition| condition.status.as_str() == status && condition.reason == reason;
            Ok(condition.filter(holds).map(|condition| condition.message))
        })
        .await
    }

    /// Proves the path by using it: what the user writes is acted on. The module must not be what it was.
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

impl Drop for Nothing {
    fn drop(&mut self) {
        for Member { runtime, kubelet } in self.members.drain(..) {
            drop(kubelet);
            self.bed.stop(runtime.name());
        }
    }
}

impl Drop for One {
    fn drop(&mut self) {
        self.bed.stop(self.runtime.name());
        if let Some(kcp) = &self.own_kcp {
            self.bed.stop(kcp);
        }
    }
}

impl One {
    /// Starts it; the name is that of the namespace in KCP and of the runtime.
    pub(crate) async fn start(name: &str, modules: &[(&str, &str, &str)]) -> Result<Self> {
        let this = Self::without_agent(name, modules).await?;
        this.runtime.start_agent().await?;
        until("the Kyma in the runtime", async || this.runtime.skr_kyma().await).await?;
        Ok(this)
    }

    /// The same, with the receiver alone.
    pub(crate) async fn without_agent(name: &str, modules: &[(&str, &str, &str)]) -> Result<Self> {
        Self::with(name, modules, quick()).await
    }

    /// The same, with the receiver alone, and with options.
    pub(crate) async fn with(name: &str, modules: &[(&str, &str, &str)], options: Options) -> Result<Self> {
        Self::on(Ground::Shared, name, modules, options).await
    }

    /// The same, with its agent, and on ground of its own.
    pub(crate) async fn to_harm(
        ground: Ground,
        name: &str,
        modules: &[(&str, &str, &str)],
        options: Options,
    ) -> Result<Self> {
        let this = Self::on(ground, name, modules, options).await?;
        this.runtime.start_agent().await?;
        until("the Kyma in the runtime", async || this.runtime.skr_kyma().await).await?;
        Ok(this)
    }

    /// The same, with the receiver alone, on ground of its own.
    pub(crate) async fn on(
        ground: Ground,
        name: &str,
        modules: &[(&str, &str, &str)],
        options: Options,
    ) -> Result<Self> {
        tidewatch_tests::install_crypto();
        let turn = TURNS.acquire().await?;
        let bed = bed::shared().await?;
        let own_kcp = (ground == Ground::OwnKcp).then(|| format!("{name}-kcp"));
        let kcp = async {
            match &own_kcp {
                Some(kcp) => bed.runtime_with_store(kcp).await,
                None => bed.kcp().await,
            }
        };
        let cluster = async {
            match ground {
                Ground::Shared | Ground::OwnKcp => bed.runtime(name).await,
                Ground::Pods => bed.runtime_for_kubelet(name).await,
                Ground::OwnStore => bed.runtime_with_store(name).await,
            }
        };
        let (kcp, cluster) = tokio::try_join!(kcp, cluster)?;
        let landscape = Arc::new(Landscape::prepare(kcp, name, options).await?);
        for (module, regular, fast) in modules {
            landscape.write_module(module, regular, fast).await?;
        }
        landscape.start_receiver().await?;
        let runtime = landscape.register(cluster).await?;
        Ok(Self { runtime, landscape, bed, own_kcp, _turn: turn })
    }

    /// Waits until the status of the runtime's Kyma is as expected, and returns it.
    pub(crate) async fn skr_status(&self, what: &str, expected: impl Fn(&KymaStatus) -> bool) -> Result<KymaStatus> {
        until(&format!("{what} in the runtime"), async || {
            Ok(self.runtime.skr_kyma().await?.and_then(|kyma| kyma.status).filter(&expected))
        })
        .await
    }

    /// Waits until the status of the KCP Kyma is as expected, and returns it.
    pub(crate) async fn kcp_status(&self, what: &str, expected: impl Fn(&KymaStatus) -> bool) -> Result<KymaStatus> {
        until(&format!("{what} in KCP"), async || {
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

    /// The Kymas of this landscape in KCP, to write as its operator.
    pub(crate) async fn kcp_kymas(&self) -> Result<Api<Kyma>> {
        Ok(Api::namespaced(self.landscape.kcp().client().await?, self.landscape.namespace()))
    }

    /// Waits until nothing is written any more: no write of ours in the runtime, other than the canary, between two canaries in a row.
    pub(crate) async fn quiet(&self) -> Result<()> {
        until("the runtime to be quiet", async || {
            let mark = self.runtime.cluster().audit_mark()?;
            let writes = self.after_canaries(mark, 3).await?;
            Ok(writes.iter().all(is_canary).then_some(()))
        })
        .await
    }

    /// Waits for so many canaries, which prove that the agent is alive, and returns all writes to the runtime since the mark.
    pub(crate) async fn after_canaries(
        &self,
        mark: tidewatch_tests::control_plane::audit::Mark,
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

/// Whether a write is the agent's renewal of its Lease.
pub(crate) fn is_canary(write: &Write) -> bool {
    write.resource == "leases" && write.name == "tidewatch-agent"
}

/// Whether a write is the active receiver's renewal of its Lease.
pub(crate) fn is_renewal(write: &Write) -> bool {
    write.resource == "leases" && write.name == "tidewatch-receiver"
}

/// The status of one module.
pub(crate) fn module<'a>(status: &'a KymaStatus, name: &str) -> Option<&'a ModuleStatus> {
    status.modules().iter().find(|module| module.name == name)
}

/// The message of a condition.
pub(crate) fn condition(status: &KymaStatus, type_: &str) -> Result<(bool, String)> {
    let condition = status.condition(type_).with_context(|| format!("the condition {type_}"))?;
    Ok((condition.is_true(), condition.message.clone()))
}
