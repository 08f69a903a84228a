//! What API servers make of what is written, so that what is read back can be compared with it.

use serde_json::Value;

/// Nulls and empty lists are not kept by API servers. Empty objects are, and say something: `subresources.status`, or `ingress: [{}]`,
/// which lets everybody in. Of a number like `0.0` they make `0`.
pub(crate) fn without_nothing(value: &Value) -> Value {
    let is_nothing = |value: &Value| value.is_null() || value.as_array().is_some_and(Vec::is_empty);
    match value {
        Value::Object(members) => {
            let members = members.iter().filter(|(_, value)| !is_nothing(value));
            Value::Object(members.map(|(key, value)| (key.clone(), without_nothing(value))).collect())
        }
        Value::Array(elements) => Value::Array(elements.iter().map(without_nothing).collect()),
        Value::Number(number) => match number.as_f64() {
            // Beyond 2^53 not every integer is a float; no bound of ours is there.
            Some(float) if number.is_f64() && float.fract() == 0.0 && float.abs() < 9.0e15 => Value::from(float as i64),
            _ => value.clone(),
        },
        value => value.clone(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn whole_numbers_are_the_same_however_they_are_written() {
        assert_eq!(
            without_nothing(&json!({"minimum": 0.0, "maximum": -2.0, "x": 0.5})),
            json!({"minimum": 0, "maximum": -2, "x": 0.5})
        );
    }

    #[test]
    fn what_is_nothing_goes_and_empty_objects_stay() {
        let written = json!({"a": null, "b": [], "c": [{}], "d": {"e": {}, "f": null}});
        assert_eq!(without_nothing(&written), json!({"c": [{}], "d": {"e": {}}}));
    }
}
