//! Mistakes in the objects of a version that would otherwise show in clusters alone, and probable ones.

mod definition;
mod lists;

use std::collections::BTreeMap;

use serde_json::Value;
use tidewatch_cluster::kinds::{built_in, is_of_kubernetes, removed, serves};
use tidewatch_oci::layer::PlacedObject;

use super::kinds_of;
use crate::{
    inventory::{ObjectKey, split_api_version},
    render::{Hook, hook_of, identity},
};

/// Findings about the objects of a version. Each is a sentence that begins with the place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Review {
    /// API servers refuse the object, or it is left out, or it must not be in a module.
    pub mistakes: Vec<String>,
    /// The module works, but probably not as intended.
    pub warnings: Vec<String>,
}

/// Reviews the objects of a version, with all of several equal ones.
pub fn review(objects: &[PlacedObject]) -> Review {
    let kinds = kinds_of(objects.iter().map(|placed| &placed.object));
    let mut review = Review::default();
    let mut places = BTreeMap::new();
    for PlacedObject { place, object } in objects {
        let (key, _) = identity(object, &kinds);
        if let Some(first) = places.get(&key) {
            review.mistakes.push(format!("{place}: it is the same object as {first}; keep one of them"));
            continue;
        }
        let mut mistakes = lists::duplicates(&key, object);
        mistakes.extend(definition::mistake(&key, object));
        let warnings = [of_kind(&key, object), of_hook(object)].into_iter().flatten();
        review.mistakes.extend(mistakes.into_iter().map(|mistake| format!("{place}: {mistake}")));
        review.warnings.extend(warnings.map(|warning| format!("{place}: {warning}")));
        places.insert(key, place);
    }
    review
}

/// Warning of a kind of Kubernetes in a version that not every API server serves.
fn of_kind(key: &ObjectKey, object: &Value) -> Option<String> {
    let ObjectKey { group, kind, .. } = key;
    let api_version = object["apiVersion"].as_str().unwrap_or_default();
    let (_, version) = split_api_version(api_version);
    if !is_of_kubernetes(group) || serves(group, version, kind) {
        return None;
    }
    let Some(removed) = removed(group, version, kind) else {
        let advice = match built_in(group, kind) {
            Some(served) if group.is_empty() => format!("write {}", served.version),
            Some(served) => format!("write {group}/{}", served.version),
            None => "without it the module is in state Error".to_owned(),
        };
        return Some(format!("not every API server serves {kind} in {api_version}; {advice}"));
    };
    let advice = removed.successor.map_or("nothing replaces it".to_owned(), |successor| format!("write {successor}"));
    Some(format!("no API server since Kubernetes {} serves {kind} in {api_version}; {advice}", removed.since))
}

/// Warning of a hook of Helm.
fn of_hook(object: &Value) -> Option<String> {
    let text = match hook_of(object)? {
        Hook::LeftOut => "it is a hook of Helm for a removal, a rollback or a test, and is never installed",
        Hook::Ordinary => {
            "it is a hook of Helm, and is installed like the other objects, neither before nor after them"
        }
    };
    Some(text.to_owned())
}

#[cfg(test)]
mod tests;
