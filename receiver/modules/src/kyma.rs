//! The reconcile of one Kyma: `fetch` → `halves` → `status`; and its `deletion` and `hand_back`, of which `leave` is the common
//! step.
//!
//! The two `halves` run at once. One is the user's selection: the Kyma in the runtime cluster (`remote`) → `decide` → `apply`.
//! The other is the `surroundings` of the modules: namespace and CRDs (`base`), image pull secret, plan or agent, and catalog.
//!
//! A reconcile reads the Kyma in KCP and in its runtime cluster, and any object that `verified_cache` does not hold as
//! verified. It writes only differences. [`tidewatch_select::kyma`] decides on its modules.

mod apply;
mod base;
mod component_layers;
mod crd;
mod decide;
mod deletion;
mod error;
pub(crate) mod fetch;
mod halves;
mod hand_back;
mod inputs;
mod leave;
mod metrics;
mod module_status;
mod parts;
mod per_kyma;
mod pull_secret;
mod remote;
mod requests;
mod selection;
mod skip_label;
mod status;
mod surroundings;
#[cfg(test)]
mod tests;
mod verified_cache;

use std::{sync::Arc, time::Duration};

use kube::{Client, ResourceExt as _};
use serde_json::Value;
use tidewatch_api::{Kyma, KymaStatus, facts::KymaFacts, key::KymaKey, plan::Work};
use tidewatch_cluster::{
    WriteBudgets,
    error_class::ErrorClass,
    runtime_access::{AccessRemark, ClientError, describe, retain},
};
use tidewatch_fleet::{
    pause::Pause,
    plans::Plans,
    queue::{QueuedWork, ReconcileOutcome, WorkSet},
    stores::{Stores, kymas},
    table::Job,
    takeover::Takeover,
};
use tidewatch_installer::{Installer, pending_removal::RemovalBackoff, pull_secret::ModulePullSecret};
use tidewatch_kit::variant::VariantName as _;
use tidewatch_select::{
    catalog::snapshot::Snapshot,
    kyma::{layer::LayerLookup, lookup::Resolved},
    windows::WindowState,
};
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

pub use component_layers::ComponentLayers;
pub use error::Error;
pub use metrics::Metrics;

pub use inputs::{Inputs, PendingInputs, is_own_annotation};

use self::{
    parts::Parts,
    per_kyma::PerKyma,
    selection::Shown,
    status::{Conditions, Findings},
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
        Ok(Err(error)) => ReconcileOutcome {
            unreached: error.is_unreached(),
            ..ReconcileOutcome::failed(works, log_failure(ctx, key, &error))
        },
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
    let kyma = base::mark(ctx, kyma).await?;
    let parts = Parts::of(works, &kyma);
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
        contested: Vec::new(),
        awaits_registry: false,
        window: None,
        catalog_used: None,
    };
    let reconciled = match reconcile.halves(queued, parts).await {
        Ok(()) if reconcile.runtime.is_none() && !works.both(WorkSet::STATUS).is_empty() => {
            reconcile.module_states(shown.selection.as_deref()).await
        }
        ended => ended,
    };
    if let Err(error) = reconciled {
        if error.is_reported() {
            reconcile.findings.failure = Some(error.line());
            reconcile.findings.conditions.access = error.access().or(reconcile.findings.conditions.access.take());
            reconcile.record_failure().await?;
        }
        let unreached = reconcile.is_unreached(&error);
        return Ok(ReconcileOutcome { unreached, ..ReconcileOutcome::failed(works, log_failure(ctx, key, &error)) });
    }
    if !reconcile.outcome.follow_up.is_empty() && parts.selection.is_none() {
        // The full reconcile that follows shows the modules.
        if reconcile.findings.conditions != Conditions::default() {
            ctx.write_conditions(&mut reconcile.kyma, &reconcile.findings.conditions).await?;
        }
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
    /// The runtime cluster's Kyma, if a competing writer changes it back.
    contested: Vec<Error>,
    /// A module waits for the registry.
    awaits_registry: bool,
    /// Maintenance window that a module waits for.
    window: Option<WindowState>,
    /// KCP's catalog by which the modules were decided on.
    catalog_used: Option<Arc<Snapshot>>,
}

impl Reconcile<'_> {
    /// Records failed work: it backs off, the other work stays ended.
    fn failed(&mut self, work: WorkSet, class: ErrorClass) {
        self.outcome.ended = self.outcome.ended.minus(work);
        self.outcome.failed |= work;
        self.outcome.class = Some(class);
    }
}
