//! The reconcile of one Manifest: facts, rendering, actions, status, and the time of the next one.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use kube::{Client, ResourceExt as _};
use serde_json::{Map, json};
use tidewatch_api::{
    Manifest, State,
    key::{KymaKey, ManifestKey},
    names::annotation,
};
use tidewatch_cluster::{
    FallbackMetrics, WriteBudgets,
    kinds::{KindCache, Kinds},
};
use tidewatch_kit::hash::hash;

use super::{
    Content, Memories, ModuleObjects, Store, StoreError,
    adoption::Installation,
    content::{PullSecret, SecretsError},
    created_jobs::CreatedJobs,
    default_object,
    execute::wanted_finalizers,
    execution::Execution,
    failure::{Failure, Retry},
    inventory::{Inventory, ObjectKey},
    look::{self, Look},
    memory::{Desired, MAX_DECISION_RECHECK, MAX_RECHECK},
    module::{goal_of, inventory_of, is_superseded, keeps_default, manages_default, of_module},
    outcome::{End, Next, Outcome, Progress},
    pods::PodSelection,
    ready::manager_of,
    record::Record,
    render::{RenderSettings, RenderedObject, render},
    report::{self, Details, Fault, Results, findings},
    sharing::Sharing,
    status::{self, Findings},
    step::{Action, DefaultObject, Facts, Goal, Seen, step},
};

/// Actions of one reconcile, far more than any module needs: a bound on a defect.
const MAX_ACTIONS: usize = 200;
/// Time after which the pods of a manager that is not ready are read, and are to be watched by the caller. Most managers are ready
/// before.
pub(crate) const WATCH_PODS_AFTER: Duration = Duration::from_secs(3);

/// State that the reconciles of all modules share. Clones share it. It remembers results by the key of the Manifest, so
/// Manifests with one key in several clusters need an engine each.
#[derive(Clone, Default)]
pub struct Engine {
    /// Kinds that the clusters serve.
    pub kinds: KindCache,
    /// Budgets of the repairs in the clusters.
    pub budgets: WriteBudgets,
    /// Results of earlier reconciles.
    pub memories: Memories,
    /// Counters of writes besides plain applies.
    pub fallbacks: FallbackMetrics,
}

/// The cluster of a module.
#[derive(Clone)]
pub struct Cluster {
    /// Key that tells the clusters of an engine apart.
    pub key: KymaKey,
    /// Client of the cluster.
    pub client: Client,
    /// Revision of the client: another one may lead to another cluster, or have other rights.
    pub revision: u64,
}

/// An object that another writer changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedObject {
    /// Identity of the object.
    pub key: ObjectKey,
    /// The object is gone, or is another one of the same name: all that it held is compared as well.
    pub is_replaced: bool,
}

/// Request for a reconcile of one Manifest.
pub struct Request<'a> {
    /// The Manifest as last read.
    pub manifest: Arc<Manifest>,
    /// The cluster of the module.
    pub cluster: &'a Cluster,
    /// Storage of the Manifest.
    pub store: &'a dyn Store,
    /// Source of the objects.
    pub content: &'a dyn Content,
    /// Image pull secret of the modules' pods.
    pub pull_secret: Option<PullSecret>,
    /// Compares all objects, also those that were applied and have not been reported since.
    pub verify: bool,
    /// Objects to compare again.
    pub changed: Vec<ChangedObject>,
    /// Takes notice of progress.
    pub progress: &'a (dyn Fn(Progress) + Send + Sync),
}

impl<'a> Request<'a> {
    /// A request without pull secret, that trusts what earlier reconciles applied.
    pub fn new(
        manifest: impl Into<Arc<Manifest>>,
        cluster: &'a Cluster,
        store: &'a dyn Store,
        content: &'a dyn Content,
    ) -> Self {
        Self {
            manifest: manifest.into(),
            cluster,
            store,
            content,
            pull_secret: None,
            verify: false,
            changed: Vec::new(),
            progress: &|_| (),
        }
    }
}

impl Engine {
    /// Reconciles one Manifest. Failures in the cluster are part of the outcome, and those that concern the user are reported
    /// in the status.
    ///
    /// # Errors
    /// The store did not read or write a Manifest. The next reconcile begins with what was written before.
    pub async fn reconcile(&self, request: Request<'_>) -> Result<Outcome, StoreError> {
        let Request { manifest, store, .. } = &request;
        let others = store.others(manifest).await?;
        if self.stand_back(manifest, &others, &request.cluster.key) {
            // The deletion of either of the two causes a reconcile, and so does a change of its number.
            return Ok(Outcome { end: End::Superseded, next: Next::OnChange });
        }
        let heirs = if goal_of(manifest) == Goal::Remove { of_module(manifest, &others) } else { Vec::new() };
        let record = Record::new(*store, (**manifest).clone());
        let key = ManifestKey::of(&**manifest);
        Reconcile { engine: self, key, request, heirs, others }.run(record).await
    }

    /// Has a Manifest stand back if one of the others replaces it, and returns true then: it writes nothing. The newer Manifest
    /// takes the objects over; if it leaves, all of them are compared.
    pub fn stand_back(&self, manifest: &Manifest, others: &[Arc<Manifest>], cluster: &KymaKey) -> bool {
        if !is_superseded(manifest, others) {
            return false;
        }
        let key = ManifestKey::of(manifest);
        self.memories.distrust(&key);
        self.memories.pods.set(&key, cluster, None);
        true
    }

    /// Reports in the status of a Manifest that its cluster cannot be reached.
    ///
    /// # Errors
    /// The store did not write the status.
    pub async fn report_unreachable(
        &self,
        store: &dyn Store,
        manifest: &Manifest,
        cause: String,
    ) -> Result<(), StoreError> {
        Record::new(store, manifest.clone()).write_status(&unreachable(manifest, cause)).await
    }
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

/// One reconcile.
struct Reconcile<'a> {
    engine: &'a Engine,
    key: ManifestKey,
    request: Request<'a>,
    /// Manifests of the same module that stay while this one is removed: the component of the module was renamed, or
    /// the rename was reverted.
    heirs: Vec<Arc<Manifest>>,
    /// All other Manifests of the cluster.
    others: Vec<Arc<Manifest>>,
}

/// The rendered version.
struct Rendering {
    /// `None` while they are not available.
    objects: Option<Vec<RenderedObject>>,
    /// Hash of the data that the caller provides for them.
    secrets: u64,
    /// Name of the image pull secret, if its content is not available.
    missing_secret: Option<String>,
    fault: Option<Fault>,
    /// Failed discovery of the kinds.
    failure: Option<Failure>,
    kinds: Kinds,
    /// The manager, if it was read during the discovery.
    look: Option<Look>,
}

impl Reconcile<'_> {
    async fn run(self, record: Record<'_>) -> Result<Outcome, StoreError> {
        let goal = goal_of(&record.manifest);
        let Rendering { objects, secrets, missing_secret, fault, failure, kinds, look } =
            self.render(&record.manifest, goal).await?;
        let inventory = inventory_of(&record.manifest);
        let desired = objects.as_ref().map(|_| {
            let Manifest { metadata, spec, .. } = &record.manifest;
            Desired {
                target: hash(&(&metadata.uid, self.request.cluster.revision)),
                objects: hash(&(metadata.generation, spec.install.source.to_string(), secrets)),
            }
        });
        let rendered = objects.iter().flatten();
        let known = inventory.keys().chain(rendered.map(|object| &object.key));
        let sharing = Sharing::of(&record.manifest, &self.others, known);
        let key = &self.key;
        let mut memory = self.engine.memories.take(key, desired, self.request.verify, inventory.clone());
        let current = memory.retain(objects.as_deref().unwrap_or_default());
        let mut facts = facts(goal, &record.manifest, objects.as_deref(), inventory, &current);
        for ChangedObject { key, is_replaced } in &self.request.changed {
            facts.seen.remove(key);
            memory.doubt(key);
            if *is_replaced {
                memory.doubt_all(facts.forget_held(key));
            }
        }
        for key in self.engine.memories.yields.take_ended(key) {
            facts.seen.remove(&key);
            memory.doubt(&key);
        }
        if let Some(secret) = missing_secret.filter(|_| goal == Goal::Install) {
            facts.keep_copies(&secret);
        }
        facts.recovered = memory.is_recovered.then_some(true);
        let default = default_object::of(&record.manifest);
        if default.is_some_and(|default| self.heirs.iter().any(|heir| keeps_default(heir, &default))) {
            facts.default_object = DefaultObject::NotWanted;
        }
        let rendered = objects.iter().flatten().map(|object| (&object.key, object.version.as_str()));
        let manager = manager_of(&record.manifest, rendered);
        let jobs = CreatedJobs::of(&record.manifest, &self.others);
        let mut execution = Execution {
            engine: self.engine,
            key,
            request: &self.request,
            record,
            kinds,
            facts,
            memory,
            results: Results { failures: failure.into_iter().collect(), ..Results::default() },
            sharing,
            heirs: self.heirs.clone(),
            turn: None,
            established: BTreeSet::new(),
            has_left: false,
            adopts: false,
            look,
            manager,
            live_manager: None,
            pods: None,
            jobs,
        };
        for _ in 0..MAX_ACTIONS {
            match step(&execution.facts) {
                Action::End => break,
                // The next reconcile deletes the default module CR first, which was left to them.
                Action::Delete(_) | Action::Leave if self.has_lost_heirs(&execution.record.manifest).await? => break,
                action => execution.run(action).await?,
            }
            if execution.has_left {
                break;
            }
        }
        Self::finish(execution, fault, desired).await
    }

    /// Returns true if the Manifests of the module that were to stay are being deleted by now, or gone.
    async fn has_lost_heirs(&self, manifest: &Manifest) -> Result<bool, StoreError> {
        if self.heirs.is_empty() {
            return Ok(false);
        }
        Ok(of_module(manifest, &self.request.store.others(manifest).await?).is_empty())
    }

    /// Renders the version that the Manifest names.
    async fn render(&self, manifest: &Manifest, goal: Goal) -> Result<Rendering, StoreError> {
        let Request { cluster, content, pull_secret, .. } = &self.request;
        let mut rendering = Rendering {
            objects: None,
            secrets: 0,
            missing_secret: None,
            fault: None,
            failure: None,
            kinds: self.engine.kinds.of(&cluster.key, cluster.revision),
            look: None,
        };
        if goal == Goal::Release {
            return Ok(rendering);
        }
        let objects = match content.objects(manifest).await {
            ModuleObjects::Ready(objects) => objects,
            ModuleObjects::Pending => return Ok(rendering),
            ModuleObjects::Failed(error) => {
                rendering.fault = Some(Fault::Content(error));
                return Ok(rendering);
            }
        };
        objects.iter().for_each(|object| rendering.kinds.define(object));
        let (discovered, look) = look::discover(&cluster.client, &mut rendering.kinds, manifest, &objects).await;
        rendering.look = look;
        if let Err(error) = discovered {
            rendering.failure = Some(Failure::new("find the kinds that the runtime serves".to_owned(), &error));
            return Ok(rendering);
        }
        let secrets = match content.secrets(manifest, &objects).await {
            Ok(secrets) => secrets,
            Err(SecretsError::Request(operation, error)) => return Err(StoreError::Request(operation, error)),
            Err(SecretsError::Invalid(fault)) => {
                rendering.fault = Some(Fault::Rendering(fault));
                return Ok(rendering);
            }
        };
        let pull_secret = pull_secret.as_ref();
        let copied = pull_secret.and_then(|secret| secret.content.as_deref());
        rendering.secrets = hash(&json!([secrets, copied]).to_string());
        rendering.missing_secret = pull_secret.filter(|_| copied.is_none()).map(|secret| secret.name.clone());
        let kinds = &rendering.kinds;
        match render(&objects, &RenderSettings { manifest, pull_secret, secrets: &secrets, kinds }) {
            Ok(objects) => rendering.objects = Some(objects),
            Err(error) => rendering.fault = Some(Fault::Rendering(error.to_string())),
        }
        Ok(rendering)
    }

    /// Observes the readiness, writes the status, and decides on the next reconcile.
    async fn finish(
        mut execution: Execution<'_>,
        fault: Option<Fault>,
        desired: Option<Desired>,
    ) -> Result<Outcome, StoreError> {
        let engine = execution.engine;
        let key = execution.key;
        let is_applied = execution.facts.is_applied();
        let facts = &execution.facts;
        let is_complete =
            facts.objects_are_current() || facts.only_custom_resources_failed() || facts.only_guarded_failed();
        let is_kept = facts.goal == Goal::Install || facts.waits();
        let is_installed = is_kept && is_complete;
        let unready = execution.memory.unready();
        let explains = execution.reads_pods(unready);
        let readiness = if is_installed { execution.readiness(explains).await } else { None };
        let foreign = if execution.has_left { execution.record.foreign_finalizers() } else { Vec::new() };
        if execution.has_left && foreign.is_empty() {
            engine.memories.forget(key);
            return Ok(Outcome { end: End::Gone, next: Next::OnChange });
        }
        let disputes = engine.memories.yields.warnings(key);
        let details = Details {
            manifest: &execution.record.manifest,
            fault: fault.as_ref(),
            results: &execution.results,
            readiness,
            disputes: &disputes,
            foreign_finalizers: &foreign,
        };
        let findings = findings(&execution.facts, &details);
        let before = execution.record.manifest.status.as_ref().map(|status| status.state);
        if let Some(findings) = &findings {
            execution.record.write_status(findings).await?;
            if findings.state == State::Ready && before != Some(State::Ready) {
                (execution.request.progress)(Progress::Ready);
            }
        }
        let mut records = Map::new();
        if is_applied && execution.facts.goal == Goal::Install && !execution.record.manifest.is_synced() {
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
        execution.results.remarks.keys().for_each(|key| execution.memory.doubt(key));
        let is_by_hand = matches!(execution.facts.installation, Installation::Foreign(_));
        let end = End::of(findings.as_ref(), is_by_hand || !execution.results.crs.blockers.is_empty());
        let next = execution.next(findings.as_ref());
        engine.memories.keep(key, execution.memory);
        Ok(Outcome { end, next })
    }
}

impl Execution<'_> {
    /// Decides on the next reconcile.
    fn next(&mut self, findings: Option<&Findings>) -> Next {
        let key = &self.key;
        let memories = &self.engine.memories;
        if let Some(class) = self.results.failures.iter().map(|failure| failure.class).min() {
            for failure in &self.results.failures {
                tracing::debug!(manifest = %key, failure = failure.line(), "A request of a Manifest's reconcile failed");
            }
            let is_lasting = self.results.failures.iter().all(|failure| failure.retry != Retry::Soon);
            let min_backoff = self.memory.next_attempt().filter(|_| is_lasting);
            return Next::Retry { class, min_backoff };
        }
        let Some(findings) = findings else { return Next::OnChange };
        let pods = self.pods.take();
        let is_layer_missing = self.facts.goal == Goal::Install && self.facts.rendered.is_none();
        let is_ready = findings.state == State::Ready || findings.installed == Some(true);
        if is_ready || self.has_left || is_layer_missing {
            self.memory.unready_for(false);
            self.watch_pods(None, Duration::ZERO);
            // Then the fields that are left to other writers are asserted again, or objects that stay are looked at.
            let asserted = memories.yields.next(key);
            let looked_at = (!self.results.remarks.is_empty()).then(|| {
                let times = self.memory.wait(&findings.operation);
                memories.recheck(times, MAX_DECISION_RECHECK)
            });
            return asserted.into_iter().chain(looked_at).min().map_or(Next::OnChange, Next::After);
        }
        let unready = self.memory.unready_for(pods.is_some());
        self.watch_pods(pods, unready);
        let mut times = self.memory.wait(report::cause(&findings.operation));
        if !self.results.migrating.is_empty() {
            // It is work of ours that goes on.
            times = 0;
        }
        Next::After(memories.recheck(times, MAX_RECHECK))
    }

    /// Has the caller watch the pods of a manager that is not ready after a while, and until it is.
    fn watch_pods(&self, pods: Option<PodSelection>, unready: Duration) {
        let pods = pods.filter(|_| self.reads_pods(unready));
        self.engine.memories.pods.set(self.key, &self.request.cluster.key, pods);
    }

    /// True once a manager was not ready for a while, and until it is.
    fn reads_pods(&self, unready: Duration) -> bool {
        unready >= WATCH_PODS_AFTER || self.engine.memories.pods(self.key).is_some()
    }
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
