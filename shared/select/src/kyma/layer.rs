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
        return Err(format!("the component {} has no resource {RAW_MANIFEST}", descriptor.name));
    };
    let [digest] = &layer.digests[..] else {
        let name = &descriptor.name;
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
