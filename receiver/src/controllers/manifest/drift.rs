//! Changes that the agent reported: the Manifests that they affect, and the objects to read again. Pure.

use tidewatch_shared::{
    api::Manifest,
    event::{Change, Object},
};

use super::{Memories, inventory::ObjectKey, inventory_of, report::is_blocked};
use crate::{
    base::key::KymaKey,
    fleet::{manifests::ManifestKey, queue::Drift},
};

/// Selects the Manifests of a runtime that changes in it affect, each with the objects to read again: none if only the
/// status of its objects changed. A report of our own write affects none.
pub(crate) fn affected<'a>(
    manifests: impl Iterator<Item = &'a Manifest>,
    drift: &Drift,
    memories: &Memories,
) -> Vec<(ManifestKey, Drift)> {
    let of_manifest = |manifest: &Manifest| {
        let key = KymaKey::of(manifest);
        let drift = match drift {
            Drift::None => return None,
            Drift::All => Drift::All,
            Drift::Objects(objects) => objects_of(manifest, objects, |object| memories.is_echo(&key, object))?,
        };
        Some((key, drift))
    };
    manifests.filter_map(of_manifest).collect()
}

/// Returns the objects of a Manifest to read again; `None` if no change concerns it.
fn objects_of(manifest: &Manifest, objects: &[Object], is_echo: impl Fn(&Object) -> bool) -> Option<Drift> {
    let inventory = inventory_of(manifest);
    let is_own = |object: &Object| inventory.contains(&object_key(object));
    let is_concerned = |object: &Object| {
        is_own(object)
            || is_manager(manifest, object)
            || is_pod_of_manager(manifest, object)
            || blocks(manifest, object)
    };
    let mut news = objects.iter().filter(|object| is_concerned(object) && !is_echo(object)).peekable();
    news.peek()?;
    let changed: Vec<_> = news.filter(|object| is_own(object) && object.change != Change::Status).cloned().collect();
    Some(if changed.is_empty() { Drift::None } else { Drift::Objects(changed) })
}

/// Identity of a reported object.
pub(super) fn object_key(Object { subject, kind, .. }: &Object) -> ObjectKey {
    ObjectKey {
        group: subject.group.clone(),
        kind: kind.clone(),
        namespace: subject.namespace.clone(),
        name: subject.name.clone(),
    }
}

/// The manager may be an object that the module does not bring itself.
fn is_manager(manifest: &Manifest, object: &Object) -> bool {
    let manager = manifest.spec.manager.as_ref();
    manager.is_some_and(|manager| {
        (&manager.group, &manager.kind, &manager.name) == (&object.subject.group, &object.kind, &object.subject.name)
    })
}

/// True for an object that may be a pod of the manager: the names of such pods begin with that of their workload.
fn is_pod_of_manager(manifest: &Manifest, object: &Object) -> bool {
    let is_pod = object.subject.group.is_empty() && object.kind == "Pod";
    let inventory = inventory_of(manifest);
    let mut workloads = inventory.keys().filter(|key| key.namespace == object.subject.namespace);
    let is_of = |name: &str| object.subject.name.strip_prefix(name).is_some_and(|rest| rest.starts_with('-'));
    is_pod
        && (manifest.spec.manager.iter().any(|it| is_of(&it.name))
            || workloads.any(|key| is_workload(key) && is_of(&key.name)))
}

fn is_workload(key: &ObjectKey) -> bool {
    key.group == "apps" || key.group == "batch"
}

/// True for a resource of a kind that the module defines, while such resources block its removal.
fn blocks(manifest: &Manifest, object: &Object) -> bool {
    let definition = format!("{}.{}", object.subject.resource, object.subject.group);
    is_blocked(manifest) && inventory_of(manifest).keys().any(|key| key.is_definition() && key.name == definition)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

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

    fn names(manifests: &[Manifest], drift: &Drift) -> Vec<(String, Drift)> {
        affected(manifests.iter(), drift, &Memories::default())
            .into_iter()
            .map(|(key, drift)| (key.name.clone(), drift))
            .collect()
    }

    #[test]
    fn object_affects_the_manifest_whose_inventory_has_it() {
        let manifests = [manifest("a", |_| ()), manifest("b", |_| ())];
        let edited = object("apps/v1/deployments/kyma-system/a", "Deployment", Change::Spec);
        let of = |objects: Vec<Object>| names(&manifests, &Drift::Objects(objects));
        assert_eq!(of(vec![edited.clone()]), [("a".to_owned(), Drift::of(edited.clone()))]);
        let other = object("/v1/configmaps/kyma-system/b", "ConfigMap", Change::Deleted);
        let both = [("a".to_owned(), Drift::of(edited.clone())), ("b".to_owned(), Drift::of(other.clone()))];
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
    fn changed_status_wakes_without_a_comparison() {
        let manifests = [manifest("a", |_| ())];
        let status = object("apps/v1/deployments/kyma-system/a", "Deployment", Change::Status);
        assert_eq!(names(&manifests, &Drift::of(status)), [("a".to_owned(), Drift::None)]);
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
    fn user_resource_affects_the_manifest_whose_removal_it_blocks() {
        let blocked = |manifest: &mut Value| {
            manifest["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            let operation = "waiting for module crs deletion: Sample default/mine";
            manifest["status"]["lastOperation"] = json!({"operation": operation});
        };
        let mine = || Drift::of(object("a.test/v1/samples/default/mine", "Sample", Change::Deleted));
        assert_eq!(names(&[manifest("a", blocked)], &mine()), [("a".to_owned(), Drift::None)]);
        assert_eq!(names(&[manifest("a", |_| ()), manifest("b", blocked)], &mine()), []);
    }
}
