//! Renders objects as YAML files.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Value, json};
use serde_saphyr::ser_options;
use thiserror::Error;
use tidewatch_shared::api;

const HEADER: &str = "# Generated from the Rust types by `cargo generate`; changes made here are lost.\n---\n";

/// The error of rendering a file.
#[derive(Debug, Error)]
pub enum RenderError {
    /// An object cannot be serialized as JSON.
    #[error("cannot serialize {name} as JSON")]
    Json {
        /// The name of the object.
        name: String,
        /// The cause.
        source: serde_json::Error,
    },
    /// An object cannot be serialized as YAML.
    #[error("cannot serialize {name} as YAML")]
    Yaml {
        /// The name of the object.
        name: String,
        /// The cause.
        source: Box<serde_saphyr::ser::Error>,
    },
}

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
/// [`RenderError`].
pub fn crds() -> Result<Vec<File>, RenderError> {
    let mut files = api::crds::crds().iter().map(crd).collect::<Result<Vec<_>, _>>()?;
    let names: Vec<_> = files.iter().map(|file| file.name.clone()).collect();
    files.push(object("kustomization", &kustomization(&names))?);
    Ok(files)
}

/// A kustomization of these resources.
pub(crate) fn kustomization(resources: &[String]) -> Value {
    json!({"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources})
}

fn crd(crd: &CustomResourceDefinition) -> Result<File, RenderError> {
    let name = || crd.metadata.name.clone().unwrap_or_default();
    let mut value = serde_json::to_value(crd).map_err(|source| RenderError::Json { name: name(), source })?;
    whole_numbers(&mut value);
    object(&crd.spec.names.plural, &value)
}

/// Renders one object as `<name>.yaml`.
pub(crate) fn object(name: &str, value: &Value) -> Result<File, RenderError> {
    let options = ser_options! { prefer_block_scalars: false };
    let yaml = serde_saphyr::to_string_with_options(value, options)
        .map_err(|source| RenderError::Yaml { name: name.to_owned(), source: Box::new(source) })?;
    Ok(File { name: format!("{name}.yaml"), content: format!("{HEADER}{yaml}") })
}

/// Converts whole floating-point numbers to integers: bounds are floating-point in the Kubernetes types, but CRDs
/// conventionally contain `0`, not `0.0`.
fn whole_numbers(value: &mut Value) {
    match value {
        Value::Number(number) => {
            let whole = number.as_f64().filter(|value| value.fract() == 0.0 && value.abs() < 1e9);
            if let (Some(whole), true) = (whole, number.is_f64()) {
                *value = (whole as i64).into();
            }
        }
        Value::Array(values) => values.iter_mut().for_each(whole_numbers),
        Value::Object(members) => members.values_mut().for_each(whole_numbers),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rendered_crds_equal_their_source() {
        for (file, object) in crds().unwrap().iter().zip(api::crds::crds()) {
            let read: CustomResourceDefinition = serde_saphyr::from_str(&file.content).unwrap();
            assert_eq!(read, object, "{}", file.name);
        }
    }
}
