//! JSON as API servers store it.

use serde_json::Value;

/// Converts floating-point numbers without a fraction to integers, since API servers return `1.0` as `1`.
pub fn normalize_numbers(value: &mut Value) {
    /// Up to 2^53, a floating-point number represents every integer.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match value {
        Value::Number(number) if number.is_f64() => {
            if let Some(whole) = number.as_f64().filter(|value| value.fract() == 0.0 && value.abs() < EXACT) {
                *value = (whole as i64).into();
            }
        }
        Value::Array(values) => values.iter_mut().for_each(normalize_numbers),
        Value::Object(members) => members.values_mut().for_each(normalize_numbers),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_whole_floating_point_numbers_change() {
        let mut value = json!({"whole": [1.0, -2.0, 0.0], "other": [1.5, 1e300, u64::MAX, "1.0", null]});
        normalize_numbers(&mut value);
        assert_eq!(value, json!({"whole": [1, -2, 0], "other": [1.5, 1e300, u64::MAX, "1.0", null]}));
    }
}
