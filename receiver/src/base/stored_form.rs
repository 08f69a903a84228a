//! The form in which API servers store objects, for comparing an object to write with the stored one.

use serde_json::Value;
use tidewatch_shared::json::normalize_numbers;

/// Returns the value as API servers store it: without nulls and empty lists, and with integral floats such as `0.0` as
/// integers. Empty objects stay, because they have a meaning: `subresources.status`, or `ingress: [{}]`, which permits
/// all traffic.
pub(crate) fn canonical(value: &Value) -> Value {
    let is_nothing = |value: &Value| value.is_null() || value.as_array().is_some_and(Vec::is_empty);
    match value {
        Value::Object(members) => {
            let members = members.iter().filter(|(_, value)| !is_nothing(value));
            Value::Object(members.map(|(key, value)| (key.clone(), canonical(value))).collect())
        }
        Value::Array(elements) => Value::Array(elements.iter().map(canonical).collect()),
        value => {
            let mut value = value.clone();
            normalize_numbers(&mut value);
            value
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn integral_floats_become_integers() {
        assert_eq!(
            canonical(&json!({"minimum": 0.0, "maximum": -2.0, "x": 0.5})),
            json!({"minimum": 0, "maximum": -2, "x": 0.5})
        );
    }

    #[test]
    fn nulls_and_empty_lists_are_removed_and_empty_objects_stay() {
        let written = json!({"a": null, "b": [], "c": [{}], "d": {"e": {}, "f": null}});
        assert_eq!(canonical(&written), json!({"c": [{}], "d": {"e": {}}}));
    }
}
