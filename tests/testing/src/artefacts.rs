//! Read-only OCI registry over plain HTTP that has every version of every component, those of `tests/modules`, the shapes, the
//! published manifests and the large modules included: an artefact is made when its tag is read first. Real registries are used
//! where the registry itself is under test.

use std::{fs, net::Ipv4Addr};

use serde_json::{Value, json};
use tidewatch_api::names::annotation;
use tidewatch_oci::testing::{FakeRegistry, digest_of};
use tokio::task::JoinSet;

use crate::modules::{self, large, published, shapes};

const DESCRIPTOR: &str = "application/vnd.ocm.software.component-descriptor.v2+yaml+tar";

/// The running registry; ends when dropped.
pub struct ArtefactServer {
    registry: FakeRegistry,
    port: u16,
    _serving: JoinSet<()>,
}

impl ArtefactServer {
    /// Listens on a free port of the loopback interface.
    pub async fn start() -> Self {
        let registry = FakeRegistry::making(make);
        let (port, serving) = registry.listen(None).await;
        Self { registry, port, _serving: serving }
    }

    /// Value of the receiver's flag for the registry's host.
    pub fn host(&self) -> String {
        format!("http://{}:{}", Ipv4Addr::LOCALHOST, self.port)
    }

    /// Number of requests so far.
    pub fn requests(&self) -> usize {
        self.registry.count("")
    }
}

/// Digest of the layer with the resources of a version of a component.
pub fn layer_digest(component: &str, version: &str) -> String {
    digest_of(&layer(component, version))
}

/// Makes the artefact of a version, if the path is that of its tag.
fn make(registry: &FakeRegistry, path: &str) {
    let tag = path.strip_prefix("/v2/").and_then(|path| path.split_once("/manifests/"));
    let Some((repository, version)) = tag.filter(|(_, tag)| !tag.starts_with("sha256:")) else { return };
    let Some(component) = repository.strip_prefix("component-descriptors/") else { return };
    let blob = |media_type: &str, content: &[u8]| json!({"mediaType": media_type, "digest": registry.blob(repository, content), "size": content.len()});
    let layer = blob("application/x-tar", &layer(component, version));
    let text = component_descriptor(component, version, &layer["digest"]).to_string();
    let descriptor = blob(DESCRIPTOR, &tar("component-descriptor.yaml", text.as_bytes()));
    let config = json!({"componentDescriptorLayer": descriptor}).to_string();
    registry.configured(repository, version, &config, &[descriptor, layer]);
}

/// The descriptor, with all members that the schema v2 requires.
fn component_descriptor(component: &str, version: &str, layer: &Value) -> Value {
    let module = component.rsplit('/').next().unwrap_or(component);
    let access = json!({"type": "localBlob", "localReference": layer, "mediaType": "application/x-tar"});
    let image = format!("example.test/{module}:{version}");
    json!({
        "meta": {"schemaVersion": "v2"},
        "component": {
            "name": component, "version": version, "provider": "kyma-project.io",
            "repositoryContexts": [], "sources": [], "componentReferences": [],
            "resources": [
                {"name": "raw-manifest", "version": version, "type": "directoryTree", "relation": "local", "access": access},
                {"name": module, "version": version, "type": "ociArtifact", "relation": "external",
                 "access": {"type": "ociArtifact", "imageReference": image}},
            ],
        },
    })
}

/// Beginning of the names of wide modules: their manifest has [`WIDE_OBJECTS`] objects, a Deployment among them.
pub const WIDE: &str = "wide-";
/// Number of objects in the manifest of a wide module.
const WIDE_OBJECTS: usize = 15;

/// Name of the Deployment of a wide module.
pub fn manager(module: &str) -> String {
    format!("{module}-manager")
}

/// The module whose Secrets get data of KCP: its manifest has the Secrets [`INJECTED`] and [`NOT_INJECTED`].
pub const DEPLOYER: &str = "deployer";
/// Name of the Secret of [`DEPLOYER`] that gets data of KCP.
pub const INJECTED: &str = "image-pull-secret";
/// Name of the Secret of [`DEPLOYER`] that keeps its own data.
pub const NOT_INJECTED: &str = "own-secret";

/// The manifest of a sample module, of a shape, of a published manifest or of a large module; of any other one, a ConfigMap that
/// names the version, and the CRD of the module's own kind.
fn layer(component: &str, version: &str) -> Vec<u8> {
    let name = component.rsplit('/').next().unwrap_or(component);
    let sample = fs::read_to_string(modules::folder(name, version).join("manifest.yaml")).ok();
    let corpus = || shapes::manifest(name, version).or_else(|| published::manifest(name));
    if let Some(manifest) = sample.or_else(corpus).or_else(|| large::manifest(name)) {
        return tar("manifest.yaml", manifest.as_bytes());
    }
    let mut objects = vec![config_map(name, version), definition(name)];
    if name.starts_with(WIDE) {
        objects.push(deployment(name, version));
        objects.push(json!({"apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": {"name": manager(name), "namespace": "kyma-system"}}));
        objects.extend((objects.len()..WIDE_OBJECTS).map(|number| config_map(&format!("{name}-{number}"), "any")));
    }
    if name == DEPLOYER {
        objects.extend([(INJECTED, "true"), (NOT_INJECTED, "false")].map(|(name, takes)| secret(name, takes)));
    }
    let texts: Vec<_> = objects.iter().map(Value::to_string).collect();
    tar("manifest.yaml", texts.join("\n---\n").as_bytes())
}

fn config_map(name: &str, version: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "kyma-system"},
        "data": {"version": version}})
}

/// A Secret, and whether it takes the data of KCP.
fn secret(name: &str, takes: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Secret", "stringData": {"key": "own"},
        "metadata": {"name": name, "namespace": "kyma-system", "annotations": {annotation::INJECT_DATA: takes}}})
}

fn deployment(module: &str, version: &str) -> Value {
    let name = manager(module);
    let labels = json!({"app": module});
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "namespace": "kyma-system"},
        "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels},
            "spec": {"serviceAccountName": name,
                     "containers": [{"name": "manager", "image": format!("example.test/{module}:{version}")}]}}}})
}

/// CRD of a module's own kind.
fn definition(module: &str) -> Value {
    let group = module_group(module);
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("samples.{group}")},
        "spec": {
            "group": group, "scope": "Namespaced",
            "names": {"kind": "Sample", "listKind": "SampleList", "plural": "samples", "singular": "sample"},
            "versions": [{"name": "v1alpha1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
                "type": "object", "x-kubernetes-preserve-unknown-fields": true,
            }}}],
        },
    })
}

/// API group of the kind `Sample` of a module, which its layer defines.
pub fn module_group(module: &str) -> String {
    format!("{module}.example.test")
}

/// A tar with one regular file, equal for equal contents.
fn tar(name: &str, content: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_ustar();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    header.set_mtime(0);
    let mut archive = tar::Builder::new(Vec::new());
    // Writing to memory does not fail, and the name is short.
    let written = archive.append_data(&mut header, name, content).and_then(|()| archive.into_inner());
    written.unwrap_or_default()
}
