//! The status of a Watcher in KCP: whether it is served.

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

use super::plan::Rejected;
use crate::fleet::forward::{Health, Target};

/// The condition that the incumbent has on Watchers; dashboards know it by this name.
const CONDITION: &str = "VirtualService";
const SERVED: &str = "the built-in gateway serves this Watcher, no VirtualService is needed";

/// How a Watcher is served.
#[derive(Clone, Copy, Debug)]
pub enum Serving<'a> {
    /// By this receiver itself.
    Here,
    /// Its events go to another manager.
    Forwarded(&'a Target, Health),
    /// Not at all.
    Rejected(&'a Rejected),
}

impl Serving<'_> {
    /// State, status of the condition, message. A service that fails is not the Watcher's fault, so the condition stays.
    fn told(self) -> (&'static str, &'static str, String) {
        let (target, health) = match self {
            Self::Here => return ("Ready", "True", SERVED.to_owned()),
            Self::Rejected(rejected) => return ("Error", "False", rejected.why.to_string()),
            Self::Forwarded(target, health) => (target, health),
        };
        let (manager, service) = (target.manager(), target.service());
        let served = format!(
            "the built-in gateway forwards to the manager {manager:?} at {service}, no VirtualService is needed"
        );
        match health {
            Health::Fine => ("Ready", "True", served),
            Health::Unreachable => {
                ("Warning", "True", format!("{served}; the service cannot be reached, its events wait"))
            }
            Health::Refusing(status) => {
                ("Warning", "True", format!("{served}; the service refuses events with HTTP status {status}"))
            }
        }
    }
}

/// What failed on the way of a status into KCP.
#[derive(Debug, Error)]
pub enum ReportError {
    /// The status could not be written.
    #[error("write the status of a Watcher")]
    Status(#[source] kube::Error),
    /// The incumbent's finalizer could not be taken off.
    #[error("take the finalizer off a Watcher")]
    Finalizer(#[source] kube::Error),
}

/// Tells a Watcher whether it is served: writes its status if that differs from the one given, which may come from a cache.
///
/// A Watcher that is being deleted loses the incumbent's finalizer instead: there is nothing of ours to take down.
///
/// # Errors
/// [`ReportError`]. A Watcher that is gone meanwhile is well reported.
pub async fn report(
    client: &Client,
    namespace: &str,
    watcher: &Watcher,
    serving: &Serving<'_>,
) -> Result<(), ReportError> {
    let api: Api<Watcher> = Api::namespaced(client.clone(), namespace);
    let name = watcher.name_any();
    if watcher.meta().deletion_timestamp.is_some() {
        return release(&api, &name, watcher).await.or_else(unless_gone).map_err(ReportError::Finalizer);
    }
    let current = serde_json::to_value(&watcher.status).unwrap_or_default();
    let Some(status) = status(&current, watcher.meta().generation, serving, Timestamp::now()) else {
        return Ok(());
    };
    let body = json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": "Watcher",
        "metadata": {"name": name, "namespace": namespace}, "status": status});
    let params = PatchParams::apply(field_manager::LIFECYCLE).force();
    let written = api.patch_status(&name, &params, &Patch::Apply(&body)).await;
    written.map(drop).or_else(unless_gone).map_err(ReportError::Status)
}

async fn release(api: &Api<Watcher>, name: &str, watcher: &Watcher) -> kube::Result<()> {
    let finalizers = watcher.finalizers();
    if !finalizers.iter().any(|held| held == finalizer::WATCHER) {
        return Ok(());
    }
    let left: Vec<_> = finalizers.iter().filter(|held| *held != finalizer::WATCHER).collect();
    // With the version that was read: another's finalizer, set meanwhile, must not be lost.
    let body = json!({"metadata": {"resourceVersion": watcher.meta().resource_version, "finalizers": left}});
    let params = PatchParams { field_manager: Some(field_manager::LIFECYCLE.to_owned()), ..PatchParams::default() };
    api.patch_metadata(name, &params, &Patch::Merge(&body)).await.map(drop)
}

fn unless_gone(error: kube::Error) -> kube::Result<()> {
    match error {
        kube::Error::Api(status) if status.is_not_found() => Ok(()),
        error => Err(error),
    }
}

/// The status to write; `None` when the current one says the same. The transition time moves with the condition's status
/// alone.
fn status(current: &Value, generation: Option<i64>, serving: &Serving<'_>, now: Timestamp) -> Option<Value> {
    let (state, held, message) = serving.told();
    let conditions = current["conditions"].as_array();
    let before = conditions.into_iter().flatten().find(|condition| condition["type"] == CONDITION);
    let since =
        before.filter(|before| before["status"] == held).and_then(|before| before["lastTransitionTime"].as_str());
    let since = since.map_or_else(|| format!("{now:.0}"), str::to_owned);
    let mut condition = json!({"type": CONDITION, "status": held, "reason": "Ready", "message": message,
        "lastTransitionTime": since});
    if let Some(generation) = generation {
        condition["observedGeneration"] = generation.into();
    }
    let mut status = json!({"state": state, "conditions": [condition]});
    if let Some(generation) = generation {
        status["observedGeneration"] = generation.into();
    }
    let told = current["state"] == status["state"]
        && current["observedGeneration"] == status["observedGeneration"]
        && before == status["conditions"].get(0);
    (!told).then_some(status)
}

#[cfg(test)]
mod tests {
    use super::{super::plan::Why, *};
    use crate::{base::key::KymaKey, fleet::forward::Service};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn a_status_is_written_on_change_and_its_time_moves_with_its_status_alone() {
        let first = status(&Value::Null, Some(1), &Serving::Here, at(0)).unwrap();
        assert_eq!(first["state"], "Ready");
        assert_eq!(first["conditions"][0]["type"], "VirtualService");
        assert_eq!(first["conditions"][0]["lastTransitionTime"], "1970-01-01T00:00:00Z");
        assert_eq!(status(&first, Some(1), &Serving::Here, at(9)), None);

        let next = status(&first, Some(2), &Serving::Here, at(9)).unwrap();
        assert_eq!(next["observedGeneration"], 2);
        assert_eq!(next["conditions"][0]["lastTransitionTime"], "1970-01-01T00:00:00Z");

        let rejected = Rejected { watcher: KymaKey::new("n", "w"), why: Why::Manager("a/b".to_owned()) };
        let error = status(&next, Some(2), &Serving::Rejected(&rejected), at(9)).unwrap();
        assert_eq!((&error["state"], &error["conditions"][0]["status"]), (&"Error".into(), &"False".into()));
        assert_eq!(error["conditions"][0]["lastTransitionTime"], "1970-01-01T00:00:09Z");
        assert!(error["conditions"][0]["message"].as_str().unwrap().contains("\"a/b\""));
        assert_eq!(status(&error, Some(2), &Serving::Rejected(&rejected), at(20)), None);

        let target = Target::new("other", Service::new("events", "team-a", 8082).unwrap()).unwrap();
        let mut before = Value::Null;
        for (health, state, words) in [
            (Health::Fine, "Ready", "team-a/events:8082"),
            (Health::Unreachable, "Warning", "cannot be reached"),
            (Health::Refusing(404), "Warning", "404"),
        ] {
            let told = status(&before, Some(2), &Serving::Forwarded(&target, health), at(30)).unwrap();
            assert_eq!((&told["state"], &told["conditions"][0]["status"]), (&state.into(), &"True".into()));
            assert!(told["conditions"][0]["message"].as_str().unwrap().contains(words));
            before = told;
        }
    }
}
