//! Carries out the actions of `step`, and adds their results to the facts. A failed request on one object stops no
//! other: it is recorded, and reported in the status.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    ops::ControlFlow,
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt as _, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams},
};
use serde_json::{Map, Value, json};
use tidewatch_shared::{
    api::{ConditionStatus, Manifest, State},
    names::{annotation, field_manager, finalizer},
};
use tokio::time::{Instant, sleep};

use super::{
    Context, Error,
    adoption::{self, Installation, Surplus},
    blocking::{self, Found},
    create_default,
    default_object::Going,
    inventory::{Inventory, ObjectKey},
    jobs::{self, CreatedJobs},
    keeping::is_marked,
    memory::{Memory, hash},
    own_webhook::{self, service},
    parting::Departure,
    pods::PodSelection,
    ready::{self, MAX_PODS, Manager, Readiness, explain, pod_selector},
    record::Record,
    recovery, recreation,
    refusals::Retry,
    render::{RenderedObject, leftovers},
    sharing::Sharing,
    stage::Stage,
    status::Findings,
    step::{Action, DefaultObject, Facts, Seen},
    turns::Turn,
};
use crate::{
    base::{error_class::ErrorClass, key::KymaKey},
    fleet::manifests::ManifestKey,
    kube::{
        kinds::{Kinds, is_built_in, is_unserved},
        object::{self, Component, Converged, Fallback, Ownership, SecondWays, Shape, Target, WriteBudget, WriteError},
        runtime_access::{classify, describe, list_first, retain},
    },
};

/// Requests to one runtime cluster for one Manifest at a time.
pub(super) const CONCURRENCY: usize = 4;
/// Deadline of the CRDs of a module to be established, and the first and the longest interval of the reads; it doubles.
const ESTABLISHED_DEADLINE: Duration = Duration::from_secs(10);
const ESTABLISHED_INTERVAL: Duration = Duration::from_millis(20);
const ESTABLISHED_MAX_INTERVAL: Duration = Duration::from_millis(500);

/// Fields that a module sets are ours, and removed when a version does not set them any more; additions of others stay:
/// operators write `caBundle`, replicas and conversion webhooks into their own objects.
pub(super) const TYPED: Shape = Shape { fields_of: Some(field_manager::MODULE), ..Shape::new(Ownership::Fields) };
/// As [`TYPED`], for custom resources, whose API servers keep empty lists.
const CUSTOM: Shape = Shape { drops_empty_lists: false, ..TYPED };
/// As [`TYPED`], for copies of the image pull secret, whose type may change.
const PULL_SECRET: Shape = Shape { immutable: &["/type", "/immutable"], ..TYPED };

/// A failed request on an object of the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    /// Operation and object, as in `apply Deployment kyma-system/x`.
    operation: String,
    /// Error of the API server, in one bounded line.
    cause: String,
    pub(super) class: ErrorClass,
    /// Another attempt is likely to succeed soon: a conflict, or a rate limit.
    pub(super) is_transient: bool,
    /// The runtime does not serve the kind.
    is_unserved: bool,
    /// The API server refuses the content of the object.
    is_invalid: bool,
    /// The module's own webhook, which does not answer, caused it.
    is_guarded: bool,
    /// Effect on the next attempt.
    pub(super) retry: Retry,
}

impl Failure {
    pub(super) fn new(operation: String, error: &kube::Error) -> Self {
        let refusal = if let kube::Error::Api(status) = error { Some(status) } else { None };
        let code = refusal.map_or(0, |refusal| refusal.code);
        let is_unserved = is_unserved(error);
        Self {
            operation,
            cause: describe(error),
            class: classify(error),
            is_transient: is_unserved || matches!(code, 409 | 429),
            is_unserved,
            is_invalid: code == 422,
            is_guarded: false,
            retry: refusal.map_or(Retry::Soon, |refusal| Retry::of(refusal)),
        }
    }

    /// A failure without a failed request.
    fn because(operation: String, cause: &str) -> Self {
        Self {
            operation,
            cause: cause.to_owned(),
            class: ErrorClass::Refused,
            is_transient: false,
            is_unserved: false,
            is_invalid: false,
            is_guarded: false,
            retry: Retry::Soon,
        }
    }

    pub(super) const fn is_unserved(&self) -> bool {
        self.is_unserved
    }

    pub(super) fn line(&self) -> String {
        format!("failed to {}: {}", self.operation, self.cause)
    }
}

/// Result of the apply of one object.
pub(super) struct Applied {
    pub(super) seen: Seen,
    /// The manager of the module, as in the last response.
    manager: Option<DynamicObject>,
    /// Form in which the API server stores the object, if that differs from the rendered one.
    accepted: Option<u64>,
    /// The object is an established CRD.
    is_established: bool,
    /// The object is a Job that Kubernetes deletes after its end.
    pub(super) expires: bool,
    /// The object was gone, and is another one now.
    is_new: bool,
    /// The object, if the module has also added fields to it while another one was its owner.
    joined: Option<DynamicObject>,
    /// One sentence about fields that stay as other modules have set them.
    remark: Option<String>,
}

impl Applied {
    /// The result for an object of which no response is to be kept.
    pub(super) const fn seen(seen: Seen) -> Self {
        Self {
            seen,
            manager: None,
            accepted: None,
            is_established: false,
            expires: false,
            is_new: false,
            joined: None,
            remark: None,
        }
    }

    pub(super) fn with(self, remark: Option<String>) -> Self {
        Self { remark, ..self }
    }
}

/// An object as it is to be written.
pub(super) struct Wanted<'a> {
    pub(super) object: &'a RenderedObject,
    /// The rendered body.
    text: String,
    /// The body without what is left to others.
    pub(super) body: Cow<'a, Value>,
}

impl<'a> Wanted<'a> {
    /// The object as rendered.
    pub(super) fn of(object: &'a RenderedObject) -> Self {
        Self { object, text: object.body.to_string(), body: Cow::Borrowed(&object.body) }
    }

    /// Hash of the rendered body.
    fn form(&self) -> u64 {
        hash(&self.text)
    }
}

/// A failed apply, with the hash of what was applied, and to what.
struct Refused {
    failure: Failure,
    content: u64,
}

/// One reconcile of one Manifest.
pub(super) struct Execution<'a> {
    pub(super) ctx: &'a Context,
    pub(super) key: &'a ManifestKey,
    /// Kyma of the Manifest.
    pub(super) kyma: KymaKey,
    pub(super) client: Client,
    pub(super) record: Record,
    pub(super) kinds: Kinds,
    pub(super) facts: Facts<'a>,
    /// Objects in the runtime cluster are compared even if they were applied before.
    pub(super) memory: Memory,
    pub(super) failures: Vec<Failure>,
    /// CRs of the module's kinds, once they were searched during a removal.
    pub(super) crs: Found,
    /// Default module CRs that are being deleted.
    pub(super) going: Vec<Going>,
    /// Objects that are left as they are, although the module is applied, with a sentence about each.
    pub(super) remarks: BTreeMap<ObjectKey, String>,
    /// Other Manifests with objects of this one.
    pub(super) sharing: Sharing,
    /// Manifests of the same module that stay while this one is removed.
    pub(super) heirs: Vec<Arc<Manifest>>,
    /// The turn to let shared objects leave, until the inventory is written.
    pub(super) turn: Option<Turn>,
    /// CRDs that are not established.
    pub(super) unestablished: Vec<String>,
    /// CRDs whose resources are being stored in another version, with that version.
    pub(super) migrating: Vec<String>,
    /// CRDs of which a response of this reconcile shows that they are established.
    pub(super) established: BTreeSet<ObjectKey>,
    /// The Manifest has no finalizer of ours left.
    pub(super) has_left: bool,
    /// The module that was installed by hand is being adopted.
    pub(super) adopts: bool,
    /// Object whose readiness is that of the module.
    pub(super) manager: Option<Manager>,
    /// The manager as in the last response, if this reconcile compared it.
    pub(super) live_manager: Option<DynamicObject>,
    /// Pods of the manager while it is not ready.
    pub(super) pods: Option<PodSelection>,
    /// Jobs that were created.
    pub(super) jobs: CreatedJobs,
}

impl<'a> Execution<'a> {
    /// Carries out an action other than [`Action::End`].
    ///
    /// # Errors
    /// A request to the control plane failed. Failures in the runtime cluster are recorded instead.
    pub(super) async fn run(&mut self, action: Action<'a>) -> Result<(), Error> {
        match action {
            Action::AddFinalizers => self.add_finalizers().await?,
            Action::FindInstallation => self.find_installation().await,
            Action::Adopt(message) => self.adopt(message).await?,
            Action::Record(inventory) => {
                let requeues = &self.ctx.metrics.requeues;
                if self.facts.inventory == Inventory::default() {
                    // The request that creates a Manifest contains its finalizers.
                    requeues.intended("manifest_add_finalizer");
                }
                requeues.intended("manifest_sync_resources_enqueue_required");
                self.record_inventory(inventory).await?;
            }
            Action::Apply(objects) => self.apply(&objects).await,
            Action::AwaitDefinitions(objects) => self.await_definitions(&objects).await,
            Action::CreateDefault => self.create_default().await,
            Action::Recover => self.recover().await?,
            Action::FindBlockers => self.find_blockers().await,
            Action::DeleteDefault => self.delete_default().await,
            Action::Prune(keys) => self.part(keys, Departure::Prune).await?,
            Action::Delete(keys) => self.part(keys, Departure::Delete).await?,
            Action::Unlabel(keys) => self.part(keys, Departure::Release).await?,
            Action::Leave => {
                self.record.leave().await?;
                self.has_left = true;
            }
            Action::End => {}
        }
        Ok(())
    }

    async fn find_installation(&mut self) {
        let Some(Manager { key, version }) = self.manager.clone() else {
            self.facts.installation = Installation::Ours;
            return;
        };
        let name = key.name.clone();
        let read = |api| read_metadata(api, name.clone());
        let found = self.request(&key, &version, read).await;
        let installation = match found.map(Option::flatten) {
            Ok(found) => {
                let target = adoption::target(&self.record.manifest, &key, self.facts.rendered);
                Ok(Installation::of(&key, found.as_ref(), target))
            }
            Err(error) => Err(Failure::new(format!("read {key}"), &error)),
        };
        let installation = match installation {
            Ok(Installation::Adoptable(message)) => {
                self.surplus().await.map(|surplus| Installation::Adoptable(message + &adoption::surplus(&surplus)))
            }
            other => other,
        };
        self.facts.installation = installation.unwrap_or_else(|failure| {
            self.failures.push(failure);
            Installation::Failed
        });
    }

    /// Fields that an adoption removes, by object.
    async fn surplus(&self) -> Result<Vec<Surplus>, Failure> {
        let served = self.facts.rendered.unwrap_or_default().iter().filter(|object| object.served);
        let reads = served.map(async |object| {
            let RenderedObject { key, version, body, .. } = object;
            let Some(api) = self.api(key, version) else { return Ok(None) };
            let found = object::get_metadata(&api, &key.name).await;
            let found = found.map_err(|error| Failure::new(format!("read {key}"), &error))?;
            let surplus = |live: DynamicObject| {
                let (fields, number) = object::surplus_of_tools(body, &live.metadata);
                Surplus { object: key.to_string(), fields, number }
            };
            Ok(found.map(surplus))
        });
        let read: Vec<_> = stream::iter(reads.collect::<Vec<_>>()).buffered(CONCURRENCY).collect().await;
        read.into_iter().filter_map(Result::transpose).collect()
    }

    async fn adopt(&mut self, message: String) -> Result<(), Error> {
        tracing::info!(manifest = %owner_of(&self.record.manifest), message, "Module that was installed by hand is adopted");
        let findings = Findings {
            state: State::Processing,
            operation: message,
            rendered: Some(true),
            installed: Some(false),
            default_created: None,
            inventory: self.facts.inventory.clone(),
        };
        self.record.write_status(&findings).await?;
        self.facts.installation = Installation::Ours;
        self.adopts = true;
        Ok(())
    }

    async fn record_inventory(&mut self, inventory: Inventory) -> Result<(), Error> {
        let synced = inventory.write();
        let state = self.record.manifest.status.as_ref().map(|status| status.state).unwrap_or_default();
        let state = crate::controllers::status::known(state);
        self.record.patch_status(&json!({"state": state, "synced": synced})).await?;
        self.facts.inventory = inventory;
        Ok(())
    }

    async fn recover(&mut self) -> Result<(), Error> {
        let searched =
            recovery::find(&self.client, &mut self.kinds, &self.record.manifest, &self.facts.inventory).await;
        let found = match searched {
            Ok(found) => found,
            Err(error) => {
                self.failures.push(Failure::new(error.to_string(), error.request()));
                self.facts.recovered = Some(false);
                return Ok(());
            }
        };
        let mut inventory = self.facts.inventory.clone();
        let lacking: Vec<_> = found.objects.iter().filter(|(key, _)| !inventory.contains(key)).collect();
        if !lacking.is_empty() {
            for (key, version) in &lacking {
                inventory.grow(key, version);
            }
            let lacking = lacking.len();
            tracing::warn!(manifest = %owner_of(&self.record.manifest), lacking, "The inventory lacked objects of the module");
            self.record_inventory(inventory).await?;
        }
        self.facts.recovered = Some(true);
        if !found.is_refused {
            self.memory.recovered();
        }
        Ok(())
    }

    async fn add_finalizers(&mut self) -> Result<(), Error> {
        let mut finalizers = self.record.manifest.finalizers().to_vec();
        finalizers.extend(
            wanted_finalizers(&self.record.manifest).filter(|name| !self.has_finalizer(name)).map(str::to_owned),
        );
        self.record.patch_metadata("add the finalizers of the Manifest", json!({"finalizers": finalizers})).await?;
        self.facts.has_finalizers = true;
        Ok(())
    }

    fn has_finalizer(&self, name: &str) -> bool {
        self.record.manifest.finalizers().iter().any(|known| known == name)
    }

    async fn apply(&mut self, objects: &[&'a RenderedObject]) {
        let objects = self.go_on_migrating(objects).await;
        let this = &*self;
        // Responses are large and a module has many: of each, only the result stays.
        let requests: Vec<_> = objects.iter().map(|object| retain(Box::pin(this.apply_one(object)))).collect();
        let applied: Vec<_> = stream::iter(requests).buffered(CONCURRENCY).collect().await;
        for (object, applied) in objects.into_iter().zip(applied) {
            let seen = match applied {
                Ok(applied) => self.applied(object, applied),
                Err(refused) => self.refused(object, refused).await,
            };
            self.facts.seen.insert(object.key.clone(), seen);
        }
    }

    fn applied(&mut self, object: &RenderedObject, applied: Applied) -> Seen {
        let Applied { seen, manager, accepted, is_established, expires, is_new, joined: _, remark } = applied;
        if seen == Seen::Current {
            self.memory.accept(&object.key, accepted);
        }
        if is_new {
            self.memory.doubt_all(self.facts.forget_held(&object.key));
        }
        self.remarks.extend(remark.map(|remark| (object.key.clone(), remark)));
        self.live_manager = manager.or(self.live_manager.take());
        if is_established {
            self.established.insert(object.key.clone());
        }
        if expires {
            self.jobs.add(object);
        }
        seen
    }

    async fn refused(&mut self, object: &'a RenderedObject, refused: Refused) -> Seen {
        if refused.failure.is_invalid && object.key.is_definition() {
            match self.migrate(object).await {
                Ok(Some(seen)) => return seen,
                Ok(None) => {}
                Err(of_migration) => {
                    self.failures.push(of_migration);
                    return Seen::Failed;
                }
            }
        }
        self.failed(object, refused)
    }

    fn failed(&mut self, object: &RenderedObject, refused: Refused) -> Seen {
        let Refused { failure, content } = refused;
        if failure.is_unserved {
            self.kinds.invalidate(&object.key.group);
        }
        self.memory.refuse(&object.key, content, &failure, &self.ctx.memories);
        let seen = if failure.is_guarded { Seen::Guarded } else { Seen::Failed };
        self.failures.push(failure);
        seen
    }

    /// Applies one object, whose failure is final.
    pub(super) async fn apply_alone(&mut self, object: &RenderedObject) -> Seen {
        match retain(Box::pin(self.apply_one(object))).await {
            Ok(applied) => self.applied(object, applied),
            Err(refused) => self.failed(object, refused),
        }
    }

    async fn apply_one(&self, object: &RenderedObject) -> Result<Applied, Refused> {
        let RenderedObject { key, version, .. } = object;
        let operation = || format!("apply {key}");
        let Some(api) = self.api(key, version) else {
            return Err(Refused { failure: unserved_kind(operation()), content: 0 });
        };
        let failed = |error: &kube::Error| Failure::new(operation(), error);
        // An object of an earlier reconcile is read first: most often it is as rendered. So is one that may be somebody's.
        let is_recorded = self.memory.was_applied(key) || self.jobs.has(key);
        let found = if is_recorded || self.adopts || !self.is_first_installation() || self.is_shared(key) {
            let found = object::get(&api, &key.name).await;
            found.map_err(|error| Refused { failure: failed(&error), content: 0 })?
        } else {
            None
        };
        let mut wanted = Wanted::of(object);
        let content = hash(&(&wanted.text, found.as_ref().map(content_version)));
        if let Some(failure) = self.memory.repeated(key, content) {
            return Err(Refused { failure, content });
        }
        let refused = |failure: Failure| Refused { failure, content };
        let is_new = found.is_none() && self.memory.was_applied(key);
        let budget = self.budget(&wanted);
        let found = match self.join(object, &api, found, &budget).await {
            ControlFlow::Continue(found) => found,
            // Only the owner of a CRD stores its resources in another version.
            ControlFlow::Break(joined) => {
                return joined.map_err(|failure| refused(Failure { is_invalid: false, ..failure }));
            }
        };
        let applied = match found {
            Some(live) => match self.prepare(&api, &mut wanted, live).await {
                Ok(live) => self.apply_wanted(&api, &wanted, Some(live)).await,
                Err(failure) => Err(failure),
            },
            None => self.apply_wanted(&api, &wanted, None).await,
        };
        let mut applied = applied.map_err(refused)?;
        if let Some(live) = applied.joined.take() {
            self.end_joining(&api, key, version, &live).await.map_err(refused)?;
        }
        Ok(Applied { is_new, ..applied })
    }

    /// Writes that the object may have.
    fn budget(&self, wanted: &Wanted<'_>) -> WriteBudget<'_> {
        // A module that is removed and listed again has another Manifest.
        let form = (self.record.manifest.uid(), &wanted.text);
        self.ctx.budgets.of(&self.kyma, Component::Module, &wanted.object.key.to_string(), form)
    }

    /// Drops from the body what an existing object is not to get, and from the object what is left of earlier versions.
    async fn prepare(
        &self,
        api: &Api<DynamicObject>,
        wanted: &mut Wanted<'_>,
        live: DynamicObject,
    ) -> Result<DynamicObject, Failure> {
        let key = &wanted.object.key;
        wanted.body = self.without_yielded(wanted.object, wanted.form(), &live).await?;
        if key.is_pod() || jobs::is_job(key) {
            self.fit(wanted, &live);
        }
        let live = self.without_leftovers(api, wanted.object, live).await;
        live.map_err(|error| Failure::new(format!("apply {key}"), &error))
    }

    async fn apply_wanted(
        &self,
        api: &Api<DynamicObject>,
        wanted: &Wanted<'_>,
        found: Option<DynamicObject>,
    ) -> Result<Applied, Failure> {
        if jobs::is_job(&wanted.object.key) {
            return self.apply_job(api, wanted, found).await;
        }
        let applied = self.converge(api, wanted, found).await;
        applied.map_err(|error| self.failure(wanted.object, error))
    }

    /// Removes the keys of a Secret that an earlier version of its text left behind.
    async fn without_leftovers(
        &self,
        api: &Api<DynamicObject>,
        RenderedObject { key, body, .. }: &RenderedObject,
        live: DynamicObject,
    ) -> kube::Result<DynamicObject> {
        let keys = leftovers(key, body, &live);
        if keys.is_empty() {
            return Ok(live);
        }
        let data: Map<_, _> = keys.into_iter().map(|key| (key, Value::Null)).collect();
        let patch = Patch::Merge(json!({"metadata": {"resourceVersion": live.resource_version()}, "data": data}));
        let params = PatchParams { field_manager: Some(field_manager::MODULE.to_owned()), ..PatchParams::default() };
        api.patch(&key.name, &params, &patch).await
    }

    /// Writes an object, given as it was found, if it differs from its body.
    pub(super) async fn converge(
        &self,
        api: &Api<DynamicObject>,
        wanted: &Wanted<'_>,
        found: Option<DynamicObject>,
    ) -> Result<Applied, WriteError> {
        let Wanted { object: RenderedObject { key, body: rendered, .. }, body, .. } = wanted;
        let disputed =
            found.as_ref().map(|live| object::disputed(field_manager::MODULE, body, live)).unwrap_or_default();
        let budget = self.budget(wanted);
        let shape = match &self.ctx.settings.pull_secret {
            Some(secret) if key.is_secret() && key.name == secret.name => &PULL_SECRET,
            _ if is_built_in(&key.group) => &TYPED,
            _ => &CUSTOM,
        };
        let target =
            Target { name: &key.name, manager: field_manager::MODULE, shape, desired: body, budget: Some(&budget) };
        let owner = owner_of(&self.record.manifest);
        let has_run = |live: &DynamicObject| jobs::is_job(key) && jobs::is_same(live, rendered);
        let may_delete = |live: &DynamicObject| recreation::may_delete(live, &owner) && !has_run(live);
        let is_own_service = |namespace: &str, name: &str| self.facts.inventory.contains(&service(namespace, name));
        let ways = SecondWays {
            metrics: &self.ctx.metrics.fallbacks,
            is_own_service: &is_own_service,
            recreates: if recreation::permits(key, rendered) { Some(&may_delete) } else { None },
            takes_over: self.is_first_installation(),
        };
        // The namespace of all modules belongs to none of them.
        let ways = Some(&ways).filter(|_| !key.is_common_namespace());
        let mut accepted = self.memory.accepted(key);
        let Converged { object, written, .. } = target.converge_with(api, found, &mut accepted, ways).await?;
        if let Some(version) = object.resource_version().filter(|_| written) {
            self.ctx.memories.wrote_object(self.key, key, &version);
            self.count_reverted(key, wanted.form(), disputed);
        }
        let joined = self.has_joined(&object).then(|| object.clone());
        Ok(Applied { joined, ..self.current(key, object, accepted) })
    }

    /// The result for an object that is as rendered.
    pub(super) fn current(&self, key: &ObjectKey, live: DynamicObject, accepted: Option<u64>) -> Applied {
        let is_manager = self.manager.as_ref().is_some_and(|manager| manager.key == *key);
        Applied {
            accepted,
            is_established: key.is_definition() && is_established(&live),
            expires: jobs::is_job(key) && jobs::expires(&live),
            manager: is_manager.then_some(live),
            ..Applied::seen(Seen::Current)
        }
    }

    /// The failure of an apply.
    pub(super) fn failure(&self, object: &RenderedObject, error: WriteError) -> Failure {
        let operation = format!("apply {}", object.key);
        let answer = if let WriteError::Answered(answer, _) = &error { Some(*answer) } else { None };
        let is_terminating = matches!(error, WriteError::Terminating);
        let Some(error) = error.request() else {
            let held = "it is deleted to be created again, and finalizers hold it";
            return if is_terminating { Failure::because(operation, held) } else { contested(operation) };
        };
        let mut failure = Failure::new(operation, &error);
        if let Some(done) = answer.map(Fallback::done) {
            failure.cause.push_str(&format!("; before that, {done}"));
        }
        if let kube::Error::Api(refusal) = &error {
            let rendered = self.facts.rendered.unwrap_or_default();
            failure.is_guarded = own_webhook::is_down(refusal, rendered, &self.facts.inventory);
        }
        if failure.is_guarded {
            self.ctx.metrics.fallbacks.count(Fallback::OwnWebhook);
        }
        // The module's own webhook may deny them until its manager runs.
        if object.stage == Stage::CustomResources && failure.retry == Retry::Later {
            failure.retry = Retry::Soon;
        }
        failure
    }

    /// True if no version of the module has been applied completely.
    fn is_first_installation(&self) -> bool {
        !self.record.manifest.annotations().contains_key(annotation::SYNC_OCI_REF)
    }

    async fn await_definitions(&mut self, objects: &[&'a RenderedObject]) {
        let (deadline, mut interval) = (Instant::now() + ESTABLISHED_DEADLINE, ESTABLISHED_INTERVAL);
        let mut waiting: Vec<_> = objects.iter().filter(|object| !self.established.contains(&object.key)).collect();
        while !waiting.is_empty() && Instant::now() < deadline {
            let mut still = Vec::new();
            for object in waiting {
                let Some(api) = self.api(&object.key, &object.version) else { continue };
                match api.get(&object.key.name).await {
                    Ok(found) if is_established(&found) => {
                        self.established.insert(object.key.clone());
                    }
                    Ok(_) => still.push(object),
                    Err(error) => {
                        self.failures.push(Failure::new(format!("read {}", object.key), &error));
                        self.facts.established = Some(false);
                        return;
                    }
                }
            }
            waiting = still;
            if !waiting.is_empty() {
                sleep(interval).await;
                interval = (interval * 2).min(ESTABLISHED_MAX_INTERVAL);
            }
        }
        self.unestablished = waiting.iter().map(|object| object.key.name.clone()).collect();
        self.facts.established = Some(self.unestablished.is_empty());
    }

    async fn create_default(&mut self) {
        let Some((key, version, body)) = self.default_object() else { return };
        let operation = format!("create the default {key}");
        // Its CRD was applied in this reconcile.
        let is_new_kind = self.established.iter().any(|definition| definition.defines_group_of(&key));
        let created = match serde_json::from_value::<DynamicObject>(body) {
            Ok(object) => {
                let request = |api| create_default::create(api, object.clone(), is_new_kind);
                self.request(&key, &version, request).await
            }
            Err(error) => Err(kube::Error::SerdeError(error)),
        };
        self.facts.default_object = match created {
            Ok(Some(())) => DefaultObject::Done,
            Ok(None) => {
                self.failures.push(unserved_kind(operation));
                DefaultObject::Failed
            }
            Err(error) => {
                self.failures.push(Failure::new(operation, &error));
                DefaultObject::Failed
            }
        };
    }

    async fn find_blockers(&mut self) {
        let (manifest, inventory) = self.blocking_kinds();
        let found = blocking::find(&self.client, &mut self.kinds, &manifest, &inventory).await;
        match found {
            Ok(found) => {
                self.facts.blocked = Some(!found.blockers.is_empty());
                if !found.defaults.is_empty() {
                    self.facts.default_object = DefaultObject::Pending;
                }
                self.crs = found;
            }
            Err(error) => {
                self.failures.push(Failure::new(error.to_string(), error.request()));
                self.facts.blocked = Some(true);
            }
        }
    }

    async fn delete_default(&mut self) {
        let mut has_failed = false;
        for key in self.crs.defaults.clone() {
            let mut api = self.located(&key).await;
            let mut deleted = retain(delete_default(api, &key)).await;
            if deleted.as_ref().is_err_and(|failure| failure.is_unserved) {
                // The CRD is gone, or serves another version by now.
                self.kinds.invalidate(&key.group);
                api = self.located(&key).await;
                deleted = retain(delete_default(api, &key)).await;
            }
            match deleted {
                Ok(going) => self.going.extend(going),
                Err(failure) => {
                    self.failures.push(failure);
                    has_failed = true;
                }
            }
        }
        // The garbage collector or the manager deletes what belongs to it.
        let is_left = !self.going.is_empty() || !self.crs.children.is_empty();
        if is_left {
            self.ctx.metrics.requeues.intended("manifest_pre_delete_enqueue_required");
        }
        self.facts.default_object = match (has_failed, is_left) {
            (true, _) => DefaultObject::Failed,
            (false, true) => DefaultObject::Terminating,
            (false, false) => DefaultObject::Done,
        };
    }

    /// Client of an object's kind in any version that the runtime serves.
    async fn located(&mut self, key: &ObjectKey) -> Result<Option<Api<DynamicObject>>, Failure> {
        Ok(self.locate(key).await?.map(|located| located.api))
    }

    /// Reads the readiness of the module's manager; `None` if the request failed, which is recorded. With `explains`, its
    /// pods are read while it is not ready.
    pub(super) async fn readiness(&mut self, explains: bool) -> Option<Readiness> {
        let Some(Manager { key, version }) = self.manager.take() else { return Some(Readiness::Ready) };
        let client = self.client.clone();
        let mut found = self.live_manager.take();
        let observe = |api| retain(observe(client.clone(), api, key.clone(), found.take(), explains));
        let observed = self.request(&key, &version, observe).await;
        let observed = observed.map(|observed| observed.unwrap_or_else(|| (Readiness::absent(&key), None)));
        let failed = |error| self.failures.push(Failure::new(format!("read {key}"), &error));
        let (readiness, pods) = observed.map_err(failed).ok()?;
        self.pods = pods;
        // A Job that has run and is gone counts as finished.
        let has_run = self.jobs.has(&key) && readiness == Readiness::absent(&key);
        Some(if has_run { Readiness::Ready } else { readiness })
    }

    /// Key, version and body of the default module CR.
    pub(super) fn default_object(&self) -> Option<(ObjectKey, String, Value)> {
        let body = self.record.manifest.spec.resource()?.clone();
        let key = ObjectKey::of(&body);
        let version = super::inventory::split_api_version(body["apiVersion"].as_str()?).1.to_owned();
        Some((key, version, body))
    }

    /// Sends a request on an object of a kind in this version; `None` if the kind is not served. The kind is discovered anew
    /// if the API server does not serve it as known.
    async fn request<T, F>(
        &mut self,
        key: &ObjectKey,
        version: &str,
        mut send: impl FnMut(Api<DynamicObject>) -> F + Send,
    ) -> kube::Result<Option<T>>
    where
        F: Future<Output = kube::Result<T>> + Send,
    {
        let Some(api) = self.api_of(key, version).await? else { return Ok(None) };
        match send(api).await {
            Err(error) if is_unserved(&error) => {}
            sent => return sent.map(Some),
        }
        self.kinds.invalidate(&key.group);
        let Some(api) = self.api_of(key, version).await? else { return Ok(None) };
        send(api).await.map(Some)
    }

    pub(super) fn api(&self, key: &ObjectKey, version: &str) -> Option<Api<DynamicObject>> {
        self.kinds.api(&self.client, &key.group, version, &key.kind, &key.namespace)
    }

    /// As [`Self::api`], after discovery of the kind if it is unknown.
    async fn api_of(&mut self, key: &ObjectKey, version: &str) -> kube::Result<Option<Api<DynamicObject>>> {
        self.kinds.discover(&self.client, [(key.group.as_str(), version, key.kind.as_str())]).await?;
        Ok(self.api(key, version))
    }
}

async fn read_metadata(api: Api<DynamicObject>, name: String) -> kube::Result<Option<DynamicObject>> {
    object::get_metadata(&api, &name).await
}

/// Deletes the default module CR. Returns what holds it while it exists. A kind that is not served has no objects.
async fn delete_default(
    api: Result<Option<Api<DynamicObject>>, Failure>,
    key: &ObjectKey,
) -> Result<Option<Going>, Failure> {
    let Some(api) = api? else { return Ok(None) };
    let failed = |error: &kube::Error| Failure::new(format!("delete {key}"), error);
    let found = object::get(&api, &key.name).await.map_err(|error| failed(&error))?;
    if found.as_ref().is_some_and(is_marked) {
        return Ok(None);
    }
    let left = match found {
        Some(found) if found.metadata.deletion_timestamp.is_none() => {
            object::delete(&api, &key.name, found.uid()).await.map_err(|error| failed(&error))?
        }
        found => found,
    };
    Ok(left.map(|left| Going::of(key, &left)))
}

/// Value of the owned-by annotation of a Manifest's objects.
pub(super) fn owner_of(manifest: &Manifest) -> String {
    format!("{}/{}", manifest.namespace().unwrap_or_default(), manifest.name_any())
}

/// Finalizers that a Manifest needs before its first object is written.
pub(super) fn wanted_finalizers(manifest: &Manifest) -> impl Iterator<Item = &'static str> {
    finalizers(super::manages_default(manifest))
}

/// Finalizers of a Manifest, with or without a default module CR that is created and deleted with the module.
pub(crate) fn finalizers(manages_default: bool) -> impl Iterator<Item = &'static str> {
    let [basic, labels, default_object] = finalizer::MANIFEST;
    [basic, labels].into_iter().chain(manages_default.then_some(default_object))
}

/// Reads an object unless this reconcile has `found` it, and its pods if it has failed, or with `explains` if it is not
/// ready.
async fn observe(
    client: Client,
    api: Api<DynamicObject>,
    key: ObjectKey,
    found: Option<DynamicObject>,
    explains: bool,
) -> kube::Result<(Readiness, Option<PodSelection>)> {
    let live = if found.is_some() { found } else { object::get(&api, &key.name).await? };
    let Some(live) = live else { return Ok((Readiness::absent(&key), None)) };
    let now = Timestamp::now();
    let readiness = ready::readiness(&key, &live, now);
    let Some(selector) = pod_selector(&key, &live).filter(|_| readiness != Readiness::Ready) else {
        return Ok((readiness, None));
    };
    let selection = PodSelection { namespace: key.namespace.clone(), selector };
    if !explains && !matches!(readiness, Readiness::Failed(_)) {
        return Ok((readiness, Some(selection)));
    }
    let pods: Api<DynamicObject> = Api::namespaced_with(client, &key.namespace, &ApiResource::erase::<Pod>(&()));
    let pods = list_first(&pods, &ListParams::default().labels(&selection.selector), MAX_PODS).await?;
    let readiness = explain(readiness, &key, &live, &pods, now);
    Ok((readiness, Some(selection)))
}

/// What changes with the content of a live object: its generation if it has one, since a status changes often.
fn content_version(live: &DynamicObject) -> (Option<String>, Option<i64>, Option<String>) {
    let generation = live.metadata.generation;
    (live.uid(), generation, live.resource_version().filter(|_| generation.is_none()))
}

fn is_established(definition: &DynamicObject) -> bool {
    let conditions = definition.data["status"]["conditions"].as_array();
    let is_true = <&'static str>::from(ConditionStatus::True);
    conditions
        .into_iter()
        .flatten()
        .any(|condition| condition["type"] == "Established" && condition["status"] == is_true)
}

fn unserved_kind(operation: String) -> Failure {
    let failure = Failure::because(operation, "the runtime does not serve the kind");
    Failure { is_transient: true, is_unserved: true, ..failure }
}

pub(super) fn contested(operation: String) -> Failure {
    Failure::because(operation, "another writer in the runtime changes it again and again")
}
