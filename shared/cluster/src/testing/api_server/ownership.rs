//! Fields that managers have applied: conflicts between them, and what a forced apply takes from the others. Lists are leaves.

use serde_json::{Map, Value, json};

/// Metadata that belongs to no manager.
const IDENTITY: [&str; 4] = ["name", "namespace", "resourceVersion", "uid"];

/// A copy of an applied object without type and identity.
pub(super) fn owned(applied: &Value) -> Value {
    let mut owned = applied.clone();
    if let Some(members) = owned.as_object_mut() {
        members.retain(|key, value| !value.is_null() && !["apiVersion", "kind"].contains(&key.as_str()));
        if let Some(metadata) = members.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.retain(|key, _| !IDENTITY.contains(&key.as_str()));
            if metadata.is_empty() {
                members.remove("metadata");
            }
        }
    }
    owned
}

/// Paths of the wanted fields that differ from the live ones and that another manager owns, each with that manager.
pub(super) fn conflicts(wanted: &Value, live: &Value, others: &[(String, Value)]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (manager, owned) in others {
        collect(wanted, live, owned, "", &mut |path| found.push((path.to_owned(), manager.clone())));
    }
    found
}

fn collect(wanted: &Value, live: &Value, owned: &Value, path: &str, found: &mut impl FnMut(&str)) {
    let (Value::Object(members), Value::Object(owned)) = (wanted, owned) else {
        if wanted != live && !owned.is_null() {
            found(path);
        }
        return;
    };
    for (key, value) in members {
        if let Some(owned) = owned.get(key) {
            collect(value, &live[key.as_str()], owned, &format!("{path}.{key}"), found);
        }
    }
}

/// Takes from an owner the fields that another manager applies with other values.
pub(super) fn take_from(owned: &mut Value, applied: &Value) {
    let (Value::Object(owned), Value::Object(applied)) = (owned, applied) else { return };
    owned.retain(|key, value| match applied.get(key) {
        Some(other) if value.is_object() && other.is_object() => {
            take_from(value, other);
            true
        }
        Some(other) => value == other,
        None => true,
    });
}

/// Fields of the writers that do not apply, from their entries in `managedFields`, with the live values.
pub(super) fn of_updates(live: &Value) -> Vec<(String, Value)> {
    let entries = live["metadata"]["managedFields"].as_array().into_iter().flatten();
    let named = |entry: &Value| (entry["manager"].as_str().unwrap().to_owned(), project(&entry["fieldsV1"], live));
    entries.filter(|entry| is_update(entry)).map(named).collect()
}

/// Takes from these writers the fields that a manager applies with other values.
pub(super) fn take_from_updates(live: &mut Value, applied: &Value) {
    let before = live.clone();
    let Some(entries) = live["metadata"]["managedFields"].as_array_mut() else { return };
    entries.iter_mut().filter(|entry| is_update(entry)).for_each(|entry| {
        take_from_set(&mut entry["fieldsV1"], applied, &before);
    });
    entries.retain(|entry| !is_update(entry) || entry["fieldsV1"] != json!({}));
}

fn is_update(entry: &Value) -> bool {
    entry["operation"] == "Update" && entry["subresource"].is_null()
}

fn project(set: &Value, live: &Value) -> Value {
    let fields = set.as_object().into_iter().flatten();
    let fields = fields.filter_map(|(member, inner)| Some((member.strip_prefix("f:")?, inner)));
    let fields = fields.filter_map(|(name, inner)| Some((name.to_owned(), project(inner, live.get(name)?))));
    let fields: Map<_, _> = fields.collect();
    let is_leaf = set.as_object().is_none_or(|set| !set.keys().any(|member| member.starts_with("f:")));
    if is_leaf { live.clone() } else { fields.into() }
}

fn take_from_set(set: &mut Value, applied: &Value, live: &Value) {
    let Some(members) = set.as_object_mut() else { return };
    members.retain(|member, inner| {
        let applied = member.strip_prefix("f:").map(|name| (&live[name], &applied[name]));
        let Some((live, applied)) = applied.filter(|(_, applied)| !applied.is_null()) else { return true };
        if *inner == json!({}) {
            return live == applied;
        }
        take_from_set(inner, applied, live);
        *inner != json!({})
    });
}
