//! Writes one condition of a Kyma in KCP. Each condition has its own field manager, so that a write touches no other
//! part of the status.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use thiserror::Error;
use tidewatch_api::{
    Condition, Kyma,
    names::{GROUP, VERSION},
};
use tidewatch_cluster::object;

use super::condition::{CA_ROTATION, Change, EVENT_PATH, MODULE_ROLLOUT, shown};

/// Timeout of a write.
const DEADLINE: Duration = Duration::from_secs(10);

/// Failure to write a condition.
#[derive(Debug, Error)]
pub(super) enum WriteError {
    /// KCP refused the write or did not respond.
    #[error("apply the condition")]
    Apply(#[source] kube::Error),
    /// The Kyma has changed since the decision, and may belong to another process now.
    #[error("the Kyma has changed since it was read")]
    Conflict,
    /// No response in time.
    #[error("the control plane did not answer in {DEADLINE:?}")]
    Timeout,
}

/// Writes the condition unless the Kyma has changed. The uid excludes a new Kyma of the same name.
pub(super) async fn condition(client: &Client, kyma: &Kyma, change: &Change) -> Result<(), WriteError> {
    let api: Api<Kyma> = Api::namespaced(client.clone(), &kyma.namespace().unwrap_or_default());
    let manager = match change.kind() {
        EVENT_PATH => "tidewatch-event-path",
        CA_ROTATION => "tidewatch-ca-rotation",
        MODULE_ROLLOUT => "tidewatch-module-rollout",
        _ => "tidewatch-pause",
    };
    let params = PatchParams::apply(manager).force();
    let body = body(kyma, change, Timestamp::now());
    let name = kyma.name_any();
    let patch = Patch::Apply(&body);
    let writing = api.patch_status(&name, &params, &patch);
    match tokio::time::timeout(DEADLINE, writing).await {
        Ok(Err(error)) if object::is_conflict(&error) => Err(WriteError::Conflict),
        Ok(written) => written.map(drop).map_err(WriteError::Apply),
        Err(_) => Err(WriteError::Timeout),
    }
}

/// Server-side apply removes fields that the manager omits, so a removed condition is left out.
fn body(kyma: &Kyma, change: &Change, now: Timestamp) -> Value {
    let conditions = match change {
        Change::Remove(_) => Vec::new(),
        Change::Set { kind, status, reason, message, .. } => {
            let same = shown(kyma, kind).filter(|shown| shown.status == *status && shown.reason == *reason);
            let since = same.map_or(Time(now), |shown| shown.last_transition_time.clone());
            let condition = Condition::new(*kind, *status, message.clone(), since);
            vec![Condition { reason: (*reason).to_owned(), ..condition }]
        }
    };
    json!({
        "apiVersion": format!("{GROUP}/{VERSION}"), "kind": "Kyma",
        "metadata": {
            "name": kyma.name_any(), "namespace": kyma.namespace(), "uid": kyma.uid(), "resourceVersion": kyma.resource_version(),
        },
        "status": {"conditions": conditions},
    })
}
