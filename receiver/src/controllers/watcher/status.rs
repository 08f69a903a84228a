//! Status of a Watcher in KCP.

use jiff::Timestamp;
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use thiserror::Error;
use tidewatch_shared::{
    api::Watcher,
    names::{GROUP, VERSION, field_manager, finalizer},
};

use super::plan::RejectedWatcher;
use crate::fleet::forward::{Health, Target};

/// Condition of the incumbent on Watchers, on which dashboards rely.
const CONDITION: &str = "VirtualService";
const SERVED: &str = "the built-in gateway serves this Watcher, no VirtualService is needed";

/// Serving of a Watcher.
#[derive(Clone, Copy, Debug)]
pub enum ServingMode<'a> {
    /// This receiver processes its events.
    Local,
    /// Its events are forwarded to another manager.
    Forwarded(&'a Target, Health),
    /// The Watcher is not served.
    Rejected(&'a RejectedWatcher),
}

impl ServingMode<'_> {
    /// Returns state, condition status and message. A failing service is not a fault of the Watcher, so the condition
    /// stays True.
    fn describe(self) -> (&'static str, &'static str, String) {
        let (target, health) = match self {
            Self::Local => return ("Ready", "True", SERVED.to_owned()),
            Self::Rejected(rejected) => return ("Error", "False", rejected.error.to_string()),
            Self::Forwarded(target, health) => (target, health),
        };
        let (manager, service) = (target.manager(), target.service());
        let served = format!(
            "the built-in gateway forwards to the manager {manager:?} at {service}, no VirtualService is needed"
        );
        match health {
            Health::Healthy => ("Ready", "True", served),
            Health::Unreachable => {
                ("Warning", "True", format!("{served}; the service cannot be reached, its events wait"))
            }
            Health::Refusing(status) => {
                ("Warning", "True", format!("{served}; the service refuses events with HTTP status {status}"))
            }
        }
    }
}

/// Failure to write to a Watcher.
#[derive(Debug, Error)]
pub enum WriteStatusError {
    /// The status could not be written.
    #[error("write the status of a Watcher")]
    Status(#[source] kube::Error),
    /// The incumbent's finalizer could not be removed.
    #[error("take the finalizer off a Watcher")]
    Finalizer(#[source] kube::Error),
}

/// Writes the status of a Watcher if it differs from the given one, which may come from a cache. If the Watcher is
/// being deleted, removes the incumbent's finalizer instead: there is nothing else to clean up.
///
/// # Errors
/// [`WriteStatusError`]; a Watcher that no longer exists is no error.
pub async fn write_status(
    client: &Client,
    namespace: &str,
    watcher: &Watcher,
    serving: &ServingMode<'_>,
) -> Result<(), WriteStatusError> {
    let api: Api<Watcher> = Api::namespaced(client.clone(), namespace);
    let name = watcher.name_any();
    if watcher.meta().deletion_timestamp.is_some() {
        let removed = remove_finalizer(&api, &name, watcher).await;
        return removed.or_else(ignore_not_found).map_err(WriteStatusError::Finalizer);
    }
    let current = serde_json::to_value(&watcher.status).unwrap_or_default();
    let Some(status) = status(&current, watcher.meta().generation, serving, Timestamp::now()) else {
        return Ok(());
    };
    let body = json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": "Watcher",
        "metadata": {"name": name, "namespace": namespace}, "status": status});
    let params = PatchParams::apply(field_manager::LIFECYCLE).force();
    let written = api.patch_status(&name, &params, &Patch::Apply(&body)).await;
    written.map(drop).or_else(ignore_not_found).map_err(WriteStatusError::Status)
}

async fn remove_finalizer(api: &Api<Watcher>, name: &str, watcher: &Watcher) -> kube::Result<()> {
    let finalizers = watcher.finalizers();
    if !finalizers.iter().any(|name| name == finalizer::WATCHER) {
        return Ok(());
    }
    let left: Vec<_> = finalizers.iter().filter(|name| *name != finalizer::WATCHER).collect();
    // The resourceVersion protects finalizers that were added since the read.
    let body = json!({"metadata": {"resourceVersion": watcher.meta().resource_version, "finalizers": left}});
    let params = PatchParams { field_manager: Some(field_manager::LIFECYCLE.to_owned()), ..PatchParams::default() };
    api.patch_metadata(name, &params, &Patch::Merge(&body)).await.map(drop)
}

fn ignore_not_found(error: kube::Error) -> kube::Result<()> {
    match error {
        kube::Error::Api(status) if status.is_not_found() => Ok(()),
        error => Err(error),
    }
}

/// Returns the status to write, `None` if the current one is equal. The transition time changes only with the status of
/// the condition.
fn status(current: &Value, generation: Option<i64>, serving: &ServingMode<'_>, now: Timestamp) -> Option<Value> {
    let (state, status, message) = serving.describe();
    let conditions = current["conditions"].as_array();
    let before = conditions.into_iter().flatten().find(|condition| condition["type"] == CONDITION);
    let since =
        before.filter(|before| before["status"] == status).and_then(|before| before["lastTransitionTime"].as_str());
    let since = since.map_or_else(|| format!("{now:.0}"), str::to_owned);
    let mut condition = json!({"type": CONDITION, "status": status, "reason": "Ready", "message": message,
        "lastTransitionTime": since});
    if let Some(generation) = generation {
        condition["observedGeneration"] = generation.into();
    }
    let mut status = json!({"state": state, "conditions": [condition]});
    if let Some(generation) = generation {
        status["observedGeneration"] = generation.into();
    }
    let current_is_equal = current["state"] == status["state"]
        && current["observedGeneration"] == status["observedGeneration"]
        && before == status["conditions"].get(0);
    (!current_is_equal).then_some(status)
}

#[cfg(test)]
mod tests {
    use super::{super::plan::WatcherError, *};
    use crate::{base::key::KymaKey, fleet::forward::Service};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn status_is_written_on_change_and_transition_time_follows_the_condition_status() {
        let first = status(&Value::Null, Some(1), &ServingMode::Local, at(0)).unwrap();
        assert_eq!(first["state"], "Ready");
        assert_eq!(first["conditions"][0]["type"], "VirtualService");
        assert_eq!(first["conditions"][0]["lastTransitionTime"], "1970-01-01T00:00:00Z");
        assert_eq!(status(&first, Some(1), &ServingMode::Local, at(9)), None);

        let next = status(&first, Some(2), &ServingMode::Local, at(9)).unwrap();
        assert_eq!(next["observedGeneration"], 2);
        assert_eq!(next["conditions"][0]["lastTransitionTime"], "1970-01-01T00:00:00Z");

        let rejected =
            RejectedWatcher { watcher: KymaKey::new("n", "w"), error: WatcherError::Manager("a/b".to_owned()) };
        let error = status(&next, Some(2), &ServingMode::Rejected(&rejected), at(9)).unwrap();
        assert_eq!((&error["state"], &error["conditions"][0]["status"]), (&"Error".into(), &"False".into()));
        assert_eq!(error["conditions"][0]["lastTransitionTime"], "1970-01-01T00:00:09Z");
        assert!(error["conditions"][0]["message"].as_str().unwrap().contains("\"a/b\""));
        assert_eq!(status(&error, Some(2), &ServingMode::Rejected(&rejected), at(20)), None);

        let target = Target::new("other", Service::new("events", "team-a", 8082).unwrap()).unwrap();
        let mut before = Value::Null;
        for (health, state, words) in [
            (Health::Healthy, "Ready", "team-a/events:8082"),
            (Health::Unreachable, "Warning", "cannot be reached"),
            (Health::Refusing(404), "Warning", "404"),
        ] {
            let current_is_equal = status(&before, Some(2), &ServingMode::Forwarded(&target, health), at(30)).unwrap();
            assert_eq!(
                (&current_is_equal["state"], &current_is_equal["conditions"][0]["status"]),
                (&state.into(), &"True".into())
            );
            assert!(current_is_equal["conditions"][0]["message"].as_str().unwrap().contains(words));
            before = current_is_equal;
        }
    }
}
