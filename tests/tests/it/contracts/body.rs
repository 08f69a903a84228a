//! Bodies of writes: what a program with types of its own writes back, and patches whose paths name list elements.

use std::collections::BTreeMap;

use json_patch::PatchErrorKind;
use serde::Deserialize;
use serde_json::{Map, Value};

/// Failure to make a body.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BodyError {
    /// A segment `{member=value}` selects no element.
    #[error("no element {0} in {1}")]
    NoElement(String, String),
    /// The change is not a JSON patch.
    #[error("the change is not a JSON patch")]
    NotAPatch(#[source] serde_json::Error),
    /// The change does not fit to the object.
    #[error("the change does not apply: {0}")]
    DoesNotApply(PatchErrorKind),
}

/// A write of a program that reads an object, changes it, and writes all that it knows of it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Put {
    /// Name of the shape of the program's type; without one it keeps everything.
    pub(crate) knows: Option<String>,
    /// A JSON patch that stands for the change.
    pub(crate) change: Vec<Value>,
}

/// The members that a type knows.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum Shape {
    /// The whole value.
    Whole(Whole),
    /// These members of the value, or of each element of a list.
    Members(BTreeMap<String, Shape>),
}

/// The word for a whole value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Whole {
    /// Everything.
    All,
}

/// The object that a program of this type writes back.
///
/// # Errors
/// See [`BodyError`].
pub(crate) fn put(live: &Value, shape: Option<&Shape>, change: &[Value]) -> Result<Value, BodyError> {
    let mut body = shape.map_or_else(|| live.clone(), |shape| reduce(live, shape));
    let patch = resolve(change, &body)?;
    json_patch::patch(&mut body, &patch).map_err(|error| BodyError::DoesNotApply(error.kind))?;
    Ok(body)
}

/// What is left of a value in a type.
fn reduce(value: &Value, shape: &Shape) -> Value {
    match (shape, value) {
        (Shape::Whole(_), value) => value.clone(),
        (Shape::Members(_), Value::Array(elements)) => elements.iter().map(|element| reduce(element, shape)).collect(),
        (Shape::Members(members), Value::Object(value)) => {
            let known =
                members.iter().filter_map(|(name, shape)| Some((name.clone(), reduce(value.get(name)?, shape))));
            Value::Object(known.collect::<Map<_, _>>())
        }
        (Shape::Members(_), other) => other.clone(),
    }
}

/// The patch with indexes in place of the segments `{member=value}`.
///
/// # Errors
/// See [`BodyError`].
pub(crate) fn resolve(patch: &[Value], live: &Value) -> Result<json_patch::Patch, BodyError> {
    let mut patch = patch.to_vec();
    for operation in &mut patch {
        for member in ["path", "from"] {
            if let Some(Value::String(path)) = operation.get_mut(member) {
                *path = with_indexes(path, live)?;
            }
        }
    }
    serde_json::from_value(Value::Array(patch)).map_err(BodyError::NotAPatch)
}

fn with_indexes(path: &str, live: &Value) -> Result<String, BodyError> {
    let mut resolved = String::new();
    for segment in path.split('/').skip(1) {
        let selector = segment.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
        resolved.push('/');
        match selector.and_then(|selector| selector.split_once('=')) {
            Some((member, wanted)) => {
                let list = resolved.strip_suffix('/').unwrap_or_default().to_owned();
                let elements = live.pointer(&list).and_then(Value::as_array);
                let is_wanted = |element: &Value| element[member] == wanted;
                let index = elements.and_then(|elements| elements.iter().position(is_wanted));
                let index = index.ok_or_else(|| BodyError::NoElement(segment.to_owned(), list))?;
                resolved.push_str(&index.to_string());
            }
            None => resolved.push_str(segment),
        }
    }
    Ok(resolved)
}
