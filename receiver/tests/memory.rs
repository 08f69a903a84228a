//! Memory per runtime of the caches that hold one object for each, counted by the allocator. In a binary of its own, because
//! other tests would allocate at the same time.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic, in its helpers too")]

use std::{alloc::System, sync::Arc};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use kube::{
    Resource,
    core::DeserializeGuard,
    runtime::{
        reflector::{self, Lookup, Store},
        watcher::Event,
    },
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use tidewatch_api::{
    Kyma, Manifest,
    facts::RestDigest,
    key::ManifestKey,
    names::{KUBECONFIG_KEY, annotation, label},
};
use tidewatch_cluster::runtime_access::{AccessSecret, ListedSecret, Metrics, RuntimeAccess, Settings};
use tidewatch_fleet::{
    CommonKymaParts, CommonParts,
    stores::{
        kymas::CachedKyma,
        manifests::{CachedManifest, Manifests},
        unread::drop_unread,
    },
};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Objects of each kind: seven eighths of a power of two, at which hash tables are full.
const OBJECTS: usize = 896;
/// Characters of a token of a service account.
const TOKEN: usize = 900;
/// Limit of the bytes that a Kyma with so many modules needs. It needs about 3,400 without modules, and 630 more for
/// each; the unread parts of its status would add 180, and 580 for each module. A reduced one has no part of a module.
const KYMA: [(usize, usize); 2] = [(0, 3_480), (3, 5_400)];
/// Limit of the bytes that a reduced Kyma needs, with any number of modules. It needs about 1,090.
const REDUCED_KYMA: usize = 1_150;
/// Limits of the bytes that a whole and a reduced access Secret and its access need. They need about 2,070 and 660. The text of a
/// kubeconfig alone has 2,000.
const SECRET: [usize; 2] = [2_150, 700];

/// Limit of the bytes that the index of the Manifests needs for each, if a Kyma has this number of them.
const INDEX: (usize, usize) = (8, 300);
/// Limits of the bytes that a whole and a reduced Manifest need, with their parts of what they share. They need about 3,350 and 480.
const MANIFEST: [usize; 2] = [3_450, 520];

fn id(n: usize) -> String {
    format!("f1c2d3e4-0000-4000-8000-{n:012}")
}

/// Metadata of an object of KCP.
fn metadata(n: usize, name: &str, labels: &Value) -> Value {
    json!({"name": name, "namespace": "kcp-system", "uid": id(n), "resourceVersion": (1_000_000 + n).to_string(),
        "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z", "labels": labels})
}

/// A reconciled Kyma with so many modules, as a list returns it.
fn kyma(n: usize, modules: usize) -> String {
    let tracked = |kind: &str, namespace: &str, name: &str| {
        json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": kind,
            "metadata": {"name": name, "namespace": namespace, "generation": 1}})
    };
    let module = |m: usize| {
        let name = format!("module-{m}");
        let component = format!("kyma-project.io/module/module-{m}");
        json!({"name": name, "state": "Ready", "channel": "regular", "version": "1.2.3", "fqdn": component,
            "ocmComponentName": component, "manifest": tracked("Manifest", "kcp-system", &format!("{}-{name}-1a2b3c", id(n))),
            "resource": tracked("Sample", "kyma-system", "default"),
            "template": tracked("ModuleTemplate", "kyma-system", &format!("{name}-1.2.3"))})
    };
    let condition = |kind: &str, message: &str| {
        json!({"type": kind, "status": "True", "reason": "Ready", "message": message, "observedGeneration": 1,
            "lastTransitionTime": "2026-01-01T00:00:00Z"})
    };
    let selected: Vec<_> = (0..modules).map(|m| json!({"name": format!("module-{m}"), "managed": true})).collect();
    let spec = json!({"channel": "regular", "modules": selected});
    let mut metadata = metadata(n, &id(n), &json!({label::RUNTIME_ID: id(n), label::INSTANCE_ID: id(n)}));
    metadata["finalizers"] = json!(["operator.kyma-project.io/Kyma"]);
    metadata["annotations"] = json!({annotation::INPUTS: "0123456789abcdef.0123456789abcdef",
        annotation::ACCEPTED_SPEC: spec.to_string(), annotation::SKR_DOMAIN: format!("{n}.kyma.example.com")});
    let status = json!({"state": "Ready", "activeChannel": "regular",
    "lastOperation": {"operation": "kyma is ready", "lastUpdateTime": "2026-01-01T00:00:00Z"},
    "modules": (0..modules).map(module).collect::<Vec<_>>(),
    "conditions": [
        condition("CRDsSync", "CRDs are synchronized to the SKR"),
        condition("EventPath", "events arrive: the agent's canary comes through, and every watch stands"),
        condition("ModuleCatalog", "module templates are synchronized"),
        condition("Modules", "all modules are in ready state"),
        condition("RuntimeAccess", "the API server of the runtime cluster responds"),
        condition("SKRWebhook", "the agent is installed, and its event path was proven"),
    ]});
    json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma", "metadata": metadata, "spec": spec,
        "status": status})
    .to_string()
}

/// An access Secret with a CA and a token.
fn secret(n: usize) -> String {
    let key = rcgen::KeyPair::generate().unwrap();
    let ca = rcgen::CertificateParams::new(vec!["runtime".to_owned()]).unwrap().self_signed(&key).unwrap();
    let kubeconfig = format!(
        "clusters: [{{name: a, cluster: {{server: 'https://api.{n}.example.com', certificate-authority-data: {}}}}}]\n\
         users: [{{name: b, user: {{token: {}}}}}]\ncontexts: [{{name: c, context: {{cluster: a, user: b}}}}]\n",
        STANDARD.encode(ca.pem()),
        "t".repeat(TOKEN)
    );
    let metadata = metadata(n, &format!("kubeconfig-{}", id(n)), &json!({label::KYMA_NAME: id(n)}));
    json!({"metadata": metadata, "type": "Opaque", "data": {KUBECONFIG_KEY: STANDARD.encode(kubeconfig)}}).to_string()
}

/// A Manifest of a Kyma that has `INDEX.0` of them.
fn manifest(n: usize) -> String {
    let kyma = id(n / INDEX.0);
    let mut metadata = metadata(n, &format!("{kyma}-module-{n}-1a2b3c"), &json!({label::KYMA_NAME: kyma}));
    metadata["ownerReferences"] =
        json!([{"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma", "name": kyma, "uid": kyma}]);
    json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest", "metadata": metadata,
        "spec": {"remote": true, "install": {"name": "raw-manifest", "source": {}}}})
    .to_string()
}

/// A Manifest of a module that is installed.
fn installed(n: usize) -> String {
    let mut object: Value = serde_json::from_str(&manifest(n)).unwrap();
    object["metadata"]["labels"][label::MODULE_NAME] = json!("module");
    object["metadata"]["labels"][label::CHANNEL] = json!("regular");
    object["metadata"]["labels"][label::MANAGED_BY] = json!("kyma");
    object["metadata"]["finalizers"] = json!(["declarative.kyma-project.io/finalizer", "label-removal-finalizer"]);
    object["metadata"]["annotations"] = json!({annotation::SYNC_OCI_REF: format!("sha256:{}", "1".repeat(64)),
        "operator.kyma-project.io/fqdn": "kyma-project.io/module/module"});
    object["spec"] = json!({"remote": true, "version": "1.2.3", "customResourcePolicy": "CreateAndDelete",
        "install": {"name": "raw-manifest", "source": {"name": "kyma-project.io/module/module", "type": "oci-ref",
            "repo": "registry.example.com/modules/component-descriptors", "ref": format!("sha256:{}", "1".repeat(64))}},
        "resource": {"apiVersion": "operator.kyma-project.io/v1alpha1", "kind": "Module", "metadata": {"name": "default"}},
        "manager": {"group": "apps", "version": "v1", "kind": "Deployment", "name": "module", "namespace": "kyma-system"}});
    let condition = |kind: &str| {
        json!({"type": kind, "status": "True", "reason": "Ready", "message": "installation is ready and resources can be used",
            "observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"})
    };
    let synced = |n: usize| json!({"group": "apps", "version": "v1", "kind": "Deployment", "name": format!("module-{n}"), "namespace": "kyma-system"});
    object["status"] = json!({"state": "Ready", "synced": (0..12).map(synced).collect::<Vec<_>>(),
        "lastOperation": {"operation": "installation is ready", "lastUpdateTime": "2026-01-01T00:00:00Z"},
        "conditions": [condition("Resources"), condition("Installation"), condition("ModuleCR")]});
    object.to_string()
}

/// Form in which the cache has a Manifest.
fn compact(parts: &mut CommonParts, mut manifest: Manifest, is_reduced: bool) -> CachedManifest {
    parts.share(&mut manifest);
    if !is_reduced {
        return manifest.into();
    }
    let metadata = &manifest.metadata;
    let key = ManifestKey::new(metadata.namespace.clone().unwrap(), metadata.name.clone().unwrap());
    CachedManifest::Reduced(Arc::new(parts.reduce(key, &manifest).unwrap()))
}

/// Fills a cache as a watch does.
fn cache<K, S>(objects: &[String], mut compact: impl FnMut(K) -> S) -> Store<S>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + 'static,
    S: Lookup<DynamicType = ()> + Clone + 'static,
{
    let (store, mut writer) = reflector::store();
    for object in objects {
        let object = serde_json::from_str::<DeserializeGuard<K>>(object).unwrap().0.unwrap();
        writer.apply_watcher_event(&Event::Apply(compact(object)));
    }
    store
}

/// Form in which the cache has a Kyma.
fn compact_kyma(parts: &mut CommonKymaParts, mut kyma: Kyma, is_reduced: bool) -> CachedKyma {
    drop_unread(&mut kyma);
    match is_reduced {
        true => CachedKyma::Reduced(Arc::new(parts.reduce(&kyma, RestDigest::default()))),
        false => kyma.into(),
    }
}

/// Bytes per object that were allocated since, and not freed.
fn held(region: &Region<'_, System>) -> usize {
    let stats = region.change();
    (stats.bytes_allocated - stats.bytes_deallocated) / OBJECTS
}

#[test]
fn object_of_each_runtime_is_held_once_and_without_unread_parts() {
    for (modules, limit) in KYMA {
        let objects: Vec<_> = (0..OBJECTS).map(|n| kyma(n, modules)).collect();
        for (is_reduced, limit) in [(false, limit), (true, REDUCED_KYMA)] {
            let mut parts = CommonKymaParts::default();
            let region = Region::new(ALLOCATOR);
            let kymas = cache(&objects, |kyma: Kyma| compact_kyma(&mut parts, kyma, is_reduced));
            let bytes = held(&region);
            println!("a Kyma with {modules} modules, reduced: {is_reduced}, needs {bytes} bytes");
            assert!(bytes <= limit, "a Kyma with {modules} modules, reduced: {is_reduced}, needs {bytes} bytes");
            assert_eq!(kymas.len(), OBJECTS);
        }
    }
    let objects: Vec<_> = (0..OBJECTS).map(secret).collect();
    for (is_reduced, limit) in [false, true].into_iter().zip(SECRET) {
        let access = RuntimeAccess::new(Settings::default(), Metrics::default());
        let region = Region::new(ALLOCATOR);
        let secrets = cache(&objects, |listed: ListedSecret| {
            let secret = AccessSecret::from(listed);
            if is_reduced { secret.reduced() } else { secret }
        });
        for secret in secrets.state() {
            access.set_secrets(&secret.kyma().unwrap().clone(), vec![secret]);
        }
        let bytes = held(&region);
        assert!(bytes <= limit, "an access Secret, reduced: {is_reduced}, needs {bytes} bytes");
    }
    let objects: Vec<_> = (0..OBJECTS).map(manifest).collect();
    let cached = cache::<Manifest, _>(&objects, CachedManifest::from);
    let region = Region::new(ALLOCATOR);
    let manifests = Manifests::from(cached.clone());
    for manifest in cached.state() {
        manifests.apply(&manifest);
    }
    let bytes = held(&region);
    assert!(bytes <= INDEX.1, "the index needs {bytes} bytes for a Manifest");
    let objects: Vec<_> = (0..OBJECTS).map(installed).collect();
    for (is_reduced, limit) in [false, true].into_iter().zip(MANIFEST) {
        let mut parts = CommonParts::default();
        let region = Region::new(ALLOCATOR);
        let manifests = cache(&objects, |manifest: Manifest| compact(&mut parts, manifest, is_reduced));
        let bytes = held(&region);
        assert!(bytes <= limit, "a Manifest, reduced: {is_reduced}, needs {bytes} bytes");
        assert_eq!(manifests.len(), OBJECTS);
    }
}
