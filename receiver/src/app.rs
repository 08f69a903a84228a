//! Builds the rooms, connects them, and runs them until a signal or a fault.

mod build;
mod workers;

use std::{process, sync::Arc, thread, time::Duration};

use anyhow::{Context as _, Result, bail};
use arc_swap::ArcSwap;
use tokio::{
    runtime::{self, Runtime},
    signal::unix::{SignalKind, signal},
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::{config::Config, gateway::Gateway, hub::Hub, telemetry};

/// The gateway answers in microseconds and never waits for work: two threads carry what one control plane can ask for.
const GATEWAY_THREADS: usize = 2;
/// After a signal: what is at work may end within this time.
const DRAIN: Duration = Duration::from_secs(20);

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
    let ended = reconcile.block_on(serve(config, &gateway));
    reconcile.shutdown_timeout(Duration::from_secs(1));
    gateway.shutdown_timeout(Duration::from_secs(1));
    ended
}

fn runtime(name: &str, threads: usize) -> Result<Runtime> {
    let mut builder = runtime::Builder::new_multi_thread();
    builder.worker_threads(threads).thread_name(name).enable_all();
    builder.build().with_context(|| format!("build the runtime {name}"))
}

async fn serve(config: Config, gateway: &Runtime) -> Result<()> {
    let mut term = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let built = build::build(&config).await?;
    let shutdown = CancellationToken::new();
    let mut tasks = JoinSet::new();

    let (settings, tls, hub, metrics) = (built.gateway, built.tls, built.hub.clone(), built.gateway_metrics);
    let event_address = listen(gateway, settings, tls, hub, metrics, &shutdown, &mut tasks).await?;
    let synced = CancellationToken::new();
    built.follow.start(built.writers, &built.readiness, synced.clone(), &mut tasks);
    let workers = workers::Workers::start(&built.context, &built.hub, config.concurrency, &synced, &shutdown);
    let probes = telemetry::Probes::bind(config.metrics_address, built.metrics, built.readiness).await?;
    let metrics_address = probes.address();
    let stop = shutdown.clone();
    tasks.spawn(async move {
        probes.run(stop).await;
        "probes"
    });
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        pid = process::id(),
        %event_address,
        %metrics_address,
        namespace = config.namespace,
        kyma_selector = config.kyma_selector,
        concurrency = config.concurrency,
        heartbeat_seconds = config.heartbeat_seconds,
        paused = config.pause,
        "Receiver runs"
    );
    let ended = tokio::select! {
        _ = term.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        Some(ended) = tasks.join_next() => match ended {
            Ok(part) => bail!("{part} ended, which it never should"),
            Err(error) => Err(error).context("a part of the receiver failed"),
        },
        error = workers.failed() => Err(error),
    };
    tracing::info!("Receiver drains");
    shutdown.cancel();
    if timeout(DRAIN, workers.drained()).await.is_err() {
        tracing::warn!("Work outlived the drain deadline");
    }
    // What is left (the gateway's last answers, the probes) has deadlines of its own; the watches of KCP end here.
    let orderly = async {
        while let Some(ended) = tasks.join_next().await {
            if matches!(ended, Ok("gateway")) {
                break;
            }
        }
    };
    let _ = timeout(DRAIN, orderly).await;
    tasks.shutdown().await;
    ended
}

/// Starts the gateway on its own runtime; its end is a task of ours.
async fn listen(
    runtime: &Runtime,
    settings: crate::gateway::Settings,
    tls: Arc<ArcSwap<rustls::ServerConfig>>,
    hub: Hub,
    metrics: crate::gateway::Metrics,
    shutdown: &CancellationToken,
    tasks: &mut JoinSet<&'static str>,
) -> Result<std::net::SocketAddr> {
    let bound = runtime.spawn(Gateway::bind(settings, tls, hub, metrics)).await.context("start the gateway")??;
    let (address, stop) = (bound.address(), shutdown.clone());
    let serving = runtime.spawn(bound.run(stop));
    tasks.spawn(async move {
        // A panic of the accept loop ends the process like its return does.
        let _ = serving.await;
        "gateway"
    });
    Ok(address)
}
