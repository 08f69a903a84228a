//! Compatibility of the custom resources with lifecycle-manager's: the CRDs are the same, objects that lifecycle-manager wrote
//! round-trip unchanged, and in a runtime our CRDs are restored after any change by its users (`acceptance.md` 40).
//!
//! `data/crds/facts` holds the requirements and fields of lifecycle-manager's CRDs without their descriptions;
//! `data/crds/objects` holds objects as lifecycle-manager leaves them.

mod runtime;

use std::{collections::BTreeSet, fs, path::Path};

use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};
use tidewatch_api::{Kyma, Manifest, ModuleReleaseMeta, ModuleTemplate, Watcher, crds};

/// All members that our CRDs have and lifecycle-manager's lack: plural name of the kind, path of the member. None of them
/// is required.
const ADDITIONS: [(&str, &str); 1] = [("modulereleasemetas", "spec.versions")];

const SCHEMA: &str = "/versions/0/schema/openAPIV3Schema";

fn data(path: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/crds").join(path);
    serde_json::from_slice(&fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))).unwrap()
}

/// Our CRDs: plural name, and the definition as JSON.
fn ours() -> Vec<(String, Value)> {
    crds::crds().iter().map(|crd| (crd.spec.names.plural.clone(), serde_json::to_value(crd).unwrap())).collect()
}

#[test]
fn the_crds_equal_lifecycle_managers_except_the_additions() {
    let ours = ours();
    assert_eq!(ours.len(), 5);
    for (plural, mut crd) in ours {
        let schema = crd["spec"].pointer_mut(SCHEMA).unwrap();
        for (_, addition) in ADDITIONS.iter().filter(|(kind, _)| *kind == plural) {
            remove_optional(schema, addition);
        }
        let mut differences = Vec::new();
        compare(
            &crd["metadata"]["name"],
            &data(&format!("facts/{plural}.json"))["metadata"]["name"],
            "name",
            &mut differences,
        );
        compare(&crd["spec"], &data(&format!("facts/{plural}.json"))["spec"], "spec", &mut differences);
        assert!(differences.is_empty(), "{plural} (ours against lifecycle-manager's):\n{}", differences.join("\n"));
    }
}

/// Removes a member such as `a.b[].c` from a schema; panics if it is missing or required.
fn remove_optional(schema: &mut Value, path: &str) {
    let (parents, name) = path.rsplit_once('.').unwrap();
    let parent = parents.split('.').fold(schema, |schema, step| match step.strip_suffix("[]") {
        Some(list) => &mut schema["properties"][list]["items"],
        None => &mut schema["properties"][step],
    });
    let required = parent["required"].as_array().cloned().unwrap_or_default();
    assert!(!required.contains(&json!(name)), "{path} is required");
    let removed = parent["properties"].as_object_mut().unwrap().remove(name);
    assert!(removed.is_some(), "{path} is not there");
}

/// Collects the differences of two schemas except descriptions. `required` and `enum` compare as sets, numbers by
/// value, and empty subresources equal absent ones.
fn compare(ours: &Value, theirs: &Value, path: &str, differences: &mut Vec<String>) {
    match (ours, theirs) {
        (Value::Object(left), Value::Object(right)) => {
            // Keys below `properties` are names of members; elsewhere they are keywords.
            let names = path.ends_with("/properties");
            let keys: BTreeSet<_> =
                left.keys().chain(right.keys()).filter(|key| names || *key != "description").collect();
            for key in keys {
                let member = |side: &Map<String, Value>| {
                    let value = side.get(key).cloned().unwrap_or_default();
                    match key.as_str() {
                        "required" | "enum" if !names => sorted(value),
                        "subresources" if !names && value.is_null() => json!({}),
                        _ => value,
                    }
                };
                compare(&member(left), &member(right), &format!("{path}/{key}"), differences);
            }
        }
        (Value::Array(left), Value::Array(right)) if left.len() == right.len() => {
            for (at, (left, right)) in left.iter().zip(right).enumerate() {
                compare(left, right, &format!("{path}/{at}"), differences);
            }
        }
        (Value::Number(left), Value::Number(right)) if left.as_f64() == right.as_f64() => {}
        _ if ours == theirs => {}
        _ => differences.push(format!("{path}: {ours} against {theirs}")),
    }
}

fn sorted(mut set: Value) -> Value {
    if let Some(values) = set.as_array_mut() {
        values.sort_by_key(Value::to_string);
    }
    set
}

#[test]
fn the_comparison_sees_every_difference() {
    let facts = data("facts/modulereleasemetas.json")["spec"].clone();
    let mut leaves = Vec::new();
    pointers(&facts, String::new(), &mut leaves);
    assert!(leaves.len() > 50, "{} leaves", leaves.len());
    for leaf in leaves {
        let mut changed = facts.clone();
        *changed.pointer_mut(&leaf).unwrap() = json!("other");
        let mut differences = Vec::new();
        compare(&changed, &facts, "spec", &mut differences);
        assert_eq!(differences.len(), 1, "{leaf}: {differences:?}");
    }
}

fn pointers(value: &Value, path: String, leaves: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(members) => members.iter().map(|(key, child)| (key.clone(), child)).collect(),
        Value::Array(values) if values.iter().any(Value::is_object) => {
            values.iter().enumerate().map(|(at, child)| (at.to_string(), child)).collect()
        }
        _ => Vec::new(),
    };
    if children.is_empty() {
        leaves.push(path);
        return;
    }
    for (key, child) in children {
        pointers(child, format!("{path}/{key}"), leaves);
    }
}

#[test]
fn the_generated_files_are_those_of_the_types() {
    for (folder, files) in tidewatch_deploy::generated().unwrap() {
        let differences = folder.compare(&files).unwrap();
        assert!(differences.is_empty(), "{differences:?}: run `cargo generate` and commit the result");
    }
}

#[test]
fn objects_of_lifecycle_manager_round_trip_unchanged() {
    round_trips::<Kyma>("kymas", "objects/kyma.json");
    round_trips::<ModuleTemplate>("moduletemplates", "objects/moduletemplate.json");
    round_trips::<ModuleReleaseMeta>("modulereleasemetas", "objects/modulereleasemeta.json");
    round_trips::<ModuleReleaseMeta>("modulereleasemetas", "objects/mandatory.json");
    round_trips::<Manifest>("manifests", "objects/manifest.json");
    round_trips::<Watcher>("watchers", "objects/watcher.json");
}

/// Round-trips an object and all variants of it that differ in one member: an optional member is absent, a list or map
/// is empty, or there is an unknown member.
fn round_trips<K: DeserializeOwned + Serialize>(plural: &str, file: &str) {
    let object = data(file);
    let (_, crd) = ours().into_iter().find(|(name, _)| name == plural).unwrap();
    let schema = crd["spec"].pointer(SCHEMA).unwrap();
    let mut variants = vec![object.clone()];
    add_variants(&object, schema, &object, "", &mut variants);
    assert!(variants.len() > 5, "{file}: {} variants", variants.len());
    for variant in variants {
        let read: K =
            serde_json::from_value(variant.clone()).unwrap_or_else(|error| panic!("{file}: {error} in {variant:#}"));
        assert_eq!(serde_json::to_value(&read).unwrap(), variant, "{file}");
    }
}

fn add_variants(at: &Value, schema: &Value, whole: &Value, path: &str, variants: &mut Vec<Value>) {
    match at {
        Value::Array(values) => {
            variants.push(variant_of(whole, path, |list| *list = json!([])));
            for (index, value) in values.iter().enumerate() {
                add_variants(value, &schema["items"], whole, &format!("{path}/{index}"), variants);
            }
        }
        Value::Object(members) => {
            let properties = schema["properties"].as_object();
            // The root and the meta/v1 types (label selectors) are closed: there the API server itself drops unknown
            // members.
            if properties.is_some() && !path.is_empty() && !path.contains("elector") {
                let unknown = json!({"list": [1, "two", null], "empty": {}});
                variants.push(variant_of(whole, path, |object| object["fromTheFuture"] = unknown));
            }
            if schema["additionalProperties"].is_object() || schema["x-kubernetes-preserve-unknown-fields"] == true {
                variants.push(variant_of(whole, path, |map| *map = json!({})));
            }
            let required = schema["required"].as_array().cloned().unwrap_or_default();
            for (key, child) in
                members.iter().filter(|(key, _)| properties.is_some_and(|properties| properties.contains_key(*key)))
            {
                let fixed = path.is_empty() && key != "status";
                if !fixed && !required.contains(&json!(key)) {
                    variants.push(variant_of(whole, path, |object| drop(object.as_object_mut().unwrap().remove(key))));
                }
                add_variants(child, &schema["properties"][key], whole, &format!("{path}/{key}"), variants);
            }
        }
        _ => {}
    }
}

fn variant_of(whole: &Value, path: &str, change: impl FnOnce(&mut Value)) -> Value {
    let mut copy = whole.clone();
    change(copy.pointer_mut(path).unwrap());
    copy
}
