//! Reconciles the installation of one runtime: reads the objects that are not verified, and writes those that differ,
//! in the order of [`Component`].

use std::collections::BTreeMap;

use futures::{StreamExt as _, stream};
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ObjectMeta, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tidewatch_shared::{
    identity::RuntimeId,
    names::{AGENT_CONTAINER, AGENT_DEPLOYMENT, AGENT_PULL_SECRET, field_manager, label},
};
use tokio::time::Instant;

use super::{
    Component, ComponentError, Error, InstallationState, Report,
    compare::{self, IGNORED_FIELDS, Repair, compare},
    component::{Kind, POLICIES, SECRETS, SERVICES, WEBHOOKS},
    desired::{DesiredObject, DesiredObjects, Params},
    error::ObjectName,
    rbac, readiness,
    upgrade::{Image, ImageDecision},
};
use crate::kube::object;

/// Maximum number of concurrent reads of one runtime.
const READ_CONCURRENCY: usize = 6;

/// Objects of the incumbent that correspond to no component, apart from its webhook configuration.
pub(super) const OBSOLETE: [(Component, Kind, &str); 2] = [
    (Component::MetricsService, SERVICES, AGENT_DEPLOYMENT),
    (Component::DenyAll, POLICIES, "kyma-project.io--seed-to-watcher"),
];

/// State of one installation.
pub(super) struct InstallRun<'a> {
    client: &'a Client,
    runtime: &'a RuntimeId,
    /// Image for the Deployment.
    image: Image,
    /// An image that the Deployment already has takes precedence over `image`.
    keeps_image: bool,
    desired: &'a DesiredObjects,
    installed: &'a mut InstallationState,
    report: Report,
    /// Roles that keep more rights than desired until the plan is written.
    widened_roles: Vec<(&'a DesiredObject, DynamicObject)>,
}

impl<'a> InstallRun<'a> {
    pub(super) fn new(
        client: &'a Client,
        runtime: &'a RuntimeId,
        decision: ImageDecision,
        desired: &'a DesiredObjects,
        installed: &'a mut InstallationState,
    ) -> Self {
        let (image, keeps_image) = match (decision, &installed.image) {
            (ImageDecision::Use(image), _) => (image, false),
            // The image found first stays, even if another field manager replaces it later.
            (ImageDecision::KeepOr(_), Some(image)) => (image.clone(), false),
            (ImageDecision::KeepOr(image), None) => (image, true),
        };
        let (report, widened_roles) = (Report::default(), Vec::new());
        Self { client, runtime, image, keeps_image, desired, installed, report, widened_roles }
    }

    fn is_verified(&self, desired: &DesiredObject) -> bool {
        let needs_image = self.keeps_image && desired.component == Component::Deployment;
        !needs_image && self.installed.is_verified(desired, self.params())
    }

    fn params(&self) -> Params<'_> {
        Params { runtime: self.runtime, image: &self.image }
    }

    pub(super) async fn run(mut self) -> Report {
        let unverified: Vec<_> = self.desired.objects.iter().filter(|desired| !self.is_verified(desired)).collect();
        if unverified.is_empty() && self.installed.obsolete_removed {
            return self.report;
        }
        let Some(mut found) = self.read(&unverified).await else { return self.report };
        if !self.installed.obsolete_removed && !self.desired.compat_webhooks {
            self.delete_obsolete(Component::Webhooks, WEBHOOKS, AGENT_DEPLOYMENT).await;
        }
        for desired in unverified {
            let Some(found) = found.remove(&desired.component) else { continue };
            if self.runtime_is_unavailable() {
                return self.report;
            }
            // A failed component blocks those that depend on it.
            if desired.component.dependencies().iter().any(|dependency| self.failed(*dependency)) {
                self.report.blocked.insert(desired.component);
            } else {
                self.ensure(desired, found).await;
            }
            if desired.component == Component::ConfigMap {
                self.narrow_roles().await;
            }
        }
        self.narrow_roles().await;
        if !self.installed.obsolete_removed && self.report.failures.is_empty() && self.report.blocked.is_empty() {
            for (component, kind, name) in OBSOLETE {
                self.delete_obsolete(component, kind, name).await;
            }
            if !self.desired.has_pull_secret {
                self.delete_obsolete(Component::PullSecret, SECRETS, AGENT_PULL_SECRET).await;
            }
            self.installed.obsolete_removed = self.report.failures.is_empty();
        }
        self.report
    }

    /// Reads the current objects. Returns `None` if the runtime cannot be reached or refuses all requests.
    async fn read(&mut self, unverified: &[&'a DesiredObject]) -> Option<BTreeMap<Component, Option<DynamicObject>>> {
        let reads: Vec<_> = unverified.iter().map(|desired| read(self.client, desired.component)).collect();
        let mut reads = stream::iter(reads).buffered(READ_CONCURRENCY);
        let mut found = BTreeMap::new();
        while let Some((component, result)) = reads.next().await {
            match result {
                Ok(object) => drop(found.insert(component, object)),
                Err(error) => self.fail(component, Error::request("read", ObjectName::of(component))(error)),
            }
            if self.runtime_is_unavailable() {
                return None;
            }
        }
        Some(found)
    }

    fn runtime_is_unavailable(&self) -> bool {
        self.report.failures.last().is_some_and(|failure| failure.error.affects_all())
    }

    fn failed(&self, component: Component) -> bool {
        self.report.failures.iter().any(|failure| failure.component == component)
    }

    fn fail(&mut self, component: Component, error: Error) {
        self.report.failures.push(ComponentError { component, error });
    }

    async fn ensure(&mut self, desired: &'a DesiredObject, found: Option<DynamicObject>) {
        let component = desired.component;
        if component == Component::Deployment && self.keeps_image {
            self.image = found.as_ref().and_then(image_set_by_us).unwrap_or_else(|| self.image.clone());
        }
        let body = desired.body(self.params());
        let role = found.as_ref().filter(|_| matches!(component, Component::ClusterRole | Component::Role));
        let widened = role.and_then(|found| rbac::widened(&body, &found.data));
        match self.reconcile(component, widened.as_ref().unwrap_or(&body), found).await {
            Ok(object) if widened.is_some() => self.widened_roles.push((desired, object)),
            result => self.record(desired, result),
        }
    }

    fn record(&mut self, desired: &DesiredObject, result: Result<DynamicObject, Error>) {
        let object = match result {
            Ok(object) => object,
            Err(error) => return self.fail(desired.component, error),
        };
        if desired.component == Component::Deployment {
            self.installed.awaiting_pod |= !readiness::is_available(&object);
            self.installed.image = Some(self.image.clone());
        }
        self.installed.mark_verified(desired, Params { runtime: self.runtime, image: &self.image });
    }

    /// Removes the rights that only the previous plan needed, once the new plan is written.
    async fn narrow_roles(&mut self) {
        if self.failed(Component::ConfigMap) || self.report.blocked.contains(&Component::ConfigMap) {
            return;
        }
        for (desired, found) in std::mem::take(&mut self.widened_roles) {
            let body = desired.body(self.params());
            let result = self.reconcile(desired.component, &body, Some(found)).await;
            self.record(desired, result);
        }
    }

    /// Repairs an object if it differs from the desired one, and returns its current state.
    async fn reconcile(
        &mut self,
        component: Component,
        body: &Value,
        found: Option<DynamicObject>,
    ) -> Result<DynamicObject, Error> {
        let object_name = ObjectName::of(component);
        let accepted = self.installed.accepted_forms.get(&component).copied();
        let repair = match &found {
            Some(found) if found.metadata.deletion_timestamp.is_some() => {
                self.release_terminating(component, found).await?;
                Repair::Apply
            }
            Some(found) => compare(component, body, found, accepted),
            None => Repair::Apply,
        };
        if repair != Repair::None && !self.installed.may_write(Instant::now()) {
            return Err(Error::Contested(object_name));
        }
        let api = component.kind().api(self.client);
        let error = Error::request("write", object_name);
        let mut written = match (repair, found) {
            (Repair::None, Some(found)) => return Ok(found),
            (Repair::Replace, Some(found)) => replace(&api, component, body, &found).await.map_err(&error)?,
            (Repair::Release, Some(found)) => release(&api, component.name(), &found).await.map_err(&error)?,
            (Repair::Recreate, Some(found)) => {
                let deleted = object::delete(&api, component.name(), found.uid()).await;
                deleted.map_err(Error::request("delete", object_name))?;
                apply(&api, component, body).await.map_err(&error)?
            }
            _ => apply(&api, component, body).await.map_err(&error)?,
        };
        self.report.written.insert(component);
        if component == Component::Deployment {
            (self.installed.awaiting_pod, self.installed.rechecks) = (true, 0);
        }
        if written.metadata.deletion_timestamp.is_some() {
            return Err(Error::Terminating(object_name));
        }
        let mut remaining = compare(component, body, &written, None);
        if component.is_agent_managed() {
            // The agent owns the content of these objects, so they are never replaced.
            let is_unlabelled = remaining == Repair::Apply;
            return if is_unlabelled { apply(&api, component, body).await.map_err(&error) } else { Ok(written) };
        }
        // An apply keeps fields of other managers. A difference that remains after a PUT is a default of this API
        // server.
        if remaining != Repair::None && repair != Repair::Replace {
            written = replace(&api, component, body, &written).await.map_err(&error)?;
            remaining = compare(component, body, &written, None);
        }
        if remaining == Repair::None {
            self.installed.accepted_forms.remove(&component);
        } else {
            self.installed.accepted_forms.insert(component, compare::accepted_form(component, body, &written));
        }
        Ok(written)
    }

    /// Removes foreign finalizers and owners from an object that is being deleted, so that it can be created again.
    async fn release_terminating(&mut self, component: Component, found: &DynamicObject) -> Result<(), Error> {
        let object = ObjectName::of(component);
        if !compare::has_foreign_lifecycle(&found.metadata) || !self.installed.may_write(Instant::now()) {
            return Err(Error::Terminating(object));
        }
        let released = release(&component.kind().api(self.client), component.name(), found).await;
        let released = released.map_err(Error::request("write", object))?;
        self.report.written.insert(component);
        if released.finalizers().is_empty() { Ok(()) } else { Err(Error::Terminating(object)) }
    }

    /// Deletes an object of the incumbent if it exists and has the incumbent's label.
    async fn delete_obsolete(&mut self, component: Component, kind: Kind, name: &'static str) {
        let api = kind.api(self.client);
        let object_name = ObjectName::new(kind, name);
        let found = match metadata(&api, name).await {
            Ok(found) => found,
            Err(error) => return self.fail(component, Error::request("read", object_name)(error)),
        };
        let is_managed = |by: &String| by == label::MANAGED_BY_SKR;
        let Some(found) = found.filter(|it| it.labels().get(label::MANAGED_BY).is_some_and(is_managed)) else { return };
        match object::delete(&api, name, found.uid()).await {
            Ok(_) => drop(self.report.written.insert(component)),
            Err(error) => self.fail(component, Error::request("delete", object_name)(error)),
        }
    }
}

/// Returns the image of a Deployment if this receiver's field manager owns the field; a different writer would have
/// taken the ownership over.
fn image_set_by_us(deployment: &DynamicObject) -> Option<Image> {
    let container = format!("k:{{\"name\":\"{AGENT_CONTAINER}\"}}");
    let entries = deployment.metadata.managed_fields.iter().flatten();
    let ours = entries.filter(|entry| entry.manager.as_deref() == Some(field_manager::TIDEWATCH));
    let mut fields = ours.filter_map(|entry| entry.fields_v1.as_ref());
    let place = ["f:spec", "f:template", "f:spec", "f:containers", &container, "f:image"];
    let is_noted = fields.any(|fields| place.iter().try_fold(&fields.0, |at, member| at.get(member)).is_some());
    let containers = deployment.data["spec"]["template"]["spec"]["containers"].as_array()?;
    let image = containers.iter().find(|container| container["name"] == AGENT_CONTAINER)?["image"].as_str()?;
    is_noted.then(|| image.into())
}

async fn read(client: &Client, component: Component) -> (Component, kube::Result<Option<DynamicObject>>) {
    let api = component.kind().api(client);
    let found = if component.is_agent_managed() {
        metadata(&api, component.name()).await
    } else {
        object::get(&api, component.name()).await
    };
    (component, found)
}

/// Reads only the metadata of an object.
pub(super) async fn metadata(api: &Api<DynamicObject>, name: &str) -> kube::Result<Option<DynamicObject>> {
    Ok(object::if_exists(api.get_metadata(name).await, name)?.map(|found| bare(found.metadata)))
}

fn bare(metadata: ObjectMeta) -> DynamicObject {
    DynamicObject { types: None, metadata, data: Value::Null }
}

async fn apply(api: &Api<DynamicObject>, component: Component, body: &Value) -> kube::Result<DynamicObject> {
    let params = PatchParams::apply(field_manager::TIDEWATCH).force();
    if component.is_agent_managed() {
        // A metadata-only response does not reveal the content either.
        let written = api.patch_metadata(component.name(), &params, &Patch::Apply(body)).await?;
        return Ok(bare(written.metadata));
    }
    api.patch(component.name(), &params, &Patch::Apply(body)).await
}

/// Replaces an object if it has not changed since it was read. This removes fields of other managers, except labels and
/// annotations of the object.
async fn replace(
    api: &Api<DynamicObject>,
    component: Component,
    body: &Value,
    found: &DynamicObject,
) -> kube::Result<DynamicObject> {
    let mut object: DynamicObject = serde_json::from_value(body.clone()).map_err(kube::Error::SerdeError)?;
    let marks = object.metadata.labels.take();
    object.metadata = compare::without_foreign_lifecycle(&found.metadata);
    object.metadata.managed_fields = None;
    object.metadata.labels.get_or_insert_default().extend(marks.into_iter().flatten());
    for (_, place, member) in IGNORED_FIELDS.iter().filter(|(of, ..)| *of == component) {
        let kept = found.data.pointer(place).and_then(|value| value.get(*member));
        if let (Some(kept), Some(members)) = (kept, object.data.pointer_mut(place).and_then(Value::as_object_mut)) {
            members.insert((*member).to_owned(), kept.clone());
        }
    }
    let params = PostParams { field_manager: Some(field_manager::TIDEWATCH.to_owned()), ..PostParams::default() };
    api.replace(component.name(), &params, &object).await
}

/// Removes foreign finalizers and owner references from an object if it is still the same one. Its content stays, and
/// is not read.
pub(super) async fn release(
    api: &Api<DynamicObject>,
    name: &str,
    found: &DynamicObject,
) -> kube::Result<DynamicObject> {
    let finalizers = compare::without_foreign_lifecycle(&found.metadata).finalizers;
    let patch = json!({"metadata": {"uid": found.uid(), "finalizers": finalizers, "ownerReferences": null}});
    let params = PatchParams::apply(field_manager::TIDEWATCH);
    let released = api.patch_metadata(name, &params, &Patch::Merge(patch)).await?;
    // The content is unchanged if it was known.
    Ok(DynamicObject { metadata: released.metadata, ..found.clone() })
}
