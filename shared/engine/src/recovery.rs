//! Objects in the runtime cluster that belong to a Manifest although its inventory lacks them: its status was lost, or the
//! store was restored from a backup that is older than the runtime.

use std::{collections::BTreeSet, sync::Arc};

use futures::{StreamExt as _, stream};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, PartialObjectMeta},
};
use tidewatch_api::{
    Manifest,
    names::{annotation, field_manager, label},
};
use tidewatch_cluster::{
    kinds::{Kind, Kinds, built_in_kinds, is_built_in},
    runtime_access::{ListError, ListLimits, list_map},
};

use super::{
    execution::CONCURRENCY,
    failure::Failure,
    inventory::{Inventory, ObjectKey, owner_of},
    search::{in_served_version, locate},
};

/// Objects of one kind with our label at most, far more than modules have.
const MAX_OBJECTS: usize = 5_000;
/// Kinds that controllers create and no module contains.
const NOT_IN_MODULES: [(&str, &str); 15] = [
    ("", "Endpoints"),
    ("", "Event"),
    ("", "Node"),
    ("", "Pod"),
    ("", "PodTemplate"),
    ("", "ReplicationController"),
    ("apps", "ControllerRevision"),
    ("apps", "ReplicaSet"),
    ("certificates.k8s.io", "CertificateSigningRequest"),
    ("discovery.k8s.io", "EndpointSlice"),
    ("events.k8s.io", "Event"),
    ("storage.k8s.io", "CSIDriver"),
    ("storage.k8s.io", "CSINode"),
    ("storage.k8s.io", "CSIStorageCapacity"),
    ("storage.k8s.io", "VolumeAttachment"),
];

/// Result of a search.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Objects of the Manifest with their API versions.
    pub(super) objects: Vec<(ObjectKey, String)>,
    /// The runtime cluster refused to list a kind. Without the right to list it we can neither have written its objects
    /// nor delete them, unless the right was revoked.
    pub(super) is_refused: bool,
}

/// Lists the metadata of the objects with our label, of all kinds of Kubernetes that modules contain and of the custom
/// kinds of the inventory, and selects those that belong to a Manifest.
///
/// # Errors
/// A request failed, or there are more objects than any module has.
pub(super) async fn find(
    client: &Client,
    kinds: &mut Kinds,
    manifest: &Manifest,
    inventory: &Inventory,
) -> Result<Found, Failure> {
    let is_custom = |key: &&ObjectKey| !is_built_in(&key.group);
    let custom: BTreeSet<_> =
        inventory.keys().filter(is_custom).map(|key| (key.group.clone(), key.kind.clone())).collect();
    let wanted: Vec<_> = custom.iter().map(|(group, kind)| (group.as_str(), kind.as_str())).collect();
    let action = "find the kinds of the recorded objects".to_owned();
    kinds.prefetch(client, wanted).await.map_err(Failure::during(action))?;
    let mut located = Vec::new();
    for (group, kind) in &custom {
        located.extend(locate(client, kinds, group, kind).await?);
    }
    let owner = &owner_of(manifest);
    let is_possible = |kind: &&Kind| !NOT_IN_MODULES.contains(&(&*kind.group, &*kind.kind));
    let mut requests: Vec<_> = located.iter().map(|kind| list(client, kind, owner)).collect();
    requests.extend(built_in_kinds().filter(is_possible).map(|kind| list(client, kind, owner)));
    let mut lists = stream::iter(requests).buffered(CONCURRENCY).enumerate();
    let mut found = Found::default();
    let mut moved = Vec::new();
    while let Some((place, listed)) = lists.next().await {
        match (located.get(place), listed) {
            // The known version may be out of date.
            (Some(kind), Err(failure)) if failure.is_unserved => moved.push(kind),
            (_, listed) => found.add(listed)?,
        }
    }
    drop(lists);
    for kind in moved {
        kinds.invalidate(&kind.group);
        let list = |kind: Arc<Kind>| async move { list(client, &kind, owner).await };
        let listed = in_served_version(client, kinds, &kind.group, &kind.kind, list).await;
        found.add(listed.map(Option::unwrap_or_default))?;
    }
    Ok(found)
}

impl Found {
    /// Adds the result of one list. A kind that is not served has no objects.
    fn add(&mut self, listed: Result<Self, Failure>) -> Result<(), Failure> {
        match listed {
            Err(failure) if failure.is_unserved => {}
            listed => {
                let Self { objects, is_refused } = listed?;
                self.objects.extend(objects);
                self.is_refused |= is_refused;
            }
        }
        Ok(())
    }
}

/// Lists the objects of one kind that belong to an owner.
async fn list(client: &Client, kind: &Kind, owner: &str) -> Result<Found, Failure> {
    let api: Api<PartialObjectMeta> = kind.api(client, "");
    let selection = ListParams::default().labels(&format!("{}={}", label::MANAGED_BY, label::MANAGED_BY_SKR));
    let limits = ListLimits { objects: MAX_OBJECTS, ..ListLimits::default() };
    let keep = |object: PartialObjectMeta| {
        is_of(&object, owner).then(|| (ObjectKey::listed(kind, &object), kind.version.to_string()))
    };
    match list_map(&api, &selection, &limits, keep).await {
        Ok(objects) => Ok(Found { objects: objects.into_iter().flatten().collect(), is_refused: false }),
        Err(ListError::Page(kube::Error::Api(status))) if status.code == 403 => {
            Ok(Found { is_refused: true, ..Found::default() })
        }
        Err(error) => Err(Failure::new(format!("list the objects of the kind {}", kind.kind), &error.into())),
    }
}

/// Returns true for an object that was applied for this owner. A copy that a user has made has the same labels and
/// annotations, but not our field manager.
fn is_of(object: &PartialObjectMeta, owner: &str) -> bool {
    let is_ours = object.annotations().get(annotation::OWNED_BY).is_some_and(|owned_by| owned_by == owner);
    let mut managers = object.managed_fields().iter().filter_map(|entry| entry.manager.as_deref());
    is_ours && managers.any(|manager| manager == field_manager::MODULE)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};
    use tidewatch_api::key::KymaKey;
    use tidewatch_cluster::{kinds::KindCache, testing::FakeApiServer};
    use tokio::time::Instant;

    use super::*;

    fn manifest() -> Manifest {
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": "m", "namespace": "kcp-system"},
            "spec": {"remote": true, "install": {"name": "i", "source": {}}}}))
        .unwrap()
    }

    fn put(server: &FakeApiServer, id: &str, change: impl FnOnce(&mut Value)) {
        server.edit(id, |object| {
            object["metadata"] = json!({"namespace": "kyma-system", "labels": {label::MANAGED_BY: "kyma"},
                "annotations": {annotation::OWNED_BY: "kcp-system/m"},
                "managedFields": [{"manager": field_manager::MODULE, "operation": "Apply"}]});
            change(object);
        });
    }

    async fn search(server: &FakeApiServer, inventory: &Inventory) -> Result<(Vec<String>, bool), String> {
        let mut kinds = KindCache::default().of(&KymaKey::new("ns", "k"), 1);
        let found = find(&server.client(), &mut kinds, &manifest(), inventory).await;
        let found = found.map_err(|failure| failure.operation)?;
        let mut names: Vec<_> = found.objects.iter().map(|(key, version)| format!("{key} {version}")).collect();
        names.sort();
        Ok((names, found.is_refused))
    }

    #[tokio::test(start_paused = true)]
    async fn only_objects_that_we_applied_for_the_manifest_belong_to_it() {
        let server = FakeApiServer::runtime();
        put(&server, "configmaps/ours", |_| ());
        put(&server, "clusterroles/ours", |object| object["metadata"]["namespace"] = Value::Null);
        put(&server, "configmaps/other", |object| {
            object["metadata"]["annotations"] = json!({annotation::OWNED_BY: "kcp-system/n"});
        });
        put(&server, "configmaps/copied", |object| {
            object["metadata"]["managedFields"] = json!([{"manager": "kubectl", "operation": "Update"}]);
        });
        put(&server, "configmaps/released", |object| object["metadata"]["labels"] = json!({}));
        put(&server, "pods/ours", |_| ());
        let expected = ["ClusterRole ours v1", "ConfigMap kyma-system/ours v1"].map(str::to_owned).to_vec();
        assert_eq!(search(&server, &Inventory::default()).await, Ok((expected, false)));
        let calls = server.calls();
        assert!(calls.iter().all(|call| call.starts_with("GET ")) && calls.len() < 40, "{calls:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn kinds_of_kubernetes_are_listed_in_two_round_trips() {
        let round_trip = Duration::from_millis(100);
        let server = FakeApiServer::runtime();
        server.set_round_trip(round_trip);
        let start = Instant::now();
        search(&server, &Inventory::default()).await.unwrap();
        assert_eq!(start.elapsed(), 2 * round_trip);
    }

    #[tokio::test(start_paused = true)]
    async fn custom_kinds_are_located_and_listed_together() {
        let round_trip = Duration::from_millis(100);
        let server = FakeApiServer::runtime();
        let groups: Vec<_> = (0..5).map(|n| format!("g{n}.test")).collect();
        for group in &groups {
            server.edit(&format!("customresourcedefinitions/samples.{group}"), |object| {
                object["spec"] = json!({"group": group, "scope": "Namespaced",
                    "names": {"kind": "Sample", "plural": "samples"},
                    "versions": [{"name": "v1", "served": true, "storage": true}]});
            });
        }
        let entry = |group: &String| json!({"group": group, "version": "v1", "kind": "Sample", "name": "s", "namespace": "kyma-system"});
        let entries: Value = groups.iter().map(entry).collect();
        let inventory = Inventory::read(&serde_json::from_value::<Vec<_>>(entries).unwrap());
        server.set_round_trip(round_trip);
        let start = Instant::now();
        search(&server, &inventory).await.unwrap();
        assert_eq!(start.elapsed(), 4 * round_trip, "two to locate them, and two for all lists");
    }

    #[tokio::test(start_paused = true)]
    async fn objects_of_a_kind_that_moved_to_another_version_are_found() {
        let server = FakeApiServer::runtime();
        let serve = |version: &str| {
            let spec = json!({"group": "example.test", "scope": "Namespaced",
                "names": {"kind": "Sample", "plural": "samples"},
                "versions": [{"name": version, "served": true, "storage": true}]});
            server.edit("customresourcedefinitions/samples.example.test", |object| object["spec"] = spec);
        };
        serve("v1");
        put(&server, "samples/ours", |_| ());
        let recorded = |name: &str| {
            let entry = json!([{"group": "example.test", "version": "v1", "kind": "Sample", "name": name,
                "namespace": "kyma-system"}]);
            Inventory::read(&serde_json::from_value::<Vec<_>>(entry).unwrap())
        };
        let cache = KindCache::default();
        let key = KymaKey::new("ns", "k");
        for version in ["v1", "v2"] {
            serve(version);
            let found = find(&server.client(), &mut cache.of(&key, 1), &manifest(), &recorded("other")).await.unwrap();
            let versions: Vec<_> = found.objects.iter().map(|(_, version)| version.as_str()).collect();
            assert_eq!(versions, [version]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn refused_list_is_reported_and_a_failed_one_is_an_error() {
        let server = FakeApiServer::runtime();
        put(&server, "configmaps/ours", |_| ());
        server.refuse("GET secrets", 403);
        let (found, is_refused) = search(&server, &Inventory::default()).await.unwrap();
        assert_eq!((found.len(), is_refused), (1, true));
        server.refuse("GET secrets", 500);
        assert_eq!(search(&server, &Inventory::default()).await, Err("list the objects of the kind Secret".to_owned()));
    }
}
