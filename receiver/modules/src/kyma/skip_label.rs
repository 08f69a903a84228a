//! The label `skip-reconciliation` on the Manifests of a Kyma, if the selector turns it around. lifecycle-manager's
//! controller of Manifests evaluates their own label alone, and would reconcile the modules of a Kyma that was taken
//! over.

use std::sync::Arc;

use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use tidewatch_api::{
    Kyma, Manifest,
    facts::KymaFacts,
    key::KymaKey,
    labels::is_true,
    names::{field_manager, label},
};
use tidewatch_cluster::object;

use super::{Context, Error, error, fetch, requests};

/// Adds the label of the Kyma to those of its Manifests that lack it, whatever is decided on their modules. Returns the
/// Manifests that exist, as stored.
pub(super) async fn add(
    ctx: &Context,
    key: &KymaKey,
    kyma: &Kyma,
    manifests: Vec<Arc<Manifest>>,
) -> Result<Vec<Arc<Manifest>>, Error> {
    if !ctx.takeover.selector().selects_skipped() || !KymaFacts::from(kyma).is_skipped() {
        return Ok(manifests);
    }
    let api: Api<Manifest> = fetch::in_kcp(ctx, &key.namespace);
    let added = requests::run(manifests.into_iter().map(|it| add_to(ctx, key, &api, it)).collect()).await;
    added.into_iter().filter_map(Result::transpose).collect()
}

async fn add_to(
    ctx: &Context,
    key: &KymaKey,
    api: &Api<Manifest>,
    manifest: Arc<Manifest>,
) -> Result<Option<Arc<Manifest>>, Error> {
    if is_true(Some(manifest.labels()), label::SKIP_RECONCILIATION) {
        return Ok(Some(manifest));
    }
    let name = manifest.name_any();
    let written = requests::write(ctx, key, &manifest, set(api, &name, json!("true"))).await?;
    Ok(written.map(Arc::new))
}

/// Removes the label from all Manifests of a Kyma, if it kept lifecycle-manager away from them.
pub(super) async fn remove(ctx: &Context, kyma: &Kyma) -> Result<(), Error> {
    if !ctx.takeover.selector().selects_skipped() {
        return Ok(());
    }
    let api: Api<Manifest> = fetch::in_kcp(ctx, &kyma.namespace().unwrap_or_default());
    let manifests = fetch::list_manifests(ctx, kyma).await?;
    let labelled = manifests.iter().filter(|manifest| manifest.labels().contains_key(label::SKIP_RECONCILIATION));
    let names: Vec<_> = labelled.map(|manifest| manifest.name_any()).collect();
    let removed = requests::run(names.iter().map(|name| set(&api, name, Value::Null)).collect()).await;
    removed.into_iter().try_for_each(|removed| removed.map(drop))
}

/// Sets or removes the label. `None` if the Manifest does not exist any more.
async fn set(api: &Api<Manifest>, name: &str, value: Value) -> Result<Option<Manifest>, Error> {
    let patch = Patch::Merge(json!({"metadata": {"labels": {label::SKIP_RECONCILIATION: value}}}));
    let params = PatchParams::apply(field_manager::LIFECYCLE_OPERATOR);
    let set = object::if_exists(api.patch(name, &params, &patch).await, name);
    set.map_err(|source| Error::Manifest { doing: error::LABEL, name: name.to_owned(), source })
}
