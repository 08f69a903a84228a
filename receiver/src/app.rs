//! Waits until this receiver is the active one, builds the rooms, connects them, and runs them until a signal or a fault.

mod build;
pub mod changes;
mod counters;
mod enrolment;
mod legacy;
mod signals;
mod workers;

use std::{net::SocketAddr, process, sync::Arc, thread, time::Duration};

use anyhow::{Context as _, Result, anyhow};
use arc_swap::ArcSwap;
use kube::Client;
use rustls::ServerConfig;
#[cfg(feature = "otlp")]
use tidewatch_shared::trace::Exporter;
use tidewatch_shared::{identity::Instance, metrics::MetricDescription};
use tokio::{
    runtime::{self, Runtime},
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::{
    config::Config,
    controllers::forward,
    ingress::{
        admin::{Admin, Fleet},
        gateway::{Bind, Gateway, Service},
    },
    kube::leader::{self, Fence, Seat},
    pki::{self, Standing},
    telemetry::{self, Metrics, Page, Pending, Readiness},
};
use build::Before;
use signals::Signals;

/// The gateway answers in microseconds and never waits for work: two threads carry what one control plane can ask for.
const GATEWAY_THREADS: usize = 2;
/// After a signal: what is at work may end within this time.
const DRAIN: Duration = Duration::from_secs(20);

/// Every metric that an active receiver has.
#[must_use]
pub fn metrics() -> Vec<MetricDescription> {
    counters::described()
}

/// Runs the receiver until it is told to end.
///
/// # Errors
/// What could not be built, or which part ended that never should.
pub fn run(config: Config) -> Result<()> {
    telemetry::init_logs(&config.log)?;
    // Two runtimes, so that reconciles never delay an answer, and so that their cost can be told apart.
    let gateway = runtime("gateway", GATEWAY_THREADS)?;
    let threads = thread::available_parallelism().map_or(2, usize::from);
    let reconcile = runtime("reconcile", threads)?;
    let enrolment = runtime("enrolment", 1)?;
    let ended = reconcile.block_on(serve(config, Ports { gateway: &gateway, enrolment: &enrolment }));
    if ended.is_err() {
        // Nothing of what failed goes on while the rest is waited for; least of all when another receiver is active already.
        gateway.shutdown_background();
        enrolment.shutdown_background();
        reconcile.shutdown_background();
        return ended;
    }
    reconcile.shutdown_timeout(Duration::from_secs(1));
    gateway.shutdown_timeout(Duration::from_secs(1));
    enrolment.shutdown_timeout(Duration::from_secs(1));
    ended
}

fn runtime(name: &str, threads: usize) -> Result<Runtime> {
    let mut builder = runtime::Builder::new_multi_thread();
    builder.worker_threads(threads).thread_name(name).enable_all();
    builder.build().with_context(|| format!("build the runtime {name}"))
}

/// Where ports are served. Whoever enrols is nobody yet, and so gets one thread of its own.
#[derive(Clone, Copy)]
struct Ports<'a> {
    gateway: &'a Runtime,
    enrolment: &'a Runtime,
}

/// What is there from the start to the end, active or not.
struct Frame {
    config: Config,
    fence: Fence,
    lease: leader::Metrics,
    pki: pki::Metrics,
    standing: Standing,
    page: Page,
    readiness: Readiness,
    fleet: Fleet,
    /// Pending until this receiver is active and its caches are named as pending in its place.
    turn: Pending,
}

async fn serve(config: Config, ports: Ports<'_>) -> Result<()> {
    #[cfg(feature = "otlp")]
    let traces = config.otlp_endpoint.as_deref().map(|to| Exporter::start("tidewatch-receiver", to)).transpose()?;
    let mut signals = Signals::listen()?;
    let instance = build::instance()?;
    let (fence, lease, readiness) = (Fence::shut(), leader::Metrics::default(), Readiness::default());
    let access = build::access(config.kubeconfig.as_deref()).await?;
    let client =
        crate::kube::client::client(&access, &Fence::default()).context("build the client of the control plane")?;
    // What is wrong with files or the CA is said now, and not when this receiver has to take over. Whoever is first makes the CA.
    let pki = pki::Metrics::default();
    let (standing, upkeep) = build::standing(&config, client.clone(), pki.clone()).await?;
    // The Lease is read and written on a client of its own, which is never behind the fence or behind work.
    let own = crate::kube::client::client_of_lease(access).context("build the client of the Lease")?;
    let mut seat = Seat::new(own, &config.namespace, &config.lease, instance, fence.clone(), lease.clone());
    let mut metrics = Metrics::new();
    lease.register(metrics.rooms());
    pki.register(metrics.rooms());
    let (page, fleet) = (Page::new(ArcSwap::from_pointee(metrics)), Fleet::new(instance));
    let turn = readiness.pending("lease");
    let tokens = standing.tokens();
    let frame = Frame { config, fence, lease, pki, standing, page, readiness, fleet, turn };

    let mut listeners = JoinSet::new();
    listeners.spawn(upkeep.run());
    show(&frame, tokens, client, &mut listeners).await?;
    let ended = tokio::select! {
        () = signals.ending() => Ok(()),
        part = ended(&mut listeners) => Err(part),
        () = seat.acquire() => {
            // Even if every other thread hangs, this one ends the process before another receiver may begin.
            let guarded = frame.fence.guard(|| {
                tracing::error!("The lease has lapsed; the receiver ends at once");
                process::exit(1);
            });
            guarded.context("start the guard of the lease")?;
            tokio::select! {
                // Everything is dropped as it is, requests that are under way included; nothing is drained or given back.
                lost = seat.hold() => return Err(lost).context("this receiver is not the active one any more"),
                part = ended(&mut listeners) => Err(part),
                worked = work(frame, instance, ports, &mut signals) => worked,
            }
        }
    };
    // Last of all: from here on another one works.
    seat.release().await;
    listeners.shutdown().await;
    #[cfg(feature = "otlp")]
    if let Some(traces) = traces {
        // A failure is a panic, which has been told.
        let _ = tokio::task::spawn_blocking(|| traces.end()).await;
    }
    ended
}

/// Metrics, probes and the admin listener are there from the start, so that a receiver that waits can be seen.
async fn show(
    frame: &Frame,
    tls: Arc<ArcSwap<ServerConfig>>,
    kcp: Client,
    tasks: &mut JoinSet<&'static str>,
) -> Result<()> {
    let Frame { config, page, readiness, fleet, .. } = frame;
    let probes = crate::ingress::probes::Probes::bind(config.metrics_address, page.clone(), readiness.clone()).await?;
    let admin = Admin::bind(&config.admin, tls, kcp, fleet.clone()).await?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        pid = process::id(),
        metrics_address = %probes.address(),
        admin_address = %admin.address(),
        namespace = config.namespace,
        lease = config.lease.lease_name,
        lease_seconds = config.lease.lease_seconds,
        "Receiver started"
    );
    tasks.spawn(async move {
        probes.run(CancellationToken::new()).await;
        "probes"
    });
    tasks.spawn(async move {
        admin.run().await;
        "admin"
    });
    Ok(())
}

/// Waits until a part ended, which none should.
async fn ended(tasks: &mut JoinSet<&'static str>) -> anyhow::Error {
    match tasks.join_next().await {
        Some(Ok(part)) => anyhow!("{part} ended, which it never should"),
        Some(Err(error)) => anyhow::Error::new(error).context("a part of the receiver failed"),
        None => anyhow!("every part has ended"),
    }
}

/// The work of the active receiver: builds the rooms, runs them, and drains them after a signal.
async fn work(frame: Frame, instance: Instance, ports: Ports<'_>, signals: &mut Signals) -> Result<()> {
    let Ports { gateway, enrolment } = ports;
    let Frame { config, fence, lease, pki, standing, page, readiness, fleet, turn } = frame;
    let before = Before { instance, fence: &fence, lease: &lease, standing: &standing, pki: &pki };
    let built = build::build(&config, before).await?;
    let shutdown = CancellationToken::new();
    let (mut tasks, mut gateways) = (JoinSet::new(), JoinSet::new());
    page.store(Arc::new(built.metrics));
    fleet.is_of(built.hub.clone(), built.rotations);

    let (settings, tls, hub, metrics) = (built.gateway, built.tls, built.hub.clone(), built.gateway_metrics);
    let binding = Gateway::bind(settings, tls, hub, metrics);
    let event_address = start(gateway, binding, "gateway", &shutdown, &mut gateways).await?;
    let v2_address = match built.v2 {
        Some(port) => {
            let (binding, files) = port.bind();
            tasks.spawn(files.run());
            Some(start(gateway, binding, "gateway of contract v2", &shutdown, &mut gateways).await?)
        }
        None => None,
    };
    let enrolment_address = match built.enrolment {
        Some(port) => Some(start(enrolment, port.bind(), "enrolment port", &shutdown, &mut gateways).await?),
        None => None,
    };
    let synced = CancellationToken::new();
    built.follow.start(built.writers, &readiness, synced.clone(), &mut tasks);
    tasks.spawn(built.access.run());
    tasks.spawn(built.paths.run(synced.clone()));
    tasks.spawn(built.rotation.run(synced.clone()));
    tasks.spawn(built.record.run(built.client));
    if let Some(agents) = built.agents {
        tasks.spawn(agents.upgrade.run(synced.clone()));
        if let Some(pull) = agents.pull {
            tasks.spawn(pull.run(synced.clone()));
        }
    }
    tasks.spawn(forward::run(built.hub.clone(), built.forward, shutdown.clone()));
    turn.done();
    let workers = workers::Workers::start(&built.context, &built.hub, config.concurrency, &synced, &shutdown);
    tracing::info!(
        %event_address,
        v2_address = v2_address.map(tracing::field::display),
        enrolment_address = enrolment_address.map(tracing::field::display),
        kyma_selector = config.kyma_selector,
        concurrency = config.concurrency,
        heartbeat_seconds = config.heartbeat_seconds,
        paused = config.pause,
        "Receiver runs"
    );
    let ended = tokio::select! {
        () = signals.ending() => Ok(()),
        part = ended(&mut tasks) => Err(part),
        part = ended(&mut gateways) => Err(part),
        error = workers.failed() => Err(error),
    };
    tracing::info!("Receiver drains");
    shutdown.cancel();
    if timeout(DRAIN, workers.drained()).await.is_err() {
        tracing::warn!("Work outlived the drain deadline");
    }
    // The gateways' last answers have deadlines of their own; the watches of KCP end here.
    let _ = timeout(DRAIN, async { while gateways.join_next().await.is_some() {} }).await;
    tasks.shutdown().await;
    ended
}

/// Starts a gateway on its own runtime; its end is a task of ours. Nothing listens before this receiver is active, so that no event is
/// taken by one that does not work.
async fn start<S: Service>(
    runtime: &Runtime,
    binding: impl Future<Output = Result<Gateway<S>, Bind>> + Send + 'static,
    name: &'static str,
    shutdown: &CancellationToken,
    tasks: &mut JoinSet<&'static str>,
) -> Result<SocketAddr> {
    let bound = runtime.spawn(binding).await.with_context(|| format!("start the {name}"))??;
    let (address, stop) = (bound.address(), shutdown.clone());
    let serving = runtime.spawn(bound.run(stop));
    tasks.spawn(async move {
        // A panic of the accept loop ends the process like its return does.
        let _ = serving.await;
        name
    });
    Ok(address)
}
