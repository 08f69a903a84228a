//! Renders objects as YAML files.

use std::slice;

use anyhow::{Context as _, Result};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Value, json};
use serde_saphyr::ser_options;
use tidewatch_kit::json;

const HEADER: &str = "# Generated from the Rust types by `cargo generate`; changes made here are lost.\n---\n";

/// A generated file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// The file name without folder.
    pub name: String,
    /// The content.
    pub content: String,
}

/// Renders the files of `deploy/crds`: one per custom resource, and a kustomization.
///
/// # Errors
/// An object cannot be serialized.
pub fn crds() -> Result<Vec<File>> {
    with_kustomization(tidewatch_api::crds::crds().iter().map(crd).collect::<Result<_>>()?)
}

/// Adds a kustomization of these files.
pub(crate) fn with_kustomization(mut files: Vec<File>) -> Result<Vec<File>> {
    let names: Vec<_> = files.iter().map(|file| file.name.clone()).collect();
    files.push(object("kustomization", &kustomization(&names))?);
    Ok(files)
}

/// A kustomization of these resources.
pub(crate) fn kustomization(resources: &[String]) -> Value {
    json!({"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources})
}

fn crd(crd: &CustomResourceDefinition) -> Result<File> {
    let name = crd.metadata.name.as_deref().unwrap_or_default();
    let mut value = serde_json::to_value(crd).with_context(|| format!("cannot serialize {name} as JSON"))?;
    // Bounds are floating-point in the Kubernetes types, but CRDs conventionally contain `0`, not `0.0`.
    json::normalize_numbers(&mut value);
    object(&crd.spec.names.plural, &value)
}

/// Renders one object as `<name>.yaml`.
pub(crate) fn object(name: &str, value: &Value) -> Result<File> {
    objects(name, slice::from_ref(value))
}

/// Renders objects as the documents of `<name>.yaml`.
pub(crate) fn objects(name: &str, values: &[Value]) -> Result<File> {
    let yaml = |value| serde_saphyr::to_string_with_options(value, ser_options! { prefer_block_scalars: false });
    let documents = values.iter().map(yaml).collect::<Result<Vec<_>, _>>();
    let documents = documents.with_context(|| format!("cannot serialize {name} as YAML"))?;
    Ok(File { name: format!("{name}.yaml"), content: format!("{HEADER}{}", documents.join("---\n")) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rendered_crds_equal_their_source() {
        for (file, object) in crds().unwrap().iter().zip(tidewatch_api::crds::crds()) {
            let read: CustomResourceDefinition = serde_saphyr::from_str(&file.content).unwrap();
            assert_eq!(read, object, "{}", file.name);
        }
    }
}
