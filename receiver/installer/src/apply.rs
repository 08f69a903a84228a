//! Reconciles the installation of one runtime: reads the objects that are not verified, and writes those that differ in
//! [`waves`].

mod waves;

use std::collections::BTreeMap;

use futures::{StreamExt as _, stream};
use kube::{Client, ResourceExt, api::DynamicObject};
use tidewatch_api::{
    identity::RuntimeId,
    names::{AGENT_CONTAINER, AGENT_DEPLOYMENT, AGENT_PULL_SECRET, annotation, field_manager, label},
};
use tidewatch_cluster::object::{self, WriteBudget};

use super::{
    Component, ComponentError, Error, InstallationState, Report,
    component::{Kind, POLICIES, SECRETS, SERVICES, WEBHOOKS},
    desired::{DesiredObject, DesiredObjects, Params},
    error::ObjectName,
    flags::is_image,
    readiness::PathEvidence,
    trial,
    upgrade::{Image, ImageDecision},
};

/// Maximum number of concurrent reads of one runtime: all components and all obsolete objects.
const READ_CONCURRENCY: usize = 20;

/// An object that is to be deleted, and the component that reports its failure.
type Obsolete = (Component, Kind, &'static str);

/// Objects of lifecycle-manager and of earlier versions that correspond to no component, apart from the webhook
/// configuration.
pub(super) const OBSOLETE: [Obsolete; 3] = [
    (Component::MetricsService, SERVICES, AGENT_DEPLOYMENT),
    (Component::MetricsPolicy, POLICIES, "kyma-project.io--seed-to-watcher"),
    // Of earlier versions of this receiver. Clusters may refuse policies without rules.
    (Component::MetricsPolicy, POLICIES, "kyma-project.io--watcher-deny-all"),
];

/// An object to read.
#[derive(Clone, Copy)]
enum Read {
    /// The object of a component.
    Component(Component),
    /// The metadata of an object that is to be deleted.
    Obsolete(Obsolete),
}

/// The objects that were read.
#[derive(Default)]
struct Found {
    /// `None` for a component without an object. Components that could not be read are not there.
    components: BTreeMap<Component, Option<DynamicObject>>,
    /// A failure counts only once the object is to be deleted.
    obsolete: Vec<(Obsolete, kube::Result<Option<DynamicObject>>)>,
}

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
        let Some(found) = self.read(&unverified).await else { return self.report };
        let Found { mut components, obsolete } = found;
        let lacks_egress_policy = components.get(&Component::ApiServerPolicy).is_some_and(Option::is_none);
        if components.get(&Component::Deployment).is_some_and(|found| found.as_ref().is_some_and(is_anothers))
            && !self.takes_over(&unverified, &mut components).await
        {
            return self.report;
        }
        // lifecycle-manager's webhook configuration goes before everything else.
        let (webhooks, obsolete): (Vec<_>, Vec<_>) =
            obsolete.into_iter().partition(|((component, ..), _)| *component == Component::Webhooks);
        for (webhooks, found) in webhooks {
            self.delete_obsolete(webhooks, found).await;
        }
        for wave in 0..Component::WAVES {
            if self.runtime_is_unavailable() {
                return self.report;
            }
            let writes = self.prepare(wave, &unverified, &mut components);
            self.write_all(writes).await;
        }
        if lacks_egress_policy && self.failed(Component::ApiServerPolicy) {
            // Alone, it would deny all other egress.
            let policy = (Component::DnsPolicy, POLICIES, Component::DnsPolicy.name());
            let (_, found) = read(self.client, Read::Obsolete(policy)).await;
            self.delete_obsolete(policy, found).await;
            self.installed.invalidate(POLICIES.plural, Component::DnsPolicy.name());
        }
        // The other obsolete objects stay until our agent has replaced what they serve.
        let is_installed = self.report.failures.iter().all(ComponentError::is_of_additional)
            && self.report.blocked.iter().all(|component| component.is_additional());
        if !self.installed.obsolete_removed && is_installed {
            let failures = self.report.failures.len();
            for (obsolete, found) in obsolete {
                self.delete_obsolete(obsolete, found).await;
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
        let mut writes = Vec::new();
        for &desired in unverified {
            match desired.component {
                Component::PullSecret | Component::Account | Component::PriorityClass => {
                    if let Some(found) = found.remove(&desired.component) {
                        writes.push(self.write_of(desired, found));
                    }
                }
                Component::Deployment => deployment = Some(desired),
                _ => {}
            }
        }
        self.write_all(writes).await;
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

    /// Reads the current objects, and the obsolete ones that may still exist. Returns `None` if the runtime cannot be reached
    /// or refuses all requests.
    async fn read(&mut self, unverified: &[&'a DesiredObject]) -> Option<Found> {
        let (known, unknown): (Vec<_>, Vec<_>) =
            unverified.iter().map(|desired| desired.component).partition(|it| self.installed.is_as_written(*it));
        let components = known.into_iter().map(|component| (component, None)).collect();
        let mut found = Found { components, ..Found::default() };
        let client = self.client;
        let obsolete = self.obsolete().into_iter().map(Read::Obsolete);
        let reads: Vec<_> =
            unknown.into_iter().map(Read::Component).chain(obsolete).map(|wanted| read(client, wanted)).collect();
        let mut reads = stream::iter(reads).buffered(READ_CONCURRENCY);
        while let Some((wanted, result)) = reads.next().await {
            match (wanted, result) {
                (Read::Component(component), Ok(object)) => drop(found.components.insert(component, object)),
                (Read::Component(component), Err(error)) => {
                    self.fail(component, Error::request("read", ObjectName::of(component))(error));
                }
                (Read::Obsolete(obsolete), result) => found.obsolete.push((obsolete, result)),
            }
            if self.runtime_is_unavailable() {
                return None;
            }
        }
        Some(found)
    }

    /// Objects to delete, unless they are known to be gone.
    fn obsolete(&self) -> Vec<Obsolete> {
        if self.installed.obsolete_removed {
            return Vec::new();
        }
        let webhooks = (Component::Webhooks, WEBHOOKS, AGENT_DEPLOYMENT);
        let copy = (Component::PullSecret, SECRETS, AGENT_PULL_SECRET);
        let webhooks = (!self.desired.compat_webhooks).then_some(webhooks);
        let copy = (!self.desired.names_pull_secret_copy).then_some(copy);
        webhooks.into_iter().chain(OBSOLETE).chain(copy).collect()
    }

    fn runtime_is_unavailable(&self) -> bool {
        self.report.failures.iter().any(|failure| failure.error.affects_all())
    }

    fn failed(&self, component: Component) -> bool {
        self.report.failures.iter().any(|failure| failure.component == component)
    }

    fn fail(&mut self, component: Component, error: Error) {
        self.report.failures.push(ComponentError { component, error });
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

    /// Deletes an object of lifecycle-manager if it exists and has lifecycle-manager's label.
    async fn delete_obsolete(&mut self, obsolete: Obsolete, found: kube::Result<Option<DynamicObject>>) {
        let (component, kind, name) = obsolete;
        let object_name = ObjectName::new(kind, name);
        let found = match found {
            Ok(found) => found,
            Err(error) => return self.fail(component, Error::request("read", object_name)(error)),
        };
        let is_managed = |by: &String| by == label::MANAGED_BY_SKR;
        let Some(found) = found.filter(|it| it.labels().get(label::MANAGED_BY).is_some_and(is_managed)) else { return };
        match object::delete(&kind.api(self.client), name, found.uid()).await {
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

async fn read(client: &Client, wanted: Read) -> (Read, kube::Result<Option<DynamicObject>>) {
    let found = match wanted {
        Read::Component(component) if !component.is_agent_managed() => {
            object::get(&component.kind().api(client), component.name()).await
        }
        Read::Component(component) => object::get_metadata(&component.kind().api(client), component.name()).await,
        Read::Obsolete((_, kind, name)) => object::get_metadata(&kind.api(client), name).await,
    };
    (wanted, found)
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
