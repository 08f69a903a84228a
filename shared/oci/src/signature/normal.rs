//! Normal forms of component descriptors: what a signature covers, independent of the place where the component is stored
//! (OCM specification, *Component descriptor normalization algorithms*).

use std::collections::HashMap;

use jiff::{Timestamp, Unit};
use serde_json::{Map, Value, json};
use strum::{Display, EnumString};

use super::canonical::Form;
use crate::descriptor::{AccessType, DescriptorError, Document, MemberError, Object, Parts, Schema};

/// Algorithm of a normal form.
#[derive(Clone, Copy, Debug, Display, EnumString, PartialEq, Eq)]
pub enum Normalisation {
    /// Every object as a list of its members; without sources. Deprecated.
    #[strum(serialize = "jsonNormalisation/v1")]
    V1,
    /// Canonical JSON; ambiguous resources get their version as identity. Deprecated.
    #[strum(serialize = "jsonNormalisation/v2")]
    V2,
    /// Canonical JSON.
    #[strum(serialize = "jsonNormalisation/v3")]
    V3,
    /// The same under its newest name.
    #[strum(serialize = "jsonNormalisation/v4alpha1")]
    V4Alpha1,
}

impl Normalisation {
    /// The normal form of a component descriptor.
    ///
    /// # Errors
    /// A member that is covered is missing or unexpected, or the schema is not supported by this algorithm.
    pub fn normal_form(self, document: &Document) -> Result<String, DescriptorError> {
        let parts = document.parts()?;
        match self {
            Self::V1 if parts.schema != Schema::V2 => {
                let schema = format!("{} with the normalisation {self}", parts.schema);
                Err(DescriptorError::Schema(schema))
            }
            Self::V1 => {
                let meta = json!({"schemaVersion": parts.schema.to_string()});
                let form = json!({"component": self.component(&parts)?, "meta": meta});
                Ok(Form::Entries.serialize(&form))
            }
            Self::V2 | Self::V3 | Self::V4Alpha1 => {
                Ok(Form::Jcs.serialize(&json!({"component": self.component(&parts)?})))
            }
        }
    }

    fn component(self, Parts { schema, head, elements, .. }: &Parts<'_>) -> Result<Value, MemberError> {
        let references = match schema {
            Schema::V2 => "componentReferences",
            Schema::V3alpha1 => "references",
        };
        let list =
            |key: &str, of: ElementForm<'_>| elements.objects(key)?.iter().map(of).collect::<Result<Vec<_>, _>>();
        let mut resources = list("resources", &resource)?;
        let mut component = Map::new();
        if self == Self::V1 {
            let mut references = list(references, &|from| element(from, &[], signing_labels))?;
            // Resources and references have this member in any case.
            for element in resources.iter_mut().chain(&mut references) {
                element.entry("extraIdentity").or_insert(Value::Null);
            }
            component.insert("componentReferences".to_owned(), json!(references));
            component.insert("provider".to_owned(), provider_v1(head)?);
        } else {
            component.insert("componentReferences".to_owned(), json!(list(references, &reference)?));
            component.insert("sources".to_owned(), json!(list("sources", &source)?));
            component.insert("provider".to_owned(), provider(head)?);
        }
        if matches!(self, Self::V1 | Self::V2) {
            distinguish(&mut resources);
        }
        component.insert("name".to_owned(), head.text("name")?.into());
        component.insert("version".to_owned(), head.text("version")?.into());
        component.insert("resources".to_owned(), json!(resources));
        if let Some(labels) = signing_labels(head)? {
            component.insert("labels".to_owned(), labels);
        }
        if head.get("creationTime").is_some() {
            component.insert("creationTime".to_owned(), creation_time(head)?.into());
        }
        Ok(Value::Object(component))
    }
}

/// Form of an element in a normal form.
type ElementForm<'a> = &'a dyn Fn(&Object<'_>) -> Result<Map<String, Value>, MemberError>;

/// Labels of an object in a normal form; none if the member is to be left out.
type Labels = fn(&Object<'_>) -> Result<Option<Value>, MemberError>;

/// An element without members that are null, empty or not covered.
fn element(from: &Object<'_>, left_out: &[&str], labels: Labels) -> Result<Map<String, Value>, MemberError> {
    let is_empty = |name: &str, value: &Value| name == "extraIdentity" && value.as_object().is_some_and(Map::is_empty);
    let members = from.members().filter(|(name, value)| {
        name.as_str() != "labels" && !left_out.contains(&name.as_str()) && !is_empty(name, value)
    });
    let mut members: Map<_, _> = members.map(|(name, value)| (name.clone(), value.clone())).collect();
    if let Some(labels) = labels(from)? {
        members.insert("labels".to_owned(), labels);
    }
    Ok(members)
}

/// A resource without content has no digest.
fn resource(from: &Object<'_>) -> Result<Map<String, Value>, MemberError> {
    let access = from.optional_object("access")?;
    let kind = access.and_then(|access| access.get("type")?.as_str().map(AccessType::of));
    let left_out: &[_] = match kind {
        Some(AccessType::None) => &["access", "srcRefs", "digest"],
        _ => &["access", "srcRefs"],
    };
    element(from, left_out, signing_labels)
}

fn source(from: &Object<'_>) -> Result<Map<String, Value>, MemberError> {
    element(from, &["access"], signing_labels)
}

/// Labels of references are all covered, because the implementations filter a member of another name.
fn reference(from: &Object<'_>) -> Result<Map<String, Value>, MemberError> {
    element(from, &[], all_labels)
}

/// Labels that sign, with the members that are covered.
fn signing_labels(of: &Object<'_>) -> Result<Option<Value>, MemberError> {
    let labels = of.objects("labels")?;
    let signing = |label: &&Object<'_>| label.get("signing").is_some_and(|value| *value == true || *value == "true");
    let labels = labels.iter().filter(signing).map(|label| present(label, &["name", "version", "value", "signing"]));
    let labels: Vec<_> = labels.collect();
    Ok((!labels.is_empty()).then(|| labels.into()))
}

fn all_labels(of: &Object<'_>) -> Result<Option<Value>, MemberError> {
    let labels = of.objects("labels")?;
    let members = ["name", "version", "value", "signing", "merge"];
    let labels: Vec<_> = labels.iter().map(|label| present(label, &members)).collect();
    Ok((!labels.is_empty()).then(|| labels.into()))
}

/// Members of a label that are neither empty nor false; the value is always present.
fn present(label: &Object<'_>, members: &[&str]) -> Value {
    let mut present = Map::new();
    for name in members {
        match label.get(name) {
            Some(value) if *name == "value" || (*value != "" && *value != false) => {
                present.insert((*name).to_owned(), value.clone());
            }
            None if *name == "value" && label.has(name).is_ok() => {
                drop(present.insert((*name).to_owned(), Value::Null))
            }
            _ => {}
        }
    }
    present.into()
}

/// The provider as an object, which v2 may keep as JSON in a string.
fn provider(head: &Object<'_>) -> Result<Value, MemberError> {
    let given = head.required("provider")?;
    let parsed = given.as_str().and_then(|text| serde_json::from_str(text).ok());
    let Some(Value::Object(mut provider)) = parsed.or_else(|| Some(given.clone()).filter(Value::is_object)) else {
        return Ok(json!({"name": head.text("provider")?}));
    };
    provider.retain(|name, _| name == "name" || name == "labels");
    with_signing_labels(provider)
}

/// The provider as v2 keeps it: a string, or JSON in a string.
fn provider_v1(head: &Object<'_>) -> Result<Value, MemberError> {
    let text = head.text("provider")?;
    match serde_json::from_str(text) {
        Ok(Value::Object(provider)) => with_signing_labels(provider),
        _ => Ok(text.into()),
    }
}

fn with_signing_labels(mut members: Map<String, Value>) -> Result<Value, MemberError> {
    let given = Value::Object(members.clone());
    members.remove("labels");
    if let Some(labels) = signing_labels(&Object::root(&given)?)? {
        members.insert("labels".to_owned(), labels);
    }
    Ok(members.into())
}

/// The time in UTC, rounded to seconds.
fn creation_time(head: &Object<'_>) -> Result<String, MemberError> {
    let time: Option<Timestamp> = head.text("creationTime")?.parse().ok();
    let time = time.and_then(|time| time.round(Unit::Second).ok());
    time.map(|time| time.to_string()).ok_or_else(|| head.error("creationTime", "is not a time as in RFC 3339"))
}

/// Adds the version to the identity of resources that share name and identity with another, one after the other: the last
/// one stays as it is.
fn distinguish(resources: &mut [Map<String, Value>]) {
    let identity = |resource: &Map<String, Value>| {
        let extra = resource.get("extraIdentity").filter(|extra| !extra.is_null());
        json!([resource.get("name"), extra]).to_string()
    };
    let mut counts = HashMap::<_, usize>::new();
    resources.iter().for_each(|resource| *counts.entry(identity(resource)).or_default() += 1);
    for resource in resources {
        let Some(count) = counts.get_mut(&identity(resource)).filter(|count| **count > 1) else { continue };
        *count -= 1;
        let version = resource.get("version").cloned().unwrap_or_default();
        match resource.get_mut("extraIdentity").and_then(Value::as_object_mut) {
            Some(extra) => drop(extra.insert("version".to_owned(), version)),
            None => drop(resource.insert("extraIdentity".to_owned(), json!({"version": version}))),
        }
        *counts.entry(identity(resource)).or_default() += 1;
    }
}

#[cfg(test)]
mod tests;
