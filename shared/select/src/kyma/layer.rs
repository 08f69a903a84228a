//! The layer of a module's version: where its resources are in the registry, and which images they use.

use serde_json::{Value, json};
use tidewatch_api::Manifest;
use tidewatch_oci::descriptor::RAW_MANIFEST;

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
