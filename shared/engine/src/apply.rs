//! Applies rendered objects, each as its kind and its owner need it, and adds the results to the facts.

use std::{borrow::Cow, ops::ControlFlow};

use futures::{StreamExt as _, stream};
use kube::{ResourceExt as _, api::DynamicObject};
use serde_json::{Map, Value, json};
use tidewatch_api::names::{annotation, field_manager};
use tidewatch_cluster::{
    kinds::is_built_in,
    object::{self, Component, Converged, Fallback, Ownership, SecondWays, Shape, Target, WriteBudget, WriteError},
    runtime_access::retain,
    workload::condition_with,
};
use tidewatch_kit::hash::hash;

use super::{
    execution::{CONCURRENCY, Execution},
    failure::{Failure, Retry},
    inventory::{ObjectKey, owner_of},
    jobs,
    own_webhook::{self, service},
    recreation,
    remote::Remote,
    render::{RenderedObject, leftovers},
    stage::Stage,
    step::Seen,
};

/// Fields that a module sets are ours, and removed when a version does not set them any more; additions of others stay:
/// operators write `caBundle`, replicas and conversion webhooks into their own objects.
pub(super) const TYPED: Shape = Shape { fields_of: Some(field_manager::MODULE), ..Shape::new(Ownership::Fields) };
/// As [`TYPED`], for custom resources, whose API servers keep empty lists.
const CUSTOM: Shape = Shape { drops_empty_lists: false, ..TYPED };
/// As [`TYPED`], for copies of the image pull secret, whose type may change.
const PULL_SECRET: Shape = Shape { immutable: &["/type", "/immutable"], ..TYPED };

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

    /// The result for a Job that has run, and was deleted after its end.
    pub(super) fn has_run() -> Self {
        Self { expires: true, ..Self::seen(Seen::Current) }
    }

    pub(super) fn with(self, remark: Option<String>) -> Self {
        Self { remark, ..self }
    }
}

/// An object as it is to be written.
pub(super) struct Wanted<'a> {
    pub(super) object: &'a RenderedObject,
    pub(super) remote: &'a Remote<'a>,
    /// The rendered body.
    text: String,
    /// The body without what is left to others.
    pub(super) body: Cow<'a, Value>,
}

impl<'a> Wanted<'a> {
    /// The object as rendered.
    pub(super) fn of(object: &'a RenderedObject, remote: &'a Remote<'a>) -> Self {
        Self { object, remote, text: object.body.to_string(), body: Cow::Borrowed(&object.body) }
    }

    /// Hash of the rendered body.
    pub(super) fn form(&self) -> u64 {
        hash(&self.text)
    }
}

/// A failed apply, with the hash of what was applied, and to what.
pub(super) struct Refused {
    failure: Failure,
    content: u64,
}

impl<'a> Execution<'a> {
    /// Applies objects of one stage.
    pub(super) async fn apply(&mut self, objects: &[&'a RenderedObject]) {
        let objects = self.go_on_migrating(objects).await;
        let results = self.send(&objects).await;
        self.settle(objects, results).await;
    }

    /// Sends the requests of an apply.
    pub(super) async fn send(&self, objects: &[&'a RenderedObject]) -> Vec<Result<Applied, Refused>> {
        // Responses are large and a module has many: of each, only the result stays.
        let requests: Vec<_> = objects.iter().map(|object| retain(Box::pin(self.apply_one(object)))).collect();
        stream::iter(requests).buffered(CONCURRENCY).collect().await
    }

    /// Adds the results of an apply to the facts, and answers refusals.
    pub(super) async fn settle(&mut self, objects: Vec<&'a RenderedObject>, results: Vec<Result<Applied, Refused>>) {
        for (object, applied) in objects.into_iter().zip(results) {
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
        self.results.remarks.extend(remark.map(|remark| (object.key.clone(), remark)));
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
                    self.results.failures.push(of_migration);
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
        self.memory.refuse(&object.key, content, &failure, &self.engine.memories);
        let seen = if failure.is_guarded { Seen::Guarded } else { Seen::Failed };
        self.results.failures.push(failure);
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
        let Some(remote) = self.remote(key, version) else {
            return Err(Refused { failure: unserved_kind(format!("apply {key}")), content: 0 });
        };
        // An object of an earlier reconcile is read first: most often it is as rendered. So is one that may be somebody's.
        let is_recorded = self.memory.was_applied(key) || self.jobs.has(key);
        let found = if is_recorded || self.adopts || !self.is_first_installation() || self.is_shared(key) {
            remote.read("apply").await.map_err(|failure| Refused { failure, content: 0 })?
        } else {
            None
        };
        let mut wanted = Wanted::of(object, &remote);
        let content = hash(&(&wanted.text, found.as_ref().map(content_version)));
        if let Some(failure) = self.memory.repeated(key, content) {
            return Err(Refused { failure, content });
        }
        let refused = |failure: Failure| Refused { failure, content };
        let is_new = found.is_none() && self.memory.was_applied(key);
        if let Some(live) = &found {
            wanted.body = self.without_yielded(object, wanted.form(), live).await.map_err(refused)?;
        }
        let found = match self.join(&wanted, found).await {
            ControlFlow::Continue(found) => found,
            // Only the owner of a CRD stores its resources in another version.
            ControlFlow::Break(joined) => {
                return joined.map_err(|failure| refused(Failure { is_invalid: false, ..failure }));
            }
        };
        let applied = match found {
            Some(live) => match self.prepare(&mut wanted, live).await {
                Ok(live) => self.apply_wanted(&wanted, Some(live)).await,
                Err(failure) => Err(failure),
            },
            None => self.apply_wanted(&wanted, None).await,
        };
        let mut applied = applied.map_err(refused)?;
        if let Some(live) = applied.joined.take() {
            self.end_joining(&remote, &live).await.map_err(refused)?;
        }
        Ok(Applied { is_new, ..applied })
    }

    /// Writes that the object may have.
    pub(super) fn budget(&self, wanted: &Wanted<'_>) -> WriteBudget<'_> {
        // A module that is removed and listed again has another Manifest.
        let form = (self.record.manifest.uid(), &wanted.text);
        self.engine.budgets.of(&self.request.cluster.key, Component::Module, &wanted.object.key.to_string(), form)
    }

    /// Removes the image pull secret from the body for an existing Pod or Job without it, and keys of earlier versions from
    /// an existing Secret.
    async fn prepare(&self, wanted: &mut Wanted<'_>, live: DynamicObject) -> Result<DynamicObject, Failure> {
        let RenderedObject { key, body, .. } = wanted.object;
        if key.is_pod() || jobs::is_job(key) {
            self.fit(wanted, &live);
        }
        let keys = leftovers(key, body, &live);
        if keys.is_empty() {
            return Ok(live);
        }
        let data: Map<_, _> = keys.into_iter().map(|key| (key, Value::Null)).collect();
        let members = json!({"metadata": {"resourceVersion": live.resource_version()}, "data": data});
        wanted.remote.merge("apply", members).await
    }

    async fn apply_wanted(&self, wanted: &Wanted<'_>, found: Option<DynamicObject>) -> Result<Applied, Failure> {
        if jobs::is_job(&wanted.object.key) {
            return self.apply_job(wanted, found).await;
        }
        let applied = self.converge(wanted, found).await;
        applied.map_err(|error| self.failure(wanted.object, error))
    }

    /// Writes an object, given as it was found, if it differs from its body.
    pub(super) async fn converge(
        &self,
        wanted: &Wanted<'_>,
        found: Option<DynamicObject>,
    ) -> Result<Applied, WriteError> {
        let Wanted { object: RenderedObject { key, body: rendered, .. }, remote, body, .. } = wanted;
        let disputed =
            found.as_ref().map(|live| object::disputed(field_manager::MODULE, body, live)).unwrap_or_default();
        let budget = self.budget(wanted);
        let shape = match &self.request.pull_secret {
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
            metrics: &self.engine.fallbacks,
            is_own_service: &is_own_service,
            recreates: if recreation::permits(key, rendered) { Some(&may_delete) } else { None },
            takes_over: self.is_first_installation(),
        };
        // The namespace of all modules belongs to none of them.
        let ways = Some(&ways).filter(|_| !key.is_common_namespace());
        let mut accepted = self.memory.accepted(key);
        let Converged { object, written, .. } = target.converge_with(&remote.api, found, &mut accepted, ways).await?;
        if let Some(version) = object.resource_version().filter(|_| written) {
            self.engine.memories.own_writes.wrote(self.key, key, &version);
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
            self.engine.fallbacks.count(Fallback::OwnWebhook);
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
}

/// Values that change with the content of a live object: its generation if it has one, since a status changes often.
fn content_version(live: &DynamicObject) -> (Option<String>, Option<i64>, Option<String>) {
    let generation = live.metadata.generation;
    (live.uid(), generation, live.resource_version().filter(|_| generation.is_none()))
}

/// True for a CRD whose kind the API server serves.
pub(super) fn is_established(definition: &DynamicObject) -> bool {
    condition_with(definition, "Established", "True").is_some()
}

pub(super) fn unserved_kind(operation: String) -> Failure {
    let failure = Failure::because(operation, "the runtime does not serve the kind");
    Failure { is_transient: true, is_unserved: true, ..failure }
}

pub(super) fn contested(operation: String) -> Failure {
    Failure::because(operation, "another writer in the runtime changes it again and again")
}
