//! One pod from its binding to its end.

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
    NODE, Played, Shared, Told,
    container::{self, Maker},
    given::{Given, Needs, PATIENCE, Tokens},
    image::{Image, Own},
    layout::Laid,
    policy,
    probe::Prober,
    rewrite::{Ports, Rewrite},
    status::{Conditions, Doing, Ended, Past, containers, status},
    unready::Unready,
    volumes::{self, Filled},
};
use crate::process::{Process, Program, Signal};

/// How often a running pod is looked at.
const TICK: Duration = Duration::from_millis(50);
/// How often its volumes are compared with what they are filled from. Real kubelets need up to a minute.
const SYNC: Duration = Duration::from_secs(1);
/// The pause after something was missing or refused.
const RETRY: Duration = Duration::from_millis(300);
/// The first pause before a container that ended a second time is started again; it doubles up to [`BACKOFF_CAP`]. Real kubelets
/// begin with ten seconds.
const BACKOFF: Duration = Duration::from_secs(1);
const BACKOFF_CAP: Duration = Duration::from_secs(8);
/// A run of this length is no crash loop.
const LONG_RUN: Duration = Duration::from_secs(30);
/// The end of a process whose liveness probe fails, where the pod says nothing.
const DEFAULT_GRACE: Duration = Duration::from_secs(30);

pub(super) struct Runner {
    shared: Arc<Shared>,
    uid: String,
    pod: Arc<Pod>,
    api: Api<Pod>,
    told: watch::Receiver<Told>,
    folder: PathBuf,
    log: PathBuf,
    volumes: BTreeMap<String, Laid>,
    tokens: Tokens,
    ports: Ports,
    past: Past,
    conditions: Conditions,
    written: Option<Value>,
    silenced: bool,
}

/// One run of the container.
struct Run {
    process: Arc<Process>,
    since: Timestamp,
    readiness: Option<Prober>,
    liveness: Option<Prober>,
}

impl Runner {
    pub(super) fn new(shared: Arc<Shared>, uid: String, pod: Arc<Pod>, told: watch::Receiver<Told>) -> Self {
        let api = Api::namespaced(shared.client.clone(), &pod.namespace().unwrap_or_default());
        let (folder, log) = (shared.dir.join(&uid), shared.dir.join(format!("{}.log", pod.name_any())));
        Self {
            shared,
            uid,
            pod,
            api,
            told,
            folder,
            log,
            volumes: BTreeMap::new(),
            tokens: Tokens::default(),
            ports: Ports::default(),
            past: Past::default(),
            conditions: Conditions::default(),
            written: None,
            silenced: false,
        }
    }

    /// Until the pod is gone.
    pub(super) async fn run(mut self) {
        let mut told = self.told.clone();
        tokio::select! {
            _ = told.wait_for(|told| !matches!(told, Told::Wanted(_))) => {}
            never = self.live() => match never {},
        }
        self.end().await;
        self.shared.table().pods.remove(&self.uid);
        // What cannot be removed goes with the test bed.
        let _ = fs::remove_dir_all(&self.folder);
    }

    async fn live(&mut self) -> Infallible {
        self.bind().await;
        let image = containers(&self.pod).next().and_then(|container| container.image.clone()).unwrap_or_default();
        let own = match Image::of(&image) {
            Image::Own(own) => own,
            Image::Foreign => return self.stay(Doing::Runs { since: Timestamp::now(), ready: true }).await,
            Image::Missing => {
                let message = format!("Back-off pulling image \"{image}\": not found");
                return self.stay(Doing::Waits { reason: "ImagePullBackOff", message }).await;
            }
        };
        let played = Played {
            namespace: self.pod.namespace().unwrap_or_default(),
            name: self.pod.name_any(),
            binary: own.binary,
            process: None,
            restarts: 0,
            ready: false,
            silenced: false,
            ports: BTreeMap::new(),
            volumes: BTreeMap::new(),
            log: self.log.clone(),
        };
        {
            let mut table = self.shared.table();
            if !table.closed {
                table.pods.insert(self.uid.clone(), played);
            }
        }
        self.serve(own).await
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
            let asked = self.api.create_subresource::<_, Value>("binding", &name, &params, &binding);
            match timeout(PATIENCE, asked).await {
                Ok(Ok(_)) => return,
                // Bound already: its answer was lost.
                Ok(Err(kube::Error::Api(status))) if status.is_conflict() => return,
                // Gone: the watch will say so.
                Ok(Err(_)) | Err(_) => sleep(RETRY).await,
            }
        }
    }

    /// Says one thing for ever.
    async fn stay(&mut self, doing: Doing) -> Infallible {
        loop {
            self.say(&doing).await;
            sleep(RETRY).await;
        }
    }

    /// Starts the program again and again.
    async fn serve(&mut self, own: Own) -> Infallible {
        let mut pause = Duration::ZERO;
        loop {
            let mut run = self.begin(own).await;
            let began = Instant::now();
            let ended = self.attend(&mut run).await;
            let restarts = self.past.restarts + 1;
            self.past = Past { restarts, last: Some(ended) };
            self.shared.note(&self.uid, |pod| {
                (pod.process, pod.ready, pod.silenced, pod.restarts) = (None, false, false, restarts);
            });
            if began.elapsed() >= LONG_RUN {
                pause = Duration::ZERO;
            }
            if !pause.is_zero() {
                let message = format!("back-off {pause:?} restarting failed container of pod {}", self.pod.name_any());
                let until = Instant::now() + pause;
                while Instant::now() < until {
                    self.say(&Doing::Waits { reason: "CrashLoopBackOff", message: message.clone() }).await;
                    sleep(TICK).await;
                }
            }
            pause = (pause * 2).clamp(BACKOFF, BACKOFF_CAP);
        }
    }

    /// Starts the program as soon as everything is there.
    async fn begin(&mut self, own: Own) -> Run {
        loop {
            match self.try_begin(own).await {
                Ok(run) => return run,
                Err(unready) => {
                    let doing = Doing::Waits { reason: unready.reason(), message: unready.to_string() };
                    self.say(&doing).await;
                    sleep(RETRY).await;
                }
            }
        }
    }

    async fn try_begin(&mut self, own: Own) -> Result<Run, Unready> {
        self.hear();
        let pod = self.pod.clone();
        let container = only_container(&pod)?;
        let given = self.fill(Some(container)).await?;
        let mounts = container.volume_mounts.iter().flatten().map(|mount| {
            let plain = mount.sub_path.is_none() && mount.sub_path_expr.is_none();
            let laid = self.volumes.get(&mount.name).filter(|_| plain);
            let laid = laid.ok_or_else(|| Unready::Unknown(format!("the mount {}", mount.mount_path)))?;
            Ok((mount.mount_path.clone(), laid.folder().to_path_buf()))
        });
        let mounts = mounts.collect::<Result<_, Unready>>()?;
        let known = own.listeners.iter().map(|(_, port)| *port).collect();
        let (rewrite, api) = (Rewrite { mounts, known }, self.shared.api);
        let maker = Maker { pod: &pod, container, own, given: &given, rewrite: &rewrite, api };
        let start = maker.make(&mut self.ports)?;
        let now = Instant::now();
        let ports = &mut self.ports;
        let mut probe = |probe: Option<&k8s_openapi::api::core::v1::Probe>, quick| {
            probe.map(|probe| Prober::new(probe, container, ports, quick, now)).transpose()
        };
        let readiness = probe(container.readiness_probe.as_ref(), true)?;
        let liveness = probe(container.liveness_probe.as_ref(), false)?;
        let binary = self.shared.binaries.get(own.binary).map_err(|error| Unready::Unknown(error.to_string()))?;
        let host = |doing| move |error: std::io::Error| Unready::Host(doing, error);
        fs::create_dir_all(&self.folder).map_err(host("make the pod's folder"))?;
        let program = match own.broken {
            Some(script) => Program::new(pod.name_any(), "/bin/sh", &self.log).args(["-c", script]),
            None => Program::new(pod.name_any(), binary, &self.log).args(start.args),
        };
        let mut program = program.dir(&self.folder).fresh();
        program.env.extend(start.env.into_iter().map(|(name, value)| (name.into(), value.into())));
        let given_ports = self.ports.given().clone();
        self.shared.note(&self.uid, |played| played.ports = given_ports);
        let since = Timestamp::now();
        let launched = self.shared.launch(&self.uid, program);
        let launched = launched.map_err(|error| Unready::Unknown(format!("how to start it: {error}")))?;
        let process = launched.ok_or_else(|| Unready::Unknown("an end of its own".to_owned()))?;
        Ok(Run { process, since, readiness, liveness })
    }

    /// Makes the volumes hold what they should; with a container, also what its variables need is read.
    async fn fill(&mut self, container: Option<&Container>) -> Result<Given, Unready> {
        let (pod, mut needs) = (self.pod.clone(), Needs::default());
        let all = || pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        all().for_each(|volume| volumes::needs(volume, &mut needs));
        container.into_iter().for_each(|container| container::needs(container, &mut needs));
        let round = self.shared.round.load(Ordering::Relaxed);
        let given = needs.read(&self.shared.client, &pod, &mut self.tokens, round).await?;
        let mut folders = BTreeMap::new();
        for volume in all() {
            let filled = volumes::fill(volume, &pod, &given)?;
            let folder = self.folder.join("volumes").join(&volume.name);
            let laid = self.volumes.entry(volume.name.clone()).or_insert_with(|| Laid::new(folder));
            let put = match &filled {
                Filled::Empty => laid.empty(),
                Filled::Files(files) => laid.put(files).map(drop),
            };
            put.map_err(|error| Unready::Host("lay out a volume", error))?;
            folders.insert(volume.name.clone(), laid.folder().to_path_buf());
        }
        self.shared.note(&self.uid, |played| played.volumes = folders);
        Ok(given)
    }

    /// Until the process has ended.
    async fn attend(&mut self, run: &mut Run) -> Ended {
        let mut ready = run.readiness.is_none();
        let mut sync = Instant::now() + SYNC;
        loop {
            match run.process.status() {
                Ok(None) => {}
                Ok(Some(status)) => return self.ended(run, Some(status)),
                Err(_) => return self.ended(run, None),
            }
            if !self.silenced {
                if let Some(prober) = &mut run.readiness {
                    ready = prober.look().await.unwrap_or(false);
                }
                if let Some(prober) = &mut run.liveness
                    && prober.look().await == Some(false)
                {
                    let grace = self.pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
                    let grace = grace.and_then(|grace| u64::try_from(grace).ok()).map(Duration::from_secs);
                    stop(&run.process, grace.unwrap_or(DEFAULT_GRACE)).await;
                    continue;
                }
            }
            if Instant::now() >= sync {
                self.hear();
                // What is gone meanwhile stays as it was, as with a real kubelet; it is tried again.
                let _ = self.fill(None).await;
                self.enforce(&run.process).await;
                sync = Instant::now() + SYNC;
            }
            self.say(&Doing::Runs { since: run.since, ready: ready && !self.silenced }).await;
            sleep(TICK).await;
        }
    }

    /// Freezes the process while NetworkPolicies leave it no way out, if that is asked for.
    async fn enforce(&mut self, process: &Process) {
        let Some(ports) = &self.shared.policies else { return };
        let policies =
            Api::<NetworkPolicy>::namespaced(self.shared.client.clone(), &self.pod.namespace().unwrap_or_default());
        let Ok(Ok(policies)) = timeout(PATIENCE, policies.list(&ListParams::default())).await else { return };
        let silenced = policy::silenced(self.pod.labels(), &policies.items, ports);
        if silenced != self.silenced {
            let signal = if silenced { Signal::Stop } else { Signal::Cont };
            // One that is gone is seen at the next look.
            let _ = process.signal(signal);
            self.silenced = silenced;
            self.shared.note(&self.uid, |pod| pod.silenced = silenced);
        }
    }

    fn ended(&mut self, run: &Run, status: Option<ExitStatus>) -> Ended {
        self.silenced = false;
        let signal = status.and_then(|status| status.signal());
        let code = status.and_then(|status| status.code()).unwrap_or(128 + signal.unwrap_or_default());
        let container = containers(&self.pod).next();
        let policy = container.and_then(|container| container.termination_message_policy.as_deref());
        let told = policy == Some("FallbackToLogsOnError") && code != 0;
        let message = if told { run.process.tail().lines.join("\n") } else { String::new() };
        Ended { code, signal, message, from: run.since, until: Timestamp::now() }
    }

    /// Takes note of changes of the pod: labels and annotations may.
    fn hear(&mut self) {
        if let Told::Wanted(pod) = &*self.told.borrow_and_update() {
            self.pod = pod.clone();
        }
    }

    /// Writes the status if it changed. What fails is tried again with the next look.
    async fn say(&mut self, doing: &Doing) {
        let status = status(&self.pod, doing, &self.past, &mut self.conditions, Timestamp::now());
        if self.written.as_ref() == Some(&status) {
            return;
        }
        let (ready, restarts) = (matches!(doing, Doing::Runs { ready: true, .. }), self.past.restarts);
        self.shared.note(&self.uid, |pod| (pod.ready, pod.restarts) = (ready, restarts));
        let (name, patch) = (self.pod.name_any(), Patch::Merge(&status));
        let params = PatchParams::default();
        let written = timeout(PATIENCE, self.api.patch_status(&name, &params, &patch)).await;
        if matches!(written, Ok(Ok(_))) {
            self.written = Some(status);
        }
    }

    /// The end that was asked for: the process, then the object.
    async fn end(&mut self) {
        let process = self.shared.table().pods.get(&self.uid).and_then(|pod| pod.process.clone());
        if let Some(process) = process {
            if self.silenced {
                let _ = process.signal(Signal::Cont);
            }
            let mut told = self.told.clone();
            let grace = match *told.borrow() {
                Told::Ending(grace) => Some(grace),
                Told::Wanted(_) | Told::Gone => None,
            };
            if let Some(grace) = grace {
                tokio::select! {
                    () = stop(&process, Duration::from_secs(grace)) => {}
                    _ = told.wait_for(|told| matches!(told, Told::Gone)) => {}
                }
            }
            process.kill();
        }
        let now = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(Preconditions { uid: Some(self.uid.clone()), resource_version: None }),
            ..DeleteParams::default()
        };
        while !matches!(*self.told.borrow(), Told::Gone) {
            match timeout(PATIENCE, self.api.delete(&self.pod.name_any(), &now)).await {
                Ok(Ok(_)) => return,
                // Gone, or another one of that name.
                Ok(Err(kube::Error::Api(status))) if status.is_not_found() || status.is_conflict() => return,
                Ok(Err(_)) | Err(_) => sleep(RETRY).await,
            }
        }
    }
}

/// SIGTERM, then SIGKILL when the time is over.
async fn stop(process: &Process, grace: Duration) {
    // One that is gone needs no signal.
    let _ = process.signal(Signal::Term);
    if process.ended(grace).await.is_err() {
        process.kill();
    }
}

/// The one container, of a pod in which there is nothing that is not played.
fn only_container(pod: &Pod) -> Result<&Container, Unready> {
    let unknown = |what: &str| Err(Unready::Unknown(what.to_owned()));
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
