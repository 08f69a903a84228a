//! Status of a Watcher in KCP.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::json;
use thiserror::Error;
use tidewatch_api::{
    Condition, ConditionStatus, State, Watcher, WatcherStatus,
    names::{GROUP, VERSION, field_manager, finalizer},
};
use tidewatch_fleet::forward::{Health, Target};

use super::plan::WatcherError;

/// Condition of lifecycle-manager on Watchers, on which dashboards rely.
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
    Rejected(&'a WatcherError),
}

impl ServingMode<'_> {
    /// Returns state, condition status and message. A failing service is not a fault of the Watcher, so the condition
    /// stays True.
    fn describe(self) -> (State, ConditionStatus, String) {
        let (target, health) = match self {
            Self::Local => return (State::Ready, ConditionStatus::True, SERVED.to_owned()),
            Self::Rejected(error) => return (State::Error, ConditionStatus::False, error.to_string()),
            Self::Forwarded(target, health) => (target, health),
        };
        let manager = target.manager();
        let service = target.service();
        let (state, fault) = match health {
            Health::Healthy => (State::Ready, String::new()),
            Health::Unreachable => (State::Warning, "; the service cannot be reached, its events wait".to_owned()),
            Health::Refusing(status) => {
                (State::Warning, format!("; the service refuses events with HTTP status {status}"))
            }
        };
        let message = format!(
            "the built-in gateway forwards to the manager {manager:?} at {service}, no VirtualService is needed{fault}"
        );
        (state, ConditionStatus::True, message)
    }
}

/// Failure to write to a Watcher.
#[derive(Debug, Error)]
pub enum WriteStatusError {
    /// The status could not be written.
    #[error("write the status of a Watcher")]
    Status(#[source] kube::Error),
    /// lifecycle-manager's finalizer could not be removed.
    #[error("take the finalizer off a Watcher")]
    Finalizer(#[source] kube::Error),
}

/// Writes the status of a Watcher if it differs from the given one, which may come from a cache. If the Watcher is
/// being deleted, removes lifecycle-manager's finalizer instead: there is nothing else to clean up.
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
    let status = status(watcher.status.as_ref(), watcher.meta().generation, serving, Timestamp::now());
    let Some(status) = status else { return Ok(()) };
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
fn status(
    current: Option<&WatcherStatus>,
    generation: Option<i64>,
    serving: &ServingMode<'_>,
    now: Timestamp,
) -> Option<WatcherStatus> {
    let (state, status, message) = serving.describe();
    let conditions = current.map(WatcherStatus::conditions).unwrap_or_default();
    let before = conditions.iter().find(|condition| condition.type_ == CONDITION);
    let same = before.filter(|before| before.status == status);
    let since = same.map_or(Time(now), |same| same.last_transition_time.clone());
    let mut condition = Condition::new(CONDITION, status, message, since);
    condition.observed_generation = generation;
    let current_is_equal = before == Some(&condition)
        && current.is_some_and(|current| current.state == state && current.observed_generation == generation);
    let conditions = Some(vec![condition]);
    (!current_is_equal).then(|| WatcherStatus {
        state,
        conditions,
        observed_generation: generation,
        ..WatcherStatus::default()
    })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use tidewatch_fleet::forward::Service;

    use super::*;

    /// As [`super::status`], in the form of the custom resource.
    fn status(current: &Value, generation: Option<i64>, serving: &ServingMode<'_>, now: Timestamp) -> Option<Value> {
        let current = serde_json::from_value::<Option<WatcherStatus>>(current.clone()).unwrap();
        super::status(current.as_ref(), generation, serving, now).map(|status| json!(status))
    }

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

        let rejected = WatcherError::Manager("a/b".to_owned());
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
