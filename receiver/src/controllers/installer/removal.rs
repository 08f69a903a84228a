//! Takes an installation away, whoever's it is: the webhook configuration first, so that no user's write meets a dead webhook; then the
//! agent; and when its process has ended, its objects in the opposite order of their making.

use std::time::Duration;

use jiff::Timestamp;
use kube::{
    Client, ResourceExt,
    api::{DynamicObject, ListParams, ObjectMeta},
};
use tidewatch_shared::names::{AGENT_DEPLOYMENT, AGENT_OBJECT, field_manager, label};

use super::{
    Error, Failure, Part,
    apply::{OBSOLETE, delete, metadata, release},
    error::Object,
    form::is_held,
    objects::pod_selector,
    part::{Kind, PODS},
};
use crate::controllers::wait::Wait;

/// A process whose pod should have ended so long ago is waited for no longer: its node is lost, and nobody will say that it ended. As
/// long as a cluster without access is waited for before it counts as gone.
const LOST_AFTER: Duration = Duration::from_secs(600);
/// Pods that are looked at.
const MAX_PODS: u32 = 500;
/// Pods that are named.
const MAX_NAMED: usize = 3;

/// Does as much as can be done now. `None` when all is gone.
///
/// # Errors
/// The first that was refused. What does not depend on it is gone nevertheless.
pub(super) async fn step(client: &Client) -> Result<Option<Wait>, Failure> {
    let mut removal = Removal { client, waits: false, held: Vec::new(), failure: None };
    // API servers hear a moment later that nobody is to be asked any more: the agent goes with the next pass.
    removal.part(Part::Webhooks).await;
    if removal.is_held_up() {
        return removal.ended();
    }
    let left = removal.part(Part::Deployment).await;
    if removal.failure.is_none() {
        removal.processes(left).await;
    }
    // They still need what is below.
    if removal.failure.is_some() || !removal.held.is_empty() {
        return removal.ended();
    }
    let first = [Part::Webhooks, Part::Deployment];
    let rest = Part::ALL.into_iter().rev().filter(|part| !first.contains(part));
    let rest = rest.map(|part| (part, part.kind(), part.name()));
    for (part, kind, name) in OBSOLETE.into_iter().chain(rest) {
        if removal.is_over() {
            break;
        }
        removal.object(part, kind, name).await;
    }
    removal.ended()
}

/// What is left of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    /// Nothing of ours.
    Nothing,
    /// Somebody else's, which stays.
    Anothers,
}

struct Removal<'a> {
    client: &'a Client,
    /// Something was there: whether it is gone is looked at again.
    waits: bool,
    /// What others hold, in words.
    held: Vec<String>,
    failure: Option<Failure>,
}

impl Removal<'_> {
    fn ended(self) -> Result<Option<Wait>, Failure> {
        match self.failure {
            Some(failure) => Err(failure),
            None => Ok((self.waits || !self.held.is_empty()).then(|| Wait::for_these(&self.held))),
        }
    }

    const fn is_held_up(&self) -> bool {
        self.waits || self.failure.is_some()
    }

    fn is_over(&self) -> bool {
        self.failure.as_ref().is_some_and(|failure| failure.error.is_of_all())
    }

    fn failed(&mut self, part: Part, error: Error) {
        // The first one is told, unless nothing more can be asked.
        if self.failure.is_none() || error.is_of_all() {
            self.failure = Some(Failure { part, error });
        }
    }

    async fn part(&mut self, part: Part) -> Left {
        self.object(part, part.kind(), part.name()).await
    }

    /// Deletes an object that is ours or the incumbent's.
    async fn object(&mut self, part: Part, kind: Kind, name: &'static str) -> Left {
        let (api, object) = (kind.api(self.client), Object::new(kind, name));
        let found = match metadata(&api, name).await {
            Ok(Some(found)) => found,
            Ok(None) => return Left::Nothing,
            Err(source) => {
                self.failed(part, Error::Read { object, source });
                return Left::Nothing;
            }
        };
        if !is_ours(&found) {
            return Left::Anothers;
        }
        self.waits = true;
        let gone = if found.metadata.deletion_timestamp.is_none() {
            delete(&api, name, found.uid()).await.map_err(|source| Error::Delete { object, source })
        } else if is_held(&found.metadata) {
            let released = release(&api, name, &found).await.map(drop);
            released.map_err(|source| Error::Write { object, source })
        } else {
            self.held.push(format!("the {object}"));
            Ok(())
        };
        if let Err(error) = gone {
            self.failed(part, error);
        }
        Left::Nothing
    }

    /// Looks for processes of the Deployment that just went, or of one before.
    async fn processes(&mut self, deployment: Left) {
        let params = ListParams::default().labels(&pod_selector()).limit(MAX_PODS);
        let pods = match PODS.api(self.client).list_metadata(&params).await {
            Ok(pods) => pods.items,
            Err(source) => {
                let object = Object::new(PODS, AGENT_DEPLOYMENT);
                return self.failed(Part::Deployment, Error::Read { object, source });
            }
        };
        let (now, is_gone) = (Timestamp::now(), deployment == Left::Nothing);
        let run = |pod: &ObjectMeta| is_agents(pod, is_gone) && !is_lost(pod, now);
        let mut running: Vec<_> = pods.into_iter().map(|pod| pod.metadata).filter(run).collect();
        running.sort_by(|a, b| a.name.cmp(&b.name));
        let minutes = LOST_AFTER.as_secs() / 60;
        for pod in running.iter().take(MAX_NAMED) {
            let name = pod.name.as_deref().unwrap_or_default();
            // The same words before and after somebody begins to delete it.
            self.held.push(format!("the Pod {name} (if its node is lost, for {minutes} minutes)"));
        }
    }
}

/// Whether an object is ours or the incumbent's. Anybody may take a label off, but who wrote to an object is noted by its API server.
fn is_ours(found: &DynamicObject) -> bool {
    let marks = [(label::MANAGED_BY, label::MANAGED_BY_SKR), (label::PART_OF, label::PART_OF_TIDEWATCH)];
    let marked = marks.into_iter().any(|(key, value)| found.labels().get(key).is_some_and(|is| is == value));
    // An agent writes under the name of its objects.
    let wrote = |manager: &str| [field_manager::TIDEWATCH, AGENT_OBJECT].contains(&manager);
    let mut entries = found.metadata.managed_fields.iter().flatten();
    marked || entries.any(|entry| entry.manager.as_deref().is_some_and(wrote))
}

/// Whether a pod with the agent's label is an agent: one that we marked, or one of a Deployment of its name, unless that is somebody else's.
fn is_agents(pod: &ObjectMeta, is_gone: bool) -> bool {
    let label = |key: &str| pod.labels.as_ref().and_then(|labels| labels.get(key)).map(String::as_str);
    let of_deployment = || {
        // How ReplicaSets of a Deployment are named.
        let set = label("pod-template-hash").map(|hash| format!("{AGENT_DEPLOYMENT}-{hash}"));
        let mut owners = pod.owner_references.iter().flatten();
        owners.any(|owner| owner.kind == "ReplicaSet" && Some(&owner.name) == set.as_ref())
    };
    label(label::PART_OF) == Some(label::PART_OF_TIDEWATCH) || (is_gone && of_deployment())
}

/// Whether a pod should have ended long ago.
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
    fn a_pod_is_an_agent_by_our_mark_or_by_its_deployment() {
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
            assert_eq!([true, false].map(|is_gone| is_agents(pod, is_gone)), expected, "{pod:?}");
        }
    }

    #[test]
    fn a_pod_is_lost_long_after_it_should_have_ended() {
        let due: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let ending = pod(json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}));
        for (late, lost) in [(-30, false), (0, false), (599, false), (600, true), (100_000, true)] {
            let now = Timestamp::from_second(due.as_second() + late).unwrap();
            assert_eq!(is_lost(&ending, now), lost, "{late}");
            assert!(!is_lost(&pod(json!({})), now), "nobody ends it");
        }
    }

    #[test]
    fn what_was_ours_is_known_without_its_labels() {
        let object = |metadata: Value| serde_json::from_value(json!({ "metadata": metadata })).unwrap();
        let managed = |by: &str| json!({"managedFields": [{"manager": "kubectl"}, {"manager": by}]});
        assert!(is_ours(&object(json!({"labels": {"operator.kyma-project.io/managed-by": "kyma"}}))));
        assert!(is_ours(&object(json!({"labels": {"app.kubernetes.io/part-of": "tidewatch"}}))));
        assert!(is_ours(&object(managed("tidewatch"))) && is_ours(&object(managed("tidewatch-agent"))));
        assert!(!is_ours(&object(managed("helm"))) && !is_ours(&object(json!({}))));
        assert!(!is_ours(&object(json!({"labels": {"operator.kyma-project.io/managed-by": "me"}}))));
    }
}
