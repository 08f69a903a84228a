//! Server-side apply of one field manager, and JSON merge patches.

use serde_json::{Map, Value, json};

use super::ownership::owned;

/// Sets the applied fields, removes those that the manager applied before and no longer and that no other manager owns, and
/// keeps the rest. Conditions and channels are maps by `type` and `channel`; other lists are atomic.
pub(super) fn apply(before: &Value, now: &Value, live: &mut Value, others: &[&Value]) {
    if now.is_object() && !live.is_object() {
        *live = json!({});
    }
    match (now, &mut *live) {
        (Value::Object(now), Value::Object(live)) => {
            let before_keys = before.as_object().into_iter().flatten().map(|(key, _)| key);
            for key in before_keys.filter(|key| !now.contains_key(*key)) {
                match (of_member(others, key).as_slice(), live.get_mut(key)) {
                    ([], _) => drop(live.remove(key)),
                    (others, Some(member)) if member.is_object() => apply(&before[key], &json!({}), member, others),
                    _ => {}
                }
            }
            for (key, value) in now.iter().filter(|(_, value)| !value.is_null()) {
                let member = live.entry(key).or_insert(Value::Null);
                apply(&before[key.as_str()], value, member, &of_member(others, key));
            }
        }
        (Value::Array(items), _) if map_key(items).or_else(|| map_key(before.as_array()?)).is_some() => {
            let key = map_key(items).or_else(|| map_key(before.as_array()?)).unwrap();
            apply_map(key, before, items, live, others);
        }
        _ => *live = now.clone(),
    }
}

/// What others own of a member.
fn of_member<'a>(others: &[&'a Value], key: &str) -> Vec<&'a Value> {
    others.iter().filter_map(|owned| owned.get(key)).collect()
}

/// Key of the items of a list that is a map.
fn map_key(items: &[Value]) -> Option<&'static str> {
    let has = |key: &str| !items.is_empty() && items.iter().all(|item| item[key].is_string());
    // Modules have a channel and a name; other lists than conditions have items with a type as well, but no status.
    if has("channel") && !has("name") { Some("channel") } else { (has("type") && has("status")).then_some("type") }
}

fn apply_map(key: &str, before: &Value, items: &[Value], live: &mut Value, others: &[&Value]) {
    let by_key = |items: &[Value]| -> Map<String, Value> {
        items.iter().map(|item| (item[key].as_str().unwrap().to_owned(), item.clone())).collect()
    };
    let list = |value: &Value| by_key(value.as_array().map_or(&[], Vec::as_slice));
    let mut merged = Value::Object(list(live));
    let others: Vec<_> = others.iter().map(|owned| Value::Object(list(owned))).collect();
    let others: Vec<_> = others.iter().collect();
    apply(&Value::Object(list(before)), &Value::Object(by_key(items)), &mut merged, &others);
    let Value::Object(mut merged) = merged else { unreachable!("made of an object") };
    // Applied items come first and in their order, those of others follow.
    let mut ordered: Vec<_> = items.iter().filter_map(|item| merged.remove(item[key].as_str().unwrap())).collect();
    ordered.extend(merged.into_iter().map(|(_, item)| item));
    *live = ordered.into();
}

/// Removes what a manager's entry in `managedFields` has, the applied object lacks, and no other entry has: a writer may
/// have changed the entry.
pub(super) fn prune(live: &mut Value, manager: &str, applied: &Value) {
    let entries = live["metadata"]["managedFields"].as_array().cloned().unwrap_or_default();
    let is_ours = |entry: &&Value| entry["manager"] == manager && entry["operation"] == "Apply";
    let Some(ours) = entries.iter().find(is_ours) else { return };
    let others: Vec<_> = entries.iter().filter(|entry| !is_ours(entry)).map(|entry| &entry["fieldsV1"]).collect();
    remove_owned(live, &ours["fieldsV1"], applied, &others);
}

fn remove_owned(live: &mut Value, set: &Value, applied: &Value, others: &[&Value]) {
    for (member, inner) in set.as_object().into_iter().flatten() {
        let others: Vec<_> = others.iter().filter_map(|set| set.get(member)).collect();
        if let (Some(name), Some(members)) = (member.strip_prefix("f:"), live.as_object_mut()) {
            match (members.get_mut(name), applied.get(name)) {
                (Some(live), Some(applied)) => remove_owned(live, inner, applied, &others),
                (Some(_), None) if others.is_empty() => drop(members.remove(name)),
                _ => {}
            }
        } else if let (Some(key), Some(elements)) = (member.strip_prefix("k:"), live.as_array_mut()) {
            let key: Value = serde_json::from_str(key).unwrap();
            let is_of = |element: &Value| key.as_object().unwrap().iter().all(|(name, value)| element[name] == *value);
            let applied = applied.as_array().and_then(|applied| applied.iter().find(|element| is_of(element)));
            match (elements.iter().position(is_of), applied) {
                (Some(index), Some(applied)) => remove_owned(&mut elements[index], inner, applied, &others),
                (Some(index), None) if others.is_empty() => drop(elements.remove(index)),
                _ => {}
            }
        }
    }
}

/// Records the manager and its fields in `managedFields`; one without fields has no entry.
pub(super) fn record_manager(live: &mut Value, manager: &str, applied: &Value) {
    let entries = live["metadata"]["managedFields"].as_array().cloned().unwrap_or_default();
    let is_other = |entry: &Value| entry["manager"] != manager || entry["operation"] != "Apply";
    let mut entries: Vec<_> = entries.into_iter().filter(is_other).collect();
    let fields = fields(&owned(applied));
    if fields != json!({}) {
        let version = &applied["apiVersion"];
        entries.push(json!({"manager": manager, "operation": "Apply", "apiVersion": version, "fieldsV1": fields}));
    }
    live["metadata"]["managedFields"] = entries.into();
}

/// Fields of a value as `fieldsV1` has them; a list is a map if its items have names.
fn fields(value: &Value) -> Value {
    match value {
        Value::Object(members) => members.iter().map(|(key, value)| (format!("f:{key}"), fields(value))).collect(),
        Value::Array(items) if items.iter().all(|item| item["name"].is_string()) => {
            let key = |item: &Value| format!("k:{}", json!({"name": item["name"]}));
            items.iter().map(|item| (key(item), fields(item))).collect()
        }
        _ => json!({}),
    }
}

/// Merges a patch (RFC 7396): `null` removes, lists are atomic.
pub fn merge(patch: &Value, live: &mut Value) {
    let Value::Object(patch) = patch else { return *live = patch.clone() };
    if !live.is_object() {
        *live = json!({});
    }
    let Value::Object(live) = live else { unreachable!("made an object") };
    for (key, value) in patch {
        if value.is_null() {
            live.remove(key);
        } else {
            merge(value, live.entry(key).or_insert(Value::Null));
        }
    }
}
