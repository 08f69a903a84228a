//! The CustomResourceDefinitions in the form that an API server stores.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{CustomResourceDefinition, JSONSchemaProps};
use kube::CustomResourceExt;
use serde_json::{Map, Value, json};

use super::{Kyma, Manifest, ModuleReleaseMeta, ModuleTemplate, Watcher};

/// The five CRDs of the control plane, sorted by name.
///
/// To compare them with the CRDs of an API server, deserialize those into the same type: as bare JSON, the bound `0` of
/// the one is the `0.0` of the other.
pub fn crds() -> Vec<CustomResourceDefinition> {
    let all = [Kyma::crd(), Manifest::crd(), ModuleReleaseMeta::crd(), ModuleTemplate::crd(), Watcher::crd()];
    all.into_iter().map(finish).collect()
}

/// The three CRDs of a runtime: Kyma, ModuleReleaseMeta and ModuleTemplate.
pub fn runtime_crds() -> Vec<CustomResourceDefinition> {
    [Kyma::crd(), ModuleReleaseMeta::crd(), ModuleTemplate::crd()].into_iter().map(finish).collect()
}

fn finish(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    // Defaulted by the API server; set explicitly, so that the applied CRD equals the stored one.
    crd.spec.names.list_kind = Some(format!("{}List", crd.spec.names.kind));
    for version in &mut crd.spec.versions {
        let schema = version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut());
        if let Some(schema) = schema {
            finish_root(schema);
        }
    }
    crd
}

fn finish_root(schema: &mut JSONSchemaProps) {
    let mut value = serde_json::to_value(&*schema).expect("a schema is JSON");
    structural(&mut value);
    // The schema derived for the root has a title and requires `spec`; lifecycle-manager's has neither.
    if let Some(members) = value.as_object_mut() {
        members.remove("required");
        members.remove("title");
        if let Some(Value::Object(properties)) = members.get_mut("properties") {
            describe_root(properties);
        }
    }
    *schema = serde_json::from_value(value).expect("a finished schema is still one");
}

fn describe_root(properties: &mut Map<String, Value>) {
    for (name, kind) in [("apiVersion", "string"), ("kind", "string"), ("metadata", "object")] {
        properties.insert(name.to_owned(), json!({"type": kind}));
    }
}

/// Removes the differences between the generated and lifecycle-manager's schemas: `nullable` on optional members (the API
/// server drops such nulls before clients see them), and line breaks in descriptions.
fn structural(schema: &mut Value) {
    let Value::Object(members) = schema else { return };
    if !members.contains_key("x-kubernetes-preserve-unknown-fields") {
        members.remove("nullable");
    }
    if let Some(Value::Array(values)) = members.get_mut("enum") {
        values.retain(|value| !value.is_null());
    }
    if members.get("default").is_some_and(Value::is_null) {
        members.remove("default");
    }
    if let Some(Value::String(description)) = members.get_mut("description") {
        *description = description.split_whitespace().collect::<Vec<_>>().join(" ");
    }
    for child in ["items", "additionalProperties"] {
        if let Some(child) = members.get_mut(child) {
            structural(child);
        }
    }
    if let Some(Value::Object(properties)) = members.get_mut("properties") {
        properties.values_mut().for_each(structural);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_are_structural() {
        for crd in crds() {
            let value = serde_json::to_value(&crd.spec).unwrap();
            check_structural(&value["versions"][0]["schema"]["openAPIV3Schema"], &crd.spec.names.kind);
        }
    }

    fn check_structural(schema: &Value, path: &str) {
        let members = schema.as_object().unwrap_or_else(|| panic!("{path} is no object"));
        for key in ["$ref", "$schema", "anyOf", "oneOf", "allOf", "not", "definitions", "title"] {
            assert!(!members.contains_key(key), "{path} has {key}");
        }
        assert!(members.get("type").is_some_and(Value::is_string), "{path} has no type");
        if let Some(format) = members.get("format") {
            assert!(["int64", "date-time", "date", "uri"].map(Value::from).contains(format), "{path}: {format}");
        }
        for (name, child) in members.get("properties").and_then(Value::as_object).into_iter().flatten() {
            check_structural(child, &format!("{path}.{name}"));
        }
        for child in ["items", "additionalProperties"] {
            if let Some(schema) = members.get(child) {
                check_structural(schema, &format!("{path}.{child}"));
            }
        }
    }
}
