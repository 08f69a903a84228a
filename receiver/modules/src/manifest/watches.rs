//! Watches on the modules of one runtime, derived from the inventories of its Manifests. Pure.

use std::collections::{BTreeMap, BTreeSet};

use tidewatch_api::{
    Resource,
    facts::ManifestFacts,
    key::ManifestKey,
    names::{SKR_NAMESPACE, label},
    plan::{Field, PlannedWatch, Work, carries_secrets},
};
use tidewatch_cluster::kinds::{Kind, built_in};
use tidewatch_engine::{PodSelection, awaits_resources};

use super::{Memories, drift::shown};

/// Watches per runtime at most, far more than kinds that modules contain. Beyond it, the verification finds drift.
const MAX_WATCHES: usize = 100;
/// API group of the CRDs, which the base plan watches.
const DEFINITIONS: &str = "apiextensions.k8s.io";
/// Resources that controllers write all the time, or that a watch of another resource covers.
const UNWATCHED: [(&str, &str); 6] = [
    ("", "endpoints"),
    ("", "events"),
    ("", "nodes"),
    ("coordination.k8s.io", "leases"),
    ("discovery.k8s.io", "endpointslices"),
    ("events.k8s.io", "events"),
];

/// Builds the watches on the objects of modules: by kind, on objects with our label. Kinds that can contain secrets are
/// not watched. While a removal waits for CRs, the kinds that the module defines are watched as well, while resources keep a
/// CRD that a version does not contain, their kind, and while a manager is not ready, its pods.
pub fn module_watches<'a>(
    manifests: impl Iterator<Item = (ManifestKey, ManifestFacts<'a>)>,
    memories: &Memories,
) -> Vec<PlannedWatch> {
    let mut kinds: BTreeMap<(&str, &str), (&Kind, BTreeSet<&str>)> = BTreeMap::new();
    let mut blocking = BTreeSet::new();
    let mut pods = Vec::new();
    for (key, manifest) in manifests {
        pods.extend(memories.pods(&key).map(|selection| of_pods(&key.name, selection)));
        let objects = manifest.synced;
        for object in objects {
            let Some(kind) = watched_kind(object) else { continue };
            kinds.entry((&*kind.group, &*kind.plural)).or_insert((kind, BTreeSet::new())).1.insert(&object.namespace);
        }
        let definitions = objects.iter().filter(|object| object.group == DEFINITIONS);
        let awaited = definitions.filter(|definition| awaits_resources(&shown(&manifest), &definition.name));
        blocking.extend(awaited.filter_map(|definition| definition.name.split_once('.')));
    }
    let of_kinds = kinds.values().map(|(kind, namespaces)| of_objects(kind, namespaces));
    let of_blocking = blocking.into_iter().map(|(plural, group)| of_resources(plural, group));
    let is_valid = |watch: &PlannedWatch| watch.check().is_ok();
    of_kinds.chain(of_blocking).chain(pods).filter(is_valid).take(MAX_WATCHES).collect()
}

/// Kind of an object, if the agent may and should watch it.
fn watched_kind(object: &Resource) -> Option<&'static Kind> {
    let kind = built_in(&object.group, &object.kind)?;
    let is_watched = kind.group != DEFINITIONS
        && !carries_secrets(&kind.group, &kind.plural)
        && !UNWATCHED.contains(&(&*kind.group, &*kind.plural));
    is_watched.then_some(kind)
}

/// Watch on the objects of modules of one kind. Within the namespace of all modules if no object is elsewhere, so that
/// the agent's rights stay small.
fn of_objects(kind: &Kind, namespaces: &BTreeSet<&str>) -> PlannedWatch {
    let is_local = kind.namespaced && namespaces.iter().all(|namespace| *namespace == SKR_NAMESPACE);
    // Their readiness is that of the module.
    let is_workload = kind.group == "apps" || kind.group == "batch";
    let name = format!("modules/{}", full_name(&kind.plural, &kind.group));
    PlannedWatch {
        namespace: is_local.then(|| SKR_NAMESPACE.to_owned()),
        label_selector: format!("{}={}", label::MANAGED_BY, label::MANAGED_BY_SKR),
        field: if is_workload { Field::Status } else { Field::Spec },
        ..PlannedWatch::ours(&name, &kind.group, &kind.version, &kind.plural, Work::Manifest)
    }
}

/// Watch on all resources of a kind that a module defines.
fn of_resources(plural: &str, group: &str) -> PlannedWatch {
    PlannedWatch::ours(&format!("blocking/{}", full_name(plural, group)), group, "*", plural, Work::Manifest)
}

/// Watch on the pods of a manager. Named by the Manifest: a module whose component was renamed has two of them.
fn of_pods(manifest: &str, PodSelection { namespace, selector }: PodSelection) -> PlannedWatch {
    PlannedWatch {
        namespace: Some(namespace),
        label_selector: selector,
        field: Field::Status,
        ..PlannedWatch::ours(&format!("pods/{manifest}"), "", "v1", "pods", Work::Manifest)
    }
}

fn full_name(plural: &str, group: &str) -> String {
    if group.is_empty() { plural.to_owned() } else { format!("{plural}.{group}") }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tidewatch_api::{Manifest, key::KymaKey, plan::Plan};
    use tidewatch_installer::watcher::extend;

    use super::*;

    fn manifest(objects: &[(&str, &str, &str, &str)], change: impl FnOnce(&mut Value)) -> Manifest {
        let entry = |(group, kind, namespace, name): &(&str, &str, &str, &str)| json!({"group": group, "version": "v1", "kind": kind, "namespace": namespace, "name": name});
        let synced: Vec<_> = objects.iter().map(entry).collect();
        let mut manifest = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": "m", "namespace": "ns"},
            "spec": {"remote": true, "install": {"name": "i", "source": {}}},
            "status": {"state": "Ready", "synced": synced}});
        change(&mut manifest);
        serde_json::from_value(manifest).unwrap()
    }

    fn facts(manifest: &Manifest) -> (ManifestKey, ManifestFacts<'_>) {
        (ManifestKey::of(manifest), manifest.into())
    }

    fn summary(manifests: &[Manifest]) -> Vec<(String, Option<String>, Field)> {
        let watches = module_watches(manifests.iter().map(facts), &Memories::default());
        watches.into_iter().map(|watch| (watch.name, watch.namespace, watch.field)).collect()
    }

    #[test]
    fn each_kind_of_the_inventories_is_watched_once() {
        let system = Some("kyma-system".to_owned());
        let a = [
            ("apps", "Deployment", "kyma-system", "a"),
            ("", "ConfigMap", "kyma-system", "a"),
            ("rbac.authorization.k8s.io", "ClusterRole", "", "a"),
        ];
        let b = [("apps", "Deployment", "kyma-system", "b"), ("", "ConfigMap", "elsewhere", "b")];
        let expected = [
            ("modules/configmaps".to_owned(), None, Field::Spec),
            ("modules/deployments.apps".to_owned(), system.clone(), Field::Status),
            ("modules/clusterroles.rbac.authorization.k8s.io".to_owned(), None, Field::Spec),
        ];
        let manifests = [manifest(&a, |_| ()), manifest(&b, |_| ())];
        assert_eq!(summary(&manifests), expected);
        assert_eq!(summary(&manifests[..1])[0], ("modules/configmaps".to_owned(), system, Field::Spec));
        assert_eq!(summary(&[manifest(&[], |_| ())]), []);
    }

    #[test]
    fn secrets_busy_kinds_and_unknown_ones_are_not_watched() {
        let objects = [
            ("", "Secret", "kyma-system", "a"),
            ("coordination.k8s.io", "Lease", "kyma-system", "a"),
            ("certificates.k8s.io", "CertificateSigningRequest", "", "a"),
            ("apiextensions.k8s.io", "CustomResourceDefinition", "", "samples.example.test"),
            ("example.test", "Sample", "kyma-system", "a"),
        ];
        assert_eq!(summary(&[manifest(&objects, |_| ())]), []);
    }

    #[test]
    fn kinds_of_a_module_are_watched_while_its_removal_waits_for_their_resources() {
        let objects = [("apiextensions.k8s.io", "CustomResourceDefinition", "", "samples.example.test")];
        let deleted = |operation: &'static str| {
            move |manifest: &mut Value| {
                manifest["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
                manifest["status"]["lastOperation"] = json!({"operation": operation});
            }
        };
        let blocked = manifest(&objects, deleted("waiting for module crs deletion: Sample default/mine"));
        let watches = module_watches(std::iter::once(facts(&blocked)), &Memories::default());
        let [watch] = &watches[..] else { panic!("{watches:?}") };
        assert_eq!(
            (&*watch.name, &*watch.group, &*watch.version, &*watch.resource),
            ("blocking/samples.example.test", "example.test", "*", "samples")
        );
        assert_eq!((&watch.namespace, &*watch.label_selector), (&None, ""), "those of the user, everywhere");
        let default_left = "waiting for the default module CR to be deleted: Sample kyma-system/default (finalizer f)";
        assert_eq!(summary(&[manifest(&objects, deleted(default_left))]), summary(&[blocked]));
        assert_eq!(summary(&[manifest(&objects, deleted("waiting for objects to be deleted"))]), []);
        let warned = |definition: &str| {
            let operation =
                format!("CustomResourceDefinition {definition} is not part of this version any more, and stays");
            manifest(&objects, |manifest| {
                manifest["status"]["state"] = json!("Warning");
                manifest["status"]["lastOperation"] = json!({"operation": operation});
            })
        };
        assert_eq!(
            module_watches(std::iter::once(facts(&warned("samples.example.test"))), &Memories::default()),
            watches
        );
        assert_eq!(summary(&[warned("others.example.test")]), []);
    }

    #[test]
    fn pods_of_a_manager_are_watched_while_it_is_not_ready() {
        let labelled = |manifest: &mut Value| manifest["metadata"]["labels"] = json!({label::MODULE_NAME: "keda"});
        let manifest = manifest(&[], labelled);
        let memories = Memories::default();
        let key = ManifestKey::of(&manifest);
        let kyma = KymaKey::new("ns", "k");
        let watches = || module_watches(std::iter::once(facts(&manifest)), &memories);
        assert_eq!(watches(), []);
        let selection = |selector: String| Some(PodSelection { namespace: "kyma-system".to_owned(), selector });
        memories.put_pods(&key, &kyma, selection("app=keda".to_owned()));
        let [watch] = &watches()[..] else { panic!("{:?}", watches()) };
        assert_eq!((&*watch.name, &*watch.resource, &*watch.label_selector), ("pods/m", "pods", "app=keda"));
        assert_eq!((watch.namespace.as_deref(), watch.field), (Some("kyma-system"), Field::Status));
        memories.put_pods(&key, &kyma, selection("x".repeat(10_000)));
        assert_eq!(watches(), [], "a selector that is too long");
        memories.put_pods(&key, &kyma, None);
        assert_eq!(watches(), []);
    }

    #[test]
    fn pods_of_both_managers_are_watched_while_a_module_has_two_manifests() {
        let of_module = |name: &'static str| {
            let labelled = move |manifest: &mut Value| {
                manifest["metadata"]["name"] = json!(name);
                manifest["metadata"]["labels"] = json!({label::MODULE_NAME: "keda"});
            };
            manifest(&[], labelled)
        };
        let manifests = [of_module("k-new-1"), of_module("k-old-2")];
        let memories = Memories::default();
        for manifest in &manifests {
            let pods = PodSelection { namespace: "kyma-system".to_owned(), selector: "app=keda".to_owned() };
            memories.put_pods(&ManifestKey::of(manifest), &KymaKey::new("ns", "k"), Some(pods));
        }
        let watches = module_watches(manifests.iter().map(facts), &memories);
        let names: Vec<_> = watches.iter().map(|watch| &*watch.name).collect();
        assert_eq!(names, ["pods/k-new-1", "pods/k-old-2"]);
        let plan = extend(&Plan::new("r".to_owned(), Vec::new()).unwrap(), watches.clone());
        assert_eq!(plan.watches(), watches);
    }

    #[test]
    fn hostile_inventories_yield_valid_and_few_watches() {
        let names: Vec<_> = (0..1_000).map(|n| format!("p{n}.G {n}/../x")).chain(["secrets.".to_owned()]).collect();
        let mut objects: Vec<_> =
            names.iter().map(|name| (DEFINITIONS, "CustomResourceDefinition", "", name.as_str())).collect();
        let valid: Vec<_> = (0..1_000).map(|n| format!("p{n}.example.test")).collect();
        objects.extend(valid.iter().map(|name| (DEFINITIONS, "CustomResourceDefinition", "", name.as_str())));
        let blocked = manifest(&objects, |manifest| {
            manifest["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            manifest["status"]["lastOperation"] = json!({"operation": "waiting for module crs deletion: x"});
        });
        let watches = module_watches(std::iter::once(facts(&blocked)), &Memories::default());
        assert_eq!(watches.len(), MAX_WATCHES);
        assert!(watches.iter().all(|watch| watch.check().is_ok()));
    }
}
