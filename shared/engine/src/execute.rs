//! Carries out the actions of `step`, and adds their results to the facts. A failed request on one object stops no
//! other: it is recorded, and reported in the status.

use futures::{StreamExt as _, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DynamicObject, ListParams},
};
use serde_json::json;
use tidewatch_api::{Manifest, State, names::finalizer};
use tidewatch_cluster::{
    object,
    runtime_access::{list_first, retain},
};

use super::{
    StoreError,
    adoption::{self, Installation, Surplus},
    apply::unserved_kind,
    blocking, create_default,
    default_object::Going,
    execution::{CONCURRENCY, Execution},
    failure::Failure,
    inventory::{Inventory, ObjectKey, owner_of},
    kept::is_marked,
    module::manages_default,
    outcome::Progress,
    parting::{BlockingKinds, Departure},
    pods::PodSelection,
    ready::{self, MAX_PODS, Manager, Readiness, explain, pod_selector},
    recovery,
    remote::Remote,
    render::RenderedObject,
    status::Findings,
    step::{Action, DefaultObject},
};

impl<'a> Execution<'a> {
    /// Carries out an action other than [`Action::End`].
    ///
    /// # Errors
    /// The store did not read or write a Manifest. Failures in the runtime cluster are recorded instead.
    pub(super) async fn run(&mut self, action: Action<'a>) -> Result<(), StoreError> {
        match action {
            Action::AddFinalizers => self.add_finalizers().await?,
            Action::FindInstallation => self.find_installation().await,
            Action::Adopt(message) => self.adopt(message).await?,
            Action::Record(inventory) => {
                if self.facts.inventory == Inventory::default() {
                    (self.request.progress)(Progress::Begun);
                }
                (self.request.progress)(Progress::Recorded);
                self.record_inventory(inventory).await?;
            }
            Action::Apply(objects) => self.apply(&objects).await,
            Action::AwaitDefinitions { definitions, meanwhile } => {
                self.await_definitions(&definitions, meanwhile).await;
            }
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
        let Some(manager) = self.manager.clone() else {
            self.facts.installation = Installation::Ours;
            return;
        };
        let look = self.look.take().filter(|look| look.manager == manager);
        let Manager { key, version } = manager;
        let found = match look {
            Some(look) => Ok(look.found),
            None => {
                let read = |api| read_metadata(api, key.name.clone());
                self.request(&key, &version, read).await.map(Option::flatten)
            }
        };
        let installation = match found {
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
            self.results.failures.push(failure);
            Installation::Failed
        });
    }

    /// Fields that an adoption removes, by object.
    async fn surplus(&self) -> Result<Vec<Surplus>, Failure> {
        let served = self.facts.rendered.unwrap_or_default().iter().filter(|object| object.served);
        let reads = served.map(async |object| {
            let RenderedObject { key, version, body, .. } = object;
            let Some(remote) = self.remote(key, version) else { return Ok(None) };
            let found = remote.read_metadata("read").await?;
            let surplus = |live: DynamicObject| {
                let (fields, number) = object::surplus_of_tools(body, &live.metadata);
                Surplus { object: key.to_string(), fields, number }
            };
            Ok(found.map(surplus))
        });
        let read: Vec<_> = stream::iter(reads.collect::<Vec<_>>()).buffered(CONCURRENCY).collect().await;
        read.into_iter().filter_map(Result::transpose).collect()
    }

    async fn adopt(&mut self, message: String) -> Result<(), StoreError> {
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

    async fn record_inventory(&mut self, inventory: Inventory) -> Result<(), StoreError> {
        let synced = inventory.write();
        let state = self.record.manifest.status.as_ref().map(|status| status.state).unwrap_or_default().known();
        self.record.patch_status(&json!({"state": state, "synced": synced})).await?;
        self.facts.inventory = inventory;
        Ok(())
    }

    async fn recover(&mut self) -> Result<(), StoreError> {
        let searched =
            recovery::find(&self.request.cluster.client, &mut self.kinds, &self.record.manifest, &self.facts.inventory)
                .await;
        let found = match searched {
            Ok(found) => found,
            Err(failure) => {
                self.results.failures.push(failure);
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
            self.memory.is_recovered = true;
        }
        Ok(())
    }

    async fn add_finalizers(&mut self) -> Result<(), StoreError> {
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
                self.results.failures.push(unserved_kind(operation));
                DefaultObject::Failed
            }
            Err(error) => {
                self.results.failures.push(Failure::new(operation, &error));
                DefaultObject::Failed
            }
        };
    }

    async fn find_blockers(&mut self) {
        let BlockingKinds { manifest, inventory, kept_groups } = self.blocking_kinds();
        let found =
            blocking::find(&self.request.cluster.client, &mut self.kinds, &manifest, &inventory, &kept_groups).await;
        match found {
            Ok(found) => {
                self.facts.blocked = Some(!found.blockers.is_empty());
                if !found.defaults.is_empty() {
                    self.facts.default_object = DefaultObject::Pending;
                }
                self.results.crs = found;
            }
            Err(failure) => {
                self.results.failures.push(failure);
                self.facts.blocked = Some(true);
            }
        }
    }

    async fn delete_default(&mut self) {
        let mut has_failed = false;
        for key in self.results.crs.defaults.clone() {
            let mut deleted = retain(delete_default(self.locate(&key).await)).await;
            if deleted.as_ref().is_err_and(|failure| failure.is_unserved) {
                // The CRD is gone, or serves another version by now.
                self.kinds.invalidate(&key.group);
                deleted = retain(delete_default(self.locate(&key).await)).await;
            }
            match deleted {
                Ok(going) => self.results.going.extend(going),
                Err(failure) => {
                    self.results.failures.push(failure);
                    has_failed = true;
                }
            }
        }
        // The garbage collector or the manager deletes what belongs to it.
        let is_left = !self.results.going.is_empty() || !self.results.crs.children.is_empty();
        if is_left {
            (self.request.progress)(Progress::AwaitsDefault);
        }
        self.facts.default_object = match (has_failed, is_left) {
            (true, _) => DefaultObject::Failed,
            (false, true) => DefaultObject::Terminating,
            (false, false) => DefaultObject::Done,
        };
    }

    /// Reads the readiness of the module's manager; `None` if the request failed, which is recorded. With `explains`, its
    /// pods are read while it is not ready.
    pub(super) async fn readiness(&mut self, explains: bool) -> Option<Readiness> {
        let Some(Manager { key, version }) = self.manager.take() else { return Some(Readiness::Ready) };
        let client = self.request.cluster.client.clone();
        let mut found = self.live_manager.take();
        let observe = |api| retain(observe(client.clone(), api, key.clone(), found.take(), explains));
        let observed = self.request(&key, &version, observe).await;
        let observed = observed.map(|observed| observed.unwrap_or_else(|| (Readiness::absent(&key), None)));
        let failed = |error| self.results.failures.push(Failure::new(format!("read {key}"), &error));
        let (readiness, pods) = observed.map_err(failed).ok()?;
        self.pods = pods;
        // A Job that has run and is gone counts as finished.
        let has_run = self.jobs.has(&key) && readiness == Readiness::absent(&key);
        Some(if has_run { Readiness::Ready } else { readiness })
    }
}

async fn read_metadata(api: Api<DynamicObject>, name: String) -> kube::Result<Option<DynamicObject>> {
    object::get_metadata(&api, &name).await
}

/// Deletes the default module CR. Returns what holds it while it exists. A kind that is not served has no objects.
async fn delete_default(located: Result<Option<Remote<'_>>, Failure>) -> Result<Option<Going>, Failure> {
    let Some(remote) = located? else { return Ok(None) };
    let found = remote.read("delete").await?;
    if found.as_ref().is_some_and(is_marked) {
        return Ok(None);
    }
    let left = match found {
        Some(found) if found.metadata.deletion_timestamp.is_none() => remote.delete(&found).await?,
        found => found,
    };
    Ok(left.map(|left| Going::of(remote.key, &left)))
}

/// Finalizers that a Manifest needs before its first object is written.
pub(super) fn wanted_finalizers(manifest: &Manifest) -> impl Iterator<Item = &'static str> {
    finalizers(manages_default(manifest))
}

/// Finalizers of a Manifest, with or without a default module CR that is created and deleted with the module.
pub fn finalizers(manages_default: bool) -> impl Iterator<Item = &'static str> {
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
