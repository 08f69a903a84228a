//! Changes that the agent reported: the Manifests that they affect, and the objects to read again.

use std::sync::Arc;

use tidewatch_api::{Manifest, State, facts::ManifestFacts, key::ManifestKey};
use tidewatch_cluster::kinds::built_in;
use tidewatch_contract::event::{Change, Object, Subject};
use tidewatch_engine::{Inventory, ObjectKey, WaitFacts, awaits_resources, inventory_of};
use tidewatch_fleet::{manifest_queue::ManifestQueue, queue::Drift, stores::manifests::Manifests, table::RuntimeTable};

use super::Memories;

/// Hands reports of changed module objects over to the queue of the Manifests that they affect.
pub fn connect_reports(fleet: &RuntimeTable, queue: &ManifestQueue, manifests: Manifests, memories: Memories) {
    let known = queue.clone();
    queue.connect_reports(fleet, move |report| match manifests.of_kyma(&report.events.kyma, None) {
        Ok(of_kyma) => affected(of_kyma, &report.drift, &memories, |key| known.is_queued(key)),
        // Their inventories are not known yet, so that each may have a changed object.
        Err(_) => {
            let of_kyma = manifests.find_of_kyma(&report.events.kyma, None);
            of_kyma.iter().map(|manifest| (manifest.key(), Drift::All)).collect()
        }
    });
}

/// Selects the Manifests of a runtime that changes in it affect, each with the objects to read again: none if only the
/// status of its objects changed. A report of our own write affects none, unless a reconcile is queued: then it replaces an earlier
/// report of the object. Inventories are those of our last writes, which the cached Manifests may lack.
pub(super) fn affected(
    manifests: impl IntoIterator<Item = Arc<Manifest>>,
    drift: &Drift,
    memories: &Memories,
    is_queued: impl Fn(&ManifestKey) -> bool,
) -> Vec<(ManifestKey, Drift)> {
    let of_manifest = |manifest: Arc<Manifest>| {
        let key = ManifestKey::of(&*manifest);
        let drift = match drift {
            Drift::None => return None,
            Drift::All => Drift::All,
            Drift::Objects(objects) | Drift::Reported(objects) => {
                let is_queued = is_queued(&key);
                objects_of(&manifest, objects, |object| !is_queued && is_echo(memories, &key, object))?
            }
        };
        Some((key, drift))
    };
    manifests.into_iter().filter_map(of_manifest).collect()
}

/// Returns true once if a report is that of our own write, after which no other writer has written.
pub(super) fn is_echo(memories: &Memories, key: &ManifestKey, object: &Object) -> bool {
    let is_written = memories.is_echo(key, &reported_key(object), &object.resource_version);
    // The agent may name the last version that it saw of an object that is gone.
    is_written && object.change != Change::Deleted
}

/// Returns the objects of a Manifest to read again; `None` if no change concerns it.
fn objects_of(manifest: &Manifest, objects: &[Object], is_echo: impl Fn(&Object) -> bool) -> Option<Drift> {
    let inventory = inventory_of(manifest);
    let mut drift = Drift::None;
    let mut has_other_cause = false;
    for object in objects {
        if object.subject.name.is_empty() {
            let own = of_resource(&inventory, object);
            has_other_cause |= concerns_resource(manifest, &inventory, object);
            drift.merge(own);
            continue;
        }
        let key = reported_key(object);
        let is_own = inventory.contains(&key);
        let takes_own_along = is_replaced(object) && inventory.keys().any(|own| key.holds(own));
        let is_other = || {
            is_manager(manifest, object)
                || is_pod_of_manager(manifest, &inventory, object)
                || blocks(manifest, &inventory, &object.subject)
        };
        let is_concerned = is_own || takes_own_along || is_other();
        if is_concerned && is_echo(object) {
            // The report of the whole resource came before.
            drift.confirm(|known| reported_key(known) == key);
        } else if is_concerned {
            if takes_own_along || is_own && object.change != Change::Status {
                drift.merge(Drift::of(object.clone()));
            } else {
                has_other_cause = true;
            }
        }
    }
    match (drift, has_other_cause) {
        (Drift::None, false) => None,
        (drift, false) => Some(drift.as_only_cause()),
        (drift, true) => Some(drift),
    }
}

/// True for an object that is gone, or is another one of the same name: what a Namespace or a CRD held went along, and not all
/// of it is watched.
pub(super) fn is_replaced(object: &Object) -> bool {
    matches!(object.change, Change::Deleted | Change::Created)
}

/// The identity of an object that the agent reports.
pub(super) fn reported_key(object: &Object) -> ObjectKey {
    let subject = &object.subject;
    ObjectKey::new(&subject.group, &object.kind, &subject.namespace, &subject.name)
}

/// The objects of a Manifest of a resource of which any object may have changed.
fn of_resource(inventory: &Inventory, changed: &Object) -> Drift {
    let Subject { group, resource, .. } = &changed.subject;
    let mut drift = Drift::None;
    for (key, version) in inventory.entries().filter(|(key, _)| key.group == *group) {
        match built_in(group, &key.kind) {
            Some(kind) if kind.plural == *resource => {
                let ObjectKey { group, kind, namespace, name } = key.clone();
                let version = version.to_owned();
                let resource = resource.clone();
                let subject = Subject { group, version, resource, namespace, name };
                drift.merge(Drift::of(Object { subject, kind, ..changed.clone() }));
            }
            Some(_) => {}
            // The plural of its kind is not known here.
            None => return Drift::All,
        }
    }
    drift
}

/// True if the readiness or the removal of a Manifest may depend on such a resource.
fn concerns_resource(manifest: &Manifest, inventory: &Inventory, Object { subject, .. }: &Object) -> bool {
    let is_of = |group: &str, kind: &str| {
        group == subject.group && built_in(group, kind).is_none_or(|kind| kind.plural == subject.resource)
    };
    let is_ready = manifest.status.as_ref().is_some_and(|status| status.state == State::Ready);
    let is_pods = subject.group.is_empty() && subject.resource == "pods";
    (is_pods && !is_ready)
        || manifest.spec.manager.as_ref().is_some_and(|manager| is_of(&manager.group, &manager.kind))
        || blocks(manifest, inventory, subject)
}

/// The manager may be an object that the module does not bring itself.
fn is_manager(manifest: &Manifest, object: &Object) -> bool {
    let manager = manifest.spec.manager.as_ref();
    manager.is_some_and(|manager| {
        (&manager.group, &manager.kind, &manager.name) == (&object.subject.group, &object.kind, &object.subject.name)
    })
}

/// True for an object that may be a pod of the manager: the names of such pods begin with that of their workload.
fn is_pod_of_manager(manifest: &Manifest, inventory: &Inventory, object: &Object) -> bool {
    let is_pod = object.subject.group.is_empty() && object.kind == "Pod";
    let mut workloads = inventory.keys().filter(|key| key.namespace == object.subject.namespace);
    let is_of = |name: &str| object.subject.name.strip_prefix(name).is_some_and(|rest| rest.starts_with('-'));
    is_pod
        && (manifest.spec.manager.iter().any(|it| is_of(&it.name))
            || workloads.any(|key| is_workload(key) && is_of(&key.name)))
}

fn is_workload(key: &ObjectKey) -> bool {
    key.group == "apps" || key.group == "batch"
}

/// True for a resource of a kind that the module defines, while its removal waits for such resources, or while they keep the
/// CRD.
fn blocks(manifest: &Manifest, inventory: &Inventory, subject: &Subject) -> bool {
    let definition = format!("{}.{}", subject.resource, subject.group);
    awaits_resources(&shown(&manifest.into()), &definition)
        && inventory.keys().any(|key| key.is_definition() && key.name == definition)
}

/// The parts of a Manifest that show for which resources it waits.
pub(super) const fn shown<'a>(manifest: &ManifestFacts<'a>) -> WaitFacts<'a> {
    let ManifestFacts { flags, operation, .. } = *manifest;
    WaitFacts { is_deleting: flags.is_deleting, state: flags.state, operation }
}

#[cfg(test)]
mod tests {
    use kube::runtime::{reflector, watcher};
    use serde_json::{Value, json};
    use tidewatch_fleet::stores::manifests::ManifestWriter;

    use super::*;

    const DEFINITIONS: &str = "apiextensions.k8s.io";

    fn manifest(name: &str, change: impl FnOnce(&mut Value)) -> Manifest {
        let entry = |group: &str, kind: &str, namespace: &str, name: &str| json!({"group": group, "version": "v1", "kind": kind, "namespace": namespace, "name": name});
        let synced = [
            entry("apps", "Deployment", "kyma-system", name),
            entry("", "ConfigMap", "kyma-system", name),
            entry(DEFINITIONS, "CustomResourceDefinition", "", &format!("samples.{name}.test")),
        ];
        let mut manifest = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": name, "namespace": "ns"},
            "spec": {"remote": true, "install": {"name": "i", "source": {}}},
            "status": {"state": "Ready", "synced": synced}});
        change(&mut manifest);
        serde_json::from_value(manifest).unwrap()
    }

    fn blocked(manifest: &mut Value) {
        manifest["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        let operation = "waiting for module crs deletion: Sample default/mine";
        manifest["status"]["lastOperation"] = json!({"operation": operation});
    }

    fn object(subject: &str, kind: &str, change: Change) -> Object {
        Object {
            subject: subject.parse().unwrap(),
            kind: kind.to_owned(),
            uid: "u".to_owned(),
            resource_version: "1".to_owned(),
            generation: None,
            change,
        }
    }

    fn reported(object: Object) -> Drift {
        Drift::of(object).as_only_cause()
    }

    fn names(manifests: &[Manifest], drift: &Drift) -> Vec<(String, Drift)> {
        affected(manifests.iter().cloned().map(Arc::new), drift, &Memories::default(), |_| false)
            .into_iter()
            .map(|(key, drift)| (key.name.clone(), drift))
            .collect()
    }

    #[test]
    fn report_of_a_deletion_is_no_echo_of_our_last_write() {
        let memories = Memories::default();
        let key = ManifestKey::new("ns", "m");
        for (change, expected) in [(Change::Spec, true), (Change::Deleted, false)] {
            let mut report = object("/v1/configmaps/kyma-system/a", "ConfigMap", change);
            report.resource_version = "7".to_owned();
            memories.put_write(&key, &reported_key(&report), "7");
            assert_eq!(is_echo(&memories, &key, &report), expected);
        }
    }

    #[test]
    fn object_of_an_inventory_that_the_cache_lacks_affects_its_manifest() {
        let version = |version: &str, has_inventory: bool| {
            manifest("a", |manifest| {
                manifest["metadata"]["uid"] = "u".into();
                manifest["metadata"]["resourceVersion"] = version.into();
                if !has_inventory {
                    manifest["status"]["synced"] = json!([]);
                }
            })
        };
        let (cache, mut writer) = reflector::store();
        let manifests = Manifests::from(cache);
        writer.apply_watcher_event(&watcher::Event::Apply(version("1", false).into()));
        let found = || manifests.get(&ManifestKey::new("ns", "a")).unwrap();
        let memories = Memories::default();
        let map = Drift::of(object("/v1/configmaps/kyma-system/a", "ConfigMap", Change::Spec));
        assert_eq!(affected(found(), &map, &memories, |_| false), []);
        manifests.wrote(&version("2", true), ManifestWriter::Other);
        assert_eq!(
            affected(found(), &map, &memories, |_| false),
            [(ManifestKey::new("ns", "a"), map.clone().as_only_cause())]
        );
    }

    #[test]
    fn object_affects_the_manifest_whose_inventory_has_it() {
        let manifests = [manifest("a", |_| ()), manifest("b", |_| ())];
        let edited = object("apps/v1/deployments/kyma-system/a", "Deployment", Change::Spec);
        let of = |objects: Vec<Object>| names(&manifests, &Drift::Objects(objects));
        assert_eq!(of(vec![edited.clone()]), [("a".to_owned(), reported(edited.clone()))]);
        let other = object("/v1/configmaps/kyma-system/b", "ConfigMap", Change::Deleted);
        let both = [("a".to_owned(), reported(edited.clone())), ("b".to_owned(), reported(other.clone()))];
        assert_eq!(of(vec![edited, other]), both);
        for unknown in [
            object("apps/v1/deployments/default/a", "Deployment", Change::Spec),
            object("apps/v1/statefulsets/kyma-system/a", "StatefulSet", Change::Spec),
            object("/v1/configmaps/kyma-system/c", "ConfigMap", Change::Spec),
        ] {
            assert_eq!(of(vec![unknown]), []);
        }
        assert_eq!(names(&manifests, &Drift::All).len(), 2);
        assert_eq!(names(&manifests, &Drift::None), []);
    }

    #[test]
    fn whole_resource_affects_the_objects_of_its_kind() {
        let manifests = [manifest("a", |_| ()), manifest("b", |manifest| manifest["status"]["synced"] = json!([]))];
        let of = |subject: &str| names(&manifests, &Drift::of(object(subject, "", Change::Spec)));
        let map = object("/v1/configmaps/kyma-system/a", "ConfigMap", Change::Spec);
        assert_eq!(of("/v1/configmaps//"), [("a".to_owned(), reported(map))]);
        for other in ["/v1/services//", "apps/v1/statefulsets//", "a.test/v1/samples//"] {
            assert_eq!(of(other), [], "{other}");
        }
        let manifests =
            [manifest("a", |_| ()), manifest("b", |manifest| manifest["status"]["state"] = json!("Processing"))];
        let pods = Drift::of(object("/v1/pods//", "", Change::Spec));
        assert_eq!(names(&manifests, &pods), [("b".to_owned(), Drift::None)], "its manager is not ready");
    }

    #[test]
    fn whole_resource_that_the_manager_or_a_blocked_removal_depends_on_wakes() {
        let elsewhere = json!({"group": "apps", "version": "v1", "kind": "StatefulSet", "name": "elsewhere"});
        let manifests = [manifest("a", |manifest| manifest["spec"]["manager"] = elsewhere)];
        let of = |subject: &str| Drift::of(object(subject, "", Change::Spec));
        assert_eq!(names(&manifests, &of("apps/v1/statefulsets//")), [("a".to_owned(), Drift::None)]);
        assert_eq!(names(&manifests, &of("apps/v1/daemonsets//")), []);
        let manifests = [manifest("a", blocked), manifest("b", |_| ())];
        assert_eq!(names(&manifests, &of("a.test/*/samples//")), [("a".to_owned(), Drift::None)]);
        // The plural of a kind that is not of Kubernetes itself is not known.
        let own =
            json!({"group": "a.test", "version": "v1", "kind": "Sample", "namespace": "kyma-system", "name": "own"});
        let manifests = [manifest("a", |manifest| manifest["status"]["synced"] = json!([own]))];
        assert_eq!(names(&manifests, &of("a.test/*/samples//")), [("a".to_owned(), Drift::All)]);
    }

    #[test]
    fn deleted_namespace_or_definition_affects_the_manifests_with_objects_in_it() {
        let secret = json!({"group": "", "version": "v1", "kind": "Secret", "namespace": "own", "name": "s"});
        let sample = json!({"group": "a.test", "version": "v1", "kind": "Sample", "namespace": "", "name": "s"});
        let with =
            |name: &str, object: &Value| manifest(name, |manifest| manifest["status"]["synced"] = json!([object]));
        let manifests = [with("a", &secret), with("b", &sample)];
        let namespace = |change| Drift::of(object("/v1/namespaces//own", "Namespace", change));
        let path = "apiextensions.k8s.io/v1/customresourcedefinitions//samples.a.test";
        let definition = |change| Drift::of(object(path, "CustomResourceDefinition", change));
        for change in [Change::Deleted, Change::Created] {
            assert_eq!(names(&manifests, &namespace(change)), [("a".to_owned(), namespace(change).as_only_cause())]);
            assert_eq!(names(&manifests, &definition(change)), [("b".to_owned(), definition(change).as_only_cause())]);
        }
        assert_eq!(names(&manifests, &namespace(Change::Metadata)), []);
        assert_eq!(names(&manifests, &definition(Change::Spec)), []);
    }

    /// A new watch of the agent reports its resource, and then each of the objects in its first list.
    #[test]
    fn own_write_among_the_objects_of_a_listed_resource_is_not_read_again() {
        let manifest = Arc::new(manifest("a", |_| ()));
        let key = ManifestKey::of(&*manifest);
        let memories = Memories::default();
        let whole = object("/v1/configmaps//", "", Change::Spec);
        let map = object("/v1/configmaps/kyma-system/a", "ConfigMap", Change::Spec);
        let wrote = |version: &str| memories.put_write(&key, &reported_key(&map), version);
        let affected = |objects: &[&Object], is_queued: bool| {
            let drift = Drift::Objects(objects.iter().map(|object| (*object).clone()).collect());
            affected([manifest.clone()], &drift, &memories, |_| is_queued).pop().map(|(_, drift)| drift)
        };
        wrote(&map.resource_version);
        assert_eq!(affected(&[&whole, &map], false), None);
        wrote(&map.resource_version);
        assert_eq!(affected(&[&map], true), Some(reported(map.clone())), "the report of the resource may be queued");
        let before = affected(&[&map, &whole], false).and_then(|drift| Some(drift.objects()?[0].subject.clone()));
        assert_eq!(before, Some(map.subject.clone()), "the list came after that report");
        wrote("another");
        assert_eq!(affected(&[&whole, &map], false), Some(reported(map.clone())));
    }

    #[test]
    fn changed_status_wakes_without_a_comparison() {
        let manifests = [manifest("a", |_| ())];
        let status = object("apps/v1/deployments/kyma-system/a", "Deployment", Change::Status);
        assert_eq!(names(&manifests, &Drift::of(status)), [("a".to_owned(), Drift::None)]);
        let map = object("/v1/configmaps/kyma-system/a", "ConfigMap", Change::Spec);
        let status = object("apps/v1/deployments/kyma-system/a", "Deployment", Change::Status);
        let drift = names(&manifests, &Drift::Objects(vec![map.clone(), status]));
        assert_eq!(drift, [("a".to_owned(), Drift::of(map))], "the status is another cause");
        let manager = json!({"group": "apps", "version": "v1", "kind": "Deployment", "name": "elsewhere"});
        let manifests = [manifest("a", |manifest| manifest["spec"]["manager"] = manager), manifest("b", |_| ())];
        let elsewhere = object("apps/v1/deployments/kyma-system/elsewhere", "Deployment", Change::Spec);
        assert_eq!(names(&manifests, &Drift::of(elsewhere)), [("a".to_owned(), Drift::None)]);
    }

    #[test]
    fn pod_wakes_the_manifest_of_its_workload() {
        let manifests = [manifest("a", |_| ()), manifest("b", |_| ())];
        let pod = |path: &str, kind: &str| names(&manifests, &Drift::of(object(path, kind, Change::Status)));
        assert_eq!(pod("/v1/pods/kyma-system/a-6d9fb8dccd-x", "Pod"), [("a".to_owned(), Drift::None)]);
        for other in ["/v1/pods/kyma-system/a", "/v1/pods/kyma-system/ab-c", "/v1/pods/default/a-6d9fb8dccd-x"] {
            assert_eq!(pod(other, "Pod"), [], "{other}");
        }
        assert_eq!(pod("/v1/services/kyma-system/a-b", "Service"), []);
        let manager = json!({"group": "apps", "version": "v1", "kind": "Deployment", "name": "m"});
        let manifests = [manifest("a", |manifest| manifest["spec"]["manager"] = manager)];
        let of_manager = Drift::of(object("/v1/pods/kyma-system/m-0", "Pod", Change::Created));
        assert_eq!(names(&manifests, &of_manager), [("a".to_owned(), Drift::None)]);
    }

    #[test]
    fn user_resource_affects_the_manifest_whose_removal_it_blocks_or_whose_definition_it_keeps() {
        let mine = || Drift::of(object("a.test/v1/samples/default/mine", "Sample", Change::Deleted));
        assert_eq!(names(&[manifest("a", blocked)], &mine()), [("a".to_owned(), Drift::None)]);
        assert_eq!(names(&[manifest("a", |_| ()), manifest("b", blocked)], &mine()), []);
        let kept = |of: &'static str| {
            move |manifest: &mut Value| {
                let operation =
                    format!("CustomResourceDefinition samples.{of}.test is not part of this version any more");
                manifest["status"] = json!({"state": "Warning", "lastOperation": {"operation": operation},
                    "synced": manifest["status"]["synced"]});
            }
        };
        assert_eq!(names(&[manifest("a", kept("a"))], &mine()), [("a".to_owned(), Drift::None)]);
        assert_eq!(names(&[manifest("a", kept("b"))], &mine()), []);
    }
}
