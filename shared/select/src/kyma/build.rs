//! Builds the desired Manifests of a Kyma, one per resolved module. Pure.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource as _, ResourceExt};
use serde_json::{Map, Value, json};
use tidewatch_api::{
    CustomResourcePolicy, Kyma, Manifest, ModuleTemplate,
    labels::is_true,
    names::{GROUP, SKR_NAMESPACE, VERSION, annotation, field_manager, label},
};
use tidewatch_cluster::{
    kinds::is_of_kubernetes,
    object::{self, Ownership, Repair, Shape, Target},
};
use tidewatch_engine::{CreatedDefault, finalizers};

use super::{
    layer::ModuleLayer,
    lookup::Resolved,
    validate::{Follow, WantedModule},
};

/// Exclusive upper bound of the length of a name.
const NAME_LIMIT: usize = 63;
/// Custom kinds that a module works with at most: before a removal the resources of each are listed.
const MAX_ASSOCIATED: usize = 50;

/// A desired Manifest.
#[derive(Clone, Debug, PartialEq)]
pub struct Desired {
    /// Name of the Manifest.
    pub name: String,
    /// False for an unmanaged module.
    pub managed: bool,
    /// Body of the server-side apply.
    pub body: Value,
}

/// What a module installs is ours as a whole, and so are the labels of its channel and of mandatory modules.
const SHAPE: Shape = Shape {
    owns_label: |name| name == label::CHANNEL || name == label::MANDATORY_MODULE,
    ..Shape::new(Ownership::Parts(&["/spec/resource", "/spec/manager", "/spec/localizedImages"]))
};

impl Desired {
    /// Returns true if a Manifest differs from the desired one, or cannot be compared.
    pub(crate) fn differs_from(&self, manifest: &Manifest) -> bool {
        object::erase(manifest).map_or(true, |live| self.target().compare(&live, None) != Repair::None)
    }

    /// Target of the write in the control plane.
    pub fn target(&self) -> Target<'_> {
        let name = &self.name;
        let manager = field_manager::LIFECYCLE;
        Target { name, manager, shape: &SHAPE, desired: &self.body, budget: None }
    }
}

/// Builds the Manifest of one module.
pub fn manifest(kyma: &Kyma, module: &WantedModule, resolved: &Resolved, layer: &ModuleLayer) -> Desired {
    let name = name_of(kyma, module, resolved);
    let template = &resolved.template;
    let mut spec = json!({
        "customResourcePolicy": module.policy,
        "remote": true,
        "version": resolved.version,
        "install": layer.install,
    });
    let resource = resource(template, &name);
    let manages_default = resource.is_some() && module.policy == CustomResourcePolicy::CreateAndDelete;
    if let Some(resource) = resource {
        spec["resource"] = resource;
    }
    if !layer.images.is_empty() {
        spec["localizedImages"] = json!(layer.images);
    }
    let manager = template.spec.manager.as_ref().and_then(|manager| serde_json::to_value(manager).ok());
    if let Some(manager) = manager {
        spec["manager"] = manager;
    }
    let owner = kyma.controller_owner_ref(&());
    let owner = owner.map(|owner| OwnerReference { block_owner_deletion: Some(true), ..owner });
    let metadata = json!({
        "name": name,
        "namespace": kyma.namespace().unwrap_or_default(),
        "labels": labels(kyma, module, resolved),
        "annotations": annotations(module, resolved),
        "ownerReferences": Vec::from_iter(owner),
        // Part of the request that creates the Manifest: a deletion that follows at once finds them.
        "finalizers": Vec::from_iter(finalizers(manages_default)),
    });
    let body =
        json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": "Manifest", "metadata": metadata, "spec": spec});
    Desired { name, managed: module.managed, body }
}

/// Records the default module CR that was created if the desired Manifest names another one: it stays, and goes with the
/// module.
pub(crate) fn record_default(desired: &mut Desired, manifest: &Manifest) {
    if let Some(created) = CreatedDefault::beside(manifest, desired.body["spec"].get("resource")) {
        desired.body["metadata"]["annotations"][annotation::CREATED_DEFAULT] = created.to_text().into();
    }
}

/// The desired Manifest with the default module CR and the manager that are installed.
pub(crate) fn as_installed(desired: &Desired, manifest: &Manifest) -> Desired {
    let mut kept = desired.clone();
    let manager = manifest.spec.manager.as_ref().and_then(|manager| serde_json::to_value(manager).ok());
    for (member, installed) in [("resource", manifest.spec.resource().cloned()), ("manager", manager)] {
        match (installed, kept.body["spec"].as_object_mut()) {
            (Some(installed), Some(spec)) => drop(spec.insert(member.to_owned(), installed)),
            (None, Some(spec)) => drop(spec.remove(member)),
            (_, None) => {}
        }
    }
    if let Some(annotations) = kept.body["metadata"]["annotations"].as_object_mut() {
        annotations.remove(annotation::CREATED_DEFAULT);
    }
    record_default(&mut kept, manifest);
    let spec = &kept.body["spec"];
    let is_managed = spec["customResourcePolicy"] == json!(CustomResourcePolicy::CreateAndDelete);
    let manages_default = is_managed && spec.get("resource").is_some();
    kept.body["metadata"]["finalizers"] = finalizers(manages_default).collect();
    kept
}

/// Name of the Manifest of a module.
pub fn name_of(kyma: &Kyma, module: &WantedModule, resolved: &Resolved) -> String {
    name(&kyma.name_any(), &resolved.component, &module.name)
}

/// `<kyma>-<last segment of the component's name>-<hash>`, truncated to a valid name; the hash distinguishes modules
/// whose components share the last segment.
pub fn name(kyma: &str, component: &str, module: &str) -> String {
    let last = component.rsplit('/').next().unwrap_or(component);
    let mut name = format!("{kyma}-{last}-{}", fnv1([component.as_bytes(), module.as_bytes()].iter().copied()));
    if name.len() >= NAME_LIMIT {
        let cut = (0..NAME_LIMIT).rev().find(|at| name.is_char_boundary(*at)).unwrap_or(0);
        name.truncate(cut);
        name.truncate(name.trim_end_matches('-').len());
    }
    name
}

/// 32-bit FNV-1 (multiply, then xor) as lifecycle-manager computes it; not used for security.
fn fnv1<'a>(parts: impl Iterator<Item = &'a [u8]>) -> u32 {
    parts.flatten().fold(0x811c_9dc5, |hash: u32, byte| hash.wrapping_mul(0x0100_0193) ^ u32::from(*byte))
}

fn labels(kyma: &Kyma, module: &WantedModule, resolved: &Resolved) -> Value {
    let mut labels = json!({
        label::MANAGED_BY: label::MANAGED_BY_KCP,
        label::KYMA_NAME: kyma.name_any(),
        label::MODULE_NAME: module.name,
    });
    if module.follows == Ok(Follow::Mandatory) {
        labels[label::MANDATORY_MODULE] = "true".into();
    }
    if is_true(Some(kyma.labels()), label::SKIP_RECONCILIATION) {
        // Manifests are built of such a Kyma only if the selector turns the label around.
        labels[label::SKIP_RECONCILIATION] = "true".into();
    }
    if let Some(channel) = &resolved.channel {
        labels[label::CHANNEL] = channel.as_str().into();
    }
    let theirs = resolved.template.labels();
    if !theirs.is_empty() {
        labels[label::CONTROLLER_NAME] = theirs.get(label::CONTROLLER_NAME).cloned().unwrap_or_default().into();
    }
    labels
}

fn annotations(module: &WantedModule, resolved: &Resolved) -> Value {
    let mut annotations =
        json!({annotation::FQDN: resolved.component, annotation::OCM_COMPONENT_NAME: resolved.component});
    if !module.managed {
        annotations[annotation::UNMANAGED] = "true".into();
    }
    if let Some(kinds) = associated(&resolved.template) {
        annotations[annotation::ASSOCIATED] = kinds.into();
    }
    annotations
}

/// Custom kinds with which a module works, as the Manifest names them; `None` without one. Objects of Kubernetes' own kinds
/// are in every runtime, and never the module's.
fn associated(template: &ModuleTemplate) -> Option<String> {
    let is_name = |text: &str| {
        !text.is_empty() && text.chars().all(|char| char.is_ascii_alphanumeric() || matches!(char, '-' | '.'))
    };
    let kinds = template.spec.associated_resources.iter().flatten();
    let custom = kinds.filter(|kind| {
        !is_of_kubernetes(&kind.group) && is_name(&kind.group) && is_name(&kind.kind) && !kind.kind.contains('.')
    });
    let names: BTreeSet<_> = custom.map(|kind| format!("{}.{}", kind.kind, kind.group)).collect();
    let names: Vec<_> = names.into_iter().take(MAX_ASSOCIATED).collect();
    (!names.is_empty()).then(|| names.join(","))
}

/// The default module CR with name and namespace.
fn resource(template: &ModuleTemplate, name: &str) -> Option<Value> {
    let mut data =
        template.spec.data.clone().filter(|data| data.as_object().is_some_and(|members| !members.is_empty()))?;
    if !data["metadata"].is_object() {
        data["metadata"] = Value::Object(Map::new());
    }
    for (member, default) in [("name", name), ("namespace", SKR_NAMESPACE)] {
        if data["metadata"][member].as_str().is_none_or(str::is_empty) {
            data["metadata"][member] = default.into();
        }
    }
    Some(data)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tidewatch_api::{CustomResourcePolicy as Policy, names::finalizer};

    use super::*;

    #[test]
    fn the_hash_is_fnv_1() {
        // Published test vectors of 32-bit FNV-1.
        for (input, hash) in [("", 0x811c_9dc5_u32), ("a", 0x050c_5d7e), ("foobar", 0x31f0_b262)] {
            assert_eq!(fnv1([input.as_bytes()].into_iter()), hash);
        }
        assert_eq!(fnv1([b"foo".as_slice(), b"bar"].into_iter()), 0x31f0_b262, "parts follow each other");
    }

    #[test]
    fn a_name_has_the_last_segment_and_fits() {
        let hash = fnv1([b"kyma-project.io/module/serverless".as_slice(), b"serverless"].into_iter());
        assert_eq!(name("k", "kyma-project.io/module/serverless", "serverless"), format!("k-serverless-{hash}"));
        let long = name(&"k".repeat(61), "x.io/module", "m");
        assert_eq!(long, "k".repeat(61), "cut to 62, less the dash at its end");
        assert_eq!(name(&"k".repeat(70), "x.io/module", "m").len(), 62);
        let prefix = format!("k-serverless-{hash}").len() - 1;
        let exact = name(&"k".repeat(62 - prefix), "kyma-project.io/module/serverless", "serverless");
        assert_eq!((exact.len(), exact.ends_with(&hash.to_string())), (62, true), "62 characters stay whole");
    }

    fn check(template: Value, managed: bool) -> Value {
        check_of(template, managed, Follow::Channel("fast".into()))
    }

    fn check_of(template: Value, managed: bool, follows: Follow) -> Value {
        let kyma = serde_json::from_value(json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": "k", "namespace": "kcp-system", "uid": "u-1"}, "spec": {"channel": "fast"}
        }))
        .unwrap();
        let channel = match &follows {
            Follow::Channel(channel) => Some(channel.clone()),
            Follow::Pin(_) | Follow::Mandatory => None,
        };
        let module = WantedModule { name: "keda".into(), follows: Ok(follows), managed, policy: Policy::Ignore };
        let template: ModuleTemplate = serde_json::from_value(template).unwrap();
        let resolved = Resolved {
            template: Arc::new(template),
            channel,
            meta: Default::default(),
            version: "1.2.3".into(),
            component: "kyma-project.io/module/keda".into(),
        };
        let source = json!({"repo": "registry.example/component-descriptors", "name": "kyma-project.io/module/keda",
            "ref": "sha256:abc", "type": "oci-dir"});
        manifest(&kyma, &module, &resolved, &ModuleLayer::new(&source, vec!["r.io/i:1".into()])).body
    }

    fn template(spec: Value) -> Value {
        let mut whole = json!({"moduleName": "keda", "version": "1.2.3", "descriptor": {}});
        for (key, value) in spec.as_object().unwrap() {
            whole[key] = value.clone();
        }
        json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate", "metadata": {"name": "keda-1.2.3"}, "spec": whole})
    }

    #[test]
    fn a_plain_module_is_installed_from_its_layer() {
        let body = check(template(json!({})), true);
        assert_eq!(
            body["metadata"]["labels"],
            json!({
                "operator.kyma-project.io/managed-by": "lifecycle-manager", "operator.kyma-project.io/kyma-name": "k",
                "operator.kyma-project.io/module-name": "keda", "operator.kyma-project.io/channel": "fast"
            })
        );
        assert_eq!(
            body["metadata"]["annotations"],
            json!({
                "operator.kyma-project.io/fqdn": "kyma-project.io/module/keda",
                "operator.kyma-project.io/ocm-component-name": "kyma-project.io/module/keda"
            })
        );
        assert_eq!(body["metadata"]["ownerReferences"][0]["uid"], "u-1");
        assert_eq!(body["metadata"]["finalizers"], json!(finalizer::MANIFEST[..2]));
        assert_eq!(
            body["spec"],
            json!({
                "customResourcePolicy": "Ignore", "remote": true, "version": "1.2.3",
                "install": {"name": "raw-manifest", "source": {
                    "repo": "registry.example/component-descriptors", "name": "kyma-project.io/module/keda", "ref": "sha256:abc", "type": "oci-dir"
                }},
                "localizedImages": ["r.io/i:1"]
            })
        );
    }

    #[test]
    fn a_mandatory_module_has_its_label_and_no_channel() {
        let mandatory = check_of(template(json!({})), true, Follow::Mandatory);
        let selected = check(template(json!({})), true);
        let labels = json!({
            "operator.kyma-project.io/managed-by": "lifecycle-manager", "operator.kyma-project.io/kyma-name": "k",
            "operator.kyma-project.io/module-name": "keda", "operator.kyma-project.io/mandatory-module": "true"
        });
        assert_eq!(mandatory["metadata"]["labels"], labels);
        for member in ["name", "annotations", "ownerReferences", "finalizers"] {
            assert_eq!(mandatory["metadata"][member], selected["metadata"][member], "{member}");
        }
        assert_eq!(mandatory["spec"], selected["spec"]);
    }

    #[test]
    fn default_cr_that_was_created_is_recorded_when_a_version_renames_it_and_not_before() {
        let body = |name: &str| {
            let data = json!({"apiVersion": "a/v1", "kind": "Keda", "metadata": {"name": name}});
            let body = check(template(json!({"data": data})), true);
            Desired { name: "n".into(), managed: true, body }
        };
        let condition = json!({"type": "ModuleCR", "status": "True", "reason": "R", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let mut installed = body("default").body;
        installed["status"] = json!({"state": "Ready", "conditions": [condition]});
        let installed: Manifest = serde_json::from_value(installed).unwrap();
        let recorded =
            |desired: &Desired| desired.body["metadata"]["annotations"].get(annotation::CREATED_DEFAULT).cloned();
        for (name, is_recorded) in [("default", false), ("other", true)] {
            let mut desired = body(name);
            record_default(&mut desired, &installed);
            assert_eq!(recorded(&desired).is_some(), is_recorded, "{name}");
            assert_eq!(recorded(&as_installed(&desired, &installed)), None, "the installed version names it");
        }
    }

    #[test]
    fn manifest_gets_the_skip_label_of_its_kyma() {
        let module =
            WantedModule { name: "keda".into(), follows: Ok(Follow::Mandatory), managed: true, policy: Policy::Ignore };
        let resolved = Resolved {
            template: Arc::new(serde_json::from_value(template(json!({}))).unwrap()),
            channel: None,
            meta: Default::default(),
            version: "1.2.3".into(),
            component: "kyma-project.io/module/keda".into(),
        };
        let layer = ModuleLayer::new(&json!({}), Vec::new());
        for (value, expected) in [("true", json!("true")), ("True", json!("true")), ("false", Value::Null)] {
            let kyma = serde_json::from_value(json!({
                "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma", "spec": {"channel": "fast"},
                "metadata": {"name": "k", "namespace": "kcp-system", "labels": {label::SKIP_RECONCILIATION: value}}
            }))
            .unwrap();
            let body = manifest(&kyma, &module, &resolved, &layer).body;
            assert_eq!(body["metadata"]["labels"][label::SKIP_RECONCILIATION], expected, "{value}");
        }
        assert!(!(SHAPE.owns_label)(label::SKIP_RECONCILIATION), "a label of the user stays");
    }

    #[test]
    fn custom_kinds_that_the_template_associates_go_along() {
        let named = |kinds: Value| {
            let body = check(template(json!({"associatedResources": kinds})), true);
            body["metadata"]["annotations"][annotation::ASSOCIATED].clone()
        };
        let kind = |group: &str, kind: &str| json!({"group": group, "version": "v1", "kind": kind});
        let all = json!([
            kind("serverless.kyma-project.io", "Function"),
            kind("", "Secret"),
            kind("apps", "Deployment"),
            kind("networking.istio.io", "VirtualService"),
            kind("serverless.kyma-project.io", "Function"),
            kind("example.test", "A,B"),
        ]);
        let expected = "Function.serverless.kyma-project.io,VirtualService.networking.istio.io";
        assert_eq!(named(all), json!(expected));
        assert_eq!(named(json!([kind("", "Secret")])), Value::Null);
        let many: Vec<_> = (0..MAX_ASSOCIATED + 5).map(|n| kind("example.test", &format!("K{n}"))).collect();
        assert_eq!(named(many.into()).as_str().unwrap().split(',').count(), MAX_ASSOCIATED);
    }

    #[test]
    fn default_cr_manager_and_labels_go_along() {
        let mut template = template(json!({
            "data": {"apiVersion": "a/v1", "kind": "Keda", "metadata": {"name": "default"}, "spec": {"x": 1}},
            "manager": {"group": "apps", "version": "v1", "kind": "Deployment", "name": "m"}
        }));
        template["metadata"]["labels"] = json!({"x": "y"});
        let body = check(template, false);
        assert_eq!(body["metadata"]["labels"]["operator.kyma-project.io/controller-name"], "");
        assert_eq!(body["metadata"]["annotations"]["operator.kyma-project.io/is-unmanaged"], "true");
        let spec = &body["spec"];
        assert_eq!(spec["resource"]["metadata"], json!({"name": "default", "namespace": "kyma-system"}));
        assert_eq!(spec["manager"]["name"], "m");
    }
}
