//! The receiver's process: builds the components of an active receiver and runs them until a signal or a failure, once it holds
//! the Lease, or at once as a replica among others (`sharded`).

mod build;
pub mod changes;
mod counters;
mod open_files;
mod registry;
mod sharded;
mod signals;
mod task;
mod workers;

use std::{future, net::SocketAddr, process, sync::Arc, thread, time::Duration};

use anyhow::{Context as _, Result, anyhow};
use arc_swap::ArcSwap;
use kube::Client;
use open_files::OpenFiles;
use rustls::ServerConfig;
use sharded::{Followers, Ownership, ProcessParts, Replica, Sharding};
use signals::Signals;
use tidewatch_api::identity::Instance;
use tidewatch_cluster::leader::{self, FleetRole, LeaderElector, WriteFence};
use tidewatch_gateway::{
    admin::{self, ActiveFleet, FleetHandle},
    metrics_page::{Metrics, MetricsPage},
    ports::{Service, relayed::RelayedHandlers},
    probes,
};
use tidewatch_kit::readiness::{Pending, Readiness};
#[cfg(feature = "otlp")]
use tidewatch_kit::trace::Exporter;
use tidewatch_modules::forward;
use tidewatch_trust::TlsState;
use tokio::{
    runtime::{self, Runtime as Executor},
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use workers::{Kymas, Manifests, Workers};

use crate::{config::Config, telemetry};

pub use counters::described as metrics;
pub use sharded::ShardHolders;

/// After a signal, time for running reconciles and open connections to end.
const DRAIN: Duration = Duration::from_secs(20);
/// At the end, time for responses of the probes and the admin listener, and for blocking tasks of each executor.
const LAST_RESPONSES: Duration = Duration::from_secs(1);

/// Runs the receiver until SIGTERM or SIGINT.
///
/// # Errors
/// A component could not be built, one that runs forever ended, or the Lease was lost.
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

/// State of the process, before and after it becomes active.
struct Process {
    config: Config,
    open_files: OpenFiles,
    instance: Instance,
    fence: WriteFence,
    lease: leader::Metrics,
    pki: tidewatch_trust::Metrics,
    tls_state: TlsState,
    metrics: MetricsPage,
    readiness: Readiness,
    fleet: FleetHandle,
    /// Keeps `lease` pending in `/readyz` until this receiver is active and has registered its caches as pending.
    standby: Pending,
    /// Tasks of the whole fleet run while this process holds this role.
    role: FleetRole,
}

async fn serve(config: Config, open_files: OpenFiles, executors: Executors<'_>) -> Result<()> {
    #[cfg(feature = "otlp")]
    let traces = config.otlp_endpoint.as_deref().map(|to| Exporter::start("tidewatch-receiver", to)).transpose()?;
    let mut signals = Signals::listen()?;
    let instance = build::instance()?;
    let replica = config.replicas.replica().context("read the flags of the replicas")?;
    // It stays closed in a replica among others: each write there needs the fence of a shard or of the fleet role.
    let fence = WriteFence::closed();
    let lease = leader::Metrics::default();
    let readiness = Readiness::default();
    let access = build::kube_config(config.kubeconfig.as_deref()).await?;
    let client = tidewatch_cluster::client::client(&access, &WriteFence::default())
        .context("build the client of the control plane")?;
    let registry = config.registry.settings()?;
    tidewatch_oci::tls::roots(registry.ca_file.as_ref()).context("read the roots of the registry's certificate")?;
    registry
        .component_keys
        .as_deref()
        .map(tidewatch_oci::key_folder::keys)
        .transpose()
        .context("read the component keys")?;
    // Opened before the Lease is acquired, so that defects of files or of the CA show at start and not at a take-over.
    // The first receiver creates the CA.
    let pki = tidewatch_trust::Metrics::default();
    // Requests for certificates of different replicas do not affect each other.
    let requests = if replica.is_some() { WriteFence::default() } else { fence.clone() };
    let fenced = tidewatch_cluster::client::client(&access, &requests).context("build the client of cert-manager")?;
    let (tls_state, reloader) = build::tls_state(&config, client.clone(), fenced, pki.clone()).await?;
    build::check_v2_files(&config, &pki)?;
    // The Lease has a client of its own, which neither the fence nor other requests hold up.
    let own = tidewatch_cluster::client::lease_client(access).context("build the client of the Lease")?;
    let mut metrics = Metrics::new();
    lease.register_in(metrics.tidewatch());
    pki.register_in(metrics.tidewatch());
    let metrics = MetricsPage::new(ArcSwap::from_pointee(metrics));
    let fleet = FleetHandle::new(instance);
    let standby = readiness.pending("lease");
    let replica = replica.map(|settings| Replica::new(settings, own.clone(), &readiness, lease.clone()));
    let role = if replica.is_some() { FleetRole::released() } else { FleetRole::held(fence.clone()) };
    let tls = tls_state.tokens.clone();
    let process = Process {
        config,
        open_files,
        instance,
        fence,
        lease,
        pki,
        tls_state,
        metrics,
        readiness,
        fleet,
        standby,
        role,
    };

    let mut listeners = JoinSet::new();
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    listeners.spawn(async move { stopped.run_until_cancelled(reloader.run()).await.unwrap_or("certificate reloader") });
    start_status_listeners(&process, tls, client, &stop, &mut listeners).await?;
    let ended = match replica {
        Some(replica) => tokio::select! {
            error = unexpected_end(&mut listeners) => Err(error),
            ended = run_active(process, executors, &mut signals, Some(replica)) => ended,
        },
        None => run_alone(process, executors, &mut signals, &mut listeners, own).await?,
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

/// Runs as the only active receiver: waits for the Lease, and releases it after all work has ended.
///
/// # Errors
/// The Lease was lost, and nothing may be drained. The inner result is the end of a receiver that stopped in order.
async fn run_alone(
    process: Process,
    executors: Executors<'_>,
    signals: &mut Signals,
    listeners: &mut JoinSet<&'static str>,
    client: Client,
) -> Result<Result<()>> {
    let Process { config, instance, fence, lease, .. } = &process;
    let fence = fence.clone();
    let mut elector =
        LeaderElector::new(client, &config.namespace, &config.lease, *instance, fence.clone(), lease.clone());
    let ended = tokio::select! {
        () = signals.shutdown() => Ok(()),
        error = unexpected_end(listeners) => Err(error),
        () = elector.acquire() => {
            // The guard is a thread: even if all other threads hang, it ends the process before another receiver can
            // become active.
            let guarded = fence.guard(|| {
                tracing::error!("Lease expired, exiting at once");
                process::exit(1);
            });
            guarded.context("start the guard of the Lease")?;
            tokio::select! {
                // Drops everything at once, pending requests included; neither drains nor releases the Lease.
                lost = elector.hold() => return Err(lost).context("this receiver lost the Lease"),
                error = unexpected_end(listeners) => Err(error),
                ended = run_active(process, executors, signals, None) => ended,
            }
        }
    };
    // Only after all work has ended, because another receiver may become active from here on.
    elector.release().await;
    Ok(ended)
}

/// Starts the probes and the admin listener, which serve candidates as well.
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
        lease = config.lease.lease_name,
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

/// Builds and runs the components of an active receiver, and drains them after a signal. A replica among others owns shards by
/// Leases.
async fn run_active(
    process: Process,
    executors: Executors<'_>,
    signals: &mut Signals,
    replica: Option<Replica>,
) -> Result<()> {
    let Executors { gateway, enrolment } = executors;
    let built = build::build(&process, replica, gateway.handle()).await?;
    let Process { config, metrics, readiness, fleet: handle, standby, role, instance, .. } = process;
    let changes::Components { fleet, manifest_queue, .. } = built.watches.components.clone();
    metrics.store(Arc::new(built.metrics));
    let active = ActiveFleet {
        table: fleet.clone(),
        rotations: built.rotations,
        role: role.clone(),
        peers: built.replicas.peers,
        holders: built.sharding.as_ref().map(Sharding::current_holders),
    };
    handle.activate(active, &built.replicas.responders);

    let shutdown = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let mut gateways = JoinSet::new();
    let stop = &shutdown;
    let listening = &mut gateways;
    let (event_address, events) = start_listener(gateway, built.gateway, "gateway", stop, listening).await?;
    let (v2_address, v2) = match built.v2 {
        Some(v2) => Some(start_listener(gateway, v2, "gateway of contract v2", stop, listening).await?),
        None => None,
    }
    .unzip();
    let (enrolment_address, enrolments) = match built.enrolment {
        Some(enrolments) => Some(start_listener(enrolment, enrolments, "enrolment port", stop, listening).await?),
        None => None,
    }
    .unzip();
    let replica = match built.sharding {
        Some(sharding) => {
            let handlers = RelayedHandlers { events, v2, enrolment: enrolments, answers: built.answers };
            let binding = sharding.bind(&config, handlers, built.relay_port);
            let (address, _) = start_listener(gateway, binding, "relay port", stop, listening).await?;
            Some((sharding, address))
        }
        None => None,
    };
    let relay_address = replica.as_ref().map(|(_, address)| *address);
    let handover = built.watches.start(&readiness, built.synced.clone(), &mut tasks);
    for task in built.tasks {
        tasks.spawn(task);
    }
    tasks.spawn(forward::run(fleet.clone(), built.forward, shutdown.clone()));
    // The caches are pending now.
    standby.done();
    let mut workers = Workers::new(built.shares);
    let kymas = Kymas { context: built.context.clone(), fleet: fleet.clone(), manifests: manifest_queue.clone() };
    workers.start(kymas, config.concurrency, &built.synced, &shutdown);
    let manifests = Manifests { context: built.manifest_context, queue: manifest_queue };
    workers.start(manifests, config.concurrency, &built.synced, &shutdown);
    let mut ownership = match replica {
        Some((sharding, address)) => {
            let acquired = built.acquired;
            let context = built.context;
            let followers = Followers {
                handover,
                role,
                enqueue: Box::new(move |kymas| acquired.enqueue(kymas)),
                forget: Box::new(move |kyma| context.forget(kyma)),
            };
            let process = ProcessParts { instance, relay_address: address, synced: built.synced };
            Some(sharding.start(&config, process, followers, built.ownership, &mut tasks)?)
        }
        None => None,
    };
    tracing::info!(
        %event_address,
        v2_address = v2_address.map(tracing::field::display),
        enrolment_address = enrolment_address.map(tracing::field::display),
        relay_address = relay_address.map(tracing::field::display),
        kyma_selector = config.kyma_selector,
        concurrency = config.concurrency,
        event_threads = config.capacity.threads(),
        heartbeat_seconds = config.heartbeat.as_secs(),
        paused = config.pause,
        "Receiver is active"
    );
    let ended = tokio::select! {
        () = signals.shutdown() => Ok(()),
        error = unexpected_end(&mut tasks) => Err(error),
        error = unexpected_end(&mut gateways) => Err(error),
        error = workers.failed() => Err(error),
        error = unexpected_end_of(ownership.as_mut()) => Err(error),
    };
    tracing::info!("Draining");
    if let Some(ownership) = ownership {
        // Workers and listeners go on until the other replicas hold the shards, also after another task has failed.
        ownership.leave().await;
    }
    shutdown.cancel();
    if timeout(DRAIN, workers.drained()).await.is_err() {
        tracing::warn!("Reconciles exceeded the drain deadline");
    }
    // Connections of the listeners have shorter deadlines of their own.
    let _ = timeout(DRAIN, async { while gateways.join_next().await.is_some() {} }).await;
    tasks.shutdown().await;
    ended
}

async fn unexpected_end_of(ownership: Option<&mut Ownership>) -> anyhow::Error {
    match ownership {
        Some(ownership) => ownership.ended().await,
        None => future::pending().await,
    }
}

/// Starts a listener on its executor, with a task that ends when it ends; returns its address and the handler of its requests.
/// Only an active receiver listens, so that no event is accepted by one that does not reconcile.
async fn start_listener<S: Service>(
    executor: &Executor,
    binding: task::Binding<S>,
    name: &'static str,
    shutdown: &CancellationToken,
    tasks: &mut JoinSet<&'static str>,
) -> Result<(SocketAddr, Arc<S>)> {
    let bound = executor.spawn(binding).await.with_context(|| format!("start the {name}"))??;
    let address = bound.address();
    let handler = bound.service().clone();
    let serving = executor.spawn(bound.run(shutdown.clone()));
    tasks.spawn(async move {
        // A panic of the accept loop ends the process as its return does.
        let _ = serving.await;
        name
    });
    Ok((address, handler))
}
