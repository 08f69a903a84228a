//! Content of a Namespace that neither Kubernetes nor the module has made.

use futures::{StreamExt as _, stream};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, PartialObjectMeta},
};
use tidewatch_cluster::{
    kinds::{Definition, Kind, NamespacedKinds, is_built_in, is_unserved},
    runtime_access::list_first,
};

use super::{Content, MAX_LISTED, Own, first_of_others};
use crate::{
    execution::CONCURRENT_LISTS,
    failure::Failure,
    inventory::{ObjectKey, split_api_version},
};

/// Objects that Kubernetes, or a service mesh, creates in every namespace.
const IN_EVERY_NAMESPACE: [(&str, &str); 4] = [
    ("ServiceAccount", "default"),
    ("ConfigMap", "kube-root-ca.crt"),
    ("ConfigMap", "openshift-service-ca.crt"),
    ("ConfigMap", "istio-ca-root-cert"),
];
/// Annotation of a Secret with a token of a ServiceAccount.
const TOKEN_OF: &str = "kubernetes.io/service-account.name";

/// Looks for an object in a namespace that its deletion would destroy: kind by kind, until one is found.
pub(super) async fn content(client: &Client, namespace: &str, own: &Own<'_>) -> Result<Option<Content>, Failure> {
    let search = Search { client, namespace, own };
    if let Some(found) = search.find(NamespacedKinds::built_in()).await? {
        return Ok(Some(found));
    }
    let kinds = NamespacedKinds::discover(client)
        .await
        .map_err(Failure::during("find the kinds that the runtime serves".to_owned()))?;
    search.find(kinds.custom()).await
}

struct Search<'a> {
    client: &'a Client,
    namespace: &'a str,
    own: &'a Own<'a>,
}

impl Search<'_> {
    async fn find(&self, kinds: impl IntoIterator<Item = &Kind>) -> Result<Option<Content>, Failure> {
        let requests: Vec<_> = kinds.into_iter().map(|kind| self.find_of_kind(kind)).collect();
        let mut results = stream::iter(requests).buffered(CONCURRENT_LISTS);
        while let Some(found) = results.next().await {
            if let Some(found) = found? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    async fn find_of_kind(&self, kind: &Kind) -> Result<Option<Content>, Failure> {
        let listed = match self.list(kind).await {
            Ok(listed) => listed,
            Err(error) if is_unserved(&error) => return Ok(None),
            // The version may need a conversion, which the stored one does not.
            Err(error) => match self.list_stored(kind).await {
                Some(listed) => listed,
                None => return Err(Failure::new(format!("list the objects of the kind {}", kind.kind), &error)),
            },
        };
        Ok(first_of_others(kind, &listed, |key, object| self.is_exempt(key, object)))
    }

    async fn list(&self, kind: &Kind) -> kube::Result<Vec<PartialObjectMeta>> {
        let api: Api<PartialObjectMeta> = kind.api(self.client, self.namespace);
        list_first(&api, &ListParams::default(), MAX_LISTED).await
    }

    async fn list_stored(&self, kind: &Kind) -> Option<Vec<PartialObjectMeta>> {
        let name = format!("{}.{}", kind.plural, kind.group);
        let definition = Definition::read(self.client, &name).await.ok()??;
        self.list(&definition.preferred()?).await.ok()
    }

    /// True for an object that the module or Kubernetes has made, and for one that is going.
    fn is_exempt(&self, key: &ObjectKey, object: &PartialObjectMeta) -> bool {
        object.metadata.deletion_timestamp.is_some()
            || self.own.leaves(key)
            || key.group.is_empty() && IN_EVERY_NAMESPACE.contains(&(key.kind.as_str(), key.name.as_str()))
            || key.kind == "Secret" && object.annotations().contains_key(TOKEN_OF)
            || is_made_by_another(key, object)
    }
}

/// True for an object that a controller has made for another one: it stays or goes with that, which is judged itself if it is
/// in the namespace. The data of a claim cannot be made again.
fn is_made_by_another(key: &ObjectKey, object: &PartialObjectMeta) -> bool {
    let is_claim = key.group.is_empty() && key.kind == "PersistentVolumeClaim";
    object.owner_references().iter().any(|owner| !is_claim || is_built_in(split_api_version(&owner.api_version).0))
}
