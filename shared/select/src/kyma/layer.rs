//! The layer of a module's version: where its resources are in the registry, and which images they use.

use serde_json::{Value, json};
use tidewatch_api::Manifest;
use tidewatch_oci::descriptor::{Descriptor, RAW_MANIFEST};

/// `install` and `localizedImages` of a Manifest.
#[derive(Clone, Debug, PartialEq)]
pub struct ModuleLayer {
    /// `spec.install`.
    pub install: Value,
    /// `spec.localizedImages`.
    pub images: Vec<String>,
}

/// Availability of the layer of a version.
#[derive(Clone, Debug, PartialEq)]
pub enum LayerLookup {
    /// The component descriptor names it.
    Ready(ModuleLayer),
    /// The component descriptor is being fetched.
    Pending,
    /// The component descriptor cannot be read or names no layer, with the reason.
    Failed(String),
}

impl ModuleLayer {
    /// `source` is the place of the layer: repo, name, ref and type.
    pub fn new(source: &Value, images: Vec<String>) -> Self {
        Self { install: json!({"name": RAW_MANIFEST, "source": source}), images }
    }

    /// The layer that a component descriptor names; see [`install_source`].
    ///
    /// # Errors
    /// The component has no such layer, or one that a Manifest cannot name.
    pub fn of(descriptor: &Descriptor, registry: &str) -> Result<Self, String> {
        Ok(Self::new(&install_source(descriptor, registry)?, descriptor.images.clone()))
    }

    /// The layer that a Manifest installs.
    pub fn installed(manifest: &Manifest) -> Self {
        let install = serde_json::to_value(&manifest.spec.install).unwrap_or_default();
        Self { install, images: manifest.spec.localized_images.as_deref().cloned().unwrap_or_default() }
    }
}

/// `install.source` of the Manifest of a component: the place of the layer with the module's objects. `registry` is the
/// host with scheme, port and path as far as it has them.
///
/// # Errors
/// The component has no such layer, or one that a Manifest cannot name.
pub fn install_source(descriptor: &Descriptor, registry: &str) -> Result<Value, String> {
    let Some(layer) = &descriptor.raw_manifest else {
        return Err(format!("the component {} has no resource {RAW_MANIFEST}", descriptor.component.name()));
    };
    let [digest] = &layer.digests[..] else {
        let name = descriptor.component.name();
        return Err(format!(
            "the resource {RAW_MANIFEST} of the component {name} is split into several blobs, which a Manifest cannot name"
        ));
    };
    let repository = descriptor.repository();
    let (folder, name) = repository.split();
    let repo = format!("{}/{folder}", registry.trim_end_matches('/'));
    let kind = if layer.is_tar() { "oci-dir" } else { "oci-ref" };
    Ok(json!({"repo": repo.trim_end_matches('/'), "name": name, "ref": digest.to_string(), "type": kind}))
}

#[cfg(test)]
mod tests {
    use tidewatch_oci::{
        component::{ComponentVersion, Mapping},
        descriptor::{LocalBlob, Schema},
        digest::Digest,
    };

    use super::*;

    fn descriptor(media_type: &str, parts: usize) -> Descriptor {
        let digests = (0..parts).map(|part| Digest::of(&[u8::try_from(part).unwrap()])).collect();
        Descriptor {
            component: ComponentVersion::new("kyma-project.io/module/keda", "1.0.0").unwrap(),
            schema: Schema::V2,
            mapping: Mapping::UrlPath,
            raw_manifest: (parts > 0).then(|| LocalBlob { digests, media_type: media_type.into() }),
            images: vec!["r.io/keda:1.0.0".into()],
            resources: Vec::new(),
        }
    }

    #[test]
    fn manifest_names_the_layer_by_digest() {
        let found = ModuleLayer::of(&descriptor("application/x-tar", 1), "http://registry.example:5000/sub/").unwrap();
        let digest = Digest::of(&[0]).to_string();
        assert_eq!(
            found.install,
            json!({"name": "raw-manifest", "source": {
                "repo": "http://registry.example:5000/sub/component-descriptors", "name": "kyma-project.io/module/keda",
                "ref": digest, "type": "oci-dir"
            }})
        );
        assert_eq!(found.images, ["r.io/keda:1.0.0"]);
        let plain = ModuleLayer::of(&descriptor("application/yaml", 1), "r").unwrap();
        assert_eq!(plain.install["source"]["type"], "oci-ref");
        let hashed = Descriptor { mapping: Mapping::Sha256Digest, ..descriptor("", 1) };
        let source = ModuleLayer::of(&hashed, "r/sub").unwrap().install["source"].clone();
        let name = Digest::of(b"kyma-project.io/module/keda").hex();
        assert_eq!((&source["repo"], &source["name"]), (&json!("r/sub"), &json!(name)));
    }

    #[test]
    fn component_without_one_layer_is_an_error() {
        let error = |parts| ModuleLayer::of(&descriptor("application/x-tar", parts), "r").unwrap_err();
        assert!(error(0).contains("no resource raw-manifest"), "{}", error(0));
        assert!(error(2).contains("split into several blobs"), "{}", error(2));
    }
}
