//! Objects of a module that exist in a runtime cluster, as `status.synced` of the Manifest lists them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::LazyLock,
};

use kube::{ResourceExt, api::PartialObjectMeta};
use serde_json::Value;
use tidewatch_api::{Manifest, Resource, crds, names::SKR_NAMESPACE};
use tidewatch_cluster::kinds::Kind;
use tidewatch_kit::foreign_text::{MAX_NAME_BYTES, line};

/// API group of the CRDs.
pub(super) const DEFINITIONS: &str = "apiextensions.k8s.io";
/// Namespaces that belong to no module.
const COMMON_NAMESPACES: [&str; 5] = [SKR_NAMESPACE, "default", "kube-node-lease", "kube-public", "kube-system"];

/// Identity of an object: group, kind, namespace and name. The API version does not belong to it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    /// API group; empty for the core group.
    pub group: String,
    /// Kind.
    pub kind: String,
    /// Namespace; empty for cluster-scoped kinds.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl ObjectKey {
    /// The identity of an object by its parts.
    pub fn new(group: &str, kind: &str, namespace: &str, name: &str) -> Self {
        let [group, kind, namespace, name] = [group, kind, namespace, name].map(str::to_owned);
        Self { group, kind, namespace, name }
    }

    /// The identity of an object with `apiVersion`, `kind` and `metadata.name`.
    pub fn of(object: &Value) -> Self {
        fn text(value: &Value) -> &str {
            value.as_str().unwrap_or_default()
        }
        let (group, _) = split_api_version(text(&object["apiVersion"]));
        let metadata = &object["metadata"];
        Self::new(group, text(&object["kind"]), text(&metadata["namespace"]), text(&metadata["name"]))
    }

    /// The identity of an object that an inventory lists.
    pub fn recorded(object: &Resource) -> Self {
        Self::new(&object.group, &object.kind, &object.namespace, &object.name)
    }

    /// The identity of an object in a list of its kind. Its names are bounded, because the API server may be anybody's.
    pub(super) fn listed(kind: &Kind, object: &PartialObjectMeta) -> Self {
        let name = |text: &str| line(text, MAX_NAME_BYTES);
        let namespace = name(&object.namespace().unwrap_or_default());
        Self::new(&kind.group, &kind.kind, &namespace, &name(&object.name_any()))
    }

    /// True for a CustomResourceDefinition.
    pub fn is_definition(&self) -> bool {
        self.group == DEFINITIONS && self.kind == "CustomResourceDefinition"
    }

    /// True for a ServiceAccount.
    pub fn is_service_account(&self) -> bool {
        self.is_core("ServiceAccount")
    }

    /// True for a Secret.
    pub fn is_secret(&self) -> bool {
        self.is_core("Secret")
    }

    /// True for a configuration of admission webhooks.
    pub fn is_webhook_configuration(&self) -> bool {
        self.group == "admissionregistration.k8s.io" && self.kind.ends_with("WebhookConfiguration")
    }

    /// True for a Pod.
    pub fn is_pod(&self) -> bool {
        self.is_core("Pod")
    }

    /// True for a CRD of the API group of another object. The name of a CRD is `<plural>.<group>`.
    pub fn defines_group_of(&self, other: &Self) -> bool {
        self.is_definition() && self.name.split_once('.').is_some_and(|(_, group)| group == other.group)
    }

    /// True for an object that is never a module's own: its removal would end all modules, or the runtime.
    pub fn is_common(&self) -> bool {
        self.is_common_namespace() || self.is_of_product()
    }

    /// True for the namespace of all modules, and for those that every cluster has.
    pub fn is_common_namespace(&self) -> bool {
        self.is_namespace() && COMMON_NAMESPACES.contains(&self.name.as_str())
    }

    /// True for a CRD of Kyma itself, which is in every cluster.
    pub fn is_of_product(&self) -> bool {
        static NAMES: LazyLock<BTreeSet<String>> =
            LazyLock::new(|| crds::runtime_crds().iter().map(ResourceExt::name_any).collect());
        self.is_definition() && NAMES.contains(&self.name)
    }

    /// True for a Namespace or CRD with which another object goes and comes.
    pub fn holds(&self, other: &Self) -> bool {
        self.defines_group_of(other) || (self.is_namespace() && self.name == other.namespace)
    }

    fn is_namespace(&self) -> bool {
        self.is_core("Namespace")
    }

    fn is_core(&self, kind: &str) -> bool {
        self.group.is_empty() && self.kind == kind
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, namespace, name, .. } = self;
        let slash = if namespace.is_empty() { "" } else { "/" };
        write!(f, "{kind} {namespace}{slash}{name}")
    }
}

/// Group and version of an `apiVersion`.
pub(super) fn split_api_version(api_version: &str) -> (&str, &str) {
    api_version.split_once('/').unwrap_or(("", api_version))
}

/// The inventory of one Manifest. Grows before an object is written, and shrinks after its deletion was observed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inventory(BTreeMap<ObjectKey, Resource>);

impl Inventory {
    /// Reads `status.synced`. Of several entries of one object with different API versions, the last one counts.
    pub fn read(synced: &[Resource]) -> Self {
        Self(synced.iter().map(|it| (ObjectKey::recorded(it), it.clone())).collect())
    }

    /// `status.synced`, sorted.
    pub(crate) fn write(&self) -> Vec<Resource> {
        self.0.values().cloned().collect()
    }

    /// Records an object that is about to be written. Returns true if that changes the inventory.
    pub(crate) fn grow(&mut self, key: &ObjectKey, version: &str) -> bool {
        if self.0.get(key).is_some_and(|entry| entry.version == version) {
            return false;
        }
        let entry = self.0.entry(key.clone()).or_insert_with(|| Resource {
            group: key.group.clone(),
            kind: key.kind.clone(),
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            ..Resource::default()
        });
        version.clone_into(&mut entry.version);
        true
    }

    /// Removes an object that no longer exists.
    pub(crate) fn shrink(&mut self, key: &ObjectKey) -> bool {
        self.0.remove(key).is_some()
    }

    /// Returns true if the inventory lists no object.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if the inventory lists the object.
    pub fn contains(&self, key: &ObjectKey) -> bool {
        self.0.contains_key(key)
    }

    /// The objects.
    pub fn keys(&self) -> impl Iterator<Item = &ObjectKey> {
        self.0.keys()
    }

    /// Objects with their API versions.
    pub fn entries(&self) -> impl Iterator<Item = (&ObjectKey, &str)> {
        self.0.iter().map(|(key, entry)| (key, entry.version.as_str()))
    }
}

/// Value of the owned-by annotation of a Manifest's objects.
pub(super) fn owner_of(manifest: &Manifest) -> String {
    format!("{}/{}", manifest.namespace().unwrap_or_default(), manifest.name_any())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn key(name: &str) -> ObjectKey {
        ObjectKey::of(
            &json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "namespace": "ns"}}),
        )
    }

    fn entries(inventory: &Inventory) -> Vec<(String, String)> {
        inventory.entries().map(|(key, version)| (key.to_string(), version.to_owned())).collect()
    }

    #[test]
    fn inventory_grows_by_new_objects_and_versions_and_shrinks_once() {
        let mut inventory = Inventory::default();
        assert!(inventory.grow(&key("a"), "v1") && !inventory.grow(&key("a"), "v1"));
        assert!(inventory.grow(&key("b"), "v1") && inventory.grow(&key("a"), "v2"));
        let expected = [("Deployment ns/a", "v2"), ("Deployment ns/b", "v1")];
        assert_eq!(entries(&inventory), expected.map(|(key, version)| (key.to_owned(), version.to_owned())));
        assert!(inventory.shrink(&key("a")) && !inventory.shrink(&key("a")));
        assert!(inventory.contains(&key("b")) && !inventory.contains(&key("a")));
    }

    #[test]
    fn status_is_read_and_written_without_loss() {
        let synced = json!([
            {"group": "", "version": "v1", "kind": "ConfigMap", "name": "m", "namespace": "ns"},
            {"group": "apps", "version": "v1", "kind": "Deployment", "name": "d", "namespace": "ns"},
            {"group": "rbac.authorization.k8s.io", "version": "v1", "kind": "ClusterRole", "name": "r", "namespace": ""}
        ]);
        let resources: Vec<Resource> = serde_json::from_value(synced).unwrap();
        assert_eq!(Inventory::read(&resources).write(), resources);
        let newer = Resource { version: "v2".into(), ..resources[1].clone() };
        let both = Inventory::read(&[resources[1].clone(), newer.clone()]);
        assert_eq!(both.write(), [newer], "one object, whatever its version");
    }

    #[test]
    fn key_of_a_core_object_has_no_group() {
        let key = ObjectKey::of(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SKR_NAMESPACE}}));
        assert_eq!((&*key.group, &*key.to_string()), ("", &*format!("Namespace {SKR_NAMESPACE}")));
        assert!(key.is_common() && !key.is_definition());
        let other = ObjectKey { name: "other".into(), ..key.clone() };
        assert!(!other.is_common());
        assert_eq!(ObjectKey::of(&json!({})).to_string(), " ", "a malformed object is no panic");
    }

    #[test]
    fn objects_that_every_runtime_needs_are_common() {
        let of = |api_version: &str, kind: &str, name: &str| {
            ObjectKey::of(&json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": name}}))
        };
        let definition = |name: &str| of("apiextensions.k8s.io/v1", "CustomResourceDefinition", name);
        for name in ["kymas", "moduletemplates", "modulereleasemetas"] {
            assert!(definition(&format!("{name}.operator.kyma-project.io")).is_common(), "{name}");
        }
        assert!(!definition("samples.operator.kyma-project.io").is_common());
        assert!(!of("v1", "ConfigMap", "kymas.operator.kyma-project.io").is_common());
        for name in ["kyma-system", "default", "kube-node-lease", "kube-public", "kube-system"] {
            assert!(of("v1", "Namespace", name).is_common() && !of("v1", "ConfigMap", name).is_common(), "{name}");
        }
    }

    #[test]
    fn objects_go_with_their_namespace_and_with_the_crd_of_their_kind() {
        let of = |api_version: &str, kind: &str, namespace: &str, name: &str| {
            let metadata = json!({"name": name, "namespace": namespace});
            ObjectKey::of(&json!({"apiVersion": api_version, "kind": kind, "metadata": metadata}))
        };
        let namespace = of("v1", "Namespace", "", "ns");
        let definition = of("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "samples.a.test");
        let secret = of("v1", "Secret", "ns", "s");
        let sample = of("a.test/v1", "Sample", "other", "s");
        assert!(namespace.holds(&secret) && !namespace.holds(&sample) && !namespace.holds(&namespace));
        assert!(definition.holds(&sample) && !definition.holds(&secret) && !definition.holds(&definition));
        assert!(!secret.holds(&sample) && !sample.holds(&secret));
    }
}
