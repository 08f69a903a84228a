//! The receiver's process: builds the components and runs them until a signal or a failure. They work for the shards that this
//! replica holds (`sharded`).

mod build;
pub mod changes;
mod counters;
mod open_files;
mod registry;
mod sharded;
mod signals;
mod workers;

use std::{future::pending, net::SocketAddr, process, sync::Arc, thread, time::Duration};

use anyhow::{Context as _, Result, anyhow};
use arc_swap::ArcSwap;
use build::AgentPorts;
use changes::ShardHandover;
use futures::future::BoxFuture;
use kube::Client;
use open_files::OpenFiles;
use rustls::ServerConfig;
use sharded::{Followers, Held, OwnerParts, Ownership};
use signals::Signals;
use tidewatch_api::identity::Instance;
use tidewatch_cluster::leader::{FleetRole, WriteFence};
use tidewatch_fleet::{Shares, table::RuntimeTable};
use tidewatch_gateway::{
    ListenError,
    admin::{self, ActiveFleet, FleetHandle},
    ports::{Gateway, Service, relayed::RelayedHandlers, v2::V2Adapter},
    probes::{self, MetricsPage},
    relay::{Answers, ReplicaSettings},
};
use tidewatch_kit::readiness::{Pending, Readiness};
#[cfg(feature = "otlp")]
use tidewatch_kit::trace::Exporter;
use tidewatch_modules::forward;
use tidewatch_trust::TlsState;
use tokio::{
    runtime::{self, Runtime as Executor},
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use workers::{Kymas, Manifests, Workers};

use crate::{config::Config, telemetry};

pub use counters::described as metrics;
pub use sharded::ShardHolders;

/// After a signal, time for running reconciles and open connections to end.
const DRAIN: Duration = Duration::from_secs(20);
/// Time after which the shards have been divided among replicas that started together: before it, few bodies of cached
/// objects would be dropped that an acquisition does not fetch again.
const REDUCE_AFTER: Duration = Duration::from_secs(60);
/// At the end, time for responses of the probes and the admin listener, and for blocking tasks of each executor.
const LAST_RESPONSES: Duration = Duration::from_secs(1);

/// Future that listens on a port, on the executor that polls it.
type Binding<H> = BoxFuture<'static, Result<Gateway<H>, ListenError>>;

/// Task of a component; returns its name when it ends.
type Task = BoxFuture<'static, &'static str>;

/// Runs the receiver until SIGTERM or SIGINT.
///
/// # Errors
/// A component could not be built, one that runs forever ended, or the only shard was lost.
pub fn run(config: Config) -> Result<()> {
    telemetry::init_logs(&config.log)?;
    let open_files = OpenFiles::raise();
    // Separate executors, so that reconciles never delay responses, and CPU time is attributable by thread name.
    let gateway = executor("gateway", config.capacity.threads())?;
    let threads = thread::available_parallelism().map_or(2, usize::from);
    let reconcile = executor("reconcile", threads)?;
    let enrolment = executor("enrolment", 1)?;
    let ended = reconcile.block_on(serve(config, open_files, Executors { gateway: &gateway, enrolment: &enrolment }));
    for executor in [reconcile, gateway, enrolment] {
        match &ended {
            Ok(()) => executor.shutdown_timeout(LAST_RESPONSES),
            // After a failure nothing is drained: another receiver may be active already.
            Err(_) => executor.shutdown_background(),
        }
    }
    ended
}

fn executor(name: &str, threads: usize) -> Result<Executor> {
    let mut builder = runtime::Builder::new_multi_thread();
    builder.worker_threads(threads).thread_name(name).enable_all();
    builder.build().with_context(|| format!("build the executor {name}"))
}

/// Executors of the listeners. Enrolment has a single thread of its own, since its clients are unauthenticated.
#[derive(Clone, Copy)]
struct Executors<'a> {
    gateway: &'a Executor,
    enrolment: &'a Executor,
}

/// State of the process from its start on.
struct Process {
    config: Config,
    open_files: OpenFiles,
    instance: Instance,
    replica: ReplicaSettings,
    /// Client of the Leases alone, without a write fence.
    leases: Client,
    pki: tidewatch_trust::Metrics,
    tls_state: TlsState,
    metrics: MetricsPage,
    readiness: Readiness,
    fleet: FleetHandle,
    /// Keeps `shards` pending in `/readyz` until this replica serves agents.
    serves: Pending,
    /// Tasks of the whole fleet run while this process holds this role.
    role: FleetRole,
}

async fn serve(config: Config, open_files: OpenFiles, executors: Executors<'_>) -> Result<()> {
    #[cfg(feature = "otlp")]
    let traces = config.otlp_endpoint.as_deref().map(|to| Exporter::start("tidewatch-receiver", to)).transpose()?;
    let mut signals = Signals::listen()?;
    let instance = build::instance()?;
    let replica = config.replicas.settings().context("read the flags of the replicas")?;
    let readiness = Readiness::default();
    let access = build::kube_config(config.kubeconfig.as_deref()).await?;
    // Certificates are issued, and the first receiver creates the CA, before any shard is held.
    let client =
        tidewatch_cluster::client::client(&access, &WriteFence::default(), tidewatch_cluster::Metrics::default())
            .context("build the client of the control plane")?;
    let pki = tidewatch_trust::Metrics::default();
    let (tls_state, reloader) = build::tls_state(&config, client.clone(), pki.clone()).await?;
    // The Leases have a client of their own, which neither a fence nor other requests hold up.
    let leases = tidewatch_cluster::client::lease_client(access).context("build the client of the Leases")?;
    let metrics = MetricsPage::new(ArcSwap::from_pointee(probes::registry()));
    let fleet = FleetHandle::new(instance);
    let serves = readiness.pending("shards");
    let role = FleetRole::released();
    let tls = tls_state.tokens.clone();
    let process = Process {
        config,
        open_files,
        instance,
        replica,
        leases,
        pki,
        tls_state,
        metrics,
        readiness,
        fleet,
        serves,
        role,
    };

    let mut listeners = JoinSet::new();
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    listeners.spawn(async move { stopped.run_until_cancelled(reloader.run()).await.unwrap_or("certificate reloader") });
    start_status_listeners(&process, tls, client, &stop, &mut listeners).await?;
    let ended = tokio::select! {
        error = unexpected_end(&mut listeners) => Err(error),
        ended = run_components(process, executors, &mut signals) => ended,
    };
    stop.cancel();
    let _ = timeout(LAST_RESPONSES, async { while listeners.join_next().await.is_some() {} }).await;
    #[cfg(feature = "otlp")]
    if let Some(traces) = traces {
        // A failure is a panic, which is logged already.
        let _ = tokio::task::spawn_blocking(|| traces.shutdown()).await;
    }
    ended
}

/// Starts the probes and the admin listener, which serve a standby as well.
async fn start_status_listeners(
    process: &Process,
    tls: Arc<ArcSwap<ServerConfig>>,
    kcp: Client,
    stop: &CancellationToken,
    tasks: &mut JoinSet<&'static str>,
) -> Result<()> {
    let Process { config, metrics, readiness, fleet, .. } = process;
    let page = probes::bind(config.metrics_address, metrics.clone(), readiness.clone()).await?;
    let probes = match config.probe_address {
        Some(address) => Some(probes::bind_probes(address, readiness.clone()).await?),
        None => None,
    };
    let admin = admin::bind(&config.admin, tls, kcp, fleet.clone()).await?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        pid = process::id(),
        metrics_address = %page.address(),
        admin_address = %admin.address(),
        namespace = config.namespace,
        shards = process.replica.shards.get(),
        lease_seconds = config.lease.lease_duration.as_secs(),
        "Receiver started"
    );
    let servers = [("metrics", Some(page)), ("probes", probes), ("admin listener", Some(admin))];
    for (name, server) in servers.into_iter().filter_map(|(name, server)| Some((name, server?))) {
        let stop = stop.clone();
        tasks.spawn(async move {
            server.run(stop).await;
            name
        });
    }
    Ok(())
}

/// Waits for the first task that ends, although all of them run forever.
async fn unexpected_end(tasks: &mut JoinSet<&'static str>) -> anyhow::Error {
    match tasks.join_next().await {
        Some(Ok(task)) => anyhow!("task ended unexpectedly: {task}"),
        Some(Err(error)) => anyhow::Error::new(error).context("a task of the receiver failed"),
        None => anyhow!("all tasks of the receiver ended"),
    }
}

/// Builds and runs the components, and drains them after a signal.
async fn run_components(process: Process, executors: Executors<'_>, signals: &mut Signals) -> Result<()> {
    let built = build::build(&process, executors.gateway.handle()).await?;
    let Process { config, leases, metrics, readiness, fleet: handle, serves, role, instance, .. } = process;
    let changes::Components { fleet, manifest_queue, .. } = built.watches.components.clone();
    let sharding = built.sharding;
    metrics.store(Arc::new(built.metrics));
    let shutdown = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let mut listeners = Listeners { executors, stop: shutdown.clone(), tasks: JoinSet::new() };
    let service = AgentService {
        ports: built.ports,
        answers: built.answers,
        handle,
        active: ActiveFleet {
            table: fleet.clone(),
            rotations: built.rotations,
            replicas: built.replicas,
            holders: sharding.holders.holders.clone(),
            shards: sharding.holders.shards,
        },
    };
    let mut relay_address = None;
    // Without a relay only the active replica listens, so that no event is accepted by one that does not reconcile.
    let standby = if sharding.is_alone() {
        Some(service)
    } else {
        let handlers = service.begin(&mut listeners).await?;
        if let Some(binding) = sharding.bind(&config, handlers, built.counters.relay_port) {
            relay_address = Some(listeners.start(executors.gateway, binding, "relay port").await?.0);
        }
        None
    };
    let handover = built.watches.start(&readiness, built.synced.clone(), &mut tasks);
    for task in built.tasks {
        tasks.spawn(task);
    }
    tasks.spawn(forward::run(fleet.clone(), built.forward, shutdown.clone()));
    let mut workers = Workers::new(Shares::new(built.counters.shares));
    let kymas = Kymas { context: built.context.clone(), fleet: fleet.clone(), manifests: manifest_queue.clone() };
    workers.start(kymas, config.concurrency, &built.synced, &shutdown);
    let manifests = Manifests { context: built.manifest_context, queue: manifest_queue };
    workers.start(manifests, config.concurrency, &built.synced, &shutdown);
    let acquired = built.acquired;
    let context = built.context;
    let followers = Followers {
        handover: handover.clone(),
        role,
        enqueue: Box::new(move |kymas| acquired.enqueue(kymas)),
        forget: Box::new(move |kyma| context.forget(kyma)),
        held: watch::Sender::new(Held::default()),
        serves_shard: built.serves_shard,
    };
    let owner = OwnerParts { config: &config, leases, instance, relay_address, synced: built.synced };
    let mut ownership = sharding.start(owner, followers, built.counters.shards);
    tracing::info!(
        relay_address = relay_address.map(tracing::field::display),
        kyma_selector = config.kyma_selector,
        concurrency = config.concurrency,
        event_threads = config.capacity.threads(),
        heartbeat_seconds = config.heartbeat.as_secs(),
        paused = config.pause,
        "Components run"
    );
    let running = Running {
        signals,
        tasks: &mut tasks,
        listeners: &mut listeners,
        workers: &mut workers,
        ownership: &mut ownership,
    };
    let on_served = move || {
        tracing::info!("Receiver is active");
        built.counters.active.set(1);
        serves.done();
    };
    let ended = running.serve(standby, on_served, handover).await;
    tracing::info!("Draining");
    // Workers and listeners go on until the other replicas hold the shards, also after another task has failed.
    ownership.leave().await;
    shutdown.cancel();
    if timeout(DRAIN, workers.drained()).await.is_err() {
        tracing::warn!("Reconciles exceeded the drain deadline");
    }
    // Connections of the listeners have shorter deadlines of their own.
    let _ = timeout(DRAIN, async { while listeners.tasks.join_next().await.is_some() {} }).await;
    tasks.shutdown().await;
    ended
}

/// What runs until a signal or a failure.
struct Running<'a, 'b> {
    signals: &'a mut Signals,
    tasks: &'a mut JoinSet<&'static str>,
    listeners: &'a mut Listeners<'b>,
    workers: &'a mut Workers,
    ownership: &'a mut Ownership,
}

impl Running<'_, '_> {
    /// Runs until a signal or a failure. Begins the service of a standby when the shard is claimed, and calls `on_served` when
    /// agents are served.
    async fn serve(
        mut self,
        standby: Option<AgentService>,
        on_served: impl FnOnce(),
        handover: ShardHandover,
    ) -> Result<()> {
        if let Some(service) = standby {
            let is_claimed = self.ownership.is_claimed();
            tokio::select! {
                ended = self.ended() => return ended,
                () = is_claimed => {}
            }
            service.begin(self.listeners).await?;
        }
        let is_complete = self.ownership.is_complete();
        tokio::select! {
            ended = self.ended() => return ended,
            () = is_complete => on_served(),
        }
        self.tasks.spawn(async move {
            sleep(REDUCE_AFTER).await;
            handover.reduce_others();
            pending().await
        });
        self.ended().await
    }

    /// Waits for a signal, or for a failure. Cancel safe.
    async fn ended(&mut self) -> Result<()> {
        let listeners = &mut self.listeners.tasks;
        tokio::select! {
            () = self.signals.shutdown() => Ok(()),
            error = unexpected_end(self.tasks) => Err(error),
            error = unexpected_end(listeners), if !listeners.is_empty() => Err(error),
            error = self.workers.failed() => Err(error),
            error = self.ownership.ended() => Err(error),
        }
    }
}

/// What serves agents and operators.
struct AgentService {
    ports: AgentPorts,
    answers: Answers,
    handle: FleetHandle,
    active: ActiveFleet,
}

impl AgentService {
    /// Listens on the ports of the agents. Returns the handlers of their requests.
    async fn begin(self, listeners: &mut Listeners<'_>) -> Result<RelayedHandlers<RuntimeTable, V2Adapter>> {
        self.handle.activate(self.active);
        let AgentPorts { events, v2, enrolment } = self.ports;
        let Executors { gateway, enrolment: enrolment_executor } = listeners.executors;
        let (event_address, events) = listeners.start(gateway, events, "gateway").await?;
        let (v2_address, v2) = match v2 {
            Some(v2) => Some(listeners.start(gateway, v2, "gateway of contract v2").await?),
            None => None,
        }
        .unzip();
        let (enrolment_address, enrolment) = match enrolment {
            Some(enrolment) => Some(listeners.start(enrolment_executor, enrolment, "enrolment port").await?),
            None => None,
        }
        .unzip();
        tracing::info!(
            %event_address,
            v2_address = v2_address.map(tracing::field::display),
            enrolment_address = enrolment_address.map(tracing::field::display),
            "Receiver listens"
        );
        Ok(RelayedHandlers { events, v2, enrolment, answers: self.answers })
    }
}

/// Listeners that run, each on its executor, with a task that ends when it ends.
struct Listeners<'a> {
    executors: Executors<'a>,
    stop: CancellationToken,
    tasks: JoinSet<&'static str>,
}

impl Listeners<'_> {
    /// Starts a listener; returns its address and the handler of its requests.
    async fn start<S: Service>(
        &mut self,
        executor: &Executor,
        binding: Binding<S>,
        name: &'static str,
    ) -> Result<(SocketAddr, Arc<S>)> {
        let bound = executor.spawn(binding).await.with_context(|| format!("start the {name}"))??;
        let address = bound.address();
        let handler = bound.service().clone();
        let serving = executor.spawn(bound.run(self.stop.clone()));
        self.tasks.spawn(async move {
            // A panic of the accept loop ends the process as its return does.
            let _ = serving.await;
            name
        });
        Ok((address, handler))
    }
}
