//! Plays kubelet for the pods of one cluster, so that what was installed is what runs.
//!
//! * Pods of an image whose repository ends in the name of one of our programs are that program as a process: with the pod's
//!   command, arguments and environment and no other, with its ConfigMap, Secret, projected, downward API and empty volumes as files
//!   that are kept up to date, with tokens bound to the pod, probed, restarted with a growing pause when it ends, and ended by
//!   SIGTERM, then SIGKILL. Paths below its mounts and ports that it listens on are rewritten, as it has no file system and no
//!   network of its own.
//! * The tag `does-not-exist` cannot be pulled, whatever the image. Of the tags of ours, `exits` ends at once, and `hangs` says nothing;
//!   any other is the same program.
//! * Pods of other images are pretended to run and to be ready; Jobs never end.
//!
//! It binds pods by itself to the node [`NODE`], for which no Node object exists: there is no scheduler, no DaemonSet, no eviction. Resource limits,
//! security contexts, init containers, several containers, `exec` probes and startup probes are not played: a pod of ours with the
//! latter four is not started, and its status says why. NetworkPolicies count only where [`Options::policies`] asks for it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::PathBuf,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt as _,
    runtime::{WatchStreamExt as _, watcher},
};
use tokio::{
    sync::watch,
    task::{AbortHandle, JoinSet},
};

use crate::{
    control_plane::{Cluster, Person, cluster::ClusterError},
    process::{Process, ProcessError, Program, Signal},
    product::{BuildError, ProductBinaries, build_binaries},
    progress::say,
};

mod container;
mod given;
mod image;
mod layout;
mod policy;
mod probe;
mod rewrite;
mod runner;
mod status;
mod unready;
mod volumes;

use runner::Runner;

/// The node that pods are bound to.
pub const NODE: &str = "test-bed";

/// Why nobody plays kubelet.
#[derive(Debug, thiserror::Error)]
pub enum KubeletError {
    /// The programs.
    #[error("build the programs of the pods")]
    Build(#[from] BuildError),
    /// The client.
    #[error("reach the cluster")]
    Cluster(#[from] ClusterError),
    /// The folder of the pods.
    #[error("make the folder {0}")]
    Folder(PathBuf, #[source] std::io::Error),
}

/// How a kubelet differs from the usual one.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Where pods find the API server, if it is not where it listens: a [`crate::proxy::Proxy`] in front of it.
    pub api: Option<SocketAddr>,
    /// With this, NetworkPolicies are looked at: a pod that is isolated for egress and may not reach the API server (443 or
    /// 6443) or one of these ports is frozen until it may. Nothing else is enforced: no ingress, no peers.
    pub policies: Option<Vec<u16>>,
}

/// A pod of ours as it is now.
#[derive(Debug, Clone)]
pub struct Played {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The program.
    pub binary: &'static str,
    /// The process, while it runs.
    pub process: Option<Arc<Process>>,
    /// How often the program was started again.
    pub restarts: i32,
    /// What the readiness probe said last.
    pub ready: bool,
    /// Whether NetworkPolicies leave it no way out, so that it is frozen; see [`Options::policies`].
    pub silenced: bool,
    /// Which port of loopback stands for which port of the pod.
    pub ports: BTreeMap<u16, u16>,
    /// The folder of each volume, by its name.
    pub volumes: BTreeMap<String, PathBuf>,
    /// The log of all its runs.
    pub log: PathBuf,
}

impl Played {
    /// Process id, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.pid())
    }

    /// Where a port of the pod is reached.
    #[must_use]
    pub fn address(&self, port: u16) -> Option<SocketAddr> {
        self.ports.get(&port).map(|&port| ([127, 0, 0, 1], port).into())
    }
}

/// A kubelet; see the module. Belongs to the tokio runtime that started it, and its processes end with it.
pub struct Kubelet {
    shared: Arc<Shared>,
    task: AbortHandle,
}

impl Kubelet {
    /// Begins to play for a cluster with a controller manager and without a scheduler: one of
    /// [`crate::bed::TestBed::runtime_for_kubelet`].
    ///
    /// # Errors
    /// See [`KubeletError`].
    pub async fn start(cluster: &Cluster, options: Options) -> Result<Self, KubeletError> {
        let binaries = build_binaries().await?;
        let client = cluster.client_as(Person::Workloads).await?;
        let dir = cluster.dir().join("pods");
        std::fs::create_dir_all(&dir).map_err(|error| KubeletError::Folder(dir.clone(), error))?;
        let api = options.api.unwrap_or_else(|| cluster.server().address());
        let (table, round) = (Mutex::default(), AtomicU64::new(0));
        let shared = Arc::new(Shared { client, dir, api, policies: options.policies, binaries, table, round });
        let task = tokio::spawn(follow(shared.clone())).abort_handle();
        Ok(Self { shared, task })
    }

    /// The pods of ours, those that wait too.
    #[must_use]
    pub fn pods(&self) -> Vec<Played> {
        self.shared.table().pods.values().cloned().collect()
    }

    /// The pod of that name.
    #[must_use]
    pub fn pod(&self, name: &str) -> Option<Played> {
        self.pods().into_iter().find(|pod| pod.name == name)
    }

    /// The pods of a program whose process runs.
    #[must_use]
    pub fn running(&self, binary: &str) -> Vec<Played> {
        self.pods().into_iter().filter(|pod| pod.binary == binary && pod.process.is_some()).collect()
    }

    /// The process id of a pod, while it runs.
    #[must_use]
    pub fn pid_of(&self, pod: &str) -> Option<u32> {
        self.pod(pod).and_then(|pod| pod.pid())
    }

    /// Kills the process of a pod with -9; whether there was one. It is started again.
    pub fn kill(&self, pod: &str) -> bool {
        let process = self.pod(pod).and_then(|pod| pod.process);
        process.inspect(|process| process.kill()).is_some()
    }

    /// Freezes the process of a pod. Its probes fail then, and a failing liveness probe ends it.
    ///
    /// # Errors
    /// If it is gone.
    pub fn freeze(&self, pod: &Played) -> Result<(), ProcessError> {
        pod.process.iter().try_for_each(|process| process.signal(Signal::Stop))
    }

    /// Lets it go on after [`Kubelet::freeze`].
    ///
    /// # Errors
    /// If it is gone.
    pub fn thaw(&self, pod: &Played) -> Result<(), ProcessError> {
        pod.process.iter().try_for_each(|process| process.signal(Signal::Cont))
    }

    /// Has all tokens asked for anew, as if they were due. The files follow within about a second.
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

/// What all pods share.
struct Shared {
    client: Client,
    dir: PathBuf,
    api: SocketAddr,
    policies: Option<Vec<u16>>,
    binaries: ProductBinaries,
    table: Mutex<Table>,
    /// Counts [`Kubelet::renew_tokens`].
    round: AtomicU64,
}

/// The pods of ours by uid.
#[derive(Debug, Default)]
struct Table {
    /// Nothing is started any more.
    closed: bool,
    pods: BTreeMap<String, Played>,
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
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

    fn note(&self, uid: &str, change: impl FnOnce(&mut Played)) {
        if let Some(pod) = self.table().pods.get_mut(uid) {
            change(pod);
        }
    }
}

/// What a runner is told of its pod.
#[derive(Debug, Clone)]
enum Told {
    /// It is to run.
    Wanted(Arc<Pod>),
    /// It is to end within so many seconds.
    Ending(u64),
    /// The object is gone.
    Gone,
}

impl Told {
    fn of(pod: Pod) -> Self {
        match &pod.metadata.deletion_timestamp {
            Some(_) => {
                let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or_default();
                Self::Ending(u64::try_from(grace).unwrap_or_default())
            }
            None => Self::Wanted(Arc::new(pod)),
        }
    }
}

/// The pods of the cluster, each with a runner of its own.
#[derive(Default)]
struct Pods {
    told: BTreeMap<String, watch::Sender<Told>>,
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
                // A watch that broke is begun again by the stream itself.
                Some(event) => event.into_iter().for_each(|event| pods.hear(event, &shared)),
                None => return,
            },
            Some(ended) = pods.runners.join_next() => if let Err(error) = ended {
                say(&format!("the test bed's kubelet lost a pod: {error}"));
            },
        }
    }
}

impl Pods {
    fn hear(&mut self, event: watcher::Event<Pod>, shared: &Arc<Shared>) {
        match event {
            watcher::Event::Init => self.listed.clear(),
            watcher::Event::InitApply(pod) => {
                self.listed.extend(pod.uid());
                self.tell(pod, shared);
            }
            watcher::Event::InitDone => {
                let listed = std::mem::take(&mut self.listed);
                let gone = self.told.extract_if(.., |uid, _| !listed.contains(uid));
                gone.for_each(|(_, told)| drop(told.send(Told::Gone)));
            }
            watcher::Event::Apply(pod) => self.tell(pod, shared),
            watcher::Event::Delete(pod) => {
                let told = pod.uid().and_then(|uid| self.told.remove(&uid));
                told.into_iter().for_each(|told| drop(told.send(Told::Gone)));
            }
        }
    }

    fn tell(&mut self, pod: Pod, shared: &Arc<Shared>) {
        let Some(uid) = pod.uid() else { return };
        if let Some(told) = self.told.get(&uid) {
            // A runner that has ended has nobody to tell; the object goes soon.
            let _ = told.send(Told::of(pod));
            return;
        }
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or(NODE);
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
        if node != NODE || phase == "Succeeded" || phase == "Failed" {
            return;
        }
        let first = Arc::new(pod.clone());
        let (told, hears) = watch::channel(Told::of(pod));
        self.told.insert(uid.clone(), told);
        self.runners.spawn(Runner::new(shared.clone(), uid, first, hears).run());
    }
}
