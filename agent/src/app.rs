//! Which tasks there are, and how they end: all that should run for ever run until the end is asked for; if one ends
//! before, so does the process, with an error.

use std::{
    io,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};

use thiserror::Error;
use tidewatch_shared::identity::RuntimeId;
#[cfg(feature = "otlp")]
use tidewatch_shared::trace::Exporter;
use tokio::{
    sync::{Semaphore, watch},
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::{
    canary::{LeaseWatch, Renewer, Sightings},
    clock,
    config::{Config, Contract},
    core::Core,
    identity::{Credentials, Current, Files, Keeper},
    kubernetes::{Cluster, Lane},
    link::{Dial, Link, Parts, Poster},
    plan::PlanSource,
    random,
    telemetry::{Guard, Metrics, Readiness, Server, chain},
    watch::{self as watches, Shared},
};

/// A request that is under way when the end is asked for may take this long.
const LAST_REQUEST: Duration = Duration::from_secs(5);
/// Pages of lists that are read at the same time.
const PAGES: usize = 2;

/// Why the agent could not start, or did not go on.
#[derive(Debug, Error)]
pub enum Run {
    /// The API server's address and credentials.
    #[error("the cluster cannot be used")]
    Cluster(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The port of metrics and probes, or that of the status.
    #[error("metrics, probes or status could not be bound")]
    Bind(#[source] io::Error),
    /// `--address-file`.
    #[error("the address could not be written to {path}")]
    AddressFile {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// `--otlp-endpoint`.
    #[cfg(feature = "otlp")]
    #[error("traces cannot be exported")]
    Traces(#[from] tidewatch_shared::trace::Start),
    /// A task that should run for ever.
    #[error("the task {0} has ended")]
    Ended(&'static str),
    /// A task that should run for ever, by a panic.
    #[error("a task has broken off")]
    Broken(#[source] tokio::task::JoinError),
}

/// What everything hangs on.
struct App {
    config: Config,
    cluster: Cluster,
    lane: Lane,
    metrics: Metrics,
    readiness: Readiness,
    sightings: Sightings,
    tasks: JoinSet<&'static str>,
}

/// Runs until `stop` is cancelled.
///
/// # Errors
/// [`Run`].
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), Run> {
    clock::shift(config.clock_offset_seconds);
    #[cfg(feature = "otlp")]
    let traces = config.otlp_endpoint.as_deref().map(|to| Exporter::start("tidewatch-agent", to)).transpose()?;
    let cluster = |error| Run::Cluster(Box::new(error));
    let api = Cluster::load(config.kubeconfig.as_deref()).map_err(cluster)?;
    let lane = api.lane(0).map_err(cluster)?;
    let (metrics, readiness, sightings) = (Metrics::default(), Readiness::default(), Sightings::default());
    let mut app = App { config, cluster: api, lane, metrics, readiness, sightings, tasks: JoinSet::new() };
    let core = Arc::new(OnceLock::new());
    app.serve(core.clone()).await?;
    let credentials = app.keep_identity();
    // What must be done before the agent is of use; each is dropped by whoever has done it.
    let (plan, receiver) = (app.readiness.guard("plan"), app.readiness.guard("receiver"));
    let runtime = tokio::select! {
        runtime = runtime(credentials.clone()) => runtime,
        ended = app.tasks.join_next() => return Err(failure(ended)),
        () = stop.cancelled() => return Ok(()),
    };
    let Some(runtime) = runtime else { return Err(Run::Ended("identity")) };
    tracing::info!(%runtime, receiver = app.config.receiver_url.authority(), "Speaking for a runtime");
    let core = core.get_or_init(|| {
        let Config { max_objects, max_objects_total, .. } = app.config;
        let [cap, total] = [max_objects, max_objects_total].map(|most| usize::try_from(most).unwrap_or(usize::MAX));
        Core::new(runtime.clone(), cap, app.metrics.clone()).bounded(total)
    });
    let interval = watch::Sender::new(app.config.heartbeat());
    app.watch(core, plan, &runtime, interval.subscribe());
    let parts = Parts {
        endpoint: app.config.receiver_url.clone(),
        dial: Dial::tcp(),
        core: core.clone(),
        credentials,
        sightings: app.sightings.clone(),
        interval,
        pending: receiver,
        metrics: app.metrics.clone(),
    };
    let mut link = match app.config.contract {
        Contract::V2 => tokio::spawn(Poster::new(parts).run(stop.clone())),
        Contract::V3 => tokio::spawn(Link::new(parts).run(stop.clone())),
    };
    let ended = tokio::select! {
        ended = app.tasks.join_next() => Err(failure(ended)),
        ended = &mut link => match ended {
            Ok(()) if stop.is_cancelled() => Ok(()),
            Ok(()) => Err(Run::Ended("link")),
            Err(error) => Err(Run::Broken(error)),
        },
        () = stop.cancelled() => {
            // Nothing that waits is lost: whoever starts next lists, and a list is never silent.
            tracing::info!("Ending");
            if timeout(LAST_REQUEST, &mut link).await.is_err() {
                tracing::warn!("The last request was given up");
            }
            Ok(())
        }
    };
    link.abort();
    app.tasks.shutdown().await;
    #[cfg(feature = "otlp")]
    if let Some(traces) = traces {
        // A failure is a panic, which has been told.
        let _ = tokio::task::spawn_blocking(|| traces.end()).await;
    }
    ended
}

/// The runtime that the first credentials name; `None` if none will ever come.
async fn runtime(mut credentials: Current) -> Option<RuntimeId> {
    let first = credentials.wait_for(Option::is_some).await.ok()?;
    first.as_ref().map(|credentials| credentials.runtime.clone())
}

fn failure(ended: Option<Result<&'static str, tokio::task::JoinError>>) -> Run {
    match ended {
        Some(Ok(name)) => Run::Ended(name),
        Some(Err(error)) => Run::Broken(error),
        None => Run::Ended("all"),
    }
}

impl App {
    /// Metrics and probes come first, so that what is pending can be seen from the start.
    async fn serve(&mut self, core: Arc<OnceLock<Core>>) -> Result<(), Run> {
        let (metrics, readiness) = (self.metrics.clone(), self.readiness.clone());
        let bound = Server::bind(self.config.metrics_address, metrics, readiness, core, self.sightings.clone()).await;
        let (server, address) = bound.map_err(Run::Bind)?;
        let (admin, admin_address) = server.admin(self.config.admin_address).await.map_err(Run::Bind)?;
        let Config { receiver_url, namespace, identity_dir, trust_domain, heartbeat_seconds, max_objects, .. } =
            &self.config;
        tracing::info!(metrics_address = %address, %admin_address, receiver = receiver_url.authority(), namespace,
            identity_dir = %identity_dir.display(), %trust_domain, heartbeat_seconds, max_objects,
            version = env!("CARGO_PKG_VERSION"), "Started");
        if let Some(path) = &self.config.address_file {
            let written = std::fs::write(path, address.to_string());
            written.map_err(|error| Run::AddressFile { path: path.clone(), error })?;
        }
        self.tasks.spawn(async move {
            server.run().await;
            "telemetry"
        });
        self.tasks.spawn(async move {
            admin.run().await;
            "admin"
        });
        Ok(())
    }

    fn keep_identity(&mut self) -> Current {
        let files = Files::new(self.config.identity_dir.clone());
        let make = match self.config.contract {
            Contract::V2 => Credentials::v2(),
            Contract::V3 => Credentials::v3(self.config.trust_domain.clone()),
        };
        let (keeper, current) = Keeper::new(files, make, self.readiness.guard("identity"), self.metrics.clone());
        self.tasks.spawn(async move {
            keeper.run().await;
            "identity"
        });
        current
    }

    /// Plan, planned watches, and the canary.
    fn watch(&mut self, core: &Core, pending: Guard, runtime: &RuntimeId, interval: watch::Receiver<Duration>) {
        let (rebuild, rebuilds) = watch::channel(0);
        let shared = Shared {
            pages: Arc::new(Semaphore::new(PAGES)),
            rebuild: rebuilds,
            sightings: self.sightings.clone(),
            namespace: self.config.namespace.as_str().into(),
            metrics: self.metrics.clone(),
        };
        let (publish, plans) = watch::channel(None);
        let namespace = || self.config.namespace.clone();
        let source = PlanSource::new(namespace(), core.clone(), publish, pending, self.metrics.clone());
        let lease = LeaseWatch { namespace: namespace(), sightings: self.sightings.clone() };
        let renewer = Renewer {
            lane: self.lane.clone(),
            namespace: namespace(),
            // A holder of its own for each start: two agents of one runtime can be told apart.
            holder: format!("{runtime}_{:08x}", random::below(1 << 32)),
            interval,
            sightings: self.sightings.clone(),
            rebuild,
            metrics: self.metrics.clone(),
        };
        self.forever("plan", watches::run(self.lane.clone(), shared.clone(), source));
        self.forever("canary watch", watches::run(self.lane.clone(), shared.clone(), lease));
        self.forever("canary", renewer.run());
        let cluster = self.cluster.clone();
        let supervised = watches::supervise(move |slot| cluster.lane(slot), shared, core.clone(), plans);
        self.forever("watches", async {
            if let Err(error) = supervised.await {
                tracing::error!(error = chain(&error), "A watch could not be started");
            }
        });
    }

    fn forever(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(async move {
            task.await;
            name
        });
    }
}
