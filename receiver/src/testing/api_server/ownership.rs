//! Fields that managers have applied: conflicts between them, and what a forced apply takes from the others. Lists are leaves.

use serde_json::Value;

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
