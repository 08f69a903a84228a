//! The reconcile of one Kyma: fetch → prepare the runtime → catalog → decide → apply → status, and its removal.
//!
//! A reconcile reads the Kyma in KCP and in its runtime cluster, and any object that `verified_cache` does not hold as
//! verified. It writes only differences. [`tidewatch_select::kyma`] decides on its modules.

mod apply;
mod base;
mod component_layers;
mod crd;
mod deletion;
mod error;
pub(crate) mod fetch;
mod hand_back;
mod inputs;
mod leave;
mod metrics;
mod module_status;
mod per_kyma;
mod pull_secret;
mod remote;
mod requests;
mod selection;
mod skip_label;
mod status;
#[cfg(test)]
mod tests;
mod verified_cache;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures::future::join;
use jiff::Timestamp;
use kube::{Client, ResourceExt};
use serde_json::Value;
use tidewatch_api::{
    Condition, ConditionStatus, Kyma, KymaStatus, Manifest, facts::KymaFacts, identity::RuntimeId, key::KymaKey,
    names::label, plan::Work, selection::UserSelection,
};
use tidewatch_cluster::{
    WriteBudgets,
    error_class::ErrorClass,
    runtime_access::{AccessRemark, ClientError, KEPT_FOR, describe, retain},
};
use tidewatch_fleet::{
    pause::Pause,
    plans::Plans,
    queue::{QueuedWork, ReconcileOutcome, WorkSet},
    stores::{Stores, kymas},
    table::Job,
    takeover::Takeover,
};
use tidewatch_installer::{
    Component, ComponentError, Installer, Readiness, Report, Subject, pending_removal::RemovalBackoff,
    pull_secret::ModulePullSecret, was_ready,
};
use tidewatch_kit::variant::VariantName as _;
use tidewatch_select::{
    catalog::{RolloutSlot, retirement, snapshot::Snapshot, visibility::template_name},
    kyma::{
        layer::LayerLookup,
        lookup::{Resolved, Sources},
        mandatory::{self, Owned},
        modules::{self, Decisions},
        validate::{Validated, WantedModule, validate},
    },
    windows::WindowState,
};
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

pub use component_layers::ComponentLayers;
pub use error::Error;
pub use metrics::Metrics;

pub use inputs::{Inputs, PendingInputs, is_own_annotation};

use self::{
    per_kyma::PerKyma,
    remote::Ensured,
    selection::Shown,
    status::{Conditions, Findings, ShownStatus, update_runtime, write_runtime},
    verified_cache::Verified,
};
use crate::{catalog::Catalog, mandatory::MandatoryModules, windows::MaintenanceWindows};

/// Delay of the next reconcile if the catalog has changed for a module that has no version. Changes take effect together after
/// 0.3 s.
const CATALOG_AGAIN: Duration = Duration::from_secs(1);
/// Delay before an installation that the runtime cluster refused is retried.
pub(crate) const REFUSED_AGAIN: Duration = Duration::from_secs(60);

/// Returns the client of a runtime cluster with its revision.
type Clients = Box<dyn Fn(&KymaKey) -> Result<(Client, u64), ClientError> + Send + Sync>;

/// Returns what an operator should know about the access to a runtime cluster that responds.
type AccessRemarks = Box<dyn Fn(&KymaKey) -> Option<AccessRemark> + Send + Sync>;

/// Returns the layer of a resolved module. The Kyma is reconciled again when a layer that is not ready changes.
type Layers = Box<dyn Fn(&KymaKey, &Resolved) -> LayerLookup + Send + Sync>;

/// Returns true while a reconcile of a Manifest of the Kyma is in progress.
type ModulesInProgress = Box<dyn Fn(&KymaKey) -> bool + Send + Sync>;

/// Decides on modules, given the Kyma, the modules, their Manifests, the sources of a lookup, and the layers.
type Decide = for<'w> fn(
    &Kyma,
    &'w [WantedModule],
    &[Arc<Manifest>],
    &Sources<'_>,
    &dyn Fn(&Resolved) -> LayerLookup,
) -> Decisions<'w>;

/// The dependencies of a reconcile.
pub struct Context {
    /// Client of KCP.
    pub kcp: Client,
    /// Caches of KCP.
    pub stores: Stores,
    /// Clients of the runtime clusters.
    pub clients: Clients,
    /// Remarks on the access to runtime clusters that respond.
    pub access_remark: AccessRemarks,
    /// Desired catalogs.
    pub catalog: Catalog,
    /// Layers of the modules.
    pub layers: Layers,
    /// Reconciles of Manifests in progress.
    pub modules_in_progress: ModulesInProgress,
    /// Plans of the runtimes.
    pub plans: Plans,
    /// Installs the agent in runtime clusters, unless `None`.
    pub installer: Option<Installer>,
    /// Faults of mandatory modules.
    pub mandatory: MandatoryModules,
    /// Times of the upgrades that require a downtime.
    pub windows: MaintenanceWindows,
    /// Image pull secret of the modules, if there is one.
    pub pull_secret: Option<ModulePullSecret>,
    /// Paused runtime clusters, to which nothing is written.
    pub pause: Pause,
    /// Selection of the Kymas that this receiver manages.
    pub takeover: Takeover,
    /// Time without an access Secret, while its Kyma is being deleted, after which a runtime cluster counts as gone.
    pub runtime_gone_after: Duration,
    /// Metrics of the reconcile.
    pub metrics: Metrics,
    /// Budgets of the repairs in runtime clusters.
    pub budgets: WriteBudgets,
    /// Results of earlier reconciles.
    pub caches: Caches,
}

/// Results of earlier reconciles of each Kyma.
#[derive(Debug, Default)]
pub struct Caches {
    verified: PerKyma<Verified>,
    selections: PerKyma<Shown>,
    removals: RemovalBackoff,
    inputs: PendingInputs,
}

impl Caches {
    /// `inputs` is shared with the task that writes them.
    pub fn new(inputs: PendingInputs) -> Self {
        Self { inputs, ..Self::default() }
    }
}

impl Context {
    /// Drops all cached state of a deleted Kyma.
    pub fn forget(&self, key: &KymaKey) {
        self.caches.verified.forget(key);
        self.stores.manifests.forget_writes(key);
        self.caches.selections.forget(key);
        self.caches.removals.forget(key);
        self.caches.inputs.forget(key);
        self.catalog.forget(key);
        self.windows.forget(key);
    }
}

/// Reconciles one Kyma for the work of its job. Failures are part of the outcome; they are logged, and reported in the
/// status where they concern the user.
pub async fn reconcile(ctx: &Context, job: &Job) -> ReconcileOutcome {
    let _span = job.span();
    run_within(ctx, &job.key, &job.queued, job.start.time_limit).await
}

async fn run_within(ctx: &Context, key: &KymaKey, queued: &QueuedWork, time_limit: Duration) -> ReconcileOutcome {
    let start = Instant::now();
    // Forwarding has its own worker.
    let works = queued.work.minus(WorkSet::of(&[Work::Forward]));
    // A reconcile keeps several decoded objects of its runtime.
    let run = retain(run(ctx, key, queued, works));
    let outcome = match timeout(time_limit, run).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(error)) => ReconcileOutcome::failed(works, log_failure(ctx, key, &error)),
        Err(_) => {
            // The last request may or may not take effect: the next reconcile reads everything.
            ctx.caches.verified.forget(key);
            ctx.catalog.forget(key);
            ReconcileOutcome::failed(works, log_failure(ctx, key, &Error::TooLong(time_limit)))
        }
    };
    ctx.metrics.ended(&outcome, start.elapsed());
    outcome
}

/// Logs and counts a failure. Returns its class.
fn log_failure(ctx: &Context, key: &KymaKey, error: &Error) -> ErrorClass {
    let class = error.class();
    ctx.metrics.requeues.unexpected(error.requeue_reason());
    if error.is_conflict() {
        debug!(kyma = %key, %error, "Conflict with a concurrent write, requeued");
    } else {
        let cause = std::error::Error::source(error).map(|source| match source.downcast_ref::<kube::Error>() {
            Some(call) => describe(call),
            None => source.to_string(),
        });
        warn!(kyma = %key, %error, cause, class = class.as_str(), "Reconcile failed");
    }
    class
}

async fn run(ctx: &Context, key: &KymaKey, queued: &QueuedWork, works: WorkSet) -> Result<ReconcileOutcome, Error> {
    if awaits_first_decision(ctx, key) {
        debug!(kyma = %key, "First reconcile waits until the accepted state of the catalog is stored");
        return Ok(ReconcileOutcome::failed(works, ErrorClass::Conflict));
    }
    let Some(kyma) = fetch::kcp_kyma(ctx, key).await? else {
        ctx.forget(key);
        return Ok(ReconcileOutcome::ended(queued.work));
    };
    let is_deleting = kyma.metadata.deletion_timestamp.is_some();
    let is_handing_back = !is_deleting && KymaFacts::from(&kyma).is_hand_back_requested();
    let is_skipped = ctx.takeover.selector().skips(&kyma);
    // A pause stops a deletion and a hand-back; `skip-reconciliation` stops neither of them.
    if ctx.pause.of(&kyma).is_some() || (is_skipped && !is_deleting && !is_handing_back) {
        return Ok(ReconcileOutcome::default());
    }
    if let Some(rest) = ctx.takeover.remaining_quiet_period(key, &kyma, Instant::now()) {
        // Settles nothing; the Kyma is requeued.
        return Ok(ReconcileOutcome {
            min_backoff: Some(rest),
            ..ReconcileOutcome::failed(works, ErrorClass::Refused)
        });
    }
    let requeue_after = if is_deleting {
        deletion::step(ctx, key, kyma).await?
    } else if is_handing_back {
        hand_back::step(ctx, key, kyma).await?
    } else {
        return run_active(ctx, key, kyma, queued, works).await;
    };
    Ok(ReconcileOutcome { requeue_after, ..ReconcileOutcome::ended(works) })
}

/// Returns whether the first reconcile of a Kyma waits. The replica with the fleet role stores its first decision on the catalog
/// a moment after the start of a new installation, and the Kyma is enqueued then.
fn awaits_first_decision(ctx: &Context, key: &KymaKey) -> bool {
    let goes_on = |kyma: KymaFacts<'_>| kyma.is_managed() || kyma.is_deleting() || kyma.is_hand_back_requested();
    !ctx.catalog.permits_first_reconcile()
        && !kymas::find(&ctx.stores.kymas, key).is_some_and(|kyma| goes_on(kyma.facts()))
}

/// Reconciles a Kyma that is neither deleted nor handed back.
async fn run_active(
    ctx: &Context,
    key: &KymaKey,
    kyma: Kyma,
    queued: &QueuedWork,
    works: WorkSet,
) -> Result<ReconcileOutcome, Error> {
    let catalog = works.contains(Work::Catalog);
    let others = works.minus(WorkSet::of(&[Work::Catalog]) | WorkSet::STATUS);
    let kyma = base::mark(ctx, kyma).await?;
    // Taken before anything is read: a change in between is not recorded as reconciled.
    let inputs = Inputs::of(&kyma, &ctx.plans.of(key), &ctx.catalog.fingerprint(kyma.labels(), &ctx.stores));
    let before = kyma.status.clone();
    let shown = ctx.caches.selections.take(key).unwrap_or_default();
    let outcome = ReconcileOutcome::ended(works);
    let findings = Findings::default();
    let mut reconcile = Reconcile {
        ctx,
        key,
        kyma,
        before,
        runtime: None,
        unrecorded: None,
        outcome,
        findings,
        awaits_registry: false,
        window: None,
        catalog_used: None,
    };
    let prepared = if others.is_empty() { Ok(()) } else { reconcile.prepare(queued, others).await };
    if catalog && prepared.is_ok() {
        reconcile.catalog(queued).await?;
    }
    let reconciled = match prepared {
        Ok(()) if reconcile.runtime.is_some() => reconcile.modules().await,
        Ok(()) if works.both(WorkSet::STATUS).is_empty() => Ok(()),
        Ok(()) => reconcile.module_states(shown.selection.as_deref()).await,
        failed => failed,
    };
    if let Err(error) = reconciled {
        if error.is_reported() {
            reconcile.findings.failure = Some(error.line());
            reconcile.findings.conditions.access = error.access().or(reconcile.findings.conditions.access.take());
            reconcile.record_failure().await?;
        }
        return Err(error);
    }
    if !reconcile.outcome.follow_up.is_empty() && others.is_empty() {
        return Ok(reconcile.outcome);
    }
    let Shown { selection, runtime } = shown;
    let runtime = reconcile.record(runtime).await?;
    let selection = reconcile.shown_selection(selection);
    if reconcile.has_outdated_catalog() {
        reconcile.outcome.requeue_after = reconcile.outcome.requeue_after.into_iter().chain([CATALOG_AGAIN]).min();
    }
    ctx.caches.selections.keep(key, Shown { selection, runtime });
    let Reconcile { kyma, outcome, awaits_registry, window, .. } = reconcile;
    inputs::note(ctx, key, &kyma, &inputs.with_window(window), outcome.ended, awaits_registry);
    Ok(outcome)
}

/// Condition `RuntimeAccess` of a runtime that responds.
fn with_remark(remark: AccessRemark) -> Readiness {
    match remark {
        AccessRemark::LastKubeconfig(_) => Readiness::ReadyWith {
            reason: "LastKubeconfig",
            message: format!(
                "the runtime can be reached with the last kubeconfig of the access Secret, which has none now; it is used for \
                 up to {} minutes",
                KEPT_FOR.as_secs() / 60
            ),
        },
        AccessRemark::PublicRoots => Readiness::ReadyWith {
            reason: Condition::READY,
            message:
                "the runtime can be reached; the kubeconfig has no CA data, so the public roots of the receiver's \
                      system are trusted"
                    .to_owned(),
        },
    }
}

/// Names of components, for a log line.
fn names(components: &BTreeSet<Component>) -> String {
    components.iter().map(|component| component.as_str()).collect::<Vec<_>>().join(", ")
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

/// Writes the members of the metadata that record a selection. Returns the Kyma as stored, unless there are none.
async fn record(ctx: &Context, kyma: &Kyma, members: Option<Value>) -> Result<Option<Kyma>, Error> {
    let Some(members) = members else { return Ok(None) };
    base::record_metadata(ctx, kyma, members).await.map(Some)
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
    /// Members of the metadata of KCP's Kyma that record its selection, and are not written yet.
    unrecorded: Option<Value>,
    /// Result of the parts that have run.
    outcome: ReconcileOutcome,
    findings: Findings,
    /// A module waits for the registry.
    awaits_registry: bool,
    /// Maintenance window that a module waits for.
    window: Option<WindowState>,
    /// KCP's catalog by which the modules were decided on.
    catalog_used: Option<Arc<Snapshot>>,
}

impl Reconcile<'_> {
    /// Applies the objects that every runtime cluster has; if the work covers the modules, also reads or creates its Kyma.
    async fn prepare(&mut self, queued: &QueuedWork, works: WorkSet) -> Result<(), Error> {
        let Self { ctx, key, .. } = *self;
        let (client, revision) = (ctx.clients)(key)?;
        let mut verified = ctx.caches.verified.take_valid(key, revision, &queued.drift);
        let mut contested = Vec::new();
        base::ensure(ctx, key, &client, &mut verified, &mut contested).await.inspect_err(|error| {
            if matches!(error, Error::Crd { .. } | Error::NotEstablished(_) | Error::CrdTerminating(_)) {
                self.findings.conditions.crds = Some(Err(error.line()));
            }
            if error.is_of_pull_secret() {
                self.findings.conditions.pull_secret = Some(Err(error.line()));
            }
        })?;
        let crd = contested.iter().find(|error| matches!(error, Error::CrdContested(_)));
        self.findings.conditions.crds = Some(crd.map_or(Ok(None), |error| Err(error.line())));
        self.findings.conditions.pull_secret =
            ctx.pull_secret.as_ref().map(|secret| pull_secret::observation(secret, &contested));
        self.install(&client, &mut verified).await;
        let became_ready =
            self.findings.conditions.webhook.as_ref().is_some_and(Readiness::is_met) && !was_ready(&self.kyma);
        if works.minus(WorkSet::INSTALLER).is_empty() && !became_ready && !failed_on_runtime(&self.kyma) {
            ctx.caches.verified.keep(key, verified);
            self.has_access();
            self.put_off(works, &contested);
            return Ok(());
        }
        let Ensured { kyma, record } = remote::ensure(ctx, key, &client, &mut self.kyma, &mut contested).await?;
        ctx.caches.verified.keep(key, verified);
        self.put_off(works, &contested);
        self.has_access();
        self.runtime = Some((client, kyma));
        self.unrecorded = record;
        Ok(())
    }

    /// Reports that the runtime responds. While that is by the last kubeconfig of a Secret that has none now, the Kyma is
    /// reconciled again when that time ends.
    fn has_access(&mut self) {
        let remark = (self.ctx.access_remark)(self.key);
        self.findings.conditions.access = Some(remark.map_or(Readiness::Ready, with_remark));
        if let Some(AccessRemark::LastKubeconfig(rest)) = remark {
            self.outcome.requeue_after = self.outcome.requeue_after.into_iter().chain([rest]).min();
        }
    }

    /// Reports contested objects, and retries their repair with its own backoff. The rest of the reconcile goes on.
    fn put_off(&mut self, works: WorkSet, contested: &[Error]) {
        for error in contested {
            let class = log_failure(self.ctx, self.key, error);
            self.findings.failure.get_or_insert_with(|| error.line());
            (self.outcome.deferred, self.outcome.ended) = (works, self.outcome.ended.minus(works));
            self.outcome.class.get_or_insert(class);
        }
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
        let plan = ctx.plans.of(key);
        let subject = Subject { key, kyma: &self.kyma, runtime: &id };
        let report = installer.install(client, subject, &plan, installed, &ctx.budgets).await;
        let Report { failures, written, blocked } = &report;
        if !written.is_empty() {
            let written = names(written);
            debug!(kyma = %key, written, "Agent installation repaired");
        }
        for failure in failures {
            let cause = failure.error.call().map(describe);
            warn!(kyma = %key, error = %failure.error, cause, blocked = names(blocked), "Agent is not installed as desired");
        }
        let (readiness, look) = installer.readiness(client, key, &self.kyma, &report, installed).await;
        self.findings.conditions.webhook = readiness;
        // A refusal by the user's cluster is reported in the status and ends the work; other failures back off.
        let class = failures.iter().map(|failure| failure.error.class()).find(|class| *class != ErrorClass::Refused);
        match class {
            Some(class) => self.failed(WorkSet::INSTALLER, class),
            None if failures.iter().all(ComponentError::is_of_additional) => self.outcome.requeue_after = look,
            None => self.outcome.requeue_after = Some(REFUSED_AGAIN),
        }
    }

    /// Records failed work: it backs off, the other work stays ended.
    fn failed(&mut self, work: WorkSet, class: ErrorClass) {
        self.outcome.ended = self.outcome.ended.minus(work);
        self.outcome.failed |= work;
        self.outcome.class = Some(class);
    }

    /// Syncs the catalog, and writes the result to the status of KCP's Kyma, unless the body of the access Secret is missing. A
    /// failure of the sync stops no other work.
    async fn catalog(&mut self, queued: &QueuedWork) -> Result<(), Error> {
        let Self { ctx, key, .. } = *self;
        let client = match &self.runtime {
            Some((client, _)) => Ok(client.clone()),
            None => (ctx.clients)(key).map(|(client, _)| client),
        };
        let synced = match client {
            Ok(client) => {
                let synced = ctx.catalog.sync(key, &client, self.kyma.labels(), &ctx.stores, &queued.drift).await;
                synced.map_err(Error::Catalog)
            }
            Err(error) => Err(error.into()),
        };
        let observed = match &synced {
            Ok(()) => Ok(ctx.catalog.held_notice()),
            Err(Error::Catalog(error)) => Err(error.describe()),
            Err(error) => Err(error.line()),
        };
        let access = synced.as_ref().err().and_then(Error::access);
        let conditions = Conditions { catalog: Some(observed), access, ..Conditions::default() };
        if synced.as_ref().err().is_none_or(Error::is_reported) {
            ctx.write_conditions(&mut self.kyma, &conditions).await?;
        }
        let Err(error) = synced else { return Ok(()) };
        let work = WorkSet::of(&[Work::Catalog]);
        self.failed(work, log_failure(ctx, key, &error));
        // A failure of the catalog alone delays no other work of the runtime cluster.
        if matches!(&error, Error::Catalog(error) if error.is_catalog_only()) {
            self.outcome.failed = self.outcome.failed.minus(work);
            self.outcome.deferred |= work;
        }
        Ok(())
    }

    /// Applies the Manifests of the mandatory modules, and those that the runtime cluster's Kyma selects.
    async fn modules(&mut self) -> Result<(), Error> {
        let Some((_, runtime)) = &self.runtime else { return Ok(()) };
        let selection = validate(&UserSelection::of(runtime), self.kyma.annotations());
        let (catalog, owned) = self.owned(selection.as_ref().ok()).await?;
        self.mandatory_modules(&catalog, &owned.mandatory).await;
        match selection {
            Ok(wanted) => {
                let decisions = self.decide(modules::decide, &wanted.modules, &owned.selected, &catalog);
                // A module is removed by a recorded selection only.
                if !decisions.unwanted.is_empty() {
                    self.record_selection().await?;
                }
                self.apply(&wanted, decisions).await?;
                self.catalog_used = Some(catalog);
                Ok(())
            }
            Err(invalid) => {
                self.findings.failure = Some(invalid.to_string());
                self.record_selection().await
            }
        }
    }

    /// Records the selection in KCP, unless it is recorded.
    async fn record_selection(&mut self) -> Result<(), Error> {
        let unrecorded = self.unrecorded.take();
        if let Some(recorded) = record(self.ctx, &self.kyma, unrecorded).await? {
            self.kyma = recorded;
        }
        Ok(())
    }

    /// Returns true if the catalog may have changed for a module that has no version: a change of the catalog enqueues the Kymas
    /// that were known to select the module, and the selection of this one is recorded only now.
    fn has_outdated_catalog(&self) -> bool {
        let Some(used) = &self.catalog_used else { return false };
        let catalog = &self.ctx.catalog;
        let unresolved = || self.findings.modules.iter().flatten().filter(|module| module.version.is_none());
        let is_renewed = || !Arc::ptr_eq(used, &catalog.snapshot(&self.ctx.stores));
        unresolved().any(|module| catalog.is_undecided(&module.name)) || unresolved().next().is_some() && is_renewed()
    }

    /// Applies the Manifests of the mandatory modules. Their failure is in no status, and stops no other work.
    async fn mandatory_modules(&mut self, catalog: &Snapshot, owned: &[Arc<Manifest>]) {
        let Self { ctx, key, .. } = *self;
        let wanted = mandatory::wanted(catalog, owned);
        let decisions = self.decide(mandatory::decide, &wanted, owned, catalog);
        self.wait_for(&decisions);
        for (module, fault) in mandatory::faults(&decisions) {
            ctx.mandatory.report(module, fault);
        }
        if let Err(error) = apply::apply(ctx, key, &self.kyma, decisions, &KymaStatus::default()).await {
            self.failed(WorkSet::of(&[Work::Kyma]), log_failure(ctx, key, &error));
        }
    }

    /// The Manifests of the Kyma, divided by the catalog at this moment.
    async fn owned(&self, selection: Option<&Validated>) -> Result<(Arc<Snapshot>, Owned), Error> {
        let Self { ctx, key, kyma, .. } = self;
        let manifests = fetch::owned_manifests(ctx, key, kyma).await?;
        let manifests = skip_label::add(ctx, key, kyma, manifests).await?;
        let catalog = ctx.catalog.snapshot(&ctx.stores);
        let owned = Owned::divide(manifests, &catalog, selection);
        Ok((catalog, owned))
    }

    /// Decides on modules by one of the functions `decide`.
    fn decide<'w>(
        &self,
        decide: Decide,
        wanted: &'w [WantedModule],
        owned: &[Arc<Manifest>],
        catalog: &Snapshot,
    ) -> Decisions<'w> {
        let Self { ctx, kyma, .. } = self;
        let namespace = kyma.namespace().unwrap_or_default();
        let uid = kyma.uid().unwrap_or_default();
        let sources = Sources {
            namespace: &namespace,
            kyma_labels: kyma.labels(),
            catalog,
            held: &|module| ctx.catalog.is_held(module),
            today: retirement::day(Timestamp::now()),
            turn: &|module, source, version| ctx.catalog.rollout_slot(&uid, module, source, version),
            window: &|| ctx.windows.await_window(self.key, kyma, Timestamp::now()),
            edited: &|module, version| match catalog.content(&template_name(module, version)) {
                Some(content) => ctx.catalog.edit_slot(&uid, module, version, content),
                None => RolloutSlot::Now,
            },
            rollouts: ctx.catalog.rollouts(),
        };
        decide(kyma, wanted, owned, &sources, &|found| (ctx.layers)(self.key, found))
    }

    /// Records the roll-outs, the days and the registry's responses that modules wait for.
    fn wait_for(&mut self, decisions: &Decisions<'_>) {
        let uid = self.kyma.uid().unwrap_or_default();
        let day = decisions.next_day.map(|day| self.ctx.catalog.day_delay(&uid, day, Timestamp::now()));
        let waits = [self.outcome.rollout_after, decisions.turn, day];
        self.outcome.rollout_after = waits.into_iter().flatten().min();
        self.awaits_registry |= decisions.awaits_registry();
    }

    /// Records the maintenance window that modules wait for; the Kyma is reconciled at its start.
    fn wait_for_window(&mut self, decisions: &Decisions<'_>) {
        self.window = decisions.window;
        match decisions.window {
            Some(window) => {
                let after = window.delay(Timestamp::now());
                self.outcome.rollout_after = self.outcome.rollout_after.into_iter().chain(after).min();
            }
            None => self.ctx.windows.forget(self.key),
        }
    }

    /// Applies the decisions, meanwhile records the selection, and keeps the resulting statuses of the modules.
    async fn apply(&mut self, wanted: &Validated, decisions: Decisions<'_>) -> Result<(), Error> {
        self.wait_for(&decisions);
        self.wait_for_window(&decisions);
        if decisions.is_pending() {
            // Parked until the descriptor is known or failed: the events that it would settle stay unsettled.
            self.outcome.ended = self.outcome.ended.minus(WorkSet::of(&[Work::Kyma]));
        }
        let unrecorded = self.unrecorded.take();
        let Self { ctx, key, kyma, .. } = self;
        let old = kyma.status.clone().unwrap_or_default();
        let statuses = Box::pin(apply::apply(ctx, key, kyma, decisions, &old));
        let (statuses, recorded) = join(statuses, record(ctx, kyma, unrecorded)).await;
        // The status is written with the version that the record has, also after a failure.
        if let Some(recorded) = recorded? {
            self.kyma = recorded;
        }
        let mut statuses = statuses?;
        if let Some(refused) = module_status::limit_refused(&mut statuses) {
            self.findings.failure.get_or_insert(refused);
        }
        self.findings.modules = Some(statuses);
        self.findings.channel = Some(wanted.channel.clone());
        Ok(())
    }

    /// Writes the findings to both Kymas, each only if its status differs. Returns the runtime cluster's Kyma with its
    /// status, given as the last reconcile left it; `None` if that is unknown.
    async fn record(&mut self, last: Option<ShownStatus>) -> Result<Option<ShownStatus>, Error> {
        if self.findings.covers_modules() {
            self.ctx.write_status(&mut self.kyma, &self.findings).await?;
        } else {
            self.ctx.write_conditions(&mut self.kyma, &self.findings.conditions).await?;
        }
        match &self.runtime {
            Some((client, runtime)) => write_runtime(client, runtime, &self.kyma).await,
            // A failed or aborted reconcile may have written only the status in KCP.
            None if last.is_none() || self.kyma.status != self.before => self.show(last).await,
            None => Ok(last),
        }
    }

    /// As [`Self::record`], but a further failure in the runtime cluster is only logged.
    async fn record_failure(&mut self) -> Result<(), Error> {
        self.ctx.write_status(&mut self.kyma, &self.findings).await?;
        if let Some((client, runtime)) = &self.runtime
            && let Err(error) = write_runtime(client, runtime, &self.kyma).await
        {
            debug!(kyma = %self.key, %error, "Failure is not shown in the runtime");
        }
        Ok(())
    }

    /// Writes the status to the runtime cluster's Kyma if it differs, which the reconcile had no need to read until
    /// now. It is read only if it was changed since the last reconcile, or if `last` is unknown.
    async fn show(&self, last: Option<ShownStatus>) -> Result<Option<ShownStatus>, Error> {
        // Without access there is no Kyma to write to.
        if let Some(Readiness::Not { .. }) = &self.findings.conditions.access {
            return Ok(None);
        }
        let client = match (self.ctx.clients)(self.key) {
            Ok((client, _)) => client,
            Err(ClientError::Access(_)) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if let Some(last) = last
            && let Some(shown) = update_runtime(&client, &last, &self.kyma).await?
        {
            return Ok(Some(shown));
        }
        match fetch::runtime_kyma(&client).await? {
            Some(runtime) => write_runtime(&client, &runtime, &self.kyma).await,
            None => Ok(None),
        }
    }
}
