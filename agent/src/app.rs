//! Wires the agent's tasks and supervises them: tasks that must not end run until shutdown is requested; if one ends
//! earlier, the process ends with an error.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use thiserror::Error;
use tidewatch_api::identity::RuntimeId;
#[cfg(feature = "otlp")]
use tidewatch_kit::trace::Exporter;
use tokio::{
    sync::{Semaphore, SetOnce, watch},
    task::{JoinHandle, JoinSet},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::{
    canary::{CanaryState, LeaseRenewer, LeaseWatch},
    clock,
    config::{Config, Endpoint, IdentityOrigin},
    core::Core,
    identity::{
        CurrentCredentials, Enroller, EnrollerHandle, EnrollerParts, FileReloader, IdentityStatus, IdentityStop,
        SecretWatch, SecretWriter,
    },
    kubernetes::{ApiClient, ClientPool},
    link::{Link, LinkParts},
    plan::PlanSource,
    random,
    receiver::Dialer,
    server::Server,
    settings::CurrentSettings,
    telemetry::{Metrics, Pending, Readiness},
    watch::{self as watches, Discovery, PlanState, WatchContext},
};

/// A request in flight at shutdown may take this long.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// List pages read concurrently by all watches.
const CONCURRENT_PAGES: usize = 2;

/// Large watch lines buffered concurrently by all watches.
const CONCURRENT_LARGE_LINES: usize = 2;

/// Errors that prevent the agent from starting, or end it.
#[derive(Debug, Error)]
pub enum RunError {
    /// Address or credentials of the API server.
    #[error("failed to set up the API server's client")]
    ApiServer(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The listener for metrics and probes, or the admin listener.
    #[error("failed to bind the listener for metrics and probes, or the admin listener")]
    Bind(#[source] io::Error),
    /// `--address-file`.
    #[error("failed to write the bound address to {path}")]
    AddressFile {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        #[source]
        error: io::Error,
    },
    /// `--otlp-endpoint`.
    #[cfg(feature = "otlp")]
    #[error("failed to start the export of traces")]
    Traces(#[from] tidewatch_kit::trace::StartError),
    /// The flags name neither identity files nor a token file; the command line refuses this too.
    #[error("neither identity files nor an enrolment token configured")]
    NoIdentity,
    /// The agent can no longer maintain its own identity.
    #[error(transparent)]
    Identity(#[from] IdentityStop),
    /// A task that must not end has returned.
    #[error("task {0} ended unexpectedly")]
    TaskEnded(&'static str),
    /// A task has panicked.
    #[error("a task panicked")]
    TaskFailed(#[source] tokio::task::JoinError),
}

impl RunError {
    /// Exit code of the process: 1, or 3 if only a restart is needed.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Identity(IdentityStop::OtherRuntime { .. }) => 3,
            _ => 1,
        }
    }
}

/// The agent's components and tasks.
struct App {
    config: Config,
    api_clients: ClientPool,
    api_client: ApiClient,
    metrics: Metrics,
    readiness: Readiness,
    canary_state: CanaryState,
    identity_status: IdentityStatus,
    /// Shared by all watches.
    shared: WatchContext,
    /// Incremented to order a relist of every watch.
    rebuild: watch::Sender<u64>,
    /// Each returns the error that ends the agent.
    tasks: JoinSet<RunError>,
}

/// The identity of the agent and the sources of its runtime ID.
struct IdentityHandles {
    credentials: CurrentCredentials,
    /// The link's end of the channel to the enroller, if the agent renews its certificate itself.
    enroller: Option<EnrollerHandle>,
    /// Settings from the ConfigMap, if the agent enrols.
    settings: Option<CurrentSettings>,
}

/// Runs until `stop` is cancelled.
///
/// # Errors
/// [`RunError`].
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), RunError> {
    clock::set_offset(config.clock_offset_seconds);
    #[cfg(feature = "otlp")]
    let exporter = config.otlp_endpoint.as_deref().map(|to| Exporter::start("tidewatch-agent", to)).transpose()?;
    let mut app = App::new(config)?;
    let shared_core = Arc::new(SetOnce::new());
    // Readiness conditions; the component that fulfils one drops its guard.
    let plan = app.readiness.pending("plan");
    let receiver = app.readiness.pending("receiver");
    app.serve(shared_core.clone()).await?;
    let (identity, plans) = app.start_identity(plan, &shared_core)?;
    let runtime = tokio::select! {
        runtime = identity.runtime() => runtime,
        ended = app.tasks.join_next() => return Err(task_failure(ended)),
        () = stop.cancelled() => return Ok(()),
    };
    let Some(runtime) = runtime else { return Err(RunError::TaskEnded("identity")) };
    tracing::info!(%runtime, "Runtime identified");
    let core = app.config.core(runtime.clone(), app.metrics.clone());
    // Nothing else sets it.
    let _ = shared_core.set(core.clone());
    let interval = watch::Sender::new(app.config.heartbeat());
    app.watch(&core, plans, &runtime, interval.subscribe());
    let mut link = app.start_link(&core, identity, interval, receiver, &stop);
    let ended = app.run_until_stopped(&mut link, &stop).await;
    link.abort();
    app.tasks.shutdown().await;
    #[cfg(feature = "otlp")]
    if let Some(exporter) = exporter {
        // An error is a panic, which has been logged.
        let _ = tokio::task::spawn_blocking(|| exporter.shutdown()).await;
    }
    ended
}

impl IdentityHandles {
    /// The runtime ID from the settings, or else from the first credentials; `None` if neither can arrive any more.
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

fn task_failure(ended: Option<Result<RunError, tokio::task::JoinError>>) -> RunError {
    match ended {
        Some(Ok(error)) => error,
        Some(Err(error)) => RunError::TaskFailed(error),
        None => RunError::TaskEnded("all"),
    }
}

impl App {
    fn new(config: Config) -> Result<Self, RunError> {
        let api_clients = ClientPool::load(config.kubeconfig.as_deref(), &config.service_account_dir);
        let api_clients = api_clients.map_err(|error| RunError::ApiServer(Box::new(error)))?;
        let api_client = api_clients.client(0);
        let metrics = Metrics::default();
        let canary_state = CanaryState::default();
        let rebuild = watch::Sender::new(0);
        let shared = WatchContext {
            pages: Arc::new(Semaphore::new(CONCURRENT_PAGES)),
            large_lines: Arc::new(Semaphore::new(CONCURRENT_LARGE_LINES)),
            slow: Arc::new(Semaphore::new(1)),
            rebuild: rebuild.subscribe(),
            watermarks: canary_state.watermarks(),
            discovery: Discovery::default(),
            namespace: config.namespace.as_str().into(),
            metrics: metrics.clone(),
        };
        let readiness = Readiness::default();
        let identity_status = IdentityStatus::default();
        let tasks = JoinSet::new();
        Ok(Self {
            config,
            api_clients,
            api_client,
            metrics,
            readiness,
            canary_state,
            identity_status,
            shared,
            rebuild,
            tasks,
        })
    }

    /// Serves metrics and probes before anything else starts, so pending conditions are visible from the beginning.
    async fn serve(&mut self, core: Arc<SetOnce<Core>>) -> Result<(), RunError> {
        let metrics = self.metrics.clone();
        let readiness = self.readiness.clone();
        let canary_state = self.canary_state.clone();
        let identity_status = self.identity_status.clone();
        let bound =
            Server::bind(self.config.metrics_address, metrics, readiness, core, canary_state, identity_status).await;
        let (server, address) = bound.map_err(RunError::Bind)?;
        let (admin, admin_address) = server.admin(self.config.admin_address).await.map_err(RunError::Bind)?;
        self.config.announce(address, admin_address);
        if let Some(path) = &self.config.address_file {
            let written = std::fs::write(path, address.to_string());
            written.map_err(|error| RunError::AddressFile { path: path.clone(), error })?;
        }
        self.spawn_critical("telemetry", server.run());
        self.spawn_critical("admin", admin.run());
        Ok(())
    }

    /// Watches the ConfigMap and starts the identity source that the flags select.
    fn start_identity(
        &mut self,
        pending: Pending,
        core: &Arc<SetOnce<Core>>,
    ) -> Result<(IdentityHandles, watch::Receiver<PlanState>), RunError> {
        let origin = self.config.origin().ok_or(RunError::NoIdentity)?;
        let (publish, plans) = watch::channel(PlanState::default());
        let (publish_settings, settings) = watch::channel(None);
        let publish_settings = matches!(origin, IdentityOrigin::Enrolment { .. }).then_some(publish_settings);
        let namespace = self.config.namespace.clone();
        let metrics = self.metrics.clone();
        let source = PlanSource::new(namespace, publish, publish_settings, pending, metrics);
        self.spawn_critical("plan", watches::run(self.api_client.clone(), self.shared.clone(), source));
        let identity = match origin {
            IdentityOrigin::Files { folder, receiver } => self.identity_from_files(folder, receiver),
            IdentityOrigin::Enrolment { token } => self.enrol(token, settings, core.clone()),
        };
        Ok((identity, plans))
    }

    fn identity_from_files(&mut self, folder: PathBuf, receiver: Endpoint) -> IdentityHandles {
        let domain = self.config.trust_domain.clone();
        let identity_status = self.identity_status.clone();
        let pending = self.readiness.pending("identity");
        let metrics = self.metrics.clone();
        let (reloader, credentials) = FileReloader::new(folder, domain, receiver, identity_status, pending, metrics);
        self.tasks.spawn(async { reloader.run().await.into() });
        IdentityHandles { credentials, enroller: None, settings: None }
    }

    fn enrol(&mut self, token: PathBuf, settings: CurrentSettings, core: Arc<SetOnce<Core>>) -> IdentityHandles {
        let (secret, stored) = SecretWatch::new(self.config.namespace.clone());
        self.spawn_critical("secret", watches::run(self.api_client.clone(), self.shared.clone(), secret));
        let (handle, demands) = EnrollerHandle::new(self.identity_status.clone());
        let (enroller, credentials) = Enroller::new(EnrollerParts {
            domain: self.config.trust_domain.clone(),
            token,
            dial: Dialer::tcp(),
            settings: settings.clone(),
            stored,
            secret_writer: SecretWriter::new(self.api_client.clone(), &self.config.namespace),
            demands,
            core,
            identity_status: self.identity_status.clone(),
            pending: Some(self.readiness.pending("identity")),
            metrics: self.metrics.clone(),
        });
        self.tasks.spawn(async { enroller.run().await.into() });
        IdentityHandles { credentials, enroller: Some(handle), settings: Some(settings) }
    }

    /// Starts the planned watches and the canary.
    fn watch(
        &mut self,
        core: &Core,
        plans: watch::Receiver<PlanState>,
        runtime: &RuntimeId,
        interval: watch::Receiver<Duration>,
    ) {
        let namespace = || self.config.namespace.clone();
        let lease = LeaseWatch { namespace: namespace(), canary_state: self.canary_state.clone() };
        let renewer = LeaseRenewer {
            client: self.api_client.clone(),
            namespace: namespace(),
            // The holder is unique per start, so two agents of one runtime are distinguishable.
            holder: format!("{runtime}_{:08x}", random::below(1 << 32)),
            interval,
            canary_state: self.canary_state.clone(),
            rebuild: self.rebuild.clone(),
            metrics: self.metrics.clone(),
        };
        self.spawn_critical("canary watch", watches::run(self.api_client.clone(), self.shared.clone(), lease));
        self.spawn_critical("canary", renewer.run());
        let api_clients = self.api_clients.clone();
        let supervised =
            watches::supervise(move |slot| api_clients.client(slot), self.shared.clone(), core.clone(), plans);
        self.spawn_critical("watches", supervised);
    }

    /// Starts the link, which sends events and heartbeats.
    fn start_link(
        &self,
        core: &Core,
        identity: IdentityHandles,
        interval: watch::Sender<Duration>,
        pending: Pending,
        stop: &CancellationToken,
    ) -> JoinHandle<()> {
        let parts = LinkParts {
            dial: Dialer::tcp(),
            core: core.clone(),
            credentials: identity.credentials,
            enroller: identity.enroller,
            canary_state: self.canary_state.clone(),
            interval,
            pending,
            metrics: self.metrics.clone(),
        };
        tokio::spawn(Link::new(parts).run(stop.clone()))
    }

    /// Waits until a task ends unexpectedly, or until shutdown is requested and the last request has ended.
    async fn run_until_stopped(&mut self, link: &mut JoinHandle<()>, stop: &CancellationToken) -> Result<(), RunError> {
        tokio::select! {
            ended = self.tasks.join_next() => Err(task_failure(ended)),
            ended = &mut *link => match ended {
                Ok(()) if stop.is_cancelled() => Ok(()),
                Ok(()) => Err(RunError::TaskEnded("link")),
                Err(error) => Err(RunError::TaskFailed(error)),
            },
            () = stop.cancelled() => {
                // Waiting events are not lost: the next process lists every watch, and each list produces an event.
                tracing::info!("Shutting down");
                if timeout(SHUTDOWN_TIMEOUT, link).await.is_err() {
                    tracing::warn!("Shutdown aborted the last request");
                }
                Ok(())
            }
        }
    }

    fn spawn_critical(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(async move {
            task.await;
            RunError::TaskEnded(name)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_runtime_needs_only_a_restart() {
        let (current, new): (RuntimeId, RuntimeId) = ("r-1".parse().unwrap(), "r-2".parse().unwrap());
        for (stop, code) in
            [(IdentityStop::OtherRuntime { current, new, named_by: "ConfigMap" }, 3), (IdentityStop::ChannelClosed, 1)]
        {
            assert_eq!(RunError::from(stop).exit_code(), code);
        }
    }
}
