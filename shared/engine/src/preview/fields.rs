//! Changed fields of an object.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::{Map, Value};

/// A field with different values in two versions of an object.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FieldChange {
    /// Path, as in `spec.template.spec.containers[manager].image`. An element of a list is named by its member `name` if
    /// all elements have one, else by its index.
    pub path: String,
    /// Value before; `None` if the field is new.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<Value>,
    /// Value after; `None` if the field is removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<Value>,
}

/// Fields that differ, in the order of their paths. A list of plain values is one field.
pub(super) fn changes(before: &Value, after: &Value) -> Vec<FieldChange> {
    let mut found = Vec::new();
    compare("", Some(before), Some(after), &mut found);
    found
}

/// The parser of the objects bounds the depth of values, and with it the recursion.
fn compare(path: &str, before: Option<&Value>, after: Option<&Value>, found: &mut Vec<FieldChange>) {
    match (before, after) {
        (before, after) if before == after => {}
        (Some(Value::Object(before)), Some(Value::Object(after))) => {
            for name in before.keys().chain(after.keys()).collect::<BTreeSet<_>>() {
                compare(&member(path, name), before.get(name), after.get(name), found);
            }
        }
        (Some(Value::Array(old)), Some(Value::Array(new))) => match (named(old), named(new)) {
            (Some(old), Some(new)) => compare_named(path, &old, &new, found),
            _ if old.iter().chain(new).all(|element| !element.is_object() && !element.is_array()) => {
                push(path, before, after, found);
            }
            _ => {
                for index in 0..old.len().max(new.len()) {
                    compare(&format!("{path}[{index}]"), old.get(index), new.get(index), found);
                }
            }
        },
        (before, after) => push(path, before, after, found),
    }
}

fn push(path: &str, before: Option<&Value>, after: Option<&Value>, found: &mut Vec<FieldChange>) {
    found.push(FieldChange { path: path.to_owned(), before: before.cloned(), after: after.cloned() });
}

/// Elements with their names; `None` if one has no name, or two have the same.
fn named(elements: &[Value]) -> Option<Vec<(&str, &Value)>> {
    let named: Vec<_> =
        elements.iter().map(|element| Some((element["name"].as_str()?, element))).collect::<Option<_>>()?;
    let names: BTreeSet<_> = named.iter().map(|(name, _)| name).collect();
    (names.len() == named.len() && !named.is_empty()).then_some(named)
}

fn compare_named(path: &str, old: &[(&str, &Value)], new: &[(&str, &Value)], found: &mut Vec<FieldChange>) {
    let by_name = |elements: &[(&str, &Value)]| -> BTreeMap<String, Value> {
        elements.iter().map(|(name, element)| ((*name).to_owned(), (*element).clone())).collect()
    };
    let before = by_name(old);
    let after = by_name(new);
    for name in before.keys().chain(after.keys()).collect::<BTreeSet<_>>() {
        compare(&format!("{path}[{name}]"), before.get(name), after.get(name), found);
    }
    // The order matters to some lists, like that of the init containers.
    let common = |elements: &[(&str, &Value)], others: &BTreeMap<String, Value>| -> Vec<Value> {
        elements.iter().filter(|(name, _)| others.contains_key(*name)).map(|(name, _)| (*name).into()).collect()
    };
    let old_order = common(old, &after);
    let new_order = common(new, &before);
    if old_order != new_order {
        push(&format!("{path}[]"), Some(&old_order.into()), Some(&new_order.into()), found);
    }
}

/// Path of a member. A name with other characters than letters, digits, `-` and `_` is quoted.
pub(super) fn member(path: &str, name: &str) -> String {
    let is_plain = |char: char| char.is_ascii_alphanumeric() || char == '-' || char == '_';
    match (path.is_empty(), !name.is_empty() && name.chars().all(is_plain)) {
        (true, true) => name.to_owned(),
        (false, true) => format!("{path}.{name}"),
        (_, false) => format!("{path}[{name:?}]"),
    }
}

/// A member that is an object.
pub(super) fn object_of<'a>(value: &'a Value, name: &str) -> Option<&'a Map<String, Value>> {
    value.get(name)?.as_object()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(before: Value, after: Value) -> Vec<(String, Value, Value)> {
        let changes = changes(&before, &after).into_iter();
        changes.map(|it| (it.path, it.before.unwrap_or(json!("-")), it.after.unwrap_or(json!("-")))).collect()
    }

    #[test]
    fn changed_fields_have_paths_with_both_values() {
        for (before, after, expected) in [
            (json!({"a": 1}), json!({"a": 1}), vec![]),
            (json!({"a": {"b": 1}}), json!({"a": {"b": 2}}), vec![("a.b", json!(1), json!(2))]),
            (json!({"a": 1}), json!({"b": null}), vec![("a", json!(1), json!("-")), ("b", json!("-"), json!(null))]),
            (
                json!({"labels": {"app.io/x": "1"}}),
                json!({"labels": {}}),
                vec![("labels[\"app.io/x\"]", json!("1"), json!("-"))],
            ),
            (json!({"a": {"b": 1}}), json!({"a": [1]}), vec![("a", json!({"b": 1}), json!([1]))]),
            (json!({"args": ["x", "y"]}), json!({"args": ["y"]}), vec![("args", json!(["x", "y"]), json!(["y"]))]),
        ] {
            let expected: Vec<_> = expected.into_iter().map(|(path, old, new)| (path.to_owned(), old, new)).collect();
            assert_eq!(check(before, after), expected);
        }
    }

    #[test]
    fn list_elements_are_compared_by_name_where_they_have_one() {
        let list = |elements: Value| json!({"l": elements});
        for (before, after, expected) in [
            (json!([{"name": "a", "v": 1}]), json!([{"name": "b"}, {"name": "a", "v": 2}]), &["l[a].v", "l[b]"][..]),
            (json!([{"name": "a"}, {"name": "b"}]), json!([{"name": "b"}, {"name": "a"}]), &["l[]"]),
            (json!([{"v": 1}, {"v": 2}]), json!([{"v": 1}, {"v": 3}, {"v": 4}]), &["l[1].v", "l[2]"]),
            (json!([{"name": "a", "v": 1}, {"name": "a"}]), json!([{"name": "a", "v": 2}, {"name": "a"}]), &["l[0].v"]),
            (json!([]), json!([{"name": "a"}]), &["l[0]"]),
        ] {
            let paths: Vec<_> = check(list(before), list(after)).into_iter().map(|(path, ..)| path).collect();
            assert_eq!(paths, expected);
        }
    }
}
