//! The CRDs as an API server takes them.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{CustomResourceDefinition, JSONSchemaProps};
use kube::CustomResourceExt;
use serde_json::{Map, Value};

use super::{Kyma, Manifest, ModuleReleaseMeta, ModuleTemplate, Watcher};
use crate::names::VERSION;

/// All five, by name: what KCP has.
///
/// To find out whether an API server has them, read its CRDs as this type too: as bare JSON the bound `0` of the one is the
/// `0.0` of the other.
#[must_use]
pub fn crds() -> Vec<CustomResourceDefinition> {
    let all = [Kyma::crd(), Manifest::crd(), ModuleReleaseMeta::crd(), ModuleTemplate::crd(), Watcher::crd()];
    all.into_iter().map(finish).collect()
}

/// Those of a runtime: Kyma, ModuleReleaseMeta and ModuleTemplate.
#[must_use]
pub fn runtime_crds() -> Vec<CustomResourceDefinition> {
    [Kyma::crd(), ModuleReleaseMeta::crd(), ModuleTemplate::crd()].into_iter().map(finish).collect()
}

/// What `status.storedVersions` of the incumbent's CRD must become before ours is applied; `None` if it may stay.
///
/// Ours serves `v1beta2` alone, and the API server refuses a CRD without a version that objects may still be stored in. Where
/// `v1beta2` itself was not among them, no object was ever written in it: then each must be written again (an update that
/// changes nothing does it) before the others are dropped, or it can be read no more.
#[must_use]
pub fn stored_versions_after_takeover(current: &[String]) -> Option<Vec<String>> {
    let foreign = current.iter().any(|version| version != VERSION);
    foreign.then(|| vec![VERSION.to_owned()])
}

fn finish(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    // Defaulted by the API server; said, so that what we apply is what is there.
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
    // The type derived for the root has a title and requires `spec`; the incumbent's does neither.
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
        let mut plain = Map::new();
        plain.insert("type".to_owned(), kind.into());
        properties.insert(name.to_owned(), Value::Object(plain));
    }
}

/// Takes out what the generator says beyond the incumbent's schemas: that an optional member may also be null (the API server
/// drops such nulls before anyone sees them), and line breaks in descriptions.
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
    fn versions_that_are_not_served_leave_the_stored_ones() {
        let check = |current: &[&str]| {
            stored_versions_after_takeover(&current.iter().map(|&version| version.to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(check(&["v1beta1", "v1beta2"]), Some(vec!["v1beta2".to_owned()]));
        assert_eq!(
            check(&["v1beta1"]),
            Some(vec!["v1beta2".to_owned()]),
            "an API server wants the storage version in it"
        );
        assert_eq!(check(&["v1beta2"]), None);
        assert_eq!(check(&[]), None);
    }

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
