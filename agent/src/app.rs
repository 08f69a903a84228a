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
    task::{JoinHandle, JoinSet},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::{
    canary::{LeaseWatch, Renewer, Sightings},
    clock,
    config::{Config, Contract, Endpoint, Origin},
    core::Core,
    identity::{
        Credentials, Current, Enroller, Files, Keeper, Renewals, SecretWatch, Standing, Stop, Tools, Vault, errands,
    },
    kubernetes::{Cluster, Lane},
    link::{Dial, Link, Parts, Poster},
    plan::{CurrentSettings, Followed, PlanSource},
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
    /// Flags that say neither files nor a token's file; the command line refuses them too.
    #[error("neither files with an identity nor a token to enrol with are given")]
    Origin,
    /// The ConfigMap names another runtime. What is told is told of one runtime, under its name, in its sequences: the agent has to
    /// start anew.
    #[error("this agent speaks for runtime {known}, and its ConfigMap names {new} now: it has to start anew")]
    OtherRuntime {
        /// The one it speaks for.
        known: RuntimeId,
        /// The one that the ConfigMap names.
        new: RuntimeId,
    },
    /// A task that should run for ever.
    #[error("the task {0} has ended")]
    Ended(&'static str),
    /// A task that should run for ever, by a panic.
    #[error("a task has broken off")]
    Broken(#[source] tokio::task::JoinError),
}

impl Run {
    /// How the process ends: 1, or 3 when it only has to start anew.
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::OtherRuntime { .. } => 3,
            _ => 1,
        }
    }
}

/// What everything hangs on.
struct App {
    config: Config,
    cluster: Cluster,
    lane: Lane,
    metrics: Metrics,
    readiness: Readiness,
    sightings: Sightings,
    standing: Standing,
    /// What all watches share.
    shared: Shared,
    /// Raised to order a rebuild of every watch.
    rebuild: watch::Sender<u64>,
    /// Each ends with the reason why the agent does.
    tasks: JoinSet<Run>,
}

/// What the agent speaks with, and where it finds out for whom.
struct Voice {
    credentials: Current,
    /// Carried by the link, when the agent renews its certificate itself.
    renewals: Option<Renewals>,
    /// What the ConfigMap says, when that is where it stands.
    settings: Option<CurrentSettings>,
}

/// Runs until `stop` is cancelled.
///
/// # Errors
/// [`Run`].
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), Run> {
    clock::shift(config.clock_offset_seconds);
    #[cfg(feature = "otlp")]
    let traces = config.otlp_endpoint.as_deref().map(|to| Exporter::start("tidewatch-agent", to)).transpose()?;
    let mut app = App::new(config)?;
    let core = Arc::new(OnceLock::new());
    app.serve(core.clone()).await?;
    // What must be done before the agent is of use; each is dropped by whoever has done it.
    let (plan, receiver) = (app.readiness.guard("plan"), app.readiness.guard("receiver"));
    let (voice, plans) = app.find_voice(plan)?;
    let runtime = tokio::select! {
        runtime = voice.runtime() => runtime,
        ended = app.tasks.join_next() => return Err(failure(ended)),
        () = stop.cancelled() => return Ok(()),
    };
    let Some(runtime) = runtime else { return Err(Run::Ended("identity")) };
    tracing::info!(%runtime, "Speaking for a runtime");
    let core = core.get_or_init(|| {
        let Config { max_objects, max_objects_total, .. } = app.config;
        let [cap, total] = [max_objects, max_objects_total].map(|most| usize::try_from(most).unwrap_or(usize::MAX));
        Core::new(runtime.clone(), cap, app.metrics.clone()).bounded(total)
    });
    let interval = watch::Sender::new(app.config.heartbeat());
    app.watch(core, plans, &runtime, interval.subscribe());
    let mut link = app.speak(core, voice, interval, receiver, &stop);
    let ended = app.until_the_end(&mut link, &stop).await;
    link.abort();
    app.tasks.shutdown().await;
    #[cfg(feature = "otlp")]
    if let Some(traces) = traces {
        // A failure is a panic, which has been told.
        let _ = tokio::task::spawn_blocking(|| traces.end()).await;
    }
    ended
}

impl Voice {
    /// The runtime that the settings name, or else the first credentials; `None` if neither will ever come.
    async fn runtime(&self) -> Option<RuntimeId> {
        if let Some(settings) = &self.settings {
            let mut settings = settings.clone();
            let first = settings.wait_for(Option::is_some).await.ok()?;
            return first.as_ref().map(|settings| settings.runtime.clone());
        }
        let mut credentials = self.credentials.clone();
        let first = credentials.wait_for(Option::is_some).await.ok()?;
        first.as_ref().map(|credentials| credentials.runtime.clone())
    }
}

fn failure(ended: Option<Result<Run, tokio::task::JoinError>>) -> Run {
    match ended {
        Some(Ok(why)) => why,
        Some(Err(error)) => Run::Broken(error),
        None => Run::Ended("all"),
    }
}

impl App {
    fn new(config: Config) -> Result<Self, Run> {
        let cluster = |error| Run::Cluster(Box::new(error));
        let api = Cluster::load(config.kubeconfig.as_deref(), &config.service_account_dir).map_err(cluster)?;
        let lane = api.lane(0).map_err(cluster)?;
        let (metrics, sightings, rebuild) = (Metrics::default(), Sightings::default(), watch::Sender::new(0));
        let shared = Shared {
            pages: Arc::new(Semaphore::new(PAGES)),
            slow: Arc::new(Semaphore::new(1)),
            rebuild: rebuild.subscribe(),
            sightings: sightings.clone(),
            namespace: config.namespace.as_str().into(),
            metrics: metrics.clone(),
        };
        let (readiness, standing, tasks) = (Readiness::default(), Standing::default(), JoinSet::new());
        Ok(Self { config, cluster: api, lane, metrics, readiness, sightings, standing, shared, rebuild, tasks })
    }

    /// Metrics and probes come first, so that what is pending can be seen from the start.
    async fn serve(&mut self, core: Arc<OnceLock<Core>>) -> Result<(), Run> {
        let (metrics, readiness) = (self.metrics.clone(), self.readiness.clone());
        let (sightings, standing) = (self.sightings.clone(), self.standing.clone());
        let bound = Server::bind(self.config.metrics_address, metrics, readiness, core, sightings, standing).await;
        let (server, address) = bound.map_err(Run::Bind)?;
        let (admin, admin_address) = server.admin(self.config.admin_address).await.map_err(Run::Bind)?;
        let Config { namespace, trust_domain, heartbeat_seconds, max_objects, .. } = &self.config;
        tracing::info!(metrics_address = %address, %admin_address, identity = ?self.config.origin(), namespace,
            %trust_domain, heartbeat_seconds, max_objects, version = env!("CARGO_PKG_VERSION"), "Started");
        if let Some(path) = &self.config.address_file {
            let written = std::fs::write(path, address.to_string());
            written.map_err(|error| Run::AddressFile { path: path.clone(), error })?;
        }
        self.forever("telemetry", server.run());
        self.forever("admin", admin.run());
        Ok(())
    }

    /// The ConfigMap, and an identity from where the flags say.
    fn find_voice(&mut self, pending: Guard) -> Result<(Voice, watch::Receiver<Followed>), Run> {
        let origin = self.config.origin().ok_or(Run::Origin)?;
        let (publish, plans) = watch::channel(Followed::default());
        let (tell, settings) = watch::channel(None);
        let tell = matches!(origin, Origin::Enrolment { .. }).then_some(tell);
        let source = PlanSource::new(self.config.namespace.clone(), publish, tell, pending, self.metrics.clone());
        self.forever("plan", watches::run(self.lane.clone(), self.shared.clone(), source));
        let voice = match origin {
            Origin::Files { folder, receiver } => self.read_files(folder, receiver),
            Origin::Enrolment { token } => self.enrol(token, settings),
        };
        Ok((voice, plans))
    }

    fn read_files(&mut self, folder: PathBuf, receiver: Endpoint) -> Voice {
        let make = match self.config.contract {
            Contract::V2 => Credentials::v2(receiver),
            Contract::V3 => Credentials::v3(self.config.trust_domain.clone(), receiver),
        };
        let (standing, pending, metrics) =
            (self.standing.clone(), self.readiness.guard("identity"), self.metrics.clone());
        let (keeper, credentials) = Keeper::new(Files::new(folder), make, standing, pending, metrics);
        self.forever("identity", keeper.run());
        Voice { credentials, renewals: None, settings: None }
    }

    fn enrol(&mut self, token: PathBuf, settings: CurrentSettings) -> Voice {
        let (secret, stored) = SecretWatch::new(self.config.namespace.clone());
        self.forever("secret", watches::run(self.lane.clone(), self.shared.clone(), secret));
        let (renewals, errands) = errands(self.standing.clone());
        let (enroller, credentials) = Enroller::new(Tools {
            domain: self.config.trust_domain.clone(),
            token,
            dial: Dial::tcp(),
            settings: settings.clone(),
            stored,
            vault: Vault::new(self.lane.clone(), &self.config.namespace),
            errands,
            standing: self.standing.clone(),
            pending: Some(self.readiness.guard("identity")),
            metrics: self.metrics.clone(),
        });
        self.tasks.spawn(async {
            match enroller.run().await {
                Stop::OtherRuntime { known, new } => Run::OtherRuntime { known, new },
                Stop::Alone => Run::Ended("identity"),
            }
        });
        Voice { credentials, renewals: Some(renewals), settings: Some(settings) }
    }

    /// Planned watches, and the canary.
    fn watch(
        &mut self,
        core: &Core,
        plans: watch::Receiver<Followed>,
        runtime: &RuntimeId,
        interval: watch::Receiver<Duration>,
    ) {
        let namespace = || self.config.namespace.clone();
        let lease = LeaseWatch { namespace: namespace(), sightings: self.sightings.clone() };
        let renewer = Renewer {
            lane: self.lane.clone(),
            namespace: namespace(),
            // A holder of its own for each start: two agents of one runtime can be told apart.
            holder: format!("{runtime}_{:08x}", random::below(1 << 32)),
            interval,
            sightings: self.sightings.clone(),
            rebuild: self.rebuild.clone(),
            metrics: self.metrics.clone(),
        };
        self.forever("canary watch", watches::run(self.lane.clone(), self.shared.clone(), lease));
        self.forever("canary", renewer.run());
        let cluster = self.cluster.clone();
        let supervised = watches::supervise(move |slot| cluster.lane(slot), self.shared.clone(), core.clone(), plans);
        self.forever("watches", async {
            if let Err(error) = supervised.await {
                tracing::error!(error = chain(&error), "A watch could not be started");
            }
        });
    }

    /// Events and heartbeats.
    fn speak(
        &self,
        core: &Core,
        voice: Voice,
        interval: watch::Sender<Duration>,
        pending: Guard,
        stop: &CancellationToken,
    ) -> JoinHandle<()> {
        let parts = Parts {
            dial: Dial::tcp(),
            core: core.clone(),
            credentials: voice.credentials,
            sightings: self.sightings.clone(),
            interval,
            pending,
            metrics: self.metrics.clone(),
        };
        match (self.config.contract, voice.renewals) {
            (Contract::V2, _) => tokio::spawn(Poster::new(parts).run(stop.clone())),
            (Contract::V3, None) => tokio::spawn(Link::new(parts).run(stop.clone())),
            (Contract::V3, Some(renewals)) => tokio::spawn(Link::new(parts).renewing(renewals).run(stop.clone())),
        }
    }

    /// Until something that should run for ever does not, or until the end is asked for and the last request is done.
    async fn until_the_end(&mut self, link: &mut JoinHandle<()>, stop: &CancellationToken) -> Result<(), Run> {
        tokio::select! {
            ended = self.tasks.join_next() => Err(failure(ended)),
            ended = &mut *link => match ended {
                Ok(()) if stop.is_cancelled() => Ok(()),
                Ok(()) => Err(Run::Ended("link")),
                Err(error) => Err(Run::Broken(error)),
            },
            () = stop.cancelled() => {
                // Nothing that waits is lost: whoever starts next lists, and a list is never silent.
                tracing::info!("Ending");
                if timeout(LAST_REQUEST, link).await.is_err() {
                    tracing::warn!("The last request was given up");
                }
                Ok(())
            }
        }
    }

    fn forever(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(async move {
            task.await;
            Run::Ended(name)
        });
    }
}
