//! Removes an installation of this receiver or of lifecycle-manager: the webhook configuration first, so that no request of
//! a user waits for a dead webhook; then the agent; and after its process has ended, the other objects in the opposite order
//! of the components.

use std::time::Duration;

use jiff::Timestamp;
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams, ObjectMeta, PartialObjectMeta},
};
use strum::VariantArray as _;
use tidewatch_api::{
    names::{AGENT_DEPLOYMENT, AGENT_OBJECT, SKR_NAMESPACE, field_manager, label},
    selectors,
};
use tidewatch_cluster::{object, runtime_access::list_first};

use super::{
    Component, ComponentError, Error,
    apply::OBSOLETE,
    component::{Kind, PODS},
    error::ObjectName,
    objects::COMMON_LABELS,
};
use crate::pending_removal::PendingRemoval;

/// Time after a pod's deletion deadline from which its node counts as lost, since nothing would report the end of the
/// process. Equals the time after which a cluster without access counts as gone.
const LOST_AFTER: Duration = Duration::from_secs(600);
/// Maximum number of pods that are checked.
const MAX_PODS: u16 = 100;
/// Maximum number of pods in a message.
const MAX_NAMED: usize = 3;

/// Performs every step that is possible now. Returns `None` when everything is gone.
///
/// # Errors
/// The first failed request. Objects that do not depend on it are deleted nevertheless.
pub(super) async fn step(client: &Client) -> Result<Option<PendingRemoval>, ComponentError> {
    let mut removal = Removal { client, deleting: false, blockers: Vec::new(), failure: None };
    // API servers stop calling a deleted webhook with a short delay, so the agent is deleted by the next reconcile.
    removal.component(Component::Webhooks).await;
    if removal.deleting || removal.failure.is_some() {
        return removal.finish();
    }
    let is_gone = removal.component(Component::Deployment).await;
    if removal.failure.is_none() {
        removal.find_processes(is_gone).await;
    }
    // The agent's process still needs the remaining objects.
    if removal.failure.is_some() || !removal.blockers.is_empty() {
        return removal.finish();
    }
    let first = [Component::Webhooks, Component::Deployment];
    let rest = Component::VARIANTS.iter().copied().rev().filter(|component| !first.contains(component));
    let rest = rest.map(|component| (component, component.kind(), component.name()));
    for (component, kind, name) in OBSOLETE.into_iter().chain(rest) {
        if removal.failure.as_ref().is_some_and(|failure| failure.error.affects_all()) {
            break;
        }
        removal.object(component, kind, name).await;
    }
    removal.finish()
}

struct Removal<'a> {
    client: &'a Client,
    /// An object existed, so its absence is verified later.
    deleting: bool,
    /// Objects that finalizers or running processes keep, as shown in messages.
    blockers: Vec<String>,
    failure: Option<ComponentError>,
}

impl Removal<'_> {
    fn finish(self) -> Result<Option<PendingRemoval>, ComponentError> {
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        Ok((self.deleting || !self.blockers.is_empty()).then(|| PendingRemoval::of_objects(&self.blockers)))
    }

    fn fail(&mut self, component: Component, error: Error) {
        // The first error is reported, unless a later one affects the whole runtime.
        if self.failure.is_none() || error.affects_all() {
            self.failure = Some(ComponentError { component, error });
        }
    }

    async fn component(&mut self, component: Component) -> bool {
        self.object(component, component.kind(), component.name()).await
    }

    /// Deletes an object of ours or of lifecycle-manager. Returns `false` if an object of another owner stays.
    async fn object(&mut self, component: Component, kind: Kind, name: &'static str) -> bool {
        let deleted = self.delete(kind, name).await;
        deleted.unwrap_or_else(|error| {
            self.fail(component, error);
            true
        })
    }

    async fn delete(&mut self, kind: Kind, name: &'static str) -> Result<bool, Error> {
        let api = kind.api(self.client);
        let object_name = ObjectName::new(kind, name);
        let found = object::get_metadata(&api, name).await.map_err(Error::request("read", object_name))?;
        let Some(found) = found else { return Ok(true) };
        if !is_ours(&found) {
            return Ok(false);
        }
        self.deleting = true;
        if found.metadata.deletion_timestamp.is_none() {
            object::delete(&api, name, found.uid()).await.map_err(Error::request("delete", object_name))?;
        } else if object::has_foreign_lifecycle(&found.metadata) {
            let released = object::release(&api, name, field_manager::TIDEWATCH, &found).await;
            released.map_err(Error::request("write", object_name))?;
        } else {
            self.blockers.push(format!("the {object_name}"));
        }
        Ok(true)
    }

    /// Finds running processes of the deleted Deployment or of an earlier one.
    async fn find_processes(&mut self, is_gone: bool) {
        let params = ListParams::default().labels(&selectors::agent_pods());
        let pods: Api<PartialObjectMeta<DynamicObject>> =
            Api::namespaced_with(self.client.clone(), SKR_NAMESPACE, &PODS.resource());
        let pods = match list_first(&pods, &params, MAX_PODS).await {
            Ok(pods) => pods,
            Err(error) => {
                let object = ObjectName::new(PODS, AGENT_DEPLOYMENT);
                return self.fail(Component::Deployment, Error::request("read", object)(error));
            }
        };
        let now = Timestamp::now();
        let is_running = |pod: &ObjectMeta| is_agent(pod, is_gone) && !is_lost(pod, now);
        let mut running: Vec<_> = pods.into_iter().map(|pod| pod.metadata).filter(is_running).collect();
        running.sort_by(|a, b| a.name.cmp(&b.name));
        let minutes = LOST_AFTER.as_secs() / 60;
        for pod in running.iter().take(MAX_NAMED) {
            let name = pod.name.as_deref().unwrap_or_default();
            // The message is the same before and after the deletion of the pod starts.
            self.blockers.push(format!("the Pod {name} (if its node is lost, for {minutes} minutes)"));
        }
    }
}

/// Returns whether an object is ours or lifecycle-manager's, by its labels or, since a user can remove a label, by its
/// managed fields.
fn is_ours(found: &DynamicObject) -> bool {
    let is_labelled =
        COMMON_LABELS.into_iter().any(|(key, value)| found.labels().get(key).is_some_and(|is| is == value));
    // The field manager of an agent is the name of its objects.
    let wrote = |manager: &str| [field_manager::TIDEWATCH, AGENT_OBJECT].contains(&manager);
    let mut entries = found.metadata.managed_fields.iter().flatten();
    is_labelled || entries.any(|entry| entry.manager.as_deref().is_some_and(wrote))
}

/// Returns whether a pod with the agent's label is an agent: it has our label, or belongs to a Deployment of the
/// agent's name that is not foreign.
fn is_agent(pod: &ObjectMeta, is_gone: bool) -> bool {
    let label = |key: &str| pod.labels.as_ref().and_then(|labels| labels.get(key)).map(String::as_str);
    let of_deployment = || {
        // Name of a ReplicaSet of the Deployment.
        let set = label("pod-template-hash").map(|hash| format!("{AGENT_DEPLOYMENT}-{hash}"));
        let mut owners = pod.owner_references.iter().flatten();
        owners.any(|owner| owner.kind == "ReplicaSet" && Some(&owner.name) == set.as_ref())
    };
    label(label::PART_OF) == Some(label::PART_OF_TIDEWATCH) || (is_gone && of_deployment())
}

/// Returns whether the deletion deadline of a pod passed at least [`LOST_AFTER`] ago.
fn is_lost(pod: &ObjectMeta, now: Timestamp) -> bool {
    let due = pod.deletion_timestamp.as_ref().map(|due| due.0);
    due.is_some_and(|due| {
        u64::try_from(now.as_second() - due.as_second()).is_ok_and(|late| late >= LOST_AFTER.as_secs())
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(metadata: Value) -> ObjectMeta {
        serde_json::from_value(metadata).unwrap()
    }

    #[test]
    fn agent_pods_are_found_by_label_or_deployment() {
        let owned = |kind: &str, name: &str| {
            pod(json!({"labels": {"app": "skr-webhook", "pod-template-hash": "5d4"},
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": kind, "name": name, "uid": "u"}]}))
        };
        let marked = pod(json!({"labels": {"app": "skr-webhook", "app.kubernetes.io/part-of": "tidewatch"}}));
        let bare = pod(json!({"labels": {"app": "skr-webhook"}}));
        for (pod, expected) in [
            (&marked, [true, true]),
            (&owned("ReplicaSet", "skr-webhook-5d4"), [true, false]),
            (&owned("ReplicaSet", "skr-webhook-mine-5d4"), [false, false]),
            (&owned("StatefulSet", "skr-webhook-5d4"), [false, false]),
            (&bare, [false, false]),
        ] {
            assert_eq!([true, false].map(|is_gone| is_agent(pod, is_gone)), expected, "{pod:?}");
        }
    }

    #[test]
    fn pod_is_lost_ten_minutes_after_it_should_have_ended() {
        let due: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let ending = pod(json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}));
        for (late, lost) in [(-30, false), (0, false), (599, false), (600, true), (100_000, true)] {
            let now = Timestamp::from_second(due.as_second() + late).unwrap();
            assert_eq!(is_lost(&ending, now), lost, "{late}");
            assert!(!is_lost(&pod(json!({})), now), "not being deleted");
        }
    }

    #[test]
    fn ownership_is_detected_from_labels_or_managed_fields() {
        let object = |metadata: Value| serde_json::from_value(json!({ "metadata": metadata })).unwrap();
        let managed = |by: &str| json!({"managedFields": [{"manager": "kubectl"}, {"manager": by}]});
        assert!(is_ours(&object(json!({"labels": {"operator.kyma-project.io/managed-by": "kyma"}}))));
        assert!(is_ours(&object(json!({"labels": {"app.kubernetes.io/part-of": "tidewatch"}}))));
        assert!(is_ours(&object(managed("tidewatch"))) && is_ours(&object(managed("tidewatch-agent"))));
        assert!(!is_ours(&object(managed("helm"))) && !is_ours(&object(json!({}))));
        assert!(!is_ours(&object(json!({"labels": {"operator.kyma-project.io/managed-by": "me"}}))));
    }
}
