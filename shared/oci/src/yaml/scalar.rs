//! Types of scalars, after the rules of `go.yaml.in/yaml/v2` and of the conversion to JSON by `sigs.k8s.io/yaml`.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Number, Value};

use crate::excerpt::Excerpt;

/// Tag of a scalar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag<'a> {
    /// A plain scalar without a tag, or any with the tag `!`.
    Implicit,
    /// A quoted scalar or a block without a tag.
    Text,
    /// A tag of YAML, by its suffix, as `int` of `!!int`.
    Yaml(&'a str),
    /// Another tag.
    Other,
}

/// Value of a scalar.
///
/// # Errors
/// One sentence: the tag does not fit the text, or JSON has no such value.
pub(super) fn value(text: &str, tag: Tag<'_>) -> Result<Value, String> {
    let resolved = match tag {
        Tag::Text | Tag::Other | Tag::Yaml("str" | "timestamp") => return Ok(text.into()),
        Tag::Yaml("binary") => return binary(text),
        Tag::Implicit => return resolve(text),
        Tag::Yaml("bool" | "int" | "float" | "null") => resolve(text)?,
        Tag::Yaml(_) => return Ok(text.into()),
    };
    let fits = match (tag, &resolved) {
        (Tag::Yaml("bool"), Value::Bool(_)) | (Tag::Yaml("null"), Value::Null) => true,
        (Tag::Yaml("int"), Value::Number(_)) => integer_value(text).is_some(),
        (Tag::Yaml("float"), Value::Number(_)) => true,
        _ => false,
    };
    if fits { Ok(resolved) } else { Err(format!("{} does not fit its tag", Excerpt::of(text))) }
}

/// Value of a scalar as a key, which JSON makes a text: here, infinity has a name.
///
/// # Errors
/// As [`value`]; also for an integer above `i64`.
pub(super) fn key(text: &str, tag: Tag<'_>) -> Result<Value, String> {
    if tag == Tag::Implicit && is_non_finite(text) {
        return Ok(text.trim_start_matches('+').to_ascii_lowercase().into());
    }
    let value = value(text, tag)?;
    match (value.is_number(), integer_value(text)) {
        (true, Some(whole)) if whole.is_f64() => Err(format!("the number {} cannot be a key", Excerpt::of(text))),
        (true, None) => Ok(value.as_f64().map_or(value, |float| float_key(float).into())),
        _ => Ok(value),
    }
}

/// Text of a key: JSON has no other keys than strings.
///
/// # Errors
/// One sentence: the key is null, or no scalar.
pub(super) fn key_text(value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Bool(value) => Ok(value.to_string()),
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(whole), _) => Ok(whole.to_string()),
            (None, Some(value)) => Ok(float_key(value)),
            (None, None) => Err(format!("the number {number} cannot be a key")),
        },
        Value::Null => Err("null cannot be a key; quote it".to_owned()),
        Value::Array(_) | Value::Object(_) => Err("a list or an object cannot be a key".to_owned()),
    }
}

/// A floating-point number as a key: the shortest digits of its single precision.
fn float_key(value: f64) -> String {
    let scientific = format!("{:e}", value as f32);
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if (-4..6).contains(&exponent) {
        return (value as f32).to_string();
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
}

/// Value of a scalar that its text alone decides.
fn resolve(text: &str) -> Result<Value, String> {
    match text {
        "y" | "Y" | "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => Ok(true.into()),
        "n" | "N" | "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => Ok(false.into()),
        "" | "~" | "null" | "Null" | "NULL" => Ok(Value::Null),
        _ if is_non_finite(text) => Err(format!("JSON has no number {text}; quote it, if it is a text")),
        _ => Ok(numeric(text).unwrap_or_else(|| text.into())),
    }
}

/// Returns whether a text means infinity or no number.
fn is_non_finite(text: &str) -> bool {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    matches!(text, ".nan" | ".NaN" | ".NAN") || matches!(unsigned, ".inf" | ".Inf" | ".INF")
}

/// A number, if the text is one.
fn numeric(text: &str) -> Option<Value> {
    match text.as_bytes().first()? {
        b'.' => float(&text.replace('_', "")).filter(|_| are_between_digits(text)),
        b'0'..=b'9' | b'+' | b'-' => integer_value(text).or_else(|| float(&text.replace('_', ""))),
        _ => None,
    }
}

/// Returns whether digits surround each underscore.
fn are_between_digits(text: &str) -> bool {
    let ends_with_digit = |part: &str| part.ends_with(|last: char| last.is_ascii_digit());
    let begins_with_digit = |part: &str| part.starts_with(|first: char| first.is_ascii_digit());
    let around = text.match_indices('_').map(|(at, _)| (&text[..at], &text[at + 1..]));
    around.into_iter().all(|(before, after)| ends_with_digit(before) && begins_with_digit(after))
}

/// An integer with underscores, but no floating-point number, even without a fraction.
fn integer_value(text: &str) -> Option<Value> {
    integer(&text.replace('_', ""))
}

/// An integer in decimal, or with a prefix of its base; a leading zero means octal. Above `i64` it becomes a
/// floating-point number, as an API server reads it.
fn integer(text: &str) -> Option<Value> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let sign = if text.starts_with('-') { "-" } else { "" };
    let prefixed = |prefixes: [&str; 2]| prefixes.into_iter().find_map(|prefix| unsigned.strip_prefix(prefix));
    let (base, digits) = if let Some(digits) = prefixed(["0x", "0X"]) {
        (16, digits)
    } else if let Some(digits) = prefixed(["0b", "0B"]) {
        (2, digits)
    } else if let Some(digits) = prefixed(["0o", "0O"]) {
        (8, digits)
    } else if unsigned.len() > 1 && unsigned.starts_with('0') {
        (8, &unsigned[1..])
    } else {
        (10, unsigned)
    };
    if !digits.starts_with(|first: char| first.is_digit(base)) {
        return None;
    }
    if let Ok(whole) = i64::from_str_radix(&format!("{sign}{digits}"), base) {
        return Some(whole.into());
    }
    // Only numbers without a sign reach beyond `i64`.
    let large = u64::from_str_radix(digits, base).ok().filter(|_| unsigned.len() == text.len())?;
    Some(number(large as f64))
}

/// A floating-point number; one that exceeds the range of `f64` is a text.
fn float(text: &str) -> Option<Value> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let (mantissa, exponent) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let exponent = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
    let is_float = digits(whole) && digits(fraction) && digits(exponent) && !exponent.is_empty();
    if !is_float || whole.is_empty() && fraction.is_empty() {
        return None;
    }
    text.parse::<f64>().ok().filter(|value| value.is_finite()).map(number)
}

/// A finite number as Go writes it to JSON: below 10^21 without an exponent, so that it may be an integer to its reader.
pub(super) fn number(value: f64) -> Value {
    let whole = if value.fract() == 0.0 { value.to_string().parse::<i64>().ok() } else { None };
    whole.map_or_else(|| Number::from_f64(value).map_or(Value::Null, Value::Number), Value::from)
}

/// Text of a scalar in base64.
fn binary(text: &str) -> Result<Value, String> {
    let content = STANDARD.decode(text.replace(['\r', '\n'], ""));
    let content = content.map_err(|error| format!("!!binary is not base64: {error}"))?;
    Ok(String::from_utf8_lossy(&content).into())
}
