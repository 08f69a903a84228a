//! Writes the plan to a runtime: the agent's ConfigMap, and the Lease that the agent renews.

use std::collections::BTreeMap;

use futures::future::join;
use k8s_openapi::api::{coordination::v1::Lease, core::v1::ConfigMap};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, ObjectMeta, PostParams},
};
use serde_json::json;
use thiserror::Error;
use tidewatch_api::{
    names::{AGENT_OBJECT, PLAN_KEY, SKR_NAMESPACE, field_manager, label},
    plan::Plan,
};
use tidewatch_cluster::object::{self, Ownership, Repair, Shape, Target, WriteBudget};

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
    /// The ConfigMap was repaired too often within a short time; its repair waits.
    #[error("the agent's ConfigMap is changed again and again")]
    Contested,
    /// The Lease could not be read.
    #[error("read the agent's Lease")]
    ReadLease(#[source] kube::Error),
    /// The Lease could not be created.
    #[error("create the agent's Lease")]
    CreateLease(#[source] kube::Error),
}

impl ApplyError {
    /// Returns the failed request, if a request failed.
    pub fn call(&self) -> Option<&kube::Error> {
        match self {
            Self::Serialize(_) | Self::Contested => None,
            Self::ReadPlan(error) | Self::WritePlan(error) | Self::ReadLease(error) | Self::CreateLease(error) => {
                Some(error)
            }
        }
    }
}

/// All of the ConfigMap is ours.
const SHAPE: Shape = Shape { immutable: &["/immutable"], ..Shape::new(Ownership::Whole) };

/// Reconciles the ConfigMap to exactly this plan, and creates a missing Lease, at once. Reads both and writes only differences:
/// with server-side apply, or with a PUT if other managers added keys. The agent owns an existing Lease.
///
/// # Errors
/// [`ApplyError`]; a missing Lease is created even if the plan fails.
pub async fn apply(client: &Client, plan: &Plan, budget: &WriteBudget<'_>) -> Result<(), ApplyError> {
    let applied = async {
        let found = object::get(&plans(client), AGENT_OBJECT).await.map_err(ApplyError::ReadPlan)?;
        apply_plan(client, plan, found, budget).await
    };
    let (applied, created) = join(applied, ensure_lease(client)).await;
    applied.and(created)
}

/// Replaces the plan in a ConfigMap that is as this process wrote it, without a read.
///
/// # Errors
/// [`ApplyError`].
pub async fn replace(client: &Client, plan: &Plan, budget: &WriteBudget<'_>) -> Result<(), ApplyError> {
    apply_plan(client, plan, None, budget).await
}

fn plans(client: &Client) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), SKR_NAMESPACE, &ApiResource::erase::<ConfigMap>(&()))
}

async fn apply_plan(
    client: &Client,
    plan: &Plan,
    found: Option<DynamicObject>,
    budget: &WriteBudget<'_>,
) -> Result<(), ApplyError> {
    let text = serde_json::to_string(plan).map_err(ApplyError::Serialize)?;
    let desired = json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {PLAN_KEY: text},
        "metadata": {"name": AGENT_OBJECT, "namespace": SKR_NAMESPACE, "labels": labels()}});
    let manager = field_manager::TIDEWATCH;
    let target = Target { name: AGENT_OBJECT, manager, shape: &SHAPE, desired: &desired, budget: Some(budget) };
    // Additions are removed after an apply; an immutable ConfigMap is created anew.
    let repair = found.as_ref().map_or(Repair::Apply, |found| target.compare(found, None));
    if repair == Repair::None {
        return Ok(());
    }
    let found = found.filter(|_| repair == Repair::Recreate);
    let converged = target.converge(&plans(client), found, &mut None).await;
    converged.map(drop).map_err(|error| error.request().map_or(ApplyError::Contested, ApplyError::WritePlan))
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

fn labels() -> BTreeMap<String, String> {
    BTreeMap::from([(label::MANAGED_BY.to_owned(), label::MANAGED_BY_SKR.to_owned())])
}

fn post_params() -> PostParams {
    PostParams { field_manager: Some(field_manager::TIDEWATCH.to_owned()), ..PostParams::default() }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use tidewatch_api::key::KymaKey;
    use tidewatch_cluster::{WriteBudgets, testing::FakeApiServer};
    use tokio::time::Instant;

    use super::*;
    use crate::watcher;

    const MAP: &str = "configmaps/tidewatch-agent";

    /// Requests in alphabetical order: those for ConfigMap and Lease are concurrent.
    fn calls(runtime: &FakeApiServer) -> Vec<String> {
        let mut calls = runtime.calls();
        calls.sort_unstable();
        calls
    }

    #[tokio::test]
    async fn plan_is_written_once_and_repaired() {
        let runtime = FakeApiServer::default();
        let budgets = WriteBudgets::default();
        let budget = budgets.of(&KymaKey::new("ns", "k"), object::Component::Plan, AGENT_OBJECT, ());
        let (plan, ..) = watcher::plan::<Arc<tidewatch_api::Watcher>>(Vec::new(), &[]);
        apply(&runtime.client(), &plan, &budget).await.unwrap();
        assert_eq!(
            calls(&runtime),
            [
                "GET configmaps/tidewatch-agent",
                "GET leases/tidewatch-agent",
                "PATCH configmaps/tidewatch-agent",
                "POST leases"
            ]
        );

        let next = Plan::new("next".into(), plan.watches().to_vec()).unwrap();
        replace(&runtime.client(), &next, &budget).await.unwrap();
        assert_eq!(runtime.calls(), ["PATCH configmaps/tidewatch-agent"]);
        replace(&runtime.client(), &plan, &budget).await.unwrap();
        runtime.calls();

        let idle = ["GET configmaps/tidewatch-agent", "GET leases/tidewatch-agent"];
        apply(&runtime.client(), &plan, &budget).await.unwrap();
        assert_eq!(calls(&runtime), idle);
        runtime.edit(MAP, |map| assert_eq!(Plan::parse(map["data"][PLAN_KEY].as_str().unwrap()).unwrap(), plan));

        runtime.edit(MAP, |map| map["data"][PLAN_KEY] = json!("{}"));
        apply(&runtime.client(), &plan, &budget).await.unwrap();
        assert_eq!(
            calls(&runtime),
            ["GET configmaps/tidewatch-agent", "GET leases/tidewatch-agent", "PATCH configmaps/tidewatch-agent"]
        );

        runtime.edit(MAP, |map| map["data"]["other"] = json!("1"));
        apply(&runtime.client(), &plan, &budget).await.unwrap();
        assert_eq!(
            calls(&runtime),
            [
                "GET configmaps/tidewatch-agent",
                "GET leases/tidewatch-agent",
                "PATCH configmaps/tidewatch-agent",
                "PUT configmaps/tidewatch-agent"
            ]
        );
        apply(&runtime.client(), &plan, &budget).await.unwrap();
        assert_eq!(calls(&runtime), idle);
    }

    #[tokio::test(start_paused = true)]
    async fn plan_and_lease_are_read_together_and_written_together() {
        const ROUND_TRIP: Duration = Duration::from_millis(100);
        let runtime = FakeApiServer::default();
        runtime.set_round_trip(ROUND_TRIP);
        let budgets = WriteBudgets::default();
        let budget = budgets.of(&KymaKey::new("ns", "k"), object::Component::Plan, AGENT_OBJECT, ());
        let (plan, ..) = watcher::plan::<Arc<tidewatch_api::Watcher>>(Vec::new(), &[]);
        let begun = Instant::now();
        apply(&runtime.client(), &plan, &budget).await.unwrap();
        assert_eq!(begun.elapsed(), 2 * ROUND_TRIP);
        assert_eq!(runtime.writes().len(), 2);
    }

    #[tokio::test]
    async fn immutable_plan_is_created_anew() {
        let runtime = FakeApiServer::default();
        let budgets = WriteBudgets::default();
        let budget = budgets.of(&KymaKey::new("ns", "k"), object::Component::Plan, AGENT_OBJECT, ());
        let (plan, ..) = watcher::plan::<Arc<tidewatch_api::Watcher>>(Vec::new(), &[]);
        apply(&runtime.client(), &plan, &budget).await.unwrap();
        runtime.edit(MAP, |map| map["immutable"] = true.into());
        runtime.calls();
        apply(&runtime.client(), &plan, &budget).await.unwrap();
        assert_eq!(runtime.writes(), [format!("DELETE {MAP}"), format!("PATCH {MAP}")]);
        assert!(runtime.object(MAP).unwrap().get("immutable").is_none());
    }
}
