//! Objects of the layers that Manifests name. Thousands of runtime clusters share about twenty layers, so each is parsed
//! once and kept.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use serde_json::Value;
use tidewatch_api::{Manifest, key::ManifestKey};
use tidewatch_engine::ModuleObjects;
use tidewatch_fleet::manifest_queue::ManifestQueue;
use tidewatch_oci::{
    component::DESCRIPTORS,
    digest::Digest,
    layer::{LayerKind, documents},
    registry::{LayerKey, Lookup, Registry},
};
use tokio::{sync::Semaphore, task::spawn_blocking};

/// Parsed layers in memory, the most recently used ones.
const MAX_PARSED: usize = 64;
/// Memory of the layers in memory, at most, as estimated from their texts and values.
const MAX_PARSED_BYTES: usize = 128 << 20;
/// Memory of one value in bytes, as an estimate.
const BYTES_PER_VALUE: usize = 200;

/// The layers of a registry.
pub struct ModuleLayers {
    registry: Registry,
    /// Wakes the Manifests that wait for a layer.
    queue: ManifestQueue,
    parsed: Mutex<VecDeque<Parsed>>,
    /// One layer is parsed at a time, which bounds the memory.
    parsing: Semaphore,
}

#[derive(Clone)]
struct Parsed {
    key: LayerKey,
    bytes: usize,
    objects: Result<Arc<Vec<Value>>, String>,
}

impl ModuleLayers {
    /// Creates an empty cache.
    pub fn new(registry: Registry, queue: ManifestQueue) -> Self {
        Self { registry, queue, parsed: Mutex::default(), parsing: Semaphore::new(1) }
    }

    /// Returns the objects of a layer. Waits only for parsing, never for the registry: a Manifest whose layer is not
    /// available is enqueued when that changes.
    pub async fn objects(&self, manifest: &ManifestKey, key: &LayerKey) -> ModuleObjects {
        if let Some(parsed) = self.find(key) {
            return parsed;
        }
        let lookup = || self.registry.layer(&key.repository, &key.digests, key.kind);
        let found = match lookup() {
            Lookup::Ready(text) => Lookup::Ready(text),
            Lookup::Pending | Lookup::Failed(_) => {
                self.queue.wait_for_layer(manifest, key.clone());
                // It may have changed just before.
                lookup()
            }
        };
        let text = match found {
            Lookup::Ready(text) => text,
            Lookup::Pending => return ModuleObjects::Pending,
            Lookup::Failed(error) => return ModuleObjects::Failed(error.to_string()),
        };
        // The semaphore is never closed.
        let _permit = self.parsing.acquire().await;
        if let Some(parsed) = self.find(key) {
            return parsed;
        }
        let parse = move || {
            let objects = documents(&text);
            let values: usize = objects.iter().flatten().map(count_values).sum();
            (objects, text.len() + values * BYTES_PER_VALUE)
        };
        let (objects, bytes) = match spawn_blocking(parse).await {
            Ok((objects, bytes)) => (objects.map(Arc::new).map_err(|error| error.to_string()), bytes),
            Err(error) => return ModuleObjects::Failed(format!("the layer was not parsed: {error}")),
        };
        let parsed = Parsed { key: key.clone(), bytes, objects };
        let found = parsed.found();
        self.keep(parsed);
        found
    }

    fn find(&self, key: &LayerKey) -> Option<ModuleObjects> {
        let mut parsed = self.parsed.lock();
        let at = parsed.iter().position(|parsed| parsed.key == *key)?;
        let found = parsed.remove(at)?;
        let objects = found.found();
        parsed.push_back(found);
        Some(objects)
    }

    fn keep(&self, new: Parsed) {
        let mut parsed = self.parsed.lock();
        parsed.push_back(new);
        let too_many = |parsed: &VecDeque<Parsed>| {
            parsed.len() > MAX_PARSED || parsed.iter().map(|parsed| parsed.bytes).sum::<usize>() > MAX_PARSED_BYTES
        };
        while parsed.len() > 1 && too_many(&parsed) {
            parsed.pop_front();
        }
    }
}

/// Number of values in a value, itself included. The parser bounds their depth.
fn count_values(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count_values).sum(),
        Value::Object(members) => members.values().map(count_values).sum(),
        _ => 0,
    }
}

impl Parsed {
    fn found(&self) -> ModuleObjects {
        match &self.objects {
            Ok(objects) => ModuleObjects::Ready(objects.clone()),
            Err(error) => ModuleObjects::Failed(error.clone()),
        }
    }
}

/// The layer that a Manifest names: the digest is looked up in the receiver's own registry, even if the Manifest was
/// written for another one, since the digest determines the content.
///
/// # Errors
/// One sentence, when `spec.install.source` names no layer by digest.
pub(crate) fn layer_key(manifest: &Manifest) -> Result<LayerKey, String> {
    let source = &manifest.spec.install.source;
    let member = |name: &str| {
        let text = source[name].as_str().filter(|text| !text.is_empty());
        text.ok_or_else(|| format!("the Manifest names no layer: spec.install.source.{name} is missing"))
    };
    let repo = member("repo")?;
    let name = member("name")?;
    let reference = member("ref")?;
    let digest: Digest = reference
        .parse()
        .map_err(|error| format!("the Manifest does not name its layer by digest: {reference}: {error}"))?;
    let kind = match source["type"].as_str() {
        Some("oci-dir") => LayerKind::Dir,
        Some("oci-ref") => LayerKind::Plain,
        other => return Err(format!("the layer has the unknown type {}", other.unwrap_or("\"\""))),
    };
    // Without this folder the name is the whole path, below the registry and its optional path.
    let is_in_folder = repo.trim_end_matches('/').rsplit('/').next() == Some(DESCRIPTORS);
    let repository = if is_in_folder { format!("{DESCRIPTORS}/{name}") } else { name.to_owned() };
    Ok(LayerKey { repository: repository.into(), digests: [digest].into(), kind })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn key(source: Value) -> Result<LayerKey, String> {
        let manifest = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": "m"}, "spec": {"remote": true, "install": {"name": "raw-manifest", "source": source}}});
        layer_key(&serde_json::from_value(manifest).unwrap())
    }

    /// `acceptance.md` C1 31.
    #[test]
    fn layer_of_another_registry_is_looked_up_by_its_digest_in_the_own_one() {
        let digest = Digest::of(b"layer").to_string();
        let of = |repo: &str, kind: &str| {
            key(json!({"repo": repo, "name": "kyma-project.io/module/keda", "ref": digest, "type": kind})).unwrap()
        };
        for repo in ["component-descriptors", "https://other.test/sub/component-descriptors/"] {
            let found = of(repo, "oci-dir");
            assert_eq!(&*found.repository, "component-descriptors/kyma-project.io/module/keda", "{repo}");
            assert_eq!((&found.digests[..], found.kind), (&[Digest::of(b"layer")][..], LayerKind::Dir));
        }
        assert_eq!(of("component-descriptors", "oci-ref").kind, LayerKind::Plain);
        for repo in ["registry.test", "https://registry.test:5000/sub"] {
            assert_eq!(&*of(repo, "oci-dir").repository, "kyma-project.io/module/keda", "{repo}");
        }
    }

    #[test]
    fn source_that_names_no_layer_is_an_error_with_its_member() {
        let digest = Digest::of(b"layer").to_string();
        let whole = json!({"repo": "r", "name": "n", "ref": digest, "type": "oci-dir"});
        let error = |member: &str, value: Value| {
            let mut source = whole.clone();
            source[member] = value;
            key(source).unwrap_err()
        };
        for member in ["repo", "name", "ref"] {
            for value in [json!(null), json!(""), json!(7)] {
                let expected = format!("the Manifest names no layer: spec.install.source.{member} is missing");
                assert_eq!(error(member, value), expected);
            }
        }
        assert!(error("ref", json!("1.0.0")).contains("does not name its layer by digest: 1.0.0"));
        assert!(error("ref", json!("sha256:abc")).contains("does not name its layer by digest: sha256:abc"));
        assert_eq!(error("type", json!("helm-chart")), "the layer has the unknown type helm-chart");
        assert_eq!(error("type", json!(null)), "the layer has the unknown type \"\"");
    }
}
