//! Kinds of which a namespace can have objects: those of Kubernetes itself, and those of the CRDs in the runtime. Kinds of
//! other API servers, such as metrics, are not stored in it.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, ListParams, PartialObjectMeta},
};

use super::{CONCURRENT_REQUESTS, Kind, built_in_kinds, discovery};
use crate::runtime_access::{ListLimits, list_map};

/// API groups of CRDs at most; more of them are an error.
const MAX_GROUPS: usize = 200;
/// Kinds of Kubernetes itself that controllers create and that hold nothing of a user.
const WITHOUT_CONTENT: [(&str, &str); 7] = [
    ("", "Endpoints"),
    ("", "Event"),
    ("apps", "ControllerRevision"),
    ("coordination.k8s.io", "Lease"),
    ("discovery.k8s.io", "EndpointSlice"),
    ("events.k8s.io", "Event"),
    ("storage.k8s.io", "CSIStorageCapacity"),
];
/// Kinds that are looked for first: most content has one of them.
const FIRST: [&str; 6] = ["PersistentVolumeClaim", "Pod", "Deployment", "StatefulSet", "ConfigMap", "Secret"];

/// Kinds of which a namespace can have objects.
#[derive(Debug)]
pub struct NamespacedKinds(Vec<Kind>);

impl NamespacedKinds {
    /// The kinds of Kubernetes itself, the most frequent ones first.
    pub fn built_in() -> Vec<&'static Kind> {
        let has_content = |kind: &&Kind| kind.namespaced && !WITHOUT_CONTENT.contains(&(&*kind.group, &*kind.kind));
        let mut kinds: Vec<_> = built_in_kinds().filter(has_content).collect();
        kinds.sort_by_key(|kind| FIRST.iter().position(|first| *first == kind.kind).unwrap_or(FIRST.len()));
        kinds
    }

    /// Discovers the kinds of all CRDs.
    ///
    /// # Errors
    /// A request failed, or there are too many groups.
    pub async fn discover(client: &Client) -> kube::Result<Self> {
        let groups = plurals_by_group(client).await?;
        if groups.len() > MAX_GROUPS {
            let text = format!("CRDs of more than {MAX_GROUPS} API groups");
            return Err(kube::Error::Discovery(kube::error::DiscoveryError::InvalidGroupVersion(text)));
        }
        let requests: Vec<_> = groups.iter().map(|(group, plurals)| of_group(client, group, plurals)).collect();
        let found: Vec<_> = stream::iter(requests).buffered(CONCURRENT_REQUESTS).try_collect().await?;
        Ok(Self(found.into_iter().flatten().filter(|kind| kind.namespaced).collect()))
    }

    /// The namespaced kinds of CRDs.
    pub fn custom(&self) -> &[Kind] {
        &self.0
    }
}

/// Plurals of the kinds of all CRDs, from their names.
async fn plurals_by_group(client: &Client) -> kube::Result<BTreeMap<String, BTreeSet<String>>> {
    let kind = ApiResource::erase::<CustomResourceDefinition>(&());
    let api: Api<PartialObjectMeta> = Api::all_with(client.clone(), &kind);
    let name = |definition: PartialObjectMeta| definition.name_any();
    let names = list_map(&api, &ListParams::default(), &ListLimits::default(), name).await?;
    let mut groups = BTreeMap::<_, BTreeSet<_>>::new();
    for (plural, group) in names.iter().filter_map(|name| name.split_once('.')) {
        groups.entry(group.to_owned()).or_default().insert(plural.to_owned());
    }
    Ok(groups)
}

/// The kinds with these plurals that a group serves, each in the first version that serves it. A CRD that is not established
/// has none.
async fn of_group(client: &Client, group: &str, plurals: &BTreeSet<String>) -> kube::Result<Vec<Kind>> {
    let mut wanted: BTreeSet<_> = plurals.iter().map(String::as_str).collect();
    let mut found = Vec::new();
    for version in discovery::versions(client, group).await? {
        if wanted.is_empty() {
            break;
        }
        for kind in discovery::resources(client, group, &version).await? {
            if wanted.remove(&*kind.plural) {
                found.push(kind);
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::FakeApiServer;

    #[tokio::test(start_paused = true)]
    async fn namespaced_kinds_of_all_definitions_are_found() {
        let server = FakeApiServer::runtime();
        let define = |plural: &str, group: &str, scope: &str, served: &[&str]| {
            let versions: Vec<_> = served.iter().map(|version| json!({"name": version, "served": true})).collect();
            server.edit(&format!("customresourcedefinitions/{plural}.{group}"), |definition| {
                *definition = json!({"spec": {"group": group, "scope": scope, "versions": versions,
                    "names": {"plural": plural, "kind": plural.to_uppercase()}}});
            });
        };
        define("as", "a.test", "Namespaced", &["v1", "v2"]);
        define("bs", "a.test", "Cluster", &["v2"]);
        define("cs", "c.test", "Namespaced", &[]);
        define("ds", "d.test", "Namespaced", &["v1"]);
        let kinds = NamespacedKinds::discover(&server.client()).await.unwrap();
        let found: Vec<_> = kinds.custom().iter().map(|kind| (&*kind.group, &*kind.version, &*kind.plural)).collect();
        assert_eq!(found, [("a.test", "v1", "as"), ("d.test", "v1", "ds")]);
        server.refuse("GET /apis/d.test", 503);
        assert!(NamespacedKinds::discover(&server.client()).await.is_err());
    }

    #[test]
    fn kinds_of_kubernetes_that_hold_content_are_known() {
        let kinds: Vec<_> = NamespacedKinds::built_in().iter().map(|kind| &*kind.kind).collect();
        assert_eq!(kinds[..6], FIRST);
        for kind in ["Service", "Role", "Job", "ReplicaSet", "NetworkPolicy", "ServiceAccount"] {
            assert!(kinds.contains(&kind), "{kind}");
        }
        for kind in ["Lease", "Event", "Namespace", "Node", "EndpointSlice"] {
            assert!(!kinds.contains(&kind), "{kind}");
        }
    }
}
