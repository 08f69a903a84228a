//! The reconcile of one Manifest: renders the objects of a module, applies them to the runtime cluster in stages, prunes
//! and removes them, and reports their readiness.
//!
//! `step` decides on the next action from the facts, `execute` carries it out on the state in `execution`. `adoption`, `default_object`, `render`,
//! `stage`, `inventory`, `own_webhook`, `ready`, `recreation`, `report` and `status` are pure. `refusals` remembers objects
//! that the API server would refuse again, `yields` the fields that are left to other writers.

mod adoption;
mod aggregated;
mod apply;
mod apply_job;
mod blocking;
mod create_default;
mod created_jobs;
mod default_object;
mod drift;
mod execute;
mod execution;
mod failure;
mod image;
mod inventory;
mod jobs;
mod keeping;
mod kept;
mod layers;
mod memory;
mod metrics;
mod migrate;
mod own_webhook;
mod own_writes;
mod parting;
mod pods;
pub mod preview;
mod ready;
mod record;
mod recovery;
mod recreation;
mod refusals;
mod render;
mod report;
mod search;
mod sharing;
mod stage;
mod status;
mod step;
#[cfg(test)]
mod tests;
mod turns;
mod watches;
mod written;
mod yielding;
mod yields;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures::future::BoxFuture;
use kube::{Client, ResourceExt as _, runtime::reflector::ObjectRef};
use serde_json::{Map, Value, json};
use thiserror::Error;
use tidewatch_api::{
    CustomResourcePolicy, Manifest, State,
    key::{KymaKey, ManifestKey},
    names::{annotation, label},
};
use tidewatch_cluster::{
    WriteBudgets,
    body_missing::BodyMissingError,
    error_class::ErrorClass,
    kinds::{KindCache, Kinds},
    labels::is_true,
    object,
    runtime_access::{ClientError, describe},
};
use tidewatch_contract::event::Object;
use tidewatch_fleet::{
    manifest_queue::ManifestJob,
    pause::Pause,
    queue::{Drift, QueuedWork, ReconcileOutcome},
    stores::{Stores, kymas::CachedKyma, manifests::ManifestFacts},
    takeover::{self, Takeover},
};
use tidewatch_installer::pull_secret::ModulePullSecret;
use tidewatch_kit::variant::VariantName as _;
use tidewatch_oci::registry::LayerKey;
use tokio::time::{Instant, timeout};

pub(crate) use default_object::CreatedDefault;
pub(crate) use drift::affected;
pub(crate) use execute::finalizers;
pub use layers::{LayerObjects, ModuleLayers};
pub use memory::Memories;
pub use metrics::Metrics;
pub(crate) use watches::module_watches;

use self::{
    adoption::Installation,
    blocking::Found,
    created_jobs::CreatedJobs,
    drift::is_replaced,
    execute::wanted_finalizers,
    execution::Execution,
    failure::{Failure, Retry},
    inventory::{Inventory, ObjectKey, hash},
    layers::layer_key,
    memory::{Desired, MAX_DECISION_RECHECK, MAX_RECHECK},
    pods::PodSelection,
    ready::manager_of,
    record::Record,
    render::{PullSecret, RenderSettings, RenderedObject, Scope, render},
    report::{Details, Fault, findings},
    sharing::Sharing,
    status::Findings,
    step::{Action, DefaultObject, Facts, Goal, Seen, step},
};
use crate::controllers::module_secrets::{InjectError, ModuleSecrets, SecretData};

/// Actions of one reconcile, far more than any module needs: a bound on a defect.
const MAX_ACTIONS: usize = 200;
/// Time after which the pods of a manager that is not ready are read, and watched by the agent. Most managers are ready
/// before.
const WATCH_PODS_AFTER: Duration = Duration::from_secs(3);
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
type Layers = Box<dyn for<'a> Fn(&'a ManifestKey, &'a LayerKey) -> BoxFuture<'a, LayerObjects> + Send + Sync>;

/// Enqueues a reconcile of another Manifest that compares all of its objects.
type Wake = Box<dyn Fn(&ManifestKey) + Send + Sync>;

/// Dependencies of a reconcile.
pub struct Context {
    /// Client of KCP.
    pub(crate) kcp: Client,
    /// Caches of KCP.
    pub(crate) stores: Stores,
    /// Clients of the runtime clusters.
    pub(crate) clients: Clients,
    /// Layers of the modules.
    pub(crate) layers: Layers,
    /// Wakes a Manifest that gets objects of another one.
    pub(crate) wake: Wake,
    /// Kinds that the runtime clusters serve.
    pub(crate) kinds: KindCache,
    /// Secrets of KCP whose data the module `deployer` gets, if it is a restricted module.
    pub(crate) secrets: Option<ModuleSecrets>,
    /// Budgets of the repairs in runtime clusters.
    pub(crate) budgets: WriteBudgets,
    /// Settings of the reconcile.
    pub(crate) settings: Settings,
    /// Results of earlier reconciles.
    pub(crate) memories: Memories,
    /// Metrics of the reconcile.
    pub(crate) metrics: Metrics,
}

/// A request to the control plane failed, or the reconcile took too long.
#[derive(Debug, Error)]
pub enum Error {
    /// A request to the control plane, with its operation.
    #[error("{0}")]
    ControlPlane(&'static str, #[source] kube::Error),
    /// The reconcile exceeded its time limit, because the runtime cluster responds slowly.
    #[error("the reconcile took more than {} s, and was cut", .0.as_secs())]
    TooLong(Duration),
    /// Its runtime came into a shard of this replica a moment ago; the end of the fetch of its body, or of that of the access
    /// Secret, enqueues it.
    #[error(transparent)]
    Body(#[from] BodyMissingError),
}

impl Error {
    fn class(&self) -> ErrorClass {
        match self {
            Self::ControlPlane(_, call) if object::is_conflict(call) => ErrorClass::Conflict,
            Self::ControlPlane(..) | Self::Body(_) => ErrorClass::Ours,
            Self::TooLong(_) => ErrorClass::Transport,
        }
    }
}

impl Context {
    /// Drops all state of a Manifest that is gone.
    pub(crate) fn forget(&self, key: &ManifestKey) {
        self.memories.forget(key);
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
        let call = if let Error::ControlPlane(_, call) = &error { Some(call) } else { None };
        if call.is_some_and(object::is_conflict) {
            tracing::debug!(manifest = %key, %error, "Conflict with a concurrent write, requeued");
        } else {
            let cause = call.map(describe);
            let class = error.class().as_str();
            tracing::warn!(manifest = %key, %error, cause, class, "Reconcile of a Manifest failed");
        }
        ReconcileOutcome::failed(queued.work, error.class())
    });
    ctx.metrics.ended(&outcome, start.elapsed());
    outcome
}

async fn run(ctx: &Context, key: &ManifestKey, queued: &QueuedWork) -> Result<ReconcileOutcome, Error> {
    let ended = || ReconcileOutcome::ended(queued.work);
    let Some(manifest) = ctx.stores.manifests.get(key)? else {
        ctx.forget(key);
        return Ok(ended());
    };
    let manifest = ctx.memories.newest(key, manifest);
    let kyma = manifest.labels().get(label::KYMA_NAME).map(|name| KymaKey::new(&key.namespace, name));
    let Some(kyma) = kyma else { return Ok(ended()) };
    match ctx.permission(&kyma, &manifest) {
        Permission::Granted => {}
        Permission::Parked | Permission::Denied => return Ok(ReconcileOutcome::default()),
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
    let is_echo = |object: &Object| ctx.memories.is_echo(key, object);
    let reported = queued.drift.objects().unwrap_or_default();
    let unseen: Vec<_> = reported.iter().filter(|object| !is_echo(object)).collect();
    if matches!(&queued.drift, Drift::Reported(_)) && unseen.is_empty() {
        return Ok(ended());
    }
    let goal = goal_of(&manifest);
    let others = ctx.others_of_kyma(&manifest)?;
    let of_module = of_module(&manifest, &others);
    let is_newer = |other: &Arc<Manifest>| precedence(other) > precedence(&manifest);
    if goal == Goal::Install && of_module.iter().any(is_newer) {
        // The newer Manifest takes the objects over. If it leaves, all of them are compared.
        ctx.memories.distrust(key);
        ctx.memories.set_pods(key, &kyma, None);
        // The deletion of either of the two enqueues it, and so does a change of its number.
        return Ok(ended());
    }
    let heirs = if goal == Goal::Remove { of_module } else { Vec::new() };
    let mut record = Record::new(ctx, (*manifest).clone());
    let (client, revision) = match (ctx.clients)(&kyma) {
        Ok(client) => client,
        Err(ClientError::Body(missing)) => return Err(missing.into()),
        // A changed access Secret enqueues the Manifest.
        Err(ClientError::Access(error)) => {
            record.write_status(&unreachable(&manifest, error.to_string())).await?;
            return Ok(ended());
        }
    };
    let reconcile = Reconcile { ctx, key, kyma, client, revision, queued, unseen, heirs, others };
    reconcile.run(record).await
}

/// Order of the Manifests of one module: the last one is applied, the others write nothing.
pub(crate) fn precedence(manifest: &Manifest) -> impl Ord {
    let metadata = &manifest.metadata;
    (succession(manifest), metadata.creation_timestamp.as_ref(), metadata.uid.as_deref())
}

/// Number of a Manifest in the order in which its Kyma selected those of the module; 0 without a valid one.
pub(crate) fn succession(manifest: &Manifest) -> u64 {
    let number = manifest.annotations().get(annotation::SUCCESSION);
    number.and_then(|number| number.parse().ok()).unwrap_or_default()
}

/// Permission to reconcile a Manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Permission {
    Granted,
    /// A pause or the label `skip-reconciliation` stops it; the end of either enqueues it.
    Parked,
    /// The hand-back of its Kyma is requested; the withdrawal of the request enqueues it.
    Denied,
    /// The cache lacks its Kyma: another controller manages it.
    Foreign,
    /// Its Kyma is being taken over, or has yet to label it.
    Later,
}

impl Context {
    fn permission(&self, key: &KymaKey, manifest: &Manifest) -> Permission {
        let Settings { pause, takeover, .. } = &self.settings;
        // The cache has the Kymas that this receiver manages.
        let Some(kyma) = self.kyma(key) else { return Permission::Foreign };
        let kyma = kyma.facts();
        let is_labelled = |labels| is_true(Some(labels), label::SKIP_RECONCILIATION);
        let is_skipped = |labels| is_labelled(labels) && !takeover.selects_skipped();
        if pause.of(kyma).is_some() || is_skipped(manifest.labels()) {
            return Permission::Parked;
        }
        // A Kyma that is being deleted is not handed back.
        if !kyma.is_deleting() && takeover::is_hand_back_requested(kyma) {
            return Permission::Denied;
        }
        if !kyma.is_deleting() && is_skipped(kyma.labels()) {
            return Permission::Parked;
        }
        // The reconcile of its Kyma adds the label, which keeps lifecycle-manager away from the Manifest. A deletion adds none.
        let awaits_label = takeover.selects_skipped()
            && !kyma.is_deleting()
            && is_labelled(kyma.labels())
            && !is_labelled(manifest.labels());
        if takeover.is_pending(key) || awaits_label { Permission::Later } else { Permission::Granted }
    }

    /// Returns the other Manifests of the same Kyma, as our last writes returned them.
    fn others_of_kyma(&self, manifest: &Manifest) -> Result<Vec<Arc<Manifest>>, BodyMissingError> {
        let Some(kyma) = manifest.labels().get(label::KYMA_NAME) else { return Ok(Vec::new()) };
        let key = KymaKey::new(manifest.namespace().unwrap_or_default(), kyma);
        let of_kyma = self.stores.manifests.of_kyma(&key, None)?.into_iter();
        let others = of_kyma.filter(|other| other.name_any() != manifest.name_any());
        Ok(others.map(|other| self.memories.newest(&KymaKey::of(&*other), other)).collect())
    }

    fn kyma(&self, key: &KymaKey) -> Option<Arc<CachedKyma>> {
        self.stores.kymas.get(&ObjectRef::new(&key.name).within(&key.namespace))
    }
}

/// Selects the other Manifests of the same module that are not being deleted: the component of the module was renamed. The
/// newest one that stays is applied, and the default module CR is its own.
fn of_module(manifest: &Manifest, others: &[Arc<Manifest>]) -> Vec<Arc<Manifest>> {
    let module = module_of(manifest);
    let is_of_module = |other: &&Arc<Manifest>| {
        module.is_some() && module_of(other) == module && other.metadata.deletion_timestamp.is_none()
    };
    others.iter().filter(is_of_module).cloned().collect()
}

fn module_of(manifest: &Manifest) -> Option<&str> {
    manifest.labels().get(label::MODULE_NAME).map(String::as_str)
}

/// Findings of a reconcile without a client.
fn unreachable(manifest: &Manifest, operation: String) -> Findings {
    let is_deleting = manifest.metadata.deletion_timestamp.is_some();
    Findings {
        state: if is_deleting { State::Deleting } else { State::Error },
        operation,
        rendered: None,
        installed: (!is_deleting).then_some(false),
        default_created: None,
        inventory: inventory_of(manifest),
    }
}

fn inventory_of(manifest: &Manifest) -> Inventory {
    Inventory::read(manifest.status.as_ref().map(|status| status.synced()).unwrap_or_default())
}

/// True if the module has a default CR that is created and deleted with it.
fn manages_default(manifest: &Manifest) -> bool {
    manifest.spec.policy() == CustomResourcePolicy::CreateAndDelete && manifest.spec.resource().is_some()
}

/// True if a Manifest of the same module that stays has this default module CR, or the CRD of its kind.
fn keeps_default(heir: &Manifest, default: &ObjectKey) -> bool {
    let of_heir = [default_object::of(heir), heir.spec.resource().map(ObjectKey::of)];
    of_heir.iter().flatten().any(|it| it == default)
        || inventory_of(heir).keys().any(|key| key.defines_group_of(default))
}

/// True if the layer that the Manifest names was applied completely.
pub(crate) fn is_synced(manifest: &Manifest) -> bool {
    ManifestFacts::from(manifest).flags.is_synced
}

/// True for a module that is ready, or in a warning state.
pub(crate) fn is_healthy(manifest: &Manifest) -> bool {
    ManifestFacts::from(manifest).is_healthy()
}

fn goal_of(manifest: &Manifest) -> Goal {
    if manifest.annotations().get(annotation::UNMANAGED).is_some_and(|value| value == "true") {
        Goal::Release
    } else if manifest.metadata.deletion_timestamp.is_some() {
        Goal::Remove
    } else {
        Goal::Install
    }
}

/// One reconcile with a client of the runtime cluster.
struct Reconcile<'a> {
    ctx: &'a Context,
    key: &'a ManifestKey,
    kyma: KymaKey,
    client: Client,
    revision: u64,
    queued: &'a QueuedWork,
    /// Objects that the agent reported as changed, without those that are as our own writes left them.
    unseen: Vec<&'a Object>,
    /// Manifests of the same module that stay while this one is removed: the component of the module was renamed, or
    /// the rename was reverted.
    heirs: Vec<Arc<Manifest>>,
    /// All other Manifests of the Kyma.
    others: Vec<Arc<Manifest>>,
}

/// The rendered layer.
struct Rendering {
    /// `None` while the layer is not available.
    objects: Option<Vec<RenderedObject>>,
    /// Hash of the data of KCP in them.
    secrets: u64,
    /// Name of the image pull secret, if KCP lacks its content.
    missing_secret: Option<String>,
    fault: Option<Fault>,
    /// Failed discovery of the kinds.
    failure: Option<Failure>,
    kinds: Kinds,
}

impl Reconcile<'_> {
    async fn run(self, record: Record) -> Result<ReconcileOutcome, Error> {
        let goal = goal_of(&record.manifest);
        let Rendering { objects, secrets, missing_secret, fault, failure, kinds } =
            self.render(&record.manifest, goal).await?;
        let inventory = inventory_of(&record.manifest);
        let desired = objects.as_ref().map(|_| {
            let Manifest { metadata, spec, .. } = &record.manifest;
            Desired {
                target: hash(&(&metadata.uid, self.revision)),
                objects: hash(&(metadata.generation, spec.install.source.to_string(), secrets)),
            }
        });
        let rendered = objects.iter().flatten();
        let known = inventory.keys().chain(rendered.map(|object| &object.key));
        let sharing = Sharing::of(&record.manifest, &self.others, known);
        let verify = self.queued.drift == Drift::All;
        let mut memory = self.ctx.memories.take(self.key, desired, verify, inventory.clone());
        let current = memory.retain(objects.as_deref().unwrap_or_default());
        let mut facts = facts(goal, &record.manifest, objects.as_deref(), inventory, &current);
        for object in &self.unseen {
            let key = ObjectKey::reported(object);
            facts.seen.remove(&key);
            memory.doubt(&key);
            if is_replaced(object) {
                memory.doubt_all(facts.forget_held(&key));
            }
        }
        for key in self.ctx.memories.yields().take_ended(self.key) {
            facts.seen.remove(&key);
            memory.doubt(&key);
        }
        if let Some(secret) = missing_secret.filter(|_| goal == Goal::Install) {
            facts.keep_copies(&secret);
        }
        facts.recovered = memory.is_recovered().then_some(true);
        let default = default_object::of(&record.manifest);
        if default.is_some_and(|default| self.heirs.iter().any(|heir| keeps_default(heir, &default))) {
            facts.default_object = DefaultObject::NotWanted;
        }
        let rendered = objects.iter().flatten().map(|object| (&object.key, object.version.as_str()));
        let manager = manager_of(&record.manifest, rendered);
        let jobs = CreatedJobs::of(&record.manifest, &self.others);
        let mut execution = Execution {
            ctx: self.ctx,
            key: self.key,
            kyma: self.kyma.clone(),
            client: self.client.clone(),
            record,
            kinds,
            facts,
            memory,
            failures: failure.into_iter().collect(),
            crs: Found::default(),
            going: Vec::new(),
            remarks: BTreeMap::new(),
            sharing,
            heirs: self.heirs.clone(),
            turn: None,
            unestablished: Vec::new(),
            migrating: Vec::new(),
            established: BTreeSet::new(),
            has_left: false,
            adopts: false,
            manager,
            live_manager: None,
            pods: None,
            jobs,
        };
        for _ in 0..MAX_ACTIONS {
            match step(&execution.facts) {
                Action::End => break,
                // The next reconcile deletes the default module CR first, which was left to them.
                Action::Delete(_) | Action::Leave if self.has_lost_heirs(&execution.record.manifest)? => break,
                action => execution.run(action).await?,
            }
            if execution.has_left {
                break;
            }
        }
        self.finish(execution, fault, desired).await
    }

    /// Returns true if the Manifests of the module that were to stay are being deleted by now, or gone.
    fn has_lost_heirs(&self, manifest: &Manifest) -> Result<bool, BodyMissingError> {
        Ok(!self.heirs.is_empty() && of_module(manifest, &self.ctx.others_of_kyma(manifest)?).is_empty())
    }

    /// Renders the layer that the Manifest names.
    async fn render(&self, manifest: &Manifest, goal: Goal) -> Result<Rendering, Error> {
        let mut rendering = Rendering {
            objects: None,
            secrets: 0,
            missing_secret: None,
            fault: None,
            failure: None,
            kinds: self.ctx.kinds.of(&self.kyma, self.revision),
        };
        if goal == Goal::Release {
            return Ok(rendering);
        }
        let layer = match layer_key(manifest) {
            Ok(layer) => (self.ctx.layers)(self.key, &layer).await,
            Err(error) => LayerObjects::Failed(error),
        };
        let objects = match layer {
            LayerObjects::Ready(objects) => objects,
            LayerObjects::Pending => return Ok(rendering),
            LayerObjects::Failed(error) => {
                rendering.fault = Some(Fault::Layer(error));
                return Ok(rendering);
            }
        };
        objects.iter().for_each(|object| rendering.kinds.define(object));
        if let Err(error) = rendering.kinds.discover(&self.client, objects.iter().filter_map(kind_of)).await {
            rendering.failure = Some(Failure::new("find the kinds that the runtime serves".to_owned(), &error));
            return Ok(rendering);
        }
        let secrets = match &self.ctx.secrets {
            Some(secrets) => secrets.data(manifest, &objects).await,
            None => Ok(SecretData::default()),
        };
        let secrets = match secrets {
            Ok(secrets) => secrets,
            Err(InjectError::Request(error)) => {
                return Err(Error::ControlPlane("read a Secret in the control plane", error));
            }
            Err(error) => {
                rendering.fault = Some(Fault::Rendering(error.to_string()));
                return Ok(rendering);
            }
        };
        let pull_secret = self.ctx.settings.pull_secret.as_ref();
        let content = pull_secret.and_then(|secret| secret.secret.content());
        rendering.secrets = hash(&json!([secrets, content.as_deref()]).to_string());
        rendering.missing_secret = pull_secret.filter(|_| content.is_none()).map(|secret| secret.name.clone());
        let pull_secret = pull_secret.map(|secret| PullSecret { name: &secret.name, content: content.as_deref() });
        let kinds = &rendering.kinds;
        let scope = |group: &str, version: &str, kind: &str| match kinds.served(group, version, kind) {
            Some(kind) if kind.namespaced => Scope::Namespaced,
            Some(_) => Scope::Cluster,
            None => Scope::NotServed,
        };
        match render(&objects, &RenderSettings { manifest, pull_secret, secrets: &secrets, scope: &scope }) {
            Ok(objects) => rendering.objects = Some(objects),
            Err(error) => rendering.fault = Some(Fault::Rendering(error.to_string())),
        }
        Ok(rendering)
    }

    /// Observes the readiness, writes the status, and decides on the next reconcile.
    async fn finish(
        self,
        mut execution: Execution<'_>,
        fault: Option<Fault>,
        desired: Option<Desired>,
    ) -> Result<ReconcileOutcome, Error> {
        let is_applied = execution.facts.is_applied();
        let facts = &execution.facts;
        let is_complete =
            facts.objects_are_current() || facts.only_custom_resources_failed() || facts.only_guarded_failed();
        let is_kept = facts.goal == Goal::Install || facts.waits();
        let is_installed = is_kept && is_complete;
        let unready = execution.memory.unready();
        let readiness = if is_installed { execution.readiness(self.reads_pods(unready)).await } else { None };
        let foreign = if execution.has_left { execution.record.foreign_finalizers() } else { Vec::new() };
        if execution.has_left && foreign.is_empty() {
            self.ctx.forget(self.key);
            return Ok(ReconcileOutcome::ended(self.queued.work));
        }
        let disputes = self.ctx.memories.yields().warnings(self.key);
        let details = Details {
            manifest: &execution.record.manifest,
            fault: fault.as_ref(),
            failures: &execution.failures,
            crs: &execution.crs,
            going: &execution.going,
            unestablished: &execution.unestablished,
            migrating: &execution.migrating,
            remarks: execution.remarks.values().map(String::as_str).collect(),
            readiness,
            disputes: &disputes,
            foreign_finalizers: &foreign,
        };
        let findings = findings(&execution.facts, &details);
        let before = execution.record.manifest.status.as_ref().map(|status| status.state);
        if let Some(findings) = &findings {
            execution.record.write_status(findings).await?;
            if findings.state == State::Ready && before != Some(State::Ready) {
                self.ctx.metrics.requeues.intended("manifest_reconcile_finished");
            }
        }
        let mut records = Map::new();
        if is_applied && execution.facts.goal == Goal::Install && !is_synced(&execution.record.manifest) {
            let reference = execution.record.manifest.spec.install.source["ref"].clone();
            records.insert(annotation::SYNC_OCI_REF.to_owned(), reference);
        }
        // A Job that was applied but is not recorded runs once more if it is gone by the next reconcile.
        if let Some(jobs) = execution.jobs.annotation(execution.facts.rendered.unwrap_or_default()) {
            records.insert(annotation::JOBS.to_owned(), jobs.into());
        }
        if !records.is_empty() {
            let members = json!({"annotations": records});
            execution.record.patch_metadata("record what was applied of the Manifest", members).await?;
        }
        if let Some(desired) = desired.filter(|_| is_applied) {
            execution.memory.complete(desired, execution.facts.rendered.unwrap_or_default());
        }
        execution.remarks.keys().for_each(|key| execution.memory.doubt(key));
        let outcome = self.outcome(&mut execution, findings.as_ref());
        self.ctx.memories.keep(self.key, execution.memory);
        Ok(outcome)
    }

    fn outcome(&self, execution: &mut Execution<'_>, findings: Option<&Findings>) -> ReconcileOutcome {
        let work = self.queued.work;
        if let Some(class) = execution.failures.iter().map(|failure| failure.class).min() {
            let is_removal = execution.facts.goal == Goal::Remove;
            let reason = if is_removal { "manifest_pre_delete" } else { "manifest_sync_resources" };
            self.ctx.metrics.requeues.unexpected(reason);
            for failure in &execution.failures {
                tracing::debug!(manifest = %self.key, failure = failure.line(), "A request of a Manifest's reconcile failed");
            }
            let is_lasting = execution.failures.iter().all(|failure| failure.retry != Retry::Soon);
            let min_backoff = execution.memory.next_attempt().filter(|_| is_lasting);
            return ReconcileOutcome { min_backoff, ..ReconcileOutcome::failed(work, class) };
        }
        let ended = ReconcileOutcome::ended(work);
        let Some(findings) = findings else { return ended };
        let pods = execution.pods.take();
        let is_layer_missing = execution.facts.goal == Goal::Install && execution.facts.rendered.is_none();
        let is_ready = findings.state == State::Ready || findings.installed == Some(true);
        if is_ready || execution.has_left || is_layer_missing {
            execution.memory.unready_for(false);
            self.watch_pods(None, Duration::ZERO);
            // Then the fields that are left to other writers are asserted again, or objects that stay are looked at.
            let asserted = self.ctx.memories.yields().next(self.key);
            let looked_at = (!execution.remarks.is_empty()).then(|| {
                let times = execution.memory.wait(&findings.operation);
                self.ctx.memories.recheck(times, MAX_DECISION_RECHECK)
            });
            return ReconcileOutcome { requeue_after: asserted.into_iter().chain(looked_at).min(), ..ended };
        }
        let unready = execution.memory.unready_for(pods.is_some());
        self.watch_pods(pods, unready);
        let mut times = execution.memory.wait(report::cause(&findings.operation));
        if !execution.migrating.is_empty() {
            // It is work of ours that goes on.
            times = 0;
        }
        ReconcileOutcome { requeue_after: Some(self.ctx.memories.recheck(times, MAX_RECHECK)), ..ended }
    }
}

impl Reconcile<'_> {
    /// Has the agent watch the pods of a manager that is not ready after a while, and until it is.
    fn watch_pods(&self, pods: Option<PodSelection>, unready: Duration) {
        let pods = pods.filter(|_| self.reads_pods(unready));
        self.ctx.memories.set_pods(self.key, &self.kyma, pods);
    }

    /// True once a manager was not ready for a while, and until it is.
    fn reads_pods(&self, unready: Duration) -> bool {
        unready >= WATCH_PODS_AFTER || self.ctx.memories.pods(self.key).is_some()
    }
}

/// Group, version and kind of an object.
fn kind_of(object: &Value) -> Option<(&str, &str, &str)> {
    let (group, version) = inventory::split_api_version(object["apiVersion"].as_str()?);
    Some((group, version, object["kind"].as_str()?))
}

/// Facts at the begin of a reconcile. Objects that an earlier one applied are `current`, and not applied again.
fn facts<'a>(
    goal: Goal,
    manifest: &Manifest,
    rendered: Option<&'a [RenderedObject]>,
    inventory: Inventory,
    current: &[&ObjectKey],
) -> Facts<'a> {
    let seen: BTreeMap<_, _> = current.iter().map(|key| ((*key).clone(), Seen::Current)).collect();
    let mut definitions = rendered.unwrap_or_default().iter().filter(|object| object.key.is_definition());
    // They were established when the earlier reconcile ended.
    let established = definitions.all(|object| seen.contains_key(&object.key)).then_some(true);
    let is_created = status::is_default_created(manifest);
    let is_pending = manages_default(manifest) && (goal == Goal::Remove || !is_created);
    let has_finalizers =
        wanted_finalizers(manifest).all(|name| manifest.finalizers().iter().any(|known| known == name));
    Facts {
        goal,
        has_finalizers,
        rendered,
        inventory,
        recovered: None,
        seen,
        established,
        default_object: if is_pending { DefaultObject::Pending } else { DefaultObject::NotWanted },
        default_created: is_created,
        installation: Installation::Unknown,
        blocked: None,
    }
}
