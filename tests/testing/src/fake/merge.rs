//! JSON merge patch (RFC 7396), also used for server-side apply.

use serde_json::{Map, Value, json};

/// Merges a patch into an object: `null` removes, lists are atomic.
pub(super) fn merge(patch: &Value, live: &mut Value) {
    let Value::Object(patch) = patch else {
        *live = patch.clone();
        return;
    };
    if !live.is_object() {
        *live = Value::Object(Map::new());
    }
    let Some(live) = live.as_object_mut() else { return };
    for (key, value) in patch {
        if value.is_null() {
            live.remove(key);
        } else {
            merge(value, live.entry(key).or_insert(Value::Null));
        }
    }
}

/// Records the field manager in `managedFields`, without its fields.
pub(super) fn note_manager(object: &mut Value, manager: &str, operation: &str) {
    if manager.is_empty() {
        return;
    }
    let entry = json!({"manager": manager, "operation": operation});
    let fields = &mut object["metadata"]["managedFields"];
    match fields.as_array_mut() {
        Some(entries) if entries.contains(&entry) => {}
        Some(entries) => entries.push(entry),
        None => *fields = json!([entry]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_sets_removes_and_leaves() {
        let mut live = json!({"a": {"b": 1, "c": 2}, "d": [1, 2]});
        merge(&json!({"a": {"b": null, "e": {"f": null, "g": 1}}, "d": [3]}), &mut live);
        assert_eq!(live, json!({"a": {"c": 2, "e": {"g": 1}}, "d": [3]}));
    }
}
