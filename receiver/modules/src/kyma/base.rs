//! Prerequisites of a Kyma in its runtime cluster (namespace, CRDs, plan of the agent), and the finalizer and labels of
//! the KCP Kyma.

use std::{borrow::Cow, sync::Arc};

use futures::future::{OptionFuture, join, join_all};
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
use tidewatch_cluster::{
    object::{self, Component, Ownership, Shape, Target},
    runtime_access::retain,
};
use tidewatch_installer::watcher;

use super::{
    Context, Error,
    crd::{self, Served, Wanted},
    error, fetch, inputs, pull_secret,
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

/// Namespace and CRDs of a runtime cluster are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Prepared {
    /// The CRD of Kymas is new, and so there is no Kyma.
    pub(super) has_no_kyma: bool,
}

/// Applies namespace and CRDs at once. Reads only objects that `verified` does not hold, and records there the verified ones.
/// Contested objects are added to `contested`, and stop no other. The memory of an object is released once the object is as
/// desired, long before the end of the reconcile.
///
/// # Errors
/// The first failure, the namespace before the CRDs.
pub(super) async fn ensure(
    ctx: &Context,
    key: &KymaKey,
    client: &Client,
    verified: &mut Verified,
    contested: &mut Vec<Error>,
) -> Result<Prepared, Error> {
    let namespace = OptionFuture::from((!verified.namespace).then(|| retain(ensure_namespace(ctx, key, client))));
    let unverified: Vec<_> = crd::wanted().iter().filter(|wanted| !verified.crds.contains(&wanted.name)).collect();
    let form = |wanted: &Wanted| verified.forms.get(&wanted.name).copied();
    let crds: Vec<_> = unverified.iter().map(|wanted| ensure_crd(ctx, key, client, wanted, form(wanted))).collect();
    let (namespace, crds) = join(namespace, join_all(crds)).await;
    if let Some(namespace) = namespace {
        verified.namespace = unless_contested(namespace, contested)?.is_some();
    }
    let mut prepared = Prepared::default();
    for (wanted, served) in unverified.into_iter().zip(crds) {
        let Some(served) = unless_contested(served, contested)? else { continue };
        match served.form {
            Some(form) => verified.forms.insert(wanted.name.clone(), form),
            None => verified.forms.remove(&wanted.name),
        };
        verified.crds.insert(wanted.name.clone());
        prepared.has_no_kyma |= served.is_new && wanted.kind == "Kyma";
    }
    Ok(prepared)
}

/// Sets a contested object aside, so that it stops no other. Returns `None` for one.
fn unless_contested<T>(result: Result<T, Error>, contested: &mut Vec<Error>) -> Result<Option<T>, Error> {
    match result {
        Err(error) if error.is_contested() => {
            contested.push(error);
            Ok(None)
        }
        result => result.map(Some),
    }
}

async fn ensure_crd(
    ctx: &Context,
    key: &KymaKey,
    client: &Client,
    wanted: &Wanted,
    form: Option<u64>,
) -> Result<Served, Error> {
    let budget = ctx.budgets.of(key, Component::Crd, &wanted.name, ());
    retain(crd::ensure(client, wanted, form, &budget)).await
}

async fn ensure_namespace(ctx: &Context, key: &KymaKey, client: &Client) -> Result<(), Error> {
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
    let budget = ctx.budgets.of(key, Component::Kyma, SKR_NAMESPACE, ());
    let target = Target { name: SKR_NAMESPACE, manager, shape, desired: &desired, budget: Some(&budget) };
    let converged = target.converge(&api, found, &mut None).await;
    converged.map(drop).map_err(Error::converge(DOING, "the namespace kyma-system"))
}

/// Copies the image pull secret of the modules, unless `verified` is its content.
pub(super) async fn copy_pull_secret(
    ctx: &Context,
    key: &KymaKey,
    client: &Client,
    verified: &mut Option<Arc<Value>>,
) -> Result<(), Error> {
    let Some(secret) = &ctx.pull_secret else { return Ok(()) };
    let Some(content) = secret.content() else { return Ok(()) };
    if verified.as_ref() != Some(&content) {
        let budget = ctx.budgets.of(key, Component::PullSecret, &secret.name, content.to_string());
        retain(pull_secret::ensure(secret, client, &content, &budget)).await?;
        *verified = Some(content);
    }
    Ok(())
}

/// Applies the plan, unless `verified` is its revision, or the agent's installation contains the plan.
pub(super) async fn bring_plan(
    ctx: &Context,
    key: &KymaKey,
    client: &Client,
    verified: &mut Option<String>,
) -> Result<(), Error> {
    let plan = ctx.plans.of(key);
    if ctx.installer.is_some() || verified.as_deref() == Some(plan.revision()) {
        return Ok(());
    }
    let budget = ctx.budgets.of(key, Component::Plan, AGENT_OBJECT, plan.revision());
    let applied = if verified.is_some() {
        watcher::replace(client, &plan, &budget).await
    } else {
        watcher::apply(client, &plan, &budget).await
    };
    applied.map_err(Error::plan)?;
    *verified = Some(plan.revision().to_owned());
    Ok(())
}
