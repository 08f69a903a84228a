//! Reads: both Kymas by quorum reads; Manifests from the cache, with our own writes.

use std::sync::Arc;

use kube::{
    Api, Client, ResourceExt,
    api::ListParams,
    core::{NamespaceResourceScope, Resource},
};
use tidewatch_api::{
    Kyma, Manifest,
    facts::KymaFacts,
    key::KymaKey,
    names::{SKR_KYMA, label},
};
use tidewatch_cluster::object;

use super::{Context, Error, error, requests};

pub(super) use super::status::in_runtime;

const READ_MANIFEST: &str = "read a written Manifest in the control plane";
const LIST_MANIFESTS: &str = "list the Manifests in the control plane";

/// Objects of one kind in the Kyma's namespace in KCP.
pub(super) fn in_kcp<K>(ctx: &Context, namespace: &str) -> Api<K>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
{
    Api::namespaced(ctx.kcp.clone(), namespace)
}

/// The Kyma in KCP if this receiver manages it; the cache may lag behind a hand-back.
pub(super) async fn kcp_kyma(ctx: &Context, key: &KymaKey) -> Result<Option<Kyma>, Error> {
    let api = in_kcp::<Kyma>(ctx, &key.namespace);
    let takeover = &ctx.takeover;
    let read = if takeover.selector().is_limited() {
        // The API server evaluates the selector. Without a resourceVersion this is a quorum read.
        let params =
            ListParams::default().fields(&format!("metadata.name={}", key.name)).labels(&takeover.selector().query());
        api.list(&params).await.map(|list| list.items.into_iter().next())
    } else {
        object::get(&api, &key.name).await
    };
    let kyma = read.map_err(Error::kcp(error::READ_KYMA))?;
    Ok(kyma.filter(|kyma| !KymaFacts::from(kyma).is_handed_back()))
}

/// The Kyma in its runtime cluster.
pub(super) async fn runtime_kyma(client: &Client) -> Result<Option<Kyma>, Error> {
    object::get(&in_runtime(client), SKR_KYMA).await.map_err(Error::runtime("read the Kyma in the runtime"))
}

/// The Manifests of a Kyma, by label or owner reference: from the cache if it has their bodies, else from KCP. Those of
/// which the cache does not show enough are read by name: a list by label makes the API server look at the Manifests of
/// all Kymas.
pub(super) async fn owned_manifests(ctx: &Context, key: &KymaKey, kyma: &Kyma) -> Result<Vec<Arc<Manifest>>, Error> {
    let uid = kyma.metadata.uid.as_deref();
    let manifests = &ctx.stores.manifests;
    if let Ok(owned) = manifests.of_kyma(key, uid) {
        let uncertain = manifests.uncertain(key);
        if uncertain.is_empty() {
            return Ok(owned);
        }
        let api: Api<Manifest> = in_kcp(ctx, &key.namespace);
        let reads = uncertain.iter().map(|manifest| object::get_by_list(&api, &manifest.name)).collect();
        for (manifest, found) in uncertain.iter().zip(requests::run(reads).await) {
            manifests.found(manifest, found.map_err(Error::kcp(READ_MANIFEST))?);
        }
        if let Ok(owned) = manifests.of_kyma(key, uid) {
            return Ok(owned);
        }
    }
    // The runtime came into a shard of this replica a moment ago.
    Ok(list_manifests(ctx, kyma).await?.into_iter().map(Arc::new).collect())
}

fn has_owner(manifest: &Manifest, uid: Option<&str>) -> bool {
    manifest.owner_references().iter().any(|owner| uid == Some(owner.uid.as_str()))
}

/// The Manifests of a Kyma in KCP by quorum reads, those included that lost the label but have the owner reference; a
/// deletion relies on it.
pub(super) async fn list_manifests(ctx: &Context, kyma: &Kyma) -> Result<Vec<Manifest>, Error> {
    let api: Api<Manifest> = in_kcp(ctx, &kyma.namespace().unwrap_or_default());
    let params = ListParams::default().labels(&format!("{}={}", label::KYMA_NAME, kyma.name_any()));
    let mut listed = api.list(&params).await.map_err(Error::kcp(LIST_MANIFESTS))?.items;
    let uid = kyma.metadata.uid.as_deref();
    for cached in ctx.stores.manifests.find_of_kyma(&KymaKey::of(kyma), uid) {
        let key = cached.key();
        let name = &key.name;
        if !listed.iter().any(|manifest| manifest.name_any() == *name) {
            let found = object::get_by_list(&api, name).await.map_err(Error::kcp(LIST_MANIFESTS))?;
            listed.extend(found.filter(|manifest| has_owner(manifest, uid)));
        }
    }
    Ok(listed)
}
