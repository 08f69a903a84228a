//! Runs one pod from its binding to its end.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    fs,
    os::unix::process::ExitStatusExt as _,
    path::PathBuf,
    process::ExitStatus,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use k8s_openapi::{
    api::{
        core::v1::{Container, Pod},
        networking::v1::NetworkPolicy,
    },
    jiff::Timestamp,
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions},
};
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

use super::{
    NODE, PodCommand, PodState, Shared,
    container::{self, ProcessSpecBuilder},
    image::{Image, ProductImage},
    layout::VolumeDir,
    policy,
    probe::Prober,
    rewrite::{Ports, Rewrite},
    sources::{REQUEST_TIMEOUT, SourceRefs, Sources, Tokens},
    start_error::StartError,
    status::{Conditions, ContainerState, RestartHistory, Termination, containers, status},
    volumes::{self, VolumeContent},
};
use crate::process::{Process, Program, Signal};

/// Poll interval of a running pod.
const TICK: Duration = Duration::from_millis(50);
/// Interval at which its volumes are compared with their sources. Real kubelets need up to a minute.
const SYNC: Duration = Duration::from_secs(1);
/// Pause after a missing object or a refused request.
const RETRY: Duration = Duration::from_millis(300);
/// First back-off before a container that ended a second time is restarted; it doubles up to [`BACKOFF_CAP`]. Real
/// kubelets begin with ten seconds.
const BACKOFF: Duration = Duration::from_secs(1);
const BACKOFF_CAP: Duration = Duration::from_secs(8);
/// Length of a run that resets the back-off.
const LONG_RUN: Duration = Duration::from_secs(30);
/// Grace period after a failed liveness probe, if the pod sets none.
const DEFAULT_GRACE: Duration = Duration::from_secs(30);

pub(super) struct Runner {
    shared: Arc<Shared>,
    uid: String,
    pod: Arc<Pod>,
    api: Api<Pod>,
    commands: watch::Receiver<PodCommand>,
    folder: PathBuf,
    log: PathBuf,
    volumes: BTreeMap<String, VolumeDir>,
    tokens: Tokens,
    ports: Ports,
    past: RestartHistory,
    conditions: Conditions,
    written: Option<Value>,
    isolated: bool,
}

/// One run of the container.
struct Run {
    process: Arc<Process>,
    since: Timestamp,
    readiness: Option<Prober>,
    liveness: Option<Prober>,
}

impl Runner {
    pub(super) fn new(shared: Arc<Shared>, uid: String, pod: Arc<Pod>, commands: watch::Receiver<PodCommand>) -> Self {
        let api = Api::namespaced(shared.client.clone(), &pod.namespace().unwrap_or_default());
        let folder = shared.dir.join(&uid);
        let log = shared.dir.join(format!("{}.log", pod.name_any()));
        Self {
            shared,
            uid,
            pod,
            api,
            commands,
            folder,
            log,
            volumes: BTreeMap::new(),
            tokens: Tokens::default(),
            ports: Ports::default(),
            past: RestartHistory::default(),
            conditions: Conditions::default(),
            written: None,
            isolated: false,
        }
    }

    /// Runs until the pod is gone.
    pub(super) async fn run(mut self) {
        let mut commands = self.commands.clone();
        tokio::select! {
            _ = commands.wait_for(|command| !matches!(command, PodCommand::Run(_))) => {}
            never = self.run_pod() => match never {},
        }
        self.end().await;
        self.shared.table().pods.remove(&self.uid);
        // Files that cannot be removed go with the test bed.
        let _ = fs::remove_dir_all(&self.folder);
    }

    async fn run_pod(&mut self) -> Infallible {
        self.bind().await;
        let image = containers(&self.pod).next().and_then(|container| container.image.clone()).unwrap_or_default();
        let product = match Image::of(&image) {
            Image::Product(product) => product,
            Image::Foreign => {
                return self.report_forever(ContainerState::Running { since: Timestamp::now(), ready: true }).await;
            }
            Image::Missing => {
                let message = format!("Back-off pulling image \"{image}\": not found");
                return self.report_forever(ContainerState::Waiting { reason: "ImagePullBackOff", message }).await;
            }
        };
        let state = PodState {
            namespace: self.pod.namespace().unwrap_or_default(),
            name: self.pod.name_any(),
            binary: product.binary,
            process: None,
            restarts: 0,
            ready: false,
            isolated: false,
            ports: BTreeMap::new(),
            volumes: BTreeMap::new(),
            log: self.log.clone(),
        };
        {
            let mut table = self.shared.table();
            if !table.closed {
                table.pods.insert(self.uid.clone(), state);
            }
        }
        self.restart_loop(product).await
    }

    async fn bind(&self) {
        let spec = self.pod.spec.as_ref();
        if spec.is_some_and(|spec| spec.node_name.is_some()) {
            return;
        }
        let name = self.pod.name_any();
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": name, "uid": self.uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
        });
        let params = PostParams::default();
        loop {
            let request = self.api.create_subresource::<_, Value>("binding", &name, &params, &binding);
            match timeout(REQUEST_TIMEOUT, request).await {
                Ok(Ok(_)) => return,
                // Bound already: the response was lost.
                Ok(Err(kube::Error::Api(status))) if status.is_conflict() => return,
                // If the pod is gone, the watch reports it.
                Ok(Err(_)) | Err(_) => sleep(RETRY).await,
            }
        }
    }

    /// Reports the same container state for ever.
    async fn report_forever(&mut self, state: ContainerState) -> Infallible {
        loop {
            self.write_status(&state).await;
            sleep(RETRY).await;
        }
    }

    /// Starts the program, and restarts it with back-off.
    async fn restart_loop(&mut self, product: ProductImage) -> Infallible {
        let mut pause = Duration::ZERO;
        loop {
            let mut run = self.start_run(product).await;
            let began = Instant::now();
            let ended = self.supervise(&mut run).await;
            let restarts = self.past.restarts + 1;
            self.past = RestartHistory { restarts, last: Some(ended) };
            self.shared.update(&self.uid, |pod| {
                (pod.process, pod.ready, pod.isolated, pod.restarts) = (None, false, false, restarts);
            });
            if began.elapsed() >= LONG_RUN {
                pause = Duration::ZERO;
            }
            if !pause.is_zero() {
                let message = format!("back-off {pause:?} restarting failed container of pod {}", self.pod.name_any());
                let until = Instant::now() + pause;
                while Instant::now() < until {
                    self.write_status(&ContainerState::Waiting {
                        reason: "CrashLoopBackOff",
                        message: message.clone(),
                    })
                    .await;
                    sleep(TICK).await;
                }
            }
            pause = (pause * 2).clamp(BACKOFF, BACKOFF_CAP);
        }
    }

    /// Starts the program as soon as all its sources exist.
    async fn start_run(&mut self, product: ProductImage) -> Run {
        loop {
            match self.try_start(product).await {
                Ok(run) => return run,
                Err(error) => {
                    let state = ContainerState::Waiting { reason: error.reason(), message: error.to_string() };
                    self.write_status(&state).await;
                    sleep(RETRY).await;
                }
            }
        }
    }

    async fn try_start(&mut self, product: ProductImage) -> Result<Run, StartError> {
        self.refresh_pod();
        let pod = self.pod.clone();
        let container = only_container(&pod)?;
        let sources = self.fill(Some(container)).await?;
        let mounts = container.volume_mounts.iter().flatten().map(|mount| {
            let plain = mount.sub_path.is_none() && mount.sub_path_expr.is_none();
            let dir = self.volumes.get(&mount.name).filter(|_| plain);
            let dir = dir.ok_or_else(|| StartError::Unsupported(format!("the mount {}", mount.mount_path)))?;
            Ok((mount.mount_path.clone(), dir.folder().to_path_buf()))
        });
        let mounts = mounts.collect::<Result<_, StartError>>()?;
        let known = product.listeners.iter().map(|(_, port)| *port).collect();
        let rewrite = Rewrite { mounts, known };
        let api = self.shared.api;
        let builder =
            ProcessSpecBuilder { pod: &pod, container, image: product, sources: &sources, rewrite: &rewrite, api };
        let start = builder.build(&mut self.ports)?;
        let now = Instant::now();
        let ports = &mut self.ports;
        let mut probe = |probe: Option<&k8s_openapi::api::core::v1::Probe>, is_readiness| {
            probe.map(|probe| Prober::new(probe, container, ports, is_readiness, now)).transpose()
        };
        let readiness = probe(container.readiness_probe.as_ref(), true)?;
        let liveness = probe(container.liveness_probe.as_ref(), false)?;
        let binary =
            self.shared.binaries.get(product.binary).map_err(|error| StartError::Unsupported(error.to_string()))?;
        let host = |operation| move |error: std::io::Error| StartError::Host(operation, error);
        fs::create_dir_all(&self.folder).map_err(host("make the pod's folder"))?;
        let program = match product.broken {
            Some(script) => Program::new(pod.name_any(), "/bin/sh", &self.log).args(["-c", script]),
            None => Program::new(pod.name_any(), binary, &self.log).args(start.args),
        };
        let mut program = program.dir(&self.folder).fresh();
        program.env.extend(start.env.into_iter().map(|(name, value)| (name.into(), value.into())));
        let given_ports = self.ports.assigned().clone();
        self.shared.update(&self.uid, |state| state.ports = given_ports);
        let since = Timestamp::now();
        let launched = self.shared.launch(&self.uid, program);
        let launched = launched.map_err(|error| StartError::Unsupported(format!("its program: {error}")))?;
        let process = launched.ok_or_else(|| StartError::Unsupported("a start after the kubelet's end".to_owned()))?;
        Ok(Run { process, since, readiness, liveness })
    }

    /// Updates the volumes from their sources; with a container, reads the sources of its variables too.
    async fn fill(&mut self, container: Option<&Container>) -> Result<Sources, StartError> {
        let pod = self.pod.clone();
        let mut needs = SourceRefs::default();
        let all = || pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        all().for_each(|volume| volumes::needs(volume, &mut needs));
        container.into_iter().for_each(|container| container::needs(container, &mut needs));
        let round = self.shared.round.load(Ordering::Relaxed);
        let sources = needs.read(&self.shared.client, &pod, &mut self.tokens, round).await?;
        let mut folders = BTreeMap::new();
        for volume in all() {
            let filled = volumes::fill(volume, &pod, &sources)?;
            let folder = self.folder.join("volumes").join(&volume.name);
            let dir = self.volumes.entry(volume.name.clone()).or_insert_with(|| VolumeDir::new(folder));
            let put = match &filled {
                VolumeContent::Empty => dir.empty(),
                VolumeContent::Files(files) => dir.put(files).map(drop),
            };
            put.map_err(|error| StartError::Host("lay out a volume", error))?;
            folders.insert(volume.name.clone(), dir.folder().to_path_buf());
        }
        self.shared.update(&self.uid, |state| state.volumes = folders);
        Ok(sources)
    }

    /// Supervises the process until it has ended.
    async fn supervise(&mut self, run: &mut Run) -> Termination {
        let mut ready = run.readiness.is_none();
        let mut sync = Instant::now() + SYNC;
        loop {
            match run.process.status() {
                Ok(None) => {}
                Ok(Some(status)) => return self.ended(run, Some(status)),
                Err(_) => return self.ended(run, None),
            }
            if !self.isolated {
                if let Some(prober) = &mut run.readiness {
                    ready = prober.poll().await.unwrap_or(false);
                }
                if let Some(prober) = &mut run.liveness
                    && prober.poll().await == Some(false)
                {
                    let grace = self.pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
                    let grace = grace.and_then(|grace| u64::try_from(grace).ok()).map(Duration::from_secs);
                    stop(&run.process, grace.unwrap_or(DEFAULT_GRACE)).await;
                    continue;
                }
            }
            if Instant::now() >= sync {
                self.refresh_pod();
                // If a source is gone meanwhile, the volume keeps its content, as in a real kubelet, and the next sync
                // retries.
                let _ = self.fill(None).await;
                self.enforce(&run.process).await;
                sync = Instant::now() + SYNC;
            }
            self.write_status(&ContainerState::Running { since: run.since, ready: ready && !self.isolated }).await;
            sleep(TICK).await;
        }
    }

    /// Freezes the process while NetworkPolicies deny its egress, if they are enforced.
    async fn enforce(&mut self, process: &Process) {
        let Some(ports) = &self.shared.policies else { return };
        let policies =
            Api::<NetworkPolicy>::namespaced(self.shared.client.clone(), &self.pod.namespace().unwrap_or_default());
        let Ok(Ok(policies)) = timeout(REQUEST_TIMEOUT, policies.list(&ListParams::default())).await else { return };
        let isolated = policy::isolated(self.pod.labels(), &policies.items, ports);
        if isolated != self.isolated {
            let signal = if isolated { Signal::Stop } else { Signal::Cont };
            // The next poll detects a process that is gone.
            let _ = process.signal(signal);
            self.isolated = isolated;
            self.shared.update(&self.uid, |pod| pod.isolated = isolated);
        }
    }

    fn ended(&mut self, run: &Run, status: Option<ExitStatus>) -> Termination {
        self.isolated = false;
        let signal = status.and_then(|status| status.signal());
        let code = status.and_then(|status| status.code()).unwrap_or(128 + signal.unwrap_or_default());
        let container = containers(&self.pod).next();
        let policy = container.and_then(|container| container.termination_message_policy.as_deref());
        let from_log = policy == Some("FallbackToLogsOnError") && code != 0;
        let message = if from_log { run.process.tail().lines.join("\n") } else { String::new() };
        Termination { code, signal, message, from: run.since, until: Timestamp::now() }
    }

    /// Takes over changes of the pod: its labels and annotations may change.
    fn refresh_pod(&mut self) {
        if let PodCommand::Run(pod) = &*self.commands.borrow_and_update() {
            self.pod = pod.clone();
        }
    }

    /// Writes the status if it changed. The next poll retries a failed write.
    async fn write_status(&mut self, state: &ContainerState) {
        let status = status(&self.pod, state, &self.past, &mut self.conditions, Timestamp::now());
        if self.written.as_ref() == Some(&status) {
            return;
        }
        let ready = matches!(state, ContainerState::Running { ready: true, .. });
        let restarts = self.past.restarts;
        self.shared.update(&self.uid, |pod| (pod.ready, pod.restarts) = (ready, restarts));
        let name = self.pod.name_any();
        let patch = Patch::Merge(&status);
        let params = PatchParams::default();
        let written = timeout(REQUEST_TIMEOUT, self.api.patch_status(&name, &params, &patch)).await;
        if matches!(written, Ok(Ok(_))) {
            self.written = Some(status);
        }
    }

    /// Ends the pod: the process, then the object.
    async fn end(&mut self) {
        let process = self.shared.table().pods.get(&self.uid).and_then(|pod| pod.process.clone());
        if let Some(process) = process {
            if self.isolated {
                let _ = process.signal(Signal::Cont);
            }
            let mut commands = self.commands.clone();
            let grace = match *commands.borrow() {
                PodCommand::Stop(grace) => Some(grace),
                PodCommand::Run(_) | PodCommand::Deleted => None,
            };
            if let Some(grace) = grace {
                tokio::select! {
                    () = stop(&process, Duration::from_secs(grace)) => {}
                    _ = commands.wait_for(|command| matches!(command, PodCommand::Deleted)) => {}
                }
            }
            process.kill();
        }
        let now = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(Preconditions { uid: Some(self.uid.clone()), resource_version: None }),
            ..DeleteParams::default()
        };
        while !matches!(*self.commands.borrow(), PodCommand::Deleted) {
            match timeout(REQUEST_TIMEOUT, self.api.delete(&self.pod.name_any(), &now)).await {
                Ok(Ok(_)) => return,
                // Gone, or another pod of that name.
                Ok(Err(kube::Error::Api(status))) if status.is_not_found() || status.is_conflict() => return,
                Ok(Err(_)) | Err(_) => sleep(RETRY).await,
            }
        }
    }
}

/// Sends SIGTERM, then SIGKILL after the grace period.
async fn stop(process: &Process, grace: Duration) {
    // A process that is gone needs no signal.
    let _ = process.signal(Signal::Term);
    if process.ended(grace).await.is_err() {
        process.kill();
    }
}

/// The one container of a pod without unsupported features.
fn only_container(pod: &Pod) -> Result<&Container, StartError> {
    let unknown = |feature: &str| Err(StartError::Unsupported(feature.to_owned()));
    let spec = pod.spec.as_ref();
    let mut all = containers(pod);
    let (Some(container), None) = (all.next(), all.next()) else { return unknown("pods of several containers") };
    if spec.is_some_and(|spec| spec.init_containers.as_ref().is_some_and(|init| !init.is_empty())) {
        return unknown("init containers");
    }
    if spec.and_then(|spec| spec.restart_policy.as_deref()).is_some_and(|policy| policy != "Always") {
        return unknown("other restart policies than Always");
    }
    if container.startup_probe.is_some() {
        return unknown("startup probes");
    }
    Ok(container)
}
