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

/// Reconciles the ConfigMap to exactly this plan, and creates a missing Lease. Reads both and writes only differences:
/// with server-side apply, or with a PUT if other managers added keys. The agent owns an existing Lease.
///
/// # Errors
/// [`ApplyError`]; a missing Lease is created even if the plan fails.
pub async fn apply(client: &Client, plan: &Plan) -> Result<(), ApplyError> {
    let applied = apply_plan(client, plan).await;
    applied.and(ensure_lease(client).await)
}

async fn apply_plan(client: &Client, plan: &Plan) -> Result<(), ApplyError> {
    let text = serde_json::to_string(plan).map_err(ApplyError::Serialize)?;
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), SKR_NAMESPACE);
    let found = api.get_opt(AGENT_OBJECT).await.map_err(ApplyError::ReadPlan)?;
    if found.is_some_and(|found| holds(&found, &text)) {
        return Ok(());
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
    Ok(())
}

async fn ensure_lease(client: &Client) -> Result<(), ApplyError> {
    let api: Api<Lease> = Api::namespaced(client.clone(), SKR_NAMESPACE);
    if api.get_metadata_opt(AGENT_OBJECT).await.map_err(ApplyError::ReadLease)?.is_some() {
        return Ok(());
    }
    let metadata = ObjectMeta { name: Some(AGENT_OBJECT.to_owned()), labels: Some(labels()), ..ObjectMeta::default() };
    match api.create(&post_params(), &Lease { metadata, ..Lease::default() }).await {
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        created => created.map(drop).map_err(ApplyError::CreateLease),
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
    use std::sync::Arc;

    use super::*;
    use crate::{controllers::watcher, testing::FakeApiServer};

    const MAP: &str = "configmaps/tidewatch-agent";

    #[tokio::test]
    async fn plan_is_written_once_and_repaired() {
        let runtime = FakeApiServer::default();
        let (plan, ..) = watcher::plan::<Arc<tidewatch_shared::api::Watcher>>(Vec::new(), &[]);
        apply(&runtime.client(), &plan).await.unwrap();
        assert_eq!(
            runtime.calls(),
            [
                "GET configmaps/tidewatch-agent",
                "PATCH configmaps/tidewatch-agent",
                "GET leases/tidewatch-agent",
                "POST leases"
            ]
        );

        let idle = ["GET configmaps/tidewatch-agent", "GET leases/tidewatch-agent"];
        apply(&runtime.client(), &plan).await.unwrap();
        assert_eq!(runtime.calls(), idle);
        runtime.edit(MAP, |map| assert_eq!(Plan::parse(map["data"][PLAN_KEY].as_str().unwrap()).unwrap(), plan));

        runtime.edit(MAP, |map| map["data"][PLAN_KEY] = json!("{}"));
        apply(&runtime.client(), &plan).await.unwrap();
        assert_eq!(
            runtime.calls(),
            ["GET configmaps/tidewatch-agent", "PATCH configmaps/tidewatch-agent", "GET leases/tidewatch-agent"]
        );

        runtime.edit(MAP, |map| map["data"]["other"] = json!("1"));
        apply(&runtime.client(), &plan).await.unwrap();
        assert_eq!(
            runtime.calls(),
            [
                "GET configmaps/tidewatch-agent",
                "PATCH configmaps/tidewatch-agent",
                "PUT configmaps/tidewatch-agent",
                "GET leases/tidewatch-agent"
            ]
        );
        apply(&runtime.client(), &plan).await.unwrap();
        assert_eq!(runtime.calls(), idle);
    }
}
