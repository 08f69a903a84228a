//! Quantities of Kubernetes, as in `resources.limits`. Pure.

use serde_json::Value;

/// Decimal digits after the point that a quantity can have.
const SCALE: i32 = 9;

/// Returns whether two values are the same quantity, in whatever unit.
pub(super) fn are_equal(one: &Value, other: &Value) -> bool {
    match (nanos(one), nanos(other)) {
        (Some(one), Some(other)) => one == other,
        _ => false,
    }
}

/// The quantity in units of 10⁻⁹; `None` for a value that is no quantity, or one that is too large or too exact.
fn nanos(value: &Value) -> Option<i128> {
    match value {
        Value::String(text) => parse(text),
        Value::Number(number) => parse(&number.to_string()),
        _ => None,
    }
}

fn parse(text: &str) -> Option<i128> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let end = unsigned.find(|char: char| !char.is_ascii_digit() && char != '.').unwrap_or(unsigned.len());
    let (number, unit) = unsigned.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits: i128 = format!("{whole}{fraction}").parse().ok()?;
    let (factor, exponent) = unit_of(unit)?;
    let exponent = exponent.checked_add(SCALE)?.checked_sub(i32::try_from(fraction.len()).ok()?)?;
    let scaled = digits.checked_mul(factor)?;
    let power = 10i128.checked_pow(exponent.unsigned_abs())?;
    let nanos =
        if exponent >= 0 { scaled.checked_mul(power)? } else { (scaled % power == 0).then_some(scaled / power)? };
    Some(if text.starts_with('-') { -nanos } else { nanos })
}

/// Factor and decimal exponent of a unit.
fn unit_of(unit: &str) -> Option<(i128, i32)> {
    let exponent = match unit {
        "" => 0,
        "n" => -9,
        "u" => -6,
        "m" => -3,
        "k" => 3,
        "M" => 6,
        "G" => 9,
        "T" => 12,
        "P" => 15,
        "E" => 18,
        "Ki" => return Some((1 << 10, 0)),
        "Mi" => return Some((1 << 20, 0)),
        "Gi" => return Some((1 << 30, 0)),
        "Ti" => return Some((1 << 40, 0)),
        "Pi" => return Some((1 << 50, 0)),
        "Ei" => return Some((1 << 60, 0)),
        other => other.strip_prefix(['e', 'E'])?.parse().ok()?,
    };
    Some((1, exponent))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn quantities_are_equal_in_any_unit() {
        for (one, other) in [
            (json!("1000m"), json!("1")),
            (json!(1), json!("1")),
            (json!(0.5), json!("500m")),
            (json!("1Gi"), json!("1024Mi")),
            (json!("1.5Gi"), json!("1536Mi")),
            (json!("1e3"), json!("1k")),
            (json!("1E"), json!("1000P")),
            (json!("+2"), json!("2")),
            (json!("-100m"), json!("-0.1")),
            (json!("16Ei"), json!("16384Pi")),
        ] {
            assert!(are_equal(&one, &other) && are_equal(&other, &one), "{one} {other}");
        }
        for (one, other) in [
            (json!("1"), json!("2")),
            (json!("1Gi"), json!("1G")),
            (json!("x"), json!("x")),
            (json!(""), json!("")),
            (json!("1x"), json!("1x")),
            (json!("1e99999999999"), json!("1")),
            (json!("1e-40"), json!("0")),
            (json!(true), json!(true)),
            (json!("1.2.3"), json!("1.2.3")),
        ] {
            assert!(!are_equal(&one, &other), "{one} {other}");
        }
    }
}
