//! A kubelet for the pods of one cluster, so that tests run the manifests as they were installed.
//!
//! * A pod with an image repository that ends in the name of a product program, or in `sample-operator`, the operator of
//!   the sample modules, runs that program as a process:
//!   with exactly the pod's command, arguments and environment; with its ConfigMap, Secret, projected, downward API and
//!   empty volumes as files that are kept up to date; with tokens bound to the pod; probed; restarted with a growing
//!   back-off when it ends; and ended by SIGTERM, then SIGKILL. Paths below its mounts and ports on which it listens
//!   are rewritten, as the process has no file system and no network of its own.
//! * Images with the tag `does-not-exist` cannot be pulled. Of the tags of product images, `exits` ends at once, and
//!   `hangs` runs without output; any other tag is the same program.
//! * Pods of other images are reported as running and ready; Jobs never end.
//!
//! It binds pods itself to the node [`NODE`], for which no Node object exists: there is no scheduler, no DaemonSet, no
//! eviction. Resource limits, security contexts, init containers, several containers, `exec` probes and startup probes
//! are not supported: a product pod with the latter four is not started, and its status states the reason.
//! NetworkPolicies are enforced only with [`Options::policies`].

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::PathBuf,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt as _,
    runtime::{WatchStreamExt as _, watcher},
};
use parking_lot::{Mutex, MutexGuard};
use tokio::{
    sync::watch,
    task::{AbortHandle, JoinSet},
};

use crate::{
    control_plane::{Cluster, ClusterUser, cluster::ClusterError},
    process::{Process, ProcessError, Program, Signal},
    product::{BuildError, ProductBinaries, build_binaries},
    progress::print_line,
};

mod container;
mod image;
mod layout;
mod policy;
mod probe;
mod rewrite;
mod runner;
mod sources;
mod start_error;
mod status;
mod volumes;

use runner::Runner;

/// The node to which pods are bound.
pub const NODE: &str = "test-bed";

/// Failure to start a kubelet.
#[derive(Debug, thiserror::Error)]
pub enum KubeletError {
    /// The programs cannot be built.
    #[error("build the programs of the pods")]
    Build(#[from] BuildError),
    /// There is no client.
    #[error("reach the cluster")]
    Cluster(#[from] ClusterError),
    /// The folder of the pods cannot be made.
    #[error("make the folder {0}")]
    Folder(PathBuf, #[source] std::io::Error),
}

/// Deviations from the default kubelet.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Address of the API server in pods, if not its own: a [`crate::proxy::Proxy`] in front of it.
    pub api: Option<SocketAddr>,
    /// Enforces egress NetworkPolicies: a pod that is isolated for egress and may not reach the API server (443 or
    /// 6443) or one of these ports is frozen until it may. Nothing else is enforced: no ingress, no peers.
    pub policies: Option<Vec<u16>>,
}

/// Current state of a product pod.
#[derive(Debug, Clone)]
pub struct PodState {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Name of the program.
    pub binary: &'static str,
    /// The process, while it runs.
    pub process: Option<Arc<Process>>,
    /// Number of restarts of the program.
    pub restarts: i32,
    /// Last result of the readiness probe.
    pub ready: bool,
    /// True while NetworkPolicies deny its egress, so that it is frozen; see [`Options::policies`].
    pub isolated: bool,
    /// Port on loopback for each port of the pod.
    pub ports: BTreeMap<u16, u16>,
    /// Folder of each volume, by its name.
    pub volumes: BTreeMap<String, PathBuf>,
    /// Log of all its runs.
    pub log: PathBuf,
}

impl PodState {
    /// Process id, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.pid())
    }

    /// Address at which a port of the pod is reached.
    pub fn address(&self, port: u16) -> Option<SocketAddr> {
        self.ports.get(&port).map(|&port| ([127, 0, 0, 1], port).into())
    }
}

/// A kubelet; see the module. Belongs to the tokio executor that started it, and its processes end with it.
pub struct Kubelet {
    shared: Arc<Shared>,
    task: AbortHandle,
}

impl Kubelet {
    /// Starts the kubelet of a cluster with a controller manager and without a scheduler: one of
    /// [`crate::bed::TestBed::runtime_for_kubelet`].
    ///
    /// # Errors
    /// See [`KubeletError`].
    pub async fn start(cluster: &Cluster, options: Options) -> Result<Self, KubeletError> {
        let binaries = build_binaries().await?;
        let client = cluster.client_as(ClusterUser::Workloads).await?;
        let dir = cluster.dir().join("pods");
        std::fs::create_dir_all(&dir).map_err(|error| KubeletError::Folder(dir.clone(), error))?;
        let api = options.api.unwrap_or_else(|| cluster.server().address());
        let table = Mutex::default();
        let round = AtomicU64::new(0);
        let shared = Arc::new(Shared { client, dir, api, policies: options.policies, binaries, table, round });
        let task = tokio::spawn(follow(shared.clone())).abort_handle();
        Ok(Self { shared, task })
    }

    /// All product pods, also those that do not run yet.
    pub fn pods(&self) -> Vec<PodState> {
        self.shared.table().pods.values().cloned().collect()
    }

    /// The pod of that name.
    pub fn pod(&self, name: &str) -> Option<PodState> {
        self.pods().into_iter().find(|pod| pod.name == name)
    }

    /// The running pods of a program.
    pub fn running(&self, binary: &str) -> Vec<PodState> {
        self.pods().into_iter().filter(|pod| pod.binary == binary && pod.process.is_some()).collect()
    }

    /// Process id of a pod, while it runs.
    pub fn pid_of(&self, pod: &str) -> Option<u32> {
        self.pod(pod).and_then(|pod| pod.pid())
    }

    /// Kills the process of a pod with SIGKILL; false if there is none. It is restarted.
    pub fn kill(&self, pod: &str) -> bool {
        let process = self.pod(pod).and_then(|pod| pod.process);
        process.inspect(|process| process.kill()).is_some()
    }

    /// Stops the process of a pod with SIGSTOP. Its probes fail then, and a failing liveness probe ends it.
    ///
    /// # Errors
    /// If it is gone.
    pub fn freeze(&self, pod: &PodState) -> Result<(), ProcessError> {
        pod.process.iter().try_for_each(|process| process.signal(Signal::Stop))
    }

    /// Continues the process after [`Kubelet::freeze`].
    ///
    /// # Errors
    /// If it is gone.
    pub fn thaw(&self, pod: &PodState) -> Result<(), ProcessError> {
        pod.process.iter().try_for_each(|process| process.signal(Signal::Cont))
    }

    /// Renews all tokens as if they were due. The files follow within about a second.
    pub fn renew_tokens(&self) {
        self.shared.round.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.task.abort();
        let pods = {
            let mut table = self.shared.table();
            table.closed = true;
            std::mem::take(&mut table.pods)
        };
        for process in pods.into_values().filter_map(|pod| pod.process) {
            process.kill();
        }
    }
}

/// State shared by all pods.
struct Shared {
    client: Client,
    dir: PathBuf,
    api: SocketAddr,
    policies: Option<Vec<u16>>,
    binaries: ProductBinaries,
    table: Mutex<Table>,
    /// Number of calls of [`Kubelet::renew_tokens`].
    round: AtomicU64,
}

/// The product pods by uid.
#[derive(Debug, Default)]
struct Table {
    /// Set when the kubelet is dropped: no process is started any more.
    closed: bool,
    pods: BTreeMap<String, PodState>,
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }

    /// Starts the program of a pod, unless the kubelet is gone.
    fn launch(&self, uid: &str, program: Program) -> Result<Option<Arc<Process>>, ProcessError> {
        let mut table = self.table();
        if table.closed {
            return Ok(None);
        }
        let process = Arc::new(Process::start(program)?);
        if let Some(pod) = table.pods.get_mut(uid) {
            pod.process = Some(process.clone());
        }
        Ok(Some(process))
    }

    fn update(&self, uid: &str, change: impl FnOnce(&mut PodState)) {
        if let Some(pod) = self.table().pods.get_mut(uid) {
            change(pod);
        }
    }
}

/// Desired state of a pod, for its runner.
#[derive(Debug, Clone)]
enum PodCommand {
    /// Run the pod.
    Run(Arc<Pod>),
    /// End the pod within so many seconds.
    Stop(u64),
    /// The object is gone.
    Deleted,
}

impl PodCommand {
    fn of(pod: Pod) -> Self {
        match &pod.metadata.deletion_timestamp {
            Some(_) => {
                let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or_default();
                Self::Stop(u64::try_from(grace).unwrap_or_default())
            }
            None => Self::Run(Arc::new(pod)),
        }
    }
}

/// The pods of the cluster, each with a runner of its own.
#[derive(Default)]
struct Pods {
    commands: BTreeMap<String, watch::Sender<PodCommand>>,
    listed: BTreeSet<String>,
    runners: JoinSet<()>,
}

async fn follow(shared: Arc<Shared>) {
    let stream = watcher(Api::<Pod>::all(shared.client.clone()), watcher::Config::default()).default_backoff();
    let mut stream = pin!(stream);
    let mut pods = Pods::default();
    loop {
        tokio::select! {
            event = stream.next() => match event {
                // A broken watch is restarted by the stream itself.
                Some(event) => event.into_iter().for_each(|event| pods.apply_event(event, &shared)),
                None => return,
            },
            Some(ended) = pods.runners.join_next() => if let Err(error) = ended {
                print_line(&format!("the kubelet's runner of a pod failed: {error}"));
            },
        }
    }
}

impl Pods {
    fn apply_event(&mut self, event: watcher::Event<Pod>, shared: &Arc<Shared>) {
        match event {
            watcher::Event::Init => self.listed.clear(),
            watcher::Event::InitApply(pod) => {
                self.listed.extend(pod.uid());
                self.command(pod, shared);
            }
            watcher::Event::InitDone => {
                let listed = std::mem::take(&mut self.listed);
                let gone = self.commands.extract_if(.., |uid, _| !listed.contains(uid));
                gone.for_each(|(_, commands)| drop(commands.send(PodCommand::Deleted)));
            }
            watcher::Event::Apply(pod) => self.command(pod, shared),
            watcher::Event::Delete(pod) => {
                let commands = pod.uid().and_then(|uid| self.commands.remove(&uid));
                commands.into_iter().for_each(|commands| drop(commands.send(PodCommand::Deleted)));
            }
        }
    }

    fn command(&mut self, pod: Pod, shared: &Arc<Shared>) {
        let Some(uid) = pod.uid() else { return };
        if let Some(commands) = self.commands.get(&uid) {
            // A runner that has ended receives nothing; the object goes soon.
            let _ = commands.send(PodCommand::of(pod));
            return;
        }
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or(NODE);
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
        if node != NODE || phase == "Succeeded" || phase == "Failed" {
            return;
        }
        let first = Arc::new(pod.clone());
        let (commands, receiver) = watch::channel(PodCommand::of(pod));
        self.commands.insert(uid.clone(), commands);
        self.runners.spawn(Runner::new(shared.clone(), uid, first, receiver).run());
    }
}
