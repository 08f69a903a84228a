//! Splits the YAML of a layer into objects.

use std::collections::HashSet;

use serde_json::Value;

use super::{LayerError, MAX_OBJECTS, MAX_VALUES};
use crate::oci::yaml;

/// Objects of a YAML text in their order, without empty documents, with lists expanded to their items. Of several objects
/// with equal API version, kind, namespace and name the first one is kept.
///
/// Numbers, booleans and keys are read as the Go libraries of Kubernetes do: `0644` is 420, `yes` is true, `1.0` is 1.
///
/// # Errors
/// When the text is not YAML, a document is not an object with `apiVersion`, `kind` and `metadata.name`, there are more
/// than [`MAX_OBJECTS`], or the values of all documents, repetitions by aliases included, exceed the parser's limits.
pub fn documents(text: &str) -> Result<Vec<Value>, LayerError> {
    let mut objects = Objects::default();
    for (index, yaml::Document { line, value }) in
        yaml::read(text, MAX_VALUES).map_err(LayerError::Yaml)?.into_iter().enumerate()
    {
        objects.add(value).map_err(|refusal| match refusal {
            Refusal::NotAnObject(reason) => LayerError::Object { number: index + 1, line, reason },
            Refusal::TooMany => LayerError::TooMany,
        })?;
    }
    Ok(objects.kept)
}

enum Refusal {
    NotAnObject(&'static str),
    TooMany,
}

#[derive(Default)]
struct Objects {
    kept: Vec<Value>,
    /// Keys of the kept objects: API version, kind, namespace and name.
    keys: HashSet<[String; 4]>,
}

impl Objects {
    /// Adds a document. The parser bounds its depth, and with it the recursion.
    fn add(&mut self, mut document: Value) -> Result<(), Refusal> {
        if let Some(items) = items(&mut document) {
            return items.into_iter().try_for_each(|item| self.add(item));
        }
        let key = key(&document).map_err(Refusal::NotAnObject)?;
        if self.keys.contains(&key) {
            return Ok(());
        }
        if self.kept.len() >= MAX_OBJECTS {
            return Err(Refusal::TooMany);
        }
        self.keys.insert(key);
        self.kept.push(document);
        Ok(())
    }
}

/// Items of a list: of the kind `List`, or of another one like `ConfigMapList`.
fn items(document: &mut Value) -> Option<Vec<Value>> {
    let members = document.as_object_mut()?;
    let kind = members.get("kind")?.as_str()?;
    let (is_list, may_be_list) = (kind == "List", kind.ends_with("List"));
    match members.get_mut("items") {
        Some(Value::Array(items)) if may_be_list => Some(std::mem::take(items)),
        None | Some(Value::Null) if is_list => Some(Vec::new()),
        _ => None,
    }
}

fn namespace(value: &Value) -> Result<String, &'static str> {
    match value {
        Value::Null => Ok(String::new()),
        Value::String(namespace) => Ok(namespace.clone()),
        _ => Err("metadata.namespace is not a string"),
    }
}

/// API version, kind, namespace and name. Without a namespace equals an empty one.
fn key(object: &Value) -> Result<[String; 4], &'static str> {
    if !object.is_object() {
        return Err("it is a single value or a list");
    }
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let metadata = &object["metadata"];
    Ok([
        text(&object["apiVersion"]).ok_or("apiVersion is missing or not a string")?,
        text(&object["kind"]).ok_or("kind is missing or not a string")?,
        namespace(&metadata["namespace"])?,
        text(&metadata["name"]).ok_or("metadata.name is missing or not a string")?,
    ])
}
