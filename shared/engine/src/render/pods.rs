//! Pod templates of a module's workloads: localised images, and the image pull secret.

use serde_json::{Map, Value, json};
use tidewatch_api::Manager;

use super::RenderError;
use crate::{image::Localizer, inventory::ObjectKey};

/// Variable of the manager's containers with the name of the image pull secret.
pub(crate) const PULL_SECRET_VARIABLE: &str = "SKR_IMG_PULL_SECRET";

/// JSON pointer to the pod spec of a workload; `None` for any other kind.
fn pod_pointer(key: &ObjectKey) -> Option<&'static str> {
    match (key.group.as_str(), key.kind.as_str()) {
        ("apps", "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet")
        | ("batch", "Job")
        | ("", "ReplicationController") => Some("/spec/template/spec"),
        ("batch", "CronJob") => Some("/spec/jobTemplate/spec/template/spec"),
        ("", "Pod") => Some("/spec"),
        _ => None,
    }
}

/// The pod spec of a workload.
pub(super) fn pod_spec<'a>(body: &'a mut Value, key: &ObjectKey) -> Option<&'a mut Map<String, Value>> {
    body.pointer_mut(pod_pointer(key)?)?.as_object_mut()
}

/// True for a workload with a pod spec.
pub(super) fn has_pods(body: &Value, key: &ObjectKey) -> bool {
    pod_pointer(key).and_then(|pointer| body.pointer(pointer)).is_some_and(Value::is_object)
}

/// Replaces the images of containers and of volumes that are localised.
pub(super) fn localize(pod: &mut Map<String, Value>, localizer: &Localizer<'_>) {
    containers(pod).for_each(|container| localizer.localize(container));
    let volumes = pod.get_mut("volumes").and_then(Value::as_array_mut);
    volumes.into_iter().flatten().for_each(|volume| localizer.localize_volume(volume));
}

fn containers(pod: &mut Map<String, Value>) -> impl Iterator<Item = &mut Value> {
    let lists = pod.iter_mut().filter(|(name, _)| matches!(name.as_str(), "containers" | "initContainers"));
    lists.filter_map(|(_, list)| list.as_array_mut()).flatten()
}

/// Adds the image pull secret, and its name in the environment of the manager's containers; of all workloads if the
/// module names no manager.
pub(super) fn add_pull_secret(
    pod: &mut Map<String, Value>,
    key: &ObjectKey,
    secret: &str,
    manager: Option<&Manager>,
) -> Result<(), RenderError> {
    let secrets = pod.entry("imagePullSecrets").or_insert(Value::Null);
    if !secrets.is_array() {
        *secrets = json!([]);
    }
    if let Some(secrets) = secrets.as_array_mut().filter(|secrets| secrets.iter().all(|it| it["name"] != secret)) {
        secrets.push(json!({"name": secret}));
    }
    // Lifecycle-manager names it to these kinds alone.
    let is_manager_kind = key.group == "apps" && matches!(key.kind.as_str(), "Deployment" | "StatefulSet");
    let is_manager = |manager: &Manager| manager.kind == key.kind && manager.name == key.name;
    if !manager.map_or(is_manager_kind, is_manager) {
        return Ok(());
    }
    for container in containers(pod) {
        let name = container["name"].as_str().unwrap_or_default().to_owned();
        let Some(container) = container.as_object_mut() else { continue };
        let variables = container.entry("env").or_insert(Value::Null);
        if variables.is_null() {
            *variables = json!([]);
        }
        let Some(variables) = variables.as_array_mut() else { continue };
        if variables.iter().any(|variable| variable["name"] == PULL_SECRET_VARIABLE) {
            return Err(RenderError::PullSecretVariable(key.clone(), name));
        }
        variables.push(json!({"name": PULL_SECRET_VARIABLE, "value": secret}));
    }
    Ok(())
}

/// True if the pods of an object pull images with this secret.
pub(crate) fn names_pull_secret(body: &Value, key: &ObjectKey, secret: &str) -> bool {
    let pod = pod_pointer(key).and_then(|pointer| body.pointer(pointer));
    let secrets = pod.and_then(|pod| pod["imagePullSecrets"].as_array());
    secrets.into_iter().flatten().any(|it| it["name"] == secret)
}

/// An object without the image pull secret that [`add_pull_secret`] has added.
pub(crate) fn without_pull_secret(body: &Value, key: &ObjectKey, secret: &str) -> Value {
    let mut body = body.clone();
    let Some(pod) = pod_spec(&mut body, key) else { return body };
    if let Some(secrets) = pod.get_mut("imagePullSecrets").and_then(Value::as_array_mut) {
        secrets.retain(|it| it["name"] != secret);
        if secrets.is_empty() {
            pod.remove("imagePullSecrets");
        }
    }
    for container in containers(pod) {
        if let Some(variables) = container.get_mut("env").and_then(Value::as_array_mut) {
            variables.retain(|variable| variable["name"] != PULL_SECRET_VARIABLE);
        }
    }
    body
}
