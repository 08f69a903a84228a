//! Reconciles the installation of one runtime: reads the objects that are not verified, and writes those that differ,
//! in the order of [`Component`].

use std::collections::BTreeMap;

use futures::{StreamExt as _, stream};
use kube::{Client, ResourceExt, api::DynamicObject};
use serde_json::Value;
use tidewatch_api::{
    identity::RuntimeId,
    names::{AGENT_CONTAINER, AGENT_DEPLOYMENT, AGENT_PULL_SECRET, annotation, field_manager, label},
};
use tidewatch_cluster::object::{self, Converged, Target, WriteBudget};

use super::{
    Component, ComponentError, Error, InstallationState, Report,
    compare::shape,
    component::{Kind, POLICIES, SECRETS, SERVICES, WEBHOOKS},
    desired::{DesiredObject, DesiredObjects, Params},
    error::ObjectName,
    flags::is_image,
    rbac,
    readiness::{self, PathEvidence},
    trial,
    upgrade::{Image, ImageDecision},
};

/// Maximum number of concurrent reads of one runtime.
const READ_CONCURRENCY: usize = 6;

/// Objects of lifecycle-manager and of earlier versions that correspond to no component, apart from the webhook
/// configuration.
pub(super) const OBSOLETE: [(Component, Kind, &str); 3] = [
    (Component::MetricsService, SERVICES, AGENT_DEPLOYMENT),
    (Component::MetricsPolicy, POLICIES, "kyma-project.io--seed-to-watcher"),
    // Of earlier versions of this receiver. Clusters may refuse policies without rules.
    (Component::MetricsPolicy, POLICIES, "kyma-project.io--watcher-deny-all"),
];

/// State of one installation.
pub(super) struct InstallRun<'a> {
    client: &'a Client,
    params: Params<'a>,
    /// An image that the Deployment already has takes precedence over that of `params`.
    keeps_image: bool,
    path: PathEvidence,
    desired: &'a DesiredObjects,
    installed: &'a mut InstallationState,
    /// Budget of all writes to the runtime.
    budget: WriteBudget<'a>,
    report: Report,
    /// Roles that keep more rights than desired until the plan is written.
    widened_roles: Vec<(&'a DesiredObject, DynamicObject)>,
}

impl<'a> InstallRun<'a> {
    pub(super) fn new(
        client: &'a Client,
        runtime: &'a RuntimeId,
        decision: ImageDecision,
        path: PathEvidence,
        desired: &'a DesiredObjects,
        installed: &'a mut InstallationState,
        budget: WriteBudget<'a>,
    ) -> Self {
        let (image, keeps_image) = match (decision, &installed.image) {
            (ImageDecision::Use(image), _) => (image, false),
            // The image found first stays, even if another field manager replaces it later.
            (ImageDecision::KeepOr(_), Some(image)) => (image.clone(), false),
            (ImageDecision::KeepOr(image), None) => (image, true),
        };
        let unproven_before = is_unproven_before(path, &image, installed.image.as_deref(), installed.unproven_before);
        Self {
            client,
            params: Params { runtime, image, unproven_before, without_priority: installed.without_priority },
            keeps_image,
            path,
            desired,
            installed,
            budget,
            report: Report::default(),
            widened_roles: Vec::new(),
        }
    }

    fn is_verified(&self, desired: &DesiredObject) -> bool {
        // A PriorityClass that is no longer refused changes the Deployment.
        let may_change =
            desired.component == Component::Deployment && (self.keeps_image || self.params.without_priority);
        !may_change && self.installed.is_verified(desired, &self.params)
    }

    pub(super) async fn run(mut self) -> Report {
        let unverified: Vec<_> = self.desired.objects.iter().filter(|desired| !self.is_verified(desired)).collect();
        if unverified.is_empty() && self.installed.obsolete_removed {
            return self.report;
        }
        let Some(mut found) = self.read(&unverified).await else { return self.report };
        let lacks_egress_policy = found.get(&Component::ApiServerPolicy).is_some_and(Option::is_none);
        if found.get(&Component::Deployment).is_some_and(|found| found.as_ref().is_some_and(is_anothers))
            && !self.takes_over(&unverified, &mut found).await
        {
            return self.report;
        }
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
        if lacks_egress_policy && self.failed(Component::ApiServerPolicy) {
            // Alone, it would deny all other egress.
            self.delete_obsolete(Component::DnsPolicy, POLICIES, Component::DnsPolicy.name()).await;
            self.installed.invalidate(POLICIES.plural, Component::DnsPolicy.name());
        }
        let is_installed = self.report.failures.iter().all(ComponentError::is_of_additional)
            && self.report.blocked.iter().all(|component| component.is_additional());
        if !self.installed.obsolete_removed && is_installed {
            let failures = self.report.failures.len();
            for (component, kind, name) in OBSOLETE {
                self.delete_obsolete(component, kind, name).await;
            }
            if !self.desired.names_pull_secret_copy {
                self.delete_obsolete(Component::PullSecret, SECRETS, AGENT_PULL_SECRET).await;
            }
            self.installed.obsolete_removed = self.report.failures.len() == failures;
        }
        self.report
    }

    /// Prepares the replacement of lifecycle-manager's Deployment: a dry run shows whether the runtime accepts the agent's pod,
    /// for which only the objects are written that the pod refers to. Returns false if everything of lifecycle-manager is to
    /// stay, since the runtime would be without any agent.
    async fn takes_over(
        &mut self,
        unverified: &[&'a DesiredObject],
        found: &mut BTreeMap<Component, Option<DynamicObject>>,
    ) -> bool {
        let mut deployment = None;
        for &desired in unverified {
            match desired.component {
                Component::PullSecret | Component::Account | Component::PriorityClass => {
                    if let Some(found) = found.remove(&desired.component) {
                        self.ensure(desired, found).await;
                    }
                }
                Component::Deployment => deployment = Some(desired),
                _ => {}
            }
        }
        let Some(deployment) = deployment else { return true };
        let tried = trial::run(self.client, &deployment.body(&self.params)).await;
        match tried {
            Ok(()) => true,
            Err(refusal) => {
                self.fail(Component::Deployment, refusal);
                false
            }
        }
    }

    /// Reads the current objects. Returns `None` if the runtime cannot be reached or refuses all requests.
    async fn read(&mut self, unverified: &[&'a DesiredObject]) -> Option<BTreeMap<Component, Option<DynamicObject>>> {
        let (known, unknown): (Vec<_>, Vec<_>) =
            unverified.iter().map(|desired| desired.component).partition(|it| self.installed.is_as_written(*it));
        let mut found: BTreeMap<_, _> = known.into_iter().map(|component| (component, None)).collect();
        let reads: Vec<_> = unknown.into_iter().map(|component| read(self.client, component)).collect();
        let mut reads = stream::iter(reads).buffered(READ_CONCURRENCY);
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
        if component == Component::Deployment
            && let Some(found) = &found
        {
            self.follow_image(found);
        }
        let body = desired.body(&self.params);
        let is_new = found.is_none();
        let role = found.as_ref().filter(|_| matches!(component, Component::ClusterRole | Component::Role));
        let widened = role.and_then(|found| rbac::widened(&body, &found.data));
        match self.reconcile(component, widened.as_ref().unwrap_or(&body), found).await {
            Ok(object) if widened.is_some() => self.widened_roles.push((desired, object)),
            result => self.record(desired, result),
        }
        if component == Component::PriorityClass {
            self.params.without_priority = is_new && self.failed(component);
        }
    }

    /// Takes over the image of the found Deployment if it is to be kept, and the record of the event path before that image.
    fn follow_image(&mut self, found: &DynamicObject) {
        let Some(before) = image_set_by_us(found) else { return };
        if self.keeps_image {
            self.params.image = before.clone();
        }
        let is_marked = found.annotations().get(annotation::UNPROVEN_BEFORE).is_some_and(|image| **image == *before);
        self.params.unproven_before = is_unproven_before(self.path, &self.params.image, Some(&before), is_marked);
    }

    fn record(&mut self, desired: &DesiredObject, result: Result<DynamicObject, Error>) {
        let object = match result {
            Ok(object) => object,
            Err(error) => {
                // The next reconcile reads what it found.
                self.installed.doubt(desired.component);
                return self.fail(desired.component, error);
            }
        };
        if desired.component == Component::Deployment {
            self.installed.awaiting_pod |= !readiness::is_available(&object);
            self.installed.image = Some(self.params.image.clone());
            self.installed.unproven_before = self.params.unproven_before;
            self.installed.without_priority = self.params.without_priority;
        }
        self.installed.mark_verified(desired, &self.params);
    }

    /// Removes the rights that only the previous plan needed, once the new plan is written.
    async fn narrow_roles(&mut self) {
        if self.failed(Component::ConfigMap) || self.report.blocked.contains(&Component::ConfigMap) {
            return;
        }
        for (desired, found) in std::mem::take(&mut self.widened_roles) {
            let body = desired.body(&self.params);
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
        let found = match found {
            Some(found) if found.metadata.deletion_timestamp.is_some() => {
                self.release_terminating(component, &found).await?;
                None
            }
            found => found,
        };
        let name = component.name();
        let shape = shape(component);
        let budget = Some(&self.budget);
        let target = Target { name, manager: field_manager::TIDEWATCH, shape: &shape, desired: body, budget };
        let mut accepted = self.installed.accepted_forms.get(&component).copied();
        let converged = target.converge(&component.kind().api(self.client), found, &mut accepted).await;
        let Converged { object, written, .. } = converged.map_err(Error::write(object_name))?;
        if !written {
            return Ok(object);
        }
        match accepted {
            Some(form) => self.installed.accepted_forms.insert(component, form),
            None => self.installed.accepted_forms.remove(&component),
        };
        self.report.written.insert(component);
        if component == Component::Deployment {
            (self.installed.awaiting_pod, self.installed.rechecks) = (true, 0);
        }
        if object.metadata.deletion_timestamp.is_some() {
            return Err(Error::Terminating(object_name));
        }
        Ok(object)
    }

    /// Removes foreign finalizers and owners from an object that is being deleted, so that it can be created again.
    async fn release_terminating(&mut self, component: Component, found: &DynamicObject) -> Result<(), Error> {
        let object_name = ObjectName::of(component);
        if !object::has_foreign_lifecycle(&found.metadata) || !self.budget.may_write() {
            return Err(Error::Terminating(object_name));
        }
        let api = component.kind().api(self.client);
        let released = object::release(&api, component.name(), field_manager::TIDEWATCH, found).await;
        let released = released.map_err(Error::request("write", object_name))?;
        self.budget.wrote();
        self.report.written.insert(component);
        if released.finalizers().is_empty() { Ok(()) } else { Err(Error::Terminating(object_name)) }
    }

    /// Deletes an object of lifecycle-manager if it exists and has lifecycle-manager's label.
    async fn delete_obsolete(&mut self, component: Component, kind: Kind, name: &'static str) {
        let api = kind.api(self.client);
        let object_name = ObjectName::new(kind, name);
        let found = match object::get_metadata(&api, name).await {
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

/// Returns whether a Deployment is not ours, and its pod runs on.
fn is_anothers(deployment: &DynamicObject) -> bool {
    let is_ours = deployment.labels().get(label::PART_OF).is_some_and(|of| of == label::PART_OF_TIDEWATCH);
    !is_ours && deployment.metadata.deletion_timestamp.is_none()
}

/// Returns whether the event path was not proven when `image` replaced another one, nor since. `before` is the image until
/// now, and `was_unproven` the answer for it.
fn is_unproven_before(path: PathEvidence, image: &str, before: Option<&str>, was_unproven: bool) -> bool {
    match before {
        Some(before) if before == image => was_unproven && path != PathEvidence::Proven,
        Some(_) => path == PathEvidence::Lost,
        None => false,
    }
}

/// Returns the image of a Deployment if this receiver's field manager owns the field; a different writer would have
/// taken the ownership over. A runtime can return any text, which is kept while the installation is.
fn image_set_by_us(deployment: &DynamicObject) -> Option<Image> {
    let container = format!("k:{{\"name\":\"{AGENT_CONTAINER}\"}}");
    let entries = deployment.metadata.managed_fields.iter().flatten();
    let ours = entries.filter(|entry| entry.manager.as_deref() == Some(field_manager::TIDEWATCH));
    let mut fields = ours.filter_map(|entry| entry.fields_v1.as_ref());
    let place = ["f:spec", "f:template", "f:spec", "f:containers", &container, "f:image"];
    let is_noted = fields.any(|fields| place.iter().try_fold(&fields.0, |at, member| at.get(member)).is_some());
    let containers = deployment.data["spec"]["template"]["spec"]["containers"].as_array()?;
    let image = containers.iter().find(|container| container["name"] == AGENT_CONTAINER)?["image"].as_str()?;
    (is_noted && is_image(image)).then(|| image.into())
}

async fn read(client: &Client, component: Component) -> (Component, kube::Result<Option<DynamicObject>>) {
    let api = component.kind().api(client);
    let found = if component.is_agent_managed() {
        object::get_metadata(&api, component.name()).await
    } else {
        object::get(&api, component.name()).await
    };
    (component, found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_an_image_reference_is_taken_from_the_runtime() {
        let container = format!("k:{{\"name\":\"{AGENT_CONTAINER}\"}}");
        let fields = json!({"f:spec": {"f:template": {"f:spec": {"f:containers": {container: {"f:image": {}}}}}}});
        let found = |manager: &str, image: &str| {
            let deployment = json!({
                "metadata": {"managedFields": [{"manager": manager, "fieldsV1": fields}]},
                "spec": {"template": {"spec": {"containers": [{"name": AGENT_CONTAINER, "image": image}]}}}});
            image_set_by_us(&serde_json::from_value(deployment).unwrap())
        };
        assert_eq!(found(field_manager::TIDEWATCH, "r.io/agent:1").as_deref(), Some("r.io/agent:1"));
        assert_eq!(found("kubectl", "r.io/agent:1"), None);
        for image in ["", "a b", "a\n", &"x".repeat(513)] {
            assert_eq!(found(field_manager::TIDEWATCH, image), None, "{image:.20?}");
        }
    }
}
