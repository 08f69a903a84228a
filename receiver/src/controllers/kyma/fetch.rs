//! Reads: both Kymas by quorum reads; Manifests from the cache if that shows all our own writes.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{
    Api, Client, ResourceExt,
    api::ListParams,
    core::{NamespaceResourceScope, Resource},
};
use tidewatch_shared::{
    api::{Kyma, Manifest},
    names::{SKR_KYMA, label},
};

use super::{Context, Error, error};
use crate::{
    base::{key::KymaKey, takeover},
    kube::object,
};

pub(super) use crate::controllers::status::in_runtime;

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
    let (api, takeover) = (in_kcp::<Kyma>(ctx, &key.namespace), &ctx.settings.takeover);
    let read = if takeover.is_limited() {
        // The API server evaluates the selector. Without a resourceVersion this is a quorum read.
        let params = ListParams::default().fields(&format!("metadata.name={}", key.name)).labels(&takeover.query());
        api.list(&params).await.map(|list| list.items.into_iter().next())
    } else {
        object::get(&api, &key.name).await
    };
    let kyma = read.map_err(Error::kcp(error::READ_KYMA))?;
    Ok(kyma.filter(|kyma| !takeover::is_handed_back(kyma)))
}

/// The Kyma in its runtime cluster.
pub(super) async fn runtime_kyma(client: &Client) -> Result<Option<Kyma>, Error> {
    object::get(&in_runtime(client), SKR_KYMA).await.map_err(Error::runtime("read the Kyma in the runtime"))
}

/// The Manifests of a Kyma, by label or owner reference: from the cache if it has their bodies and shows all our own writes, else
/// from KCP.
pub(super) async fn owned_manifests(ctx: &Context, key: &KymaKey, kyma: &Kyma) -> Result<Vec<Arc<Manifest>>, Error> {
    let Ok(cached) = ctx.stores.manifests.of_kyma(key, kyma.metadata.uid.as_deref()) else {
        // The runtime came into a shard of this replica a moment ago. Pending writes stay until the cache shows them.
        return Ok(list_manifests(ctx, kyma).await?.into_iter().map(Arc::new).collect());
    };
    if ctx.caches.pending_writes.is_shown(key, &cached) {
        return Ok(cached);
    }
    let listed = list_manifests(ctx, kyma).await?;
    ctx.caches.pending_writes.listed(key, &listed, &cached);
    Ok(listed.into_iter().map(Arc::new).collect())
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
            let is_owner = |owner: &OwnerReference| uid == Some(owner.uid.as_str());
            listed.extend(found.filter(|manifest| manifest.owner_references().iter().any(is_owner)));
        }
    }
    Ok(listed)
}
