//! Writes one condition of a Kyma in KCP, each under a field manager of its own, so that it touches nothing else of the status.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use thiserror::Error;
use tidewatch_shared::{
    api::{Condition, Kyma},
    names::{GROUP, VERSION},
};

use super::verdict::{CA_ROTATION, EVENT_PATH, Said, shown};
use crate::kube::object;

/// A write takes no longer.
const DEADLINE: Duration = Duration::from_secs(10);

/// Why a condition was not written.
#[derive(Debug, Error)]
pub(super) enum Write {
    /// KCP refused it, or could not be asked.
    #[error("the condition could not be applied")]
    Apply(#[source] Box<kube::Error>),
    /// The Kyma is not as it was when this was decided: perhaps it is another one's now.
    #[error("the Kyma has moved on")]
    Moved,
    /// No answer in time.
    #[error("the control plane did not answer in {DEADLINE:?}")]
    Slow,
}

/// Writes it, unless somebody wrote since. The Kyma's uid goes along: one that was made anew under the same name is not meant.
pub(super) async fn condition(client: &Client, kyma: &Kyma, said: &Said) -> Result<(), Write> {
    let api: Api<Kyma> = Api::namespaced(client.clone(), &kyma.namespace().unwrap_or_default());
    let manager = match said.kind() {
        EVENT_PATH => "tidewatch-event-path",
        CA_ROTATION => "tidewatch-ca-rotation",
        _ => "tidewatch-pause",
    };
    let params = PatchParams::apply(manager).force();
    let body = body(kyma, said, Timestamp::now());
    let name = kyma.name_any();
    let patch = Patch::Apply(&body);
    let writing = api.patch_status(&name, &params, &patch);
    match tokio::time::timeout(DEADLINE, writing).await {
        Ok(Err(error)) if object::is_conflict(&error) => Err(Write::Moved),
        Ok(written) => written.map(drop).map_err(|error| Write::Apply(Box::new(error))),
        Err(_) => Err(Write::Slow),
    }
}

/// Server-side apply removes what its manager does not repeat: a condition that shall not be there is left out.
fn body(kyma: &Kyma, said: &Said, now: Timestamp) -> Value {
    let conditions = match said {
        Said::Gone(_) => Vec::new(),
        Said::Is { kind, status, reason, message, .. } => {
            let same = shown(kyma, kind).filter(|shown| shown.status == *status && shown.reason == *reason);
            let now = Time(Timestamp::from_second(now.as_second()).unwrap_or_default());
            let since = same.map_or(now, |shown| shown.last_transition_time.clone());
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
