//! Seeds of the bytes that the receiver reads from an OCI registry.

use std::io::Write as _;

use flate2::{Compression, write::GzEncoder};
use serde_json::{Value, json};
use tar::{Builder, Header};

/// Component that the seeds describe.
pub(crate) const COMPONENT: &str = "example.org/module/tide";
/// Version of [`COMPONENT`].
pub(crate) const COMPONENT_VERSION: &str = "1.2.0";
/// Media type of the component descriptor.
pub(crate) const DESCRIPTOR_MEDIA_TYPE: &str = "application/vnd.ocm.software.component-descriptor.v2+yaml+tar";

/// Objects of a module with the YAML that deserves attention: several documents, a list, anchors, numbers of YAML 1.1.
const YAML: &str = "# module\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: a, namespace: ns}\ndata: {mode: 0644, on: yes}\n\
---\napiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Secret, metadata: &m {name: a}}\n- {apiVersion: v1, kind: Pod, metadata: {<<: *m, name: b}}\n";

/// Valid inputs of a target; none for a name that is not one of the registry's targets.
pub(super) fn contents(target: &str) -> Vec<Vec<u8>> {
    match target {
        "descriptor" => {
            let [v2, v3] = descriptors().map(|descriptor| descriptor.to_string());
            let signed = signed().to_string().into_bytes();
            vec![tar("component-descriptor.yaml", &v2), v3.into_bytes(), BLOCK_STYLE.as_bytes().to_vec(), signed]
        }
        "layer" => vec![tar("raw-manifest.yaml", YAML), YAML.as_bytes().to_vec(), gzip(YAML.as_bytes())],
        _ => Vec::new(),
    }
}

/// A component descriptor as written by hand.
const BLOCK_STYLE: &str = "meta:\n  schemaVersion: v2\ncomponent:\n  name: example.org/module/tide\n  version: 1.2.0\n\
  \x20 provider: example.org\n  sources: []\n  resources:\n  - name: i\n    version: 1.2.0\n    type: ociArtifact\n\
  \x20   relation: external\n    access:\n      type: ociArtifact\n      imageReference: reg.example.org/tide:1.2.0\n";

/// One component descriptor of each schema.
fn descriptors() -> [Value; 2] {
    let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    let resources = json!([
        {"name": "raw-manifest", "version": COMPONENT_VERSION, "type": "directoryTree", "relation": "local",
         "access": {"type": "localBlob", "localReference": format!("sha256:{digest}"), "mediaType": "application/x-tar"},
         "digest": {"hashAlgorithm": "SHA-256", "normalisationAlgorithm": "genericBlobDigest/v1", "value": digest}},
        {"name": "manager", "version": COMPONENT_VERSION, "type": "ociArtifact", "relation": "external",
         "access": {"type": "ociArtifact", "imageReference": "reg.example.org/tide:1.2.0"}},
    ]);
    let contexts = json!([{"type": "OCIRegistry", "componentNameMapping": "sha256-digest"}]);
    let provider = json!({"name": "example.org"});
    [
        json!({"meta": {"schemaVersion": "v2"}, "component": {
            "name": COMPONENT, "version": COMPONENT_VERSION, "provider": provider.to_string(), "sources": [],
            "componentReferences": [], "repositoryContexts": contexts, "resources": resources}}),
        json!({"apiVersion": "ocm.software/v3alpha1", "kind": "ComponentVersion", "repositoryContexts": contexts,
            "metadata": {"name": COMPONENT, "version": COMPONENT_VERSION, "provider": provider},
            "spec": {"resources": resources}}),
    ]
}

/// A component descriptor with labels, references and a signature whose value is arbitrary.
fn signed() -> Value {
    let [mut document, _] = descriptors();
    let labels = json!([{"name": "a", "value": {"x": [1.5, "<"]}, "version": "v1", "signing": true}]);
    let digest = json!({"hashAlgorithm": "SHA-256", "normalisationAlgorithm": "jsonNormalisation/v3", "value": "00"});
    document["component"]["componentReferences"] =
        json!([{"name": "r", "componentName": "a.bc/d", "version": "1", "labels": labels, "digest": digest}]);
    document["component"]["labels"] = labels;
    let signature =
        json!({"algorithm": "RSASSA-PSS", "mediaType": "application/vnd.ocm.signature.rsa.pss", "value": "00ff"});
    document["signatures"] = json!([{"name": "release", "digest": digest, "signature": signature}]);
    document
}

fn tar(path: &str, content: &str) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    let mut header = Header::new_ustar();
    header.set_mode(0o644);
    header.set_size(content.len() as u64);
    builder.append_data(&mut header, path, content.as_bytes()).expect("the path is valid");
    builder.into_inner().expect("memory does not fail")
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(content).expect("memory does not fail");
    encoder.finish().expect("memory does not fail")
}
