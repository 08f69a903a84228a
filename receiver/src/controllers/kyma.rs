//! The reconcile of one Kyma: fetch → validate → build → apply → status, and its removal.
//!
//! A reconcile reads the Kyma in KCP and in its runtime cluster, and any object that `verified_cache` does not hold as
//! verified. It writes only differences. The decisions of `validate`, `lookup`, `build`, `modules` and `status` are
//! pure.

mod apply;
mod base;
mod build;
mod crd;
mod deletion;
mod error;
pub(crate) mod fetch;
mod hand_back;
mod inputs;
mod leave;
mod lookup;
mod metrics;
mod module_status;
mod modules;
mod pending_writes;
mod remote;
mod requeues;
#[cfg(test)]
mod tests;
mod validate;
mod verified_cache;

use std::{collections::BTreeSet, time::Duration};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{Client, ResourceExt, runtime::reflector::ObjectRef};
use tidewatch_shared::{
    api::{ConditionStatus, Kyma, KymaStatus},
    identity::RuntimeId,
    names::label,
    plan::Work,
};
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

pub use error::Error;
pub use metrics::Metrics;

pub(crate) use inputs::{Inputs, is_own_annotation};

use self::{
    lookup::Sources,
    pending_writes::PendingWrites,
    remote::Both,
    validate::validate,
    verified_cache::{Verified, VerifiedCache},
};
use crate::{
    base::{
        error_class::ErrorClass,
        key::KymaKey,
        labels::is_true,
        pause::Pause,
        stores::{CurrentPlan, Stores},
        takeover::{self, Takeover},
    },
    controllers::{
        catalog::{Catalog, CatalogError, CatalogReconcile, CatalogReconciled},
        installer::{Installer, Readiness, Report, was_ready},
        status::{Access, Findings, StatusWriter, write_runtime},
    },
    fleet::{
        queue::{QueuedWork, ReconcileOutcome, WorkSet},
        table::Job,
    },
    kube::runtime_access::{RuntimeAccess, RuntimeAccessError, describe},
};

/// Delay before an installation that the runtime cluster refused is retried.
pub(crate) const REFUSED_AGAIN: Duration = Duration::from_secs(60);

/// Settings of the Kyma reconcile.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Registry from which Manifests pull: host with optional port and path.
    pub registry: String,
    /// `--restricted-default-modules`.
    pub restricted_modules: BTreeSet<String>,
    /// Paused runtime clusters, to which nothing is written.
    pub pause: Pause,
    /// Selection of the Kymas that this receiver manages.
    pub takeover: Takeover,
    /// Deadline for a new CRD to become established in a runtime cluster.
    pub established_within: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            registry: String::new(),
            restricted_modules: BTreeSet::new(),
            pause: Pause::default(),
            takeover: Takeover::default(),
            established_within: Duration::from_secs(10),
        }
    }
}

/// The dependencies of a reconcile.
pub struct Context {
    kcp: Client,
    stores: Stores,
    clients: Clients,
    catalog: Catalog,
    plan: CurrentPlan,
    installer: Option<Installer>,
    settings: Settings,
    metrics: Metrics,
    verified: VerifiedCache,
    pending_writes: PendingWrites,
}

/// Returns the client of a runtime cluster with its revision.
type Clients = Box<dyn Fn(&KymaKey) -> Result<(Client, u64), RuntimeAccessError> + Send + Sync>;

impl Context {
    /// A context with empty caches.
    #[must_use]
    pub fn new(
        kcp: Client,
        stores: Stores,
        access: RuntimeAccess,
        catalog: Catalog,
        plan: CurrentPlan,
        settings: Settings,
        metrics: Metrics,
    ) -> Self {
        let clients: Clients = Box::new(move |key| access.client_and_revision(key));
        Self {
            kcp,
            stores,
            clients,
            catalog,
            plan,
            installer: None,
            settings,
            metrics,
            verified: VerifiedCache::default(),
            pending_writes: PendingWrites::default(),
        }
    }

    fn status(&self) -> StatusWriter {
        StatusWriter::new(self.kcp.clone(), self.installer.is_some())
    }

    /// Also installs the agent in runtime clusters.
    #[must_use]
    pub fn with_installer(self, installer: Installer) -> Self {
        Self { installer: Some(installer), ..self }
    }

    /// Drops all cached state of a deleted Kyma.
    pub fn forget(&self, key: &KymaKey) {
        self.verified.forget(key);
        self.pending_writes.forget(key);
        self.catalog.forget(key);
    }
}

/// Reconciles one Kyma for the work of its job. Failures are part of the outcome; they are logged, and reported in the
/// status where they concern the user.
pub async fn reconcile(ctx: &Context, job: &Job) -> ReconcileOutcome {
    let _span = job.span();
    run_within(ctx, &job.key, &job.queued, job.time_limit()).await
}

async fn run_within(ctx: &Context, key: &KymaKey, queued: &QueuedWork, time_limit: Duration) -> ReconcileOutcome {
    let start = Instant::now();
    // Forwarding has its own worker.
    let works = queued.work.minus(WorkSet::of(&[Work::Forward]));
    let outcome = match timeout(time_limit, run(ctx, key, queued, works)).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(error)) => failed(ctx, key, works, &error),
        Err(_) => {
            // The last request may or may not take effect: the next reconcile reads everything.
            ctx.verified.forget(key);
            ctx.catalog.forget(key);
            failed(ctx, key, works, &Error::TooLong(time_limit))
        }
    };
    ctx.metrics.ended(&outcome, start.elapsed());
    outcome
}

fn failed(ctx: &Context, key: &KymaKey, works: WorkSet, error: &Error) -> ReconcileOutcome {
    let class = error.class();
    ctx.metrics.requeues.failed(error);
    if error.is_conflict() {
        debug!(kyma = %key, %error, "somebody else wrote, the work begins anew");
    } else {
        let cause = std::error::Error::source(error).map(|source| match source.downcast_ref::<kube::Error>() {
            Some(call) => describe(call),
            None => source.to_string(),
        });
        warn!(kyma = %key, %error, cause, class = class.as_str(), "work failed");
    }
    ReconcileOutcome::failed(works, class)
}

/// How a Kyma may be reconciled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// In full.
    Active,
    /// Not at all: paused or `skip-reconciliation`.
    Parked,
    /// It has a deletion timestamp.
    Deleting,
    /// It is handed back to the incumbent.
    HandBack,
}

/// Returns the mode of a Kyma. `skip-reconciliation` stops neither a deletion nor a hand-back, a pause stops both. A
/// Kyma with a deletion timestamp is not handed back.
fn mode(settings: &Settings, kyma: &Kyma) -> Mode {
    let labelled = |key| is_true(Some(kyma.labels()), key);
    match kyma.metadata.deletion_timestamp {
        _ if settings.pause.of(kyma).is_some() => Mode::Parked,
        Some(_) => Mode::Deleting,
        None if takeover::is_hand_back_requested(kyma) => Mode::HandBack,
        None if labelled(label::SKIP_RECONCILIATION) && !settings.takeover.selects_skipped() => Mode::Parked,
        None => Mode::Active,
    }
}

async fn run(ctx: &Context, key: &KymaKey, queued: &QueuedWork, works: WorkSet) -> Result<ReconcileOutcome, Error> {
    let Some(kyma) = fetch::kcp_kyma(ctx, key).await? else {
        ctx.forget(key);
        return Ok(ReconcileOutcome::ended(queued.work));
    };
    let mode = mode(&ctx.settings, &kyma);
    if mode == Mode::Parked {
        return Ok(ReconcileOutcome::default());
    }
    if let Some(rest) = ctx.settings.takeover.remaining_quiet_period(key, &kyma, Instant::now()) {
        // Settles nothing; the Kyma is requeued.
        return Ok(ReconcileOutcome {
            requeue_after: Some(rest),
            ..ReconcileOutcome::failed(works, ErrorClass::Refused)
        });
    }
    match mode {
        Mode::Deleting => return deletion::step(ctx, key, kyma, works).await.map(|outcome| waiting(ctx, outcome)),
        Mode::HandBack => return hand_back::step(ctx, key, kyma, works).await.map(|outcome| waiting(ctx, outcome)),
        Mode::Active | Mode::Parked => {}
    }
    let (catalog, others) = (works.contains(Work::Catalog), works.minus(WorkSet::of(&[Work::Catalog])));
    let kyma = base::mark(ctx, kyma).await?;
    // Taken before anything is read: a change in between is not recorded as reconciled.
    let inputs = Inputs::of(&kyma, &ctx.plan.load(), &ctx.catalog.fingerprint(kyma.labels(), &ctx.stores));
    let before = kyma.status.clone();
    let (installed, findings) = (Ok(None), Findings::default());
    let mut reconcile = Reconcile { ctx, key, kyma, before, runtime: None, installed, rollout_after: None, findings };
    let prepared = if others.is_empty() { Ok(()) } else { reconcile.prepare(queued, others).await };
    let mut outcome = ReconcileOutcome::ended(works);
    if catalog && prepared.is_ok() {
        outcome = reconcile.catalog(queued, works).await?;
    }
    let reconciled = match prepared {
        Ok(()) => reconcile.modules().await,
        failed => failed,
    };
    if let Err(error) = reconciled {
        if !error.is_conflict() {
            reconcile.findings.failure = Some(error.line());
            reconcile.findings.conditions.access = error.access().or(reconcile.findings.conditions.access.take());
            reconcile.record_failure().await?;
        }
        return Err(error);
    }
    reconcile.record().await?;
    let outcome =
        ReconcileOutcome { rollout_after: reconcile.rollout_after, ..with_installer(outcome, reconcile.installed) };
    inputs::note(ctx, &reconcile.kyma, &inputs, outcome.ended).await;
    Ok(outcome)
}

/// Returns true if the last reconcile failed on the runtime cluster itself: then state and modules report that failure, and only a
/// reconcile of the modules resolves it.
fn failed_on_runtime(kyma: &Kyma) -> bool {
    let is_false = |kind| {
        let condition = kyma.status.as_ref().and_then(|status| status.condition(kind));
        condition.is_some_and(|condition| condition.status == ConditionStatus::False)
    };
    is_false("RuntimeAccess") || is_false("CRDsSync")
}

/// Adds the result of the installation to an outcome: failed work backs off, pending work is requeued.
fn with_installer(outcome: ReconcileOutcome, installed: Result<Option<Duration>, ErrorClass>) -> ReconcileOutcome {
    let installer = WorkSet::INSTALLER;
    match installed {
        Ok(requeue_after) => ReconcileOutcome { requeue_after: outcome.requeue_after.or(requeue_after), ..outcome },
        Err(class) => ReconcileOutcome {
            ended: outcome.ended.minus(installer),
            failed: outcome.failed | installer,
            class: outcome.class.or(Some(class)),
            ..outcome
        },
    }
}

/// Counts a requeue for objects that are still being deleted.
fn waiting(ctx: &Context, outcome: ReconcileOutcome) -> ReconcileOutcome {
    if outcome.requeue_after.is_some() {
        ctx.metrics.requeues.waits();
    }
    outcome
}

/// One reconcile of one Kyma.
struct Reconcile<'a> {
    ctx: &'a Context,
    key: &'a KymaKey,
    /// The Kyma in KCP as last read or written.
    kyma: Kyma,
    /// Its status when the reconcile began.
    before: Option<KymaStatus>,
    /// Client of the runtime cluster and its Kyma, if the reconcile covers the modules.
    runtime: Option<(Client, Kyma)>,
    /// Time until the installation is checked again, or the class of its failure.
    installed: Result<Option<Duration>, ErrorClass>,
    /// Time until the rollout slot of a module's new version.
    rollout_after: Option<Duration>,
    findings: Findings,
}

impl Reconcile<'_> {
    /// Applies the objects that every runtime cluster has; if the work covers the modules, also reads or creates its Kyma.
    async fn prepare(&mut self, queued: &QueuedWork, works: WorkSet) -> Result<(), Error> {
        let Self { ctx, key, .. } = *self;
        let (client, revision) = (ctx.clients)(key).map_err(Error::Access)?;
        let mut verified = ctx.verified.take(key, revision, &queued.drift);
        base::ensure(ctx, &client, &mut verified).await.inspect_err(|error| {
            if matches!(error, Error::Crd { .. } | Error::NotEstablished(_) | Error::CrdTerminating(_)) {
                self.findings.conditions.crds = Some(Err(error.line()));
            }
        })?;
        self.findings.conditions.crds = Some(Ok(None));
        self.install(&client, &mut verified).await;
        let became_ready = self.findings.conditions.webhook == Some(Readiness::Ready) && !was_ready(&self.kyma);
        if works.minus(WorkSet::INSTALLER).is_empty() && !became_ready && !failed_on_runtime(&self.kyma) {
            ctx.verified.keep(key, verified);
            self.findings.conditions.access = Some(Access::Usable);
            return Ok(());
        }
        let Both { kcp, runtime } = remote::ensure(ctx, &client, self.kyma.clone()).await?;
        ctx.verified.keep(key, verified);
        self.findings.conditions.access = Some(Access::Usable);
        self.kyma = kcp;
        self.runtime = Some((client, runtime));
        Ok(())
    }

    /// Installs the agent. Its failure stops no other work.
    async fn install(&mut self, client: &Client, verified: &mut Verified) {
        let Self { ctx, key, .. } = *self;
        let Some(installer) = &ctx.installer else { return };
        let installed = &mut verified.installed;
        let id = self.kyma.labels().get(label::RUNTIME_ID).and_then(|id| id.parse::<RuntimeId>().ok());
        let Some(id) = id else {
            let message = format!("the Kyma has no runtime id in its label {}", label::RUNTIME_ID);
            self.findings.conditions.webhook = Some(Readiness::Not { reason: "NoRuntimeId", message });
            return;
        };
        let plan = ctx.plan.load_full();
        let report = installer.install(client, key, &id, &plan, installed).await;
        let Report { failures, written, blocked } = &report;
        if !written.is_empty() {
            debug!(kyma = %key, ?written, "Agent installation repaired");
        }
        for failure in failures {
            let cause = failure.error.call().map(describe);
            warn!(kyma = %key, error = %failure.error, cause, ?blocked, "Agent is not installed as desired");
        }
        let (readiness, look) = installer.readiness(client, key, &self.kyma, &report, installed).await;
        self.findings.conditions.webhook = readiness;
        // A refusal by the user's cluster is reported in the status and ends the work; other failures back off.
        let class = failures.iter().map(|failure| failure.error.class()).find(|class| *class != ErrorClass::Refused);
        self.installed = match class {
            Some(class) => Err(class),
            None if failures.is_empty() => Ok(look),
            None => Ok(Some(REFUSED_AGAIN)),
        };
    }

    /// Reconciles the catalog. Its failure stops no other work.
    async fn catalog(&mut self, queued: &QueuedWork, works: WorkSet) -> Result<ReconcileOutcome, Error> {
        let Self { ctx, key, .. } = *self;
        let client = match &self.runtime {
            Some((client, _)) => Ok(client.clone()),
            None => (ctx.clients)(key).map(|(client, _)| client),
        };
        let (catalog, stores, status, kyma) = (&ctx.catalog, &ctx.stores, ctx.status(), &self.kyma);
        let reconcile = CatalogReconcile { catalog, stores, status, key, kyma, client, drift: &queued.drift };
        let CatalogReconciled { result, status } = reconcile.run(&now()).await?;
        self.stored(status);
        let work = WorkSet::of(&[Work::Catalog]);
        let error = match result {
            Ok(()) => return Ok(ReconcileOutcome::ended(works)),
            Err(CatalogError::Access(error)) => Error::Access(error),
            Err(CatalogError::Sync(error)) => Error::Catalog(error),
        };
        let outcome = ReconcileOutcome { ended: works.minus(work), ..failed(ctx, key, work, &error) };
        // A failure of the catalog alone delays no other work of the runtime cluster.
        Ok(match &error {
            Error::Catalog(error) if error.is_catalog_only() => {
                ReconcileOutcome { failed: WorkSet::EMPTY, deferred: work, ..outcome }
            }
            _ => outcome,
        })
    }

    /// Applies the Manifests that the runtime cluster's Kyma selects.
    async fn modules(&mut self) -> Result<(), Error> {
        let Some((_, runtime)) = &self.runtime else { return Ok(()) };
        let wanted = match validate(&runtime.spec) {
            Ok(wanted) => wanted,
            Err(invalid) => {
                self.findings.failure = Some(invalid.to_string());
                return Ok(());
            }
        };
        let Self { ctx, kyma, .. } = self;
        let namespace = kyma.namespace().unwrap_or_default();
        let (stores, uid) = (&ctx.stores, kyma.uid().unwrap_or_default());
        let sources = Sources {
            namespace: &namespace,
            kyma_labels: kyma.labels(),
            restricted: &ctx.settings.restricted_modules,
            release_meta: &|name| stores.release_metas.get(&ObjectRef::new(name).within(&namespace)),
            template: &|name| stores.templates.get(&ObjectRef::new(name).within(&namespace)),
            held: &|module| ctx.catalog.is_held(module),
            turn: &|module, channel, version| ctx.catalog.rollout_slot(&uid, module, channel, version),
        };
        let owned = fetch::owned_manifests(ctx, self.key, kyma).await?;
        let decisions = modules::decide(kyma, &wanted.modules, &owned, &sources, &ctx.settings.registry);
        self.rollout_after = decisions.turn;
        let old = kyma.status.clone().unwrap_or_default();
        self.findings.modules = Some(apply::apply(ctx, self.key, kyma, decisions, &old).await?);
        self.findings.channel = Some(wanted.channel);
        Ok(())
    }

    /// Writes the findings to both Kymas, each only if its status differs.
    async fn record(&mut self) -> Result<(), Error> {
        let status = match self.findings.covers_modules() {
            true => self.ctx.status().write(&self.kyma, &self.findings, &now()).await?,
            false => self.ctx.status().write_conditions(&self.kyma, &self.findings.conditions, &now()).await?,
        };
        self.stored(status);
        let status = self.kyma.status.clone().unwrap_or_default();
        match &self.runtime {
            Some((client, runtime)) => Ok(write_runtime(client, runtime, &status).await?),
            None if self.kyma.status != self.before => self.show(&status).await,
            None => Ok(()),
        }
    }

    /// As [`Self::record`], but a further failure in the runtime cluster is only logged.
    async fn record_failure(&self) -> Result<(), Error> {
        let (status, _) = self.ctx.status().write(&self.kyma, &self.findings, &now()).await?;
        if let Some((client, runtime)) = &self.runtime
            && let Err(error) = write_runtime(client, runtime, &status).await
        {
            debug!(kyma = %self.key, %error, "Failure is not shown in the runtime");
        }
        Ok(())
    }

    /// Takes over the status of the Kyma as stored in the control plane.
    fn stored(&mut self, (status, version): (KymaStatus, Option<String>)) {
        self.kyma.status = Some(status);
        self.kyma.metadata.resource_version = version.or_else(|| self.kyma.resource_version());
    }

    /// Writes a changed status to the runtime cluster's Kyma, which the reconcile had no need to read until now.
    async fn show(&self, status: &KymaStatus) -> Result<(), Error> {
        // Without access there is no Kyma to write to.
        if let (Ok((client, _)), Some(Access::Usable) | None) =
            ((self.ctx.clients)(self.key), &self.findings.conditions.access)
            && let Some(runtime) = fetch::runtime_kyma(&client).await?
        {
            write_runtime(&client, &runtime, status).await?;
        }
        Ok(())
    }
}

/// The current time in whole seconds, the precision of a status.
fn now() -> Time {
    Time(Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default())
}
