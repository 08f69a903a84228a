//! Splits the YAML of a layer into objects.

use std::collections::HashSet;

use serde_json::Value;

use super::{LayerError, MAX_OBJECTS, MAX_VALUES, Place};
use crate::yaml::{self, Document, YamlError};

/// Objects of a YAML text in their order, without empty documents, with lists expanded to their items. Of several objects
/// with equal API version, kind, namespace and name the first one is kept, as lifecycle-manager does.
///
/// The objects are those that kubectl reads: `0644` is 420, `yes` is true, `1.0` is 1. As with kubectl, a document with the
/// member `items` is a list of whatever kind, `items: null` is an empty list, and an item without API version and kind has
/// those of the list, without the ending `List`.
///
/// # Errors
/// When the text is not YAML, a document is not an object with `apiVersion`, `kind` and `metadata.name`, there are more
/// than [`MAX_OBJECTS`], or the values of all documents, repetitions by aliases included, exceed the parser's limits.
pub fn documents(text: &str) -> Result<Vec<Value>, LayerError> {
    let placed = read(text, Objects { is_distinct: true, ..Objects::default() })?;
    Ok(placed.into_iter().map(|placed| placed.object).collect())
}

/// An object of a text with its place.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedObject {
    /// Place in the text.
    pub place: Place,
    /// The object.
    pub object: Value,
}

/// As [`documents`], with the places of the objects, and with all of several equal ones.
///
/// # Errors
/// As [`documents`].
pub fn placed_documents(text: &str) -> Result<Vec<PlacedObject>, LayerError> {
    read(text, Objects::default())
}

fn read(text: &str, mut objects: Objects) -> Result<Vec<PlacedObject>, LayerError> {
    let documents = yaml::read(text, MAX_VALUES).map_err(|error| match error {
        YamlError::TooManyValues { line, .. } => LayerError::TooManyValues { line },
        other => LayerError::Yaml(other.to_string()),
    })?;
    for (document, Document { line, value }) in (1..).zip(documents) {
        objects.document = document;
        objects.line = line;
        objects.add(value)?;
    }
    Ok(objects.kept)
}

#[derive(Default)]
struct Objects {
    kept: Vec<PlacedObject>,
    /// Of several objects with equal keys the first one is kept.
    is_distinct: bool,
    /// Keys of the kept objects: API version, kind, namespace and name.
    keys: HashSet<[String; 4]>,
    /// Number of the document, counted from 1.
    document: usize,
    /// First line of the document, counted from 1.
    line: usize,
    /// Numbers of the items that lead to the object.
    items: Vec<usize>,
}

impl Objects {
    /// Adds a document or an item. The parser bounds its depth, and with it the recursion.
    fn add(&mut self, mut object: Value) -> Result<(), LayerError> {
        if let Some(items) = items(&mut object) {
            let kind = text(&object["kind"]).ok_or_else(|| self.refuse(&object, NO_KIND))?.to_owned();
            let kind = kind.strip_suffix("List").unwrap_or(&kind);
            for (number, mut item) in (1..).zip(items) {
                // Items of a nested list must name their own kind.
                if self.items.is_empty() {
                    inherit(&mut item, kind, &object["apiVersion"]);
                }
                self.items.push(number);
                self.add(item)?;
                self.items.pop();
            }
            return Ok(());
        }
        let key = key(&object).map_err(|reason| self.refuse(&object, reason))?;
        if !self.keys.insert(key) && self.is_distinct {
            return Ok(());
        }
        if self.kept.len() >= MAX_OBJECTS {
            return Err(LayerError::TooMany);
        }
        self.kept.push(PlacedObject { place: self.place(&object), object });
        Ok(())
    }

    fn place(&self, object: &Value) -> Place {
        Place::of(self.document, self.line, &self.items, object)
    }

    fn refuse(&self, object: &Value, reason: &'static str) -> LayerError {
        LayerError::Object { place: self.place(object), reason }
    }
}

const NO_KIND: &str = "kind is missing or not a string";

/// Items of a list. An object of the kind `List` is one even without items. Items of another type make no list: a custom
/// resource may have such a member.
fn items(object: &mut Value) -> Option<Vec<Value>> {
    let members = object.as_object_mut()?;
    let is_list = members.get("kind").is_some_and(|kind| kind == "List");
    match members.get_mut("items") {
        Some(Value::Array(items)) => Some(std::mem::take(items)),
        Some(Value::Null) => Some(Vec::new()),
        None if is_list => Some(Vec::new()),
        _ => None,
    }
}

/// Gives an item without API version and kind those of its list.
fn inherit(item: &mut Value, kind: &str, api_version: &Value) {
    if let Some(members) = item.as_object_mut()
        && ["apiVersion", "kind"].iter().all(|member| members.get(*member).and_then(text).is_none())
    {
        members.insert("apiVersion".to_owned(), api_version.clone());
        members.insert("kind".to_owned(), kind.into());
    }
}

fn text(value: &Value) -> Option<&str> {
    value.as_str().filter(|text| !text.is_empty())
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
        return Err("it is a single value or a list instead of an object");
    }
    let metadata = &object["metadata"];
    let no_name = match text(&metadata["generateName"]) {
        Some(_) => "metadata.name is missing, and generateName would make another object at each application",
        None => "metadata.name is missing or not a string",
    };
    Ok([
        text(&object["apiVersion"]).ok_or("apiVersion is missing or not a string")?.to_owned(),
        text(&object["kind"]).ok_or(NO_KIND)?.to_owned(),
        namespace(&metadata["namespace"])?,
        text(&metadata["name"]).ok_or(no_name)?.to_owned(),
    ])
}
