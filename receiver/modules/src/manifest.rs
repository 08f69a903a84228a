//! The reconcile of one Manifest: the engine of modules, with the Manifest in KCP, its layers from a registry, and Secrets of
//! KCP.
//!
//! `store` writes the Manifest, `content` finds the objects, and `drift` selects the Manifests that a change in a runtime
//! affects. `watches` builds the watches of the agent on the objects of modules.

mod content;
mod drift;
mod layers;
mod metrics;
mod store;
#[cfg(test)]
mod tests;
mod watches;

use std::{sync::Arc, time::Duration};

use futures::future::BoxFuture;
use kube::{Client, ResourceExt as _};
use thiserror::Error;
use tidewatch_api::{
    Manifest,
    key::{KymaKey, ManifestKey},
    labels::is_true,
    names::label,
};
use tidewatch_cluster::{
    WriteBudgets,
    body_missing::BodyMissingError,
    error_class::ErrorClass,
    kinds::KindCache,
    runtime_access::{ClientError, describe},
};
use tidewatch_contract::event::Object;
use tidewatch_engine::{
    ChangedObject, Cluster, End, Engine, Goal, ModuleObjects, Next, Outcome, Progress, PullSecret, Request, Store as _,
    StoreError, goal_of,
};
use tidewatch_fleet::{
    manifest_queue::ManifestJob,
    pause::Pause,
    queue::{Drift, QueuedWork, ReconcileOutcome},
    stores::{
        Stores,
        kymas::{self, CachedKyma},
    },
    takeover::Takeover,
};
use tidewatch_installer::pull_secret::ModulePullSecret;
use tidewatch_kit::variant::VariantName as _;
use tidewatch_oci::registry::LayerKey;
use tokio::time::{Instant, timeout};

pub use drift::connect_reports;
pub use layers::ModuleLayers;
pub use metrics::Metrics;
pub use tidewatch_engine::Memories;
pub use watches::module_watches;

use self::{
    content::KcpContent,
    drift::{is_echo, is_replaced, reported_key},
    store::KcpStore,
};
use crate::module_secrets::ModuleSecrets;

/// Delay until a Manifest whose Kyma is being taken over is looked at again.
const TAKEOVER_RECHECK: Duration = Duration::from_secs(10);

/// Settings of the reconcile.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Paused runtime clusters, to which nothing is written.
    pub pause: Pause,
    /// Selection of the Kymas that this receiver manages.
    pub takeover: Takeover,
    /// Image pull secret of the modules.
    pub pull_secret: Option<ModulePullSecret>,
}

/// Returns the client of a runtime cluster with its revision.
type Clients = Box<dyn Fn(&KymaKey) -> Result<(Client, u64), ClientError> + Send + Sync>;

/// Returns the objects of a layer. A Manifest whose layer is not available is enqueued when that changes.
type Layers = Box<dyn for<'a> Fn(&'a ManifestKey, &'a LayerKey) -> BoxFuture<'a, ModuleObjects> + Send + Sync>;

/// Enqueues a reconcile of another Manifest that compares all of its objects.
type Wake = Box<dyn Fn(&ManifestKey) + Send + Sync>;

/// Dependencies of a reconcile.
pub struct Context {
    /// Client of KCP.
    pub kcp: Client,
    /// Caches of KCP.
    pub stores: Stores,
    /// Clients of the runtime clusters.
    pub clients: Clients,
    /// Layers of the modules.
    pub layers: Layers,
    /// Wakes a Manifest that gets objects of another one.
    pub wake: Wake,
    /// Secrets of KCP whose data the module `deployer` gets, if it is a restricted module.
    pub secrets: Option<ModuleSecrets>,
    /// Settings of the reconcile.
    pub settings: Settings,
    /// Kinds that the runtime clusters serve.
    pub kinds: KindCache,
    /// Budgets of the repairs in runtime clusters.
    pub budgets: WriteBudgets,
    /// Results of earlier reconciles.
    pub memories: Memories,
    /// Metrics of the reconcile.
    pub metrics: Metrics,
}

/// A request to the control plane failed, or the reconcile took too long.
#[derive(Debug, Error)]
pub enum Error {
    /// A request to the control plane failed. Or the runtime came into a shard of this replica a moment ago: then the end of the
    /// fetch of a body, or of an access Secret, enqueues the Manifest.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The reconcile exceeded its time limit, because the runtime cluster responds slowly.
    #[error("the reconcile took more than {} s, and was cut", .0.as_secs())]
    TooLong(Duration),
}

impl From<BodyMissingError> for Error {
    fn from(missing: BodyMissingError) -> Self {
        Self::Store(missing.into())
    }
}

impl Error {
    const fn request(&self) -> Option<&kube::Error> {
        if let Self::Store(StoreError::Request(_, error)) = self { Some(error) } else { None }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::Store(error) if error.is_conflict() => ErrorClass::Conflict,
            Self::Store(_) => ErrorClass::Ours,
            Self::TooLong(_) => ErrorClass::Transport,
        }
    }
}

/// Reconciles one Manifest. Failures are part of the outcome; those that concern the user are reported in the status.
pub async fn reconcile(ctx: &Context, job: &ManifestJob) -> ReconcileOutcome {
    run_within(ctx, &job.key, &job.queued, job.time_limit).await
}

async fn run_within(ctx: &Context, key: &ManifestKey, queued: &QueuedWork, limit: Duration) -> ReconcileOutcome {
    let start = Instant::now();
    let result = match timeout(limit, run(ctx, key, queued)).await {
        Ok(result) => result,
        Err(_) => Err(Error::TooLong(limit)),
    };
    let outcome = result.unwrap_or_else(|error| {
        ctx.metrics.requeues.unexpected("manifest_sync_state");
        let class = error.class();
        if class == ErrorClass::Conflict {
            tracing::debug!(manifest = %key, %error, "Conflict with a concurrent write, requeued");
        } else {
            let cause = error.request().map(describe);
            tracing::warn!(manifest = %key, %error, cause, class = class.as_str(), "Reconcile of a Manifest failed");
        }
        ReconcileOutcome::failed(queued.work, class)
    });
    ctx.metrics.ended(&outcome, start.elapsed());
    outcome
}

async fn run(ctx: &Context, key: &ManifestKey, queued: &QueuedWork) -> Result<ReconcileOutcome, Error> {
    let ended = || ReconcileOutcome::ended(queued.work);
    let Some(manifest) = ctx.stores.manifests.get(key)? else {
        ctx.memories.forget(key);
        return Ok(ended());
    };
    let kyma = manifest.labels().get(label::KYMA_NAME).map(|name| KymaKey::new(&key.namespace, name));
    let Some(kyma) = kyma else { return Ok(ended()) };
    match ctx.permission(&kyma, &manifest) {
        Permission::Granted => {}
        Permission::Parked => return Ok(ReconcileOutcome::default()),
        Permission::Foreign => return Ok(ended()),
        Permission::Later => {
            // Settles no report; the Manifest is requeued.
            return Ok(ReconcileOutcome {
                min_backoff: Some(TAKEOVER_RECHECK),
                ..ReconcileOutcome::failed(queued.work, ErrorClass::Refused)
            });
        }
    }
    // Reports may overtake the responses of the writes that they report.
    let reported = queued.drift.objects().unwrap_or_default();
    let changed: Vec<_> =
        reported.iter().filter(|object| !is_echo(&ctx.memories, key, object)).map(changed_object).collect();
    if matches!(&queued.drift, Drift::Reported(_)) && changed.is_empty() {
        return Ok(ended());
    }
    let store = KcpStore { ctx };
    let engine = ctx.engine();
    let (client, revision) = match (ctx.clients)(&kyma) {
        Ok(client) => client,
        // The deletion of either of the two enqueues it, and so does a change of its number.
        Err(_) if engine.stand_back(&manifest, &store.others(&manifest).await?, &kyma) => return Ok(ended()),
        Err(ClientError::Body(missing)) => return Err(missing.into()),
        // A changed access Secret enqueues the Manifest.
        Err(ClientError::Access(error)) => {
            engine.report_unreachable(&store, &manifest, error.to_string()).await?;
            return Ok(ended());
        }
    };
    let is_removal = goal_of(&manifest) == Goal::Remove;
    let cluster = Cluster { key: kyma, client, revision };
    let content = KcpContent { ctx, key };
    let request = Request {
        pull_secret: ctx.settings.pull_secret.as_ref().map(pull_secret),
        verify: queued.drift == Drift::All,
        changed,
        progress: &|progress| ctx.metrics.requeues.intended(requeue_reason(progress)),
        ..Request::new(manifest, &cluster, &store, &content)
    };
    let Outcome { end, next } = engine.reconcile(request).await?;
    if end == End::Gone {
        ctx.memories.forget(key);
    }
    Ok(match next {
        Next::OnChange => ended(),
        Next::After(delay) => ReconcileOutcome { requeue_after: Some(delay), ..ended() },
        Next::Retry { class, min_backoff } => {
            let reason = if is_removal { "manifest_pre_delete" } else { "manifest_sync_resources" };
            ctx.metrics.requeues.unexpected(reason);
            ReconcileOutcome { min_backoff, ..ReconcileOutcome::failed(queued.work, class) }
        }
    })
}

fn changed_object(object: &Object) -> ChangedObject {
    ChangedObject { key: reported_key(object), is_replaced: is_replaced(object) }
}

fn pull_secret(secret: &ModulePullSecret) -> PullSecret {
    PullSecret { name: secret.name.clone(), content: secret.secret.content() }
}

/// Reasons of lifecycle-manager for the requeues at these transitions.
const fn requeue_reason(progress: Progress) -> &'static str {
    match progress {
        // The request that creates a Manifest contains its finalizers.
        Progress::Begun => "manifest_add_finalizer",
        Progress::Recorded => "manifest_sync_resources_enqueue_required",
        Progress::AwaitsDefault => "manifest_pre_delete_enqueue_required",
        Progress::Ready => "manifest_reconcile_finished",
    }
}

/// Permission to reconcile a Manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Permission {
    Granted,
    /// A pause, the label `skip-reconciliation`, or a requested hand-back of its Kyma stops it; the end of each enqueues it.
    Parked,
    /// The cache lacks its Kyma: another controller manages it.
    Foreign,
    /// Its Kyma is being taken over, or has yet to label it.
    Later,
}

impl Context {
    fn engine(&self) -> Engine {
        Engine {
            kinds: self.kinds.clone(),
            budgets: self.budgets.clone(),
            memories: self.memories.clone(),
            fallbacks: self.metrics.fallbacks.clone(),
        }
    }

    fn permission(&self, key: &KymaKey, manifest: &Manifest) -> Permission {
        let Settings { pause, takeover, .. } = &self.settings;
        // The cache has the Kymas that this receiver manages.
        let Some(kyma) = self.kyma(key) else { return Permission::Foreign };
        let kyma = kyma.facts();
        let selector = takeover.selector();
        let is_labelled = is_true(Some(manifest.labels()), label::SKIP_RECONCILIATION);
        if pause.of(kyma).is_some() || is_labelled && !selector.selects_skipped() {
            return Permission::Parked;
        }
        // A Kyma that is being deleted is not handed back.
        if !kyma.is_deleting() && (kyma.is_hand_back_requested() || selector.skips(kyma)) {
            return Permission::Parked;
        }
        // The reconcile of its Kyma adds the label, which keeps lifecycle-manager away from the Manifest. A deletion adds none.
        let awaits_label = selector.selects_skipped() && !kyma.is_deleting() && kyma.is_skipped() && !is_labelled;
        if takeover.is_pending(key) || awaits_label { Permission::Later } else { Permission::Granted }
    }

    fn kyma(&self, key: &KymaKey) -> Option<Arc<CachedKyma>> {
        kymas::find(&self.stores.kymas, key)
    }
}
