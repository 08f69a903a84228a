//! Prerequisites of a Kyma in its runtime cluster (namespace, CRDs, plan of the agent), and the finalizer and labels of
//! the KCP Kyma.

use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use tidewatch_shared::{
    api::Kyma,
    names::{SKR_NAMESPACE, annotation, field_manager, finalizer, label},
    plan::Plan,
};

use super::{Context, Error, crd, error, fetch, inputs, verified_cache::Verified};
use crate::{base::takeover, controllers::watcher, kube::object};

/// Finalizer of Kubernetes' foreground deletion: while it is present, the garbage collector deletes the dependents and
/// rejects new finalizers.
const FOREGROUND: &str = "foregroundDeletion";

/// Adds our finalizer, label and management annotation to the KCP Kyma if one is missing. Returns the Kyma as stored.
pub(super) async fn mark(ctx: &Context, kyma: Kyma) -> Result<Kyma, Error> {
    let marked = kyma.finalizers().iter().any(|name| name == finalizer::KYMA)
        && kyma.labels().get(label::MANAGED_BY).is_some_and(|by| by == label::MANAGED_BY_KCP)
        && takeover::is_managed(&kyma);
    if marked || kyma.finalizers().iter().any(|name| name == FOREGROUND) {
        return Ok(kyma);
    }
    let mut finalizers = kyma.finalizers().to_vec();
    if !finalizers.iter().any(|name| name == finalizer::KYMA) {
        finalizers.push(finalizer::KYMA.to_owned());
    }
    let mut metadata = json!({"finalizers": finalizers, "labels": {label::MANAGED_BY: label::MANAGED_BY_KCP}});
    if !takeover::is_managed(&kyma) {
        metadata["annotations"] = json!({annotation::INPUTS: inputs::NOTHING});
    }
    patch_metadata(ctx, &kyma, metadata).await
}

/// Merges into the metadata of the KCP Kyma; fails with a conflict if it was written since it was read.
pub(super) async fn patch_metadata(ctx: &Context, kyma: &Kyma, mut metadata: Value) -> Result<Kyma, Error> {
    metadata["resourceVersion"] = kyma.resource_version().unwrap_or_default().into();
    let api: Api<Kyma> = fetch::in_kcp(ctx, &kyma.namespace().unwrap_or_default());
    let params = PatchParams::apply(field_manager::LIFECYCLE_OPERATOR);
    let patch = Patch::Merge(json!({"metadata": metadata}));
    api.patch(&kyma.name_any(), &params, &patch).await.map_err(Error::kcp(error::MARK_KYMA))
}

/// Applies the prerequisites. Reads only objects that `verified` does not hold, and records there the verified ones.
pub(super) async fn ensure(ctx: &Context, client: &Client, verified: &mut Verified) -> Result<(), Error> {
    if !verified.namespace {
        ensure_namespace(client).await?;
        verified.namespace = true;
    }
    for wanted in crd::wanted() {
        if !verified.crds.contains(&wanted.name) {
            crd::ensure(client, wanted, &mut verified.forms).await?;
            verified.crds.insert(wanted.name.clone());
        }
    }
    if ctx.installer.is_some() {
        // The installation contains the plan.
        return Ok(());
    }
    let plan: std::sync::Arc<Plan> = ctx.plan.load_full();
    if verified.plan.as_deref() != Some(plan.revision()) {
        watcher::apply(client, &plan).await.map_err(Error::Plan)?;
        verified.plan = Some(plan.revision().to_owned());
    }
    Ok(())
}

async fn ensure_namespace(client: &Client) -> Result<(), Error> {
    const DOING: &str = "apply the namespace kyma-system in the runtime";
    let api: Api<Namespace> = Api::all(client.clone());
    let labels =
        [(label::ISTIO_INJECTION, "enabled"), (label::WARDEN, "enabled"), (label::MANAGED_BY, label::MANAGED_BY_SKR)];
    let found = object::get(&api, SKR_NAMESPACE).await.map_err(Error::runtime(DOING))?;
    if found.as_ref().is_some_and(|found| found.metadata.deletion_timestamp.is_some()) {
        return Err(Error::Terminating(SKR_NAMESPACE.to_owned()));
    }
    let holds =
        |found: &Namespace| labels.iter().all(|(key, value)| found.labels().get(*key).is_some_and(|is| is == value));
    if found.as_ref().is_some_and(holds) {
        return Ok(());
    }
    let labels: serde_json::Map<_, _> = labels.into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect();
    let body = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SKR_NAMESPACE, "labels": labels}});
    let params = PatchParams::apply(field_manager::SYNC_CONTEXT).force();
    api.patch(SKR_NAMESPACE, &params, &Patch::Apply(&body)).await.map_err(Error::runtime(DOING))?;
    Ok(())
}
