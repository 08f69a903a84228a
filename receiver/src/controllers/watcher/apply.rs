//! Writes the plan to a runtime: the agent's ConfigMap, and the Lease that the agent renews.

use std::collections::BTreeMap;

use k8s_openapi::api::{coordination::v1::Lease, core::v1::ConfigMap};
use kube::{
    Api, Client,
    api::{ObjectMeta, Patch, PatchParams, PostParams},
};
use serde_json::json;
use thiserror::Error;
use tidewatch_shared::{
    names::{AGENT_OBJECT, PLAN_KEY, SKR_NAMESPACE, field_manager, label},
    plan::Plan,
};

/// Failure to write a plan to a runtime.
#[derive(Debug, Error)]
pub enum ApplyError {
    /// The plan does not serialize.
    #[error("serialize the plan")]
    Serialize(#[source] serde_json::Error),
    /// The ConfigMap could not be read.
    #[error("read the agent's ConfigMap")]
    ReadPlan(#[source] kube::Error),
    /// The ConfigMap could not be written.
    #[error("write the agent's ConfigMap")]
    WritePlan(#[source] kube::Error),
    /// The Lease could not be read.
    #[error("read the agent's Lease")]
    ReadLease(#[source] kube::Error),
    /// The Lease could not be created.
    #[error("create the agent's Lease")]
    CreateLease(#[source] kube::Error),
}

impl ApplyError {
    /// Returns the failed request, if a request failed.
    #[must_use]
    pub fn call(&self) -> Option<&kube::Error> {
        match self {
            Self::Serialize(_) => None,
            Self::ReadPlan(error) | Self::WritePlan(error) | Self::ReadLease(error) | Self::CreateLease(error) => {
                Some(error)
            }
        }
    }
}

/// Writes that were necessary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ApplyOutcome {
    /// The ConfigMap was written.
    pub plan_written: bool,
    /// The Lease was created.
    pub lease_created: bool,
}

/// Reconciles the ConfigMap to exactly this plan, and creates a missing Lease. Reads both and writes only differences:
/// with server-side apply, or with a PUT if other managers added keys. The agent owns an existing Lease.
///
/// # Errors
/// [`ApplyError`]; a missing Lease is created even if the plan fails.
pub async fn apply(client: &Client, plan: &Plan) -> Result<ApplyOutcome, ApplyError> {
    let plan_written = apply_plan(client, plan).await;
    let lease_created = ensure_lease(client).await;
    Ok(ApplyOutcome { plan_written: plan_written?, lease_created: lease_created? })
}

async fn apply_plan(client: &Client, plan: &Plan) -> Result<bool, ApplyError> {
    let text = serde_json::to_string(plan).map_err(ApplyError::Serialize)?;
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), SKR_NAMESPACE);
    let found = api.get_opt(AGENT_OBJECT).await.map_err(ApplyError::ReadPlan)?;
    if found.is_some_and(|found| holds(&found, &text)) {
        return Ok(false);
    }
    let body = json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {PLAN_KEY: text},
        "metadata": {"name": AGENT_OBJECT, "namespace": SKR_NAMESPACE, "labels": labels()}});
    let params = PatchParams::apply(field_manager::TIDEWATCH).force();
    let mut applied = api.patch(AGENT_OBJECT, &params, &Patch::Apply(&body)).await.map_err(ApplyError::WritePlan)?;
    if !holds(&applied, &text) {
        applied.data = Some(BTreeMap::from([(PLAN_KEY.to_owned(), text)]));
        applied.binary_data = None;
        applied.metadata.labels.get_or_insert_default().extend(labels());
        api.replace(AGENT_OBJECT, &post_params(), &applied).await.map_err(ApplyError::WritePlan)?;
    }
    Ok(true)
}

async fn ensure_lease(client: &Client) -> Result<bool, ApplyError> {
    let api: Api<Lease> = Api::namespaced(client.clone(), SKR_NAMESPACE);
    if api.get_metadata_opt(AGENT_OBJECT).await.map_err(ApplyError::ReadLease)?.is_some() {
        return Ok(false);
    }
    let metadata = ObjectMeta { name: Some(AGENT_OBJECT.to_owned()), labels: Some(labels()), ..ObjectMeta::default() };
    match api.create(&post_params(), &Lease { metadata, ..Lease::default() }).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(false),
        Err(error) => Err(ApplyError::CreateLease(error)),
    }
}

/// Returns whether the ConfigMap contains exactly this plan. Further labels and annotations are accepted.
fn holds(found: &ConfigMap, text: &str) -> bool {
    let data = found.data.iter().flatten();
    let only_plan = data.clone().count() == 1 && data.clone().all(|(key, value)| key == PLAN_KEY && value == text);
    let marked = found.metadata.labels.iter().flatten().any(|(key, value)| labels().get(key) == Some(value));
    only_plan && found.binary_data.as_ref().is_none_or(BTreeMap::is_empty) && marked
}

fn labels() -> BTreeMap<String, String> {
    BTreeMap::from([(label::MANAGED_BY.to_owned(), label::MANAGED_BY_SKR.to_owned())])
}

fn post_params() -> PostParams {
    PostParams { field_manager: Some(field_manager::TIDEWATCH.to_owned()), ..PostParams::default() }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use http::{Method, StatusCode};
    use serde_json::Value;

    use super::*;
    use crate::{controllers::watcher, testing};

    /// A server that stores written objects by path, merges the data of an apply, and records the requests.
    #[derive(Clone, Default)]
    struct Fake(Arc<Mutex<State>>);

    #[derive(Default)]
    struct State {
        objects: BTreeMap<String, Value>,
        calls: Vec<String>,
    }

    impl Fake {
        fn client(&self) -> Client {
            let fake = self.clone();
            testing::client("default", move |parts, body| {
                let body = serde_json::from_slice(body).unwrap_or(Value::Null);
                let (status, answer) = fake.answer(&parts.method, parts.uri.path(), body);
                Some((status, answer.to_string()))
            })
        }

        fn answer(&self, method: &Method, path: &str, body: Value) -> (StatusCode, Value) {
            let State { objects, calls } = &mut *self.0.lock().unwrap();
            let path = if method == Method::POST { format!("{path}/{AGENT_OBJECT}") } else { path.to_owned() };
            let resource = path.rsplit('/').nth(1).unwrap();
            calls.push(format!("{method} {resource}"));
            if method == Method::PATCH {
                let object = objects.entry(path.clone()).or_insert_with(|| json!({"metadata": {}}));
                object["metadata"]["labels"] = body["metadata"]["labels"].clone();
                object["data"][PLAN_KEY] = body["data"][PLAN_KEY].clone();
            } else if method != Method::GET {
                objects.insert(path.clone(), body);
            }
            objects.get(&path).map_or_else(
                || (StatusCode::NOT_FOUND, json!({"kind": "Status", "reason": "NotFound", "code": 404})),
                |object| (StatusCode::OK, object.clone()),
            )
        }

        fn calls(&self) -> Vec<String> {
            std::mem::take(&mut self.0.lock().unwrap().calls)
        }

        fn map(&self, change: impl FnOnce(&mut Value)) {
            let objects = &mut self.0.lock().unwrap().objects;
            change(objects.get_mut("/api/v1/namespaces/kyma-system/configmaps/tidewatch-agent").unwrap());
        }
    }

    #[tokio::test]
    async fn plan_is_written_once_and_repaired() {
        let fake = Fake::default();
        let (plan, _) = watcher::plan::<Arc<tidewatch_shared::api::Watcher>>(&[]);
        let applied = apply(&fake.client(), &plan).await.unwrap();
        assert_eq!(applied, ApplyOutcome { plan_written: true, lease_created: true });
        assert_eq!(fake.calls(), ["GET configmaps", "PATCH configmaps", "GET leases", "POST leases"]);

        let idle = ["GET configmaps", "GET leases"];
        assert_eq!(apply(&fake.client(), &plan).await.unwrap(), ApplyOutcome::default());
        assert_eq!(fake.calls(), idle);
        fake.map(|map| assert_eq!(Plan::parse(map["data"][PLAN_KEY].as_str().unwrap()).unwrap(), plan));

        fake.map(|map| map["data"][PLAN_KEY] = json!("{}"));
        apply(&fake.client(), &plan).await.unwrap();
        assert_eq!(fake.calls(), ["GET configmaps", "PATCH configmaps", "GET leases"]);

        fake.map(|map| map["data"]["other"] = json!("1"));
        apply(&fake.client(), &plan).await.unwrap();
        assert_eq!(fake.calls(), ["GET configmaps", "PATCH configmaps", "PUT configmaps", "GET leases"]);
        apply(&fake.client(), &plan).await.unwrap();
        assert_eq!(fake.calls(), idle);
    }
}
