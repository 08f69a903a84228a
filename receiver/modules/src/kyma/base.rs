//! Prerequisites of a Kyma in its runtime cluster (namespace, CRDs, plan of the agent), and the finalizer and labels of
//! the KCP Kyma.

use std::borrow::Cow;

use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
};
use serde_json::{Value, json};
use tidewatch_api::{
    Kyma,
    facts::KymaFacts,
    key::KymaKey,
    names::{AGENT_OBJECT, SKR_NAMESPACE, annotation, field_manager, finalizer, label},
};
use tidewatch_cluster::object::{self, Component, Ownership, Shape, Target, WriteBudget};
use tidewatch_installer::watcher;

use super::{
    Context, Error, crd, error, fetch, inputs, pull_secret,
    status::{CONFLICT_RETRIES, reread},
    verified_cache::Verified,
};

/// Finalizer of Kubernetes' foreground deletion: while it is present, the garbage collector deletes the dependents and
/// rejects new finalizers.
const FOREGROUND: &str = "foregroundDeletion";

/// Adds our finalizer, label and management annotation to the KCP Kyma if one is missing. Returns the Kyma as stored.
pub(super) async fn mark(ctx: &Context, kyma: Kyma) -> Result<Kyma, Error> {
    let marked = kyma.finalizers().iter().any(|name| name == finalizer::KYMA)
        && kyma.labels().get(label::MANAGED_BY).is_some_and(|by| by == label::MANAGED_BY_KCP)
        && KymaFacts::from(&kyma).is_managed();
    if marked || kyma.finalizers().iter().any(|name| name == FOREGROUND) {
        return Ok(kyma);
    }
    let mut finalizers = kyma.finalizers().to_vec();
    if !finalizers.iter().any(|name| name == finalizer::KYMA) {
        finalizers.push(finalizer::KYMA.to_owned());
    }
    let mut metadata = json!({"finalizers": finalizers, "labels": {label::MANAGED_BY: label::MANAGED_BY_KCP}});
    if !KymaFacts::from(&kyma).is_managed() {
        metadata["annotations"] = json!({annotation::INPUTS: inputs::NOTHING});
    }
    patch_metadata(ctx, &kyma, metadata).await
}

/// Merges into the metadata of the KCP Kyma; fails with a conflict if it was written since it was read.
pub(super) async fn patch_metadata(ctx: &Context, kyma: &Kyma, metadata: Value) -> Result<Kyma, Error> {
    let api = fetch::in_kcp(ctx, &kyma.namespace().unwrap_or_default());
    send_metadata(&api, kyma, &metadata).await.map_err(Error::kcp(error::MARK_KYMA))
}

/// As [`patch_metadata`], for metadata that depends on no other writer's condition: see [`reread`].
pub(super) async fn record_metadata(ctx: &Context, kyma: &Kyma, metadata: Value) -> Result<Kyma, Error> {
    let api = fetch::in_kcp(ctx, &kyma.namespace().unwrap_or_default());
    let mut retries = CONFLICT_RETRIES;
    let mut current = Cow::Borrowed(kyma);
    loop {
        let failure = match send_metadata(&api, &current, &metadata).await {
            Ok(written) => return Ok(written),
            Err(failure) => failure,
        };
        let now = reread(&api, &current, failure, &mut retries).await;
        current = Cow::Owned(now.map_err(Error::kcp(error::MARK_KYMA))?);
    }
}

async fn send_metadata(api: &Api<Kyma>, kyma: &Kyma, metadata: &Value) -> Result<Kyma, kube::Error> {
    let mut metadata = metadata.clone();
    metadata["resourceVersion"] = kyma.resource_version().unwrap_or_default().into();
    let params = PatchParams::apply(field_manager::LIFECYCLE_OPERATOR);
    api.patch(&kyma.name_any(), &params, &Patch::Merge(json!({"metadata": metadata}))).await
}

/// Applies the prerequisites. Reads only objects that `verified` does not hold, and records there the verified ones.
/// Contested objects are added to `contested`, and stop no other.
pub(super) async fn ensure(
    ctx: &Context,
    key: &KymaKey,
    client: &Client,
    verified: &mut Verified,
    contested: &mut Vec<Error>,
) -> Result<(), Error> {
    let mut put_off = |result: Result<(), Error>| match result {
        Err(error) if error.is_contested() => {
            contested.push(error);
            Ok(false)
        }
        result => result.map(|()| true),
    };
    if !verified.namespace {
        let budget = ctx.budgets.of(key, Component::Kyma, SKR_NAMESPACE, ());
        verified.namespace = put_off(ensure_namespace(client, &budget).await)?;
    }
    for wanted in crd::wanted() {
        if !verified.crds.contains(&wanted.name) {
            let budget = ctx.budgets.of(key, Component::Crd, &wanted.name, ());
            if put_off(crd::ensure(client, wanted, &mut verified.forms, &budget).await)? {
                verified.crds.insert(wanted.name.clone());
            }
        }
    }
    if let Some(secret) = &ctx.pull_secret
        && let Some(content) = secret.content()
        && verified.pull_secret.as_ref() != Some(&content)
    {
        let budget = ctx.budgets.of(key, Component::PullSecret, &secret.name, content.to_string());
        if put_off(pull_secret::ensure(secret, client, &content, &budget).await)? {
            verified.pull_secret = Some(content);
        }
    }
    if ctx.installer.is_some() {
        // The installation contains the plan.
        return Ok(());
    }
    let plan = ctx.plans.of(key);
    if verified.plan.as_deref() != Some(plan.revision()) {
        let budget = ctx.budgets.of(key, Component::Plan, AGENT_OBJECT, plan.revision());
        let applied = match &verified.plan {
            Some(_) => watcher::replace(client, &plan, &budget).await,
            None => watcher::apply(client, &plan, &budget).await,
        };
        if put_off(applied.map_err(Error::plan))? {
            verified.plan = Some(plan.revision().to_owned());
        }
    }
    Ok(())
}

async fn ensure_namespace(client: &Client, budget: &WriteBudget<'_>) -> Result<(), Error> {
    const DOING: &str = "apply the namespace kyma-system in the runtime";
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &ApiResource::erase::<Namespace>(&()));
    let found = object::get(&api, SKR_NAMESPACE).await.map_err(Error::runtime(DOING))?;
    if found.as_ref().is_some_and(|found| found.metadata.deletion_timestamp.is_some()) {
        return Err(Error::Terminating(SKR_NAMESPACE.to_owned()));
    }
    let labels = json!({
        label::ISTIO_INJECTION: "enabled", label::WARDEN: "enabled", label::MANAGED_BY: label::MANAGED_BY_SKR
    });
    let desired =
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SKR_NAMESPACE, "labels": labels}});
    let manager = field_manager::SYNC_CONTEXT;
    let shape = &Shape::new(Ownership::Fields);
    let target = Target { name: SKR_NAMESPACE, manager, shape, desired: &desired, budget: Some(budget) };
    let converged = target.converge(&api, found, &mut None).await;
    converged.map(drop).map_err(Error::converge(DOING, "the namespace kyma-system"))
}
