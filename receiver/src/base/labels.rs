//! Syntax and values of labels.

use std::collections::BTreeMap;

/// Returns true if a label is `true` in any letter case.
#[must_use]
pub fn is_true(labels: Option<&BTreeMap<String, String>>, key: &str) -> bool {
    labels.and_then(|labels| labels.get(key)).is_some_and(|value| value.eq_ignore_ascii_case("true"))
}

/// Returns true if a text is a label key: a name, or a DNS prefix of at most 253 characters, a slash and a name.
#[must_use]
pub fn is_label_key(key: &str) -> bool {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    let dns = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
    let prefix_holds = prefix.is_none_or(|prefix| (1..=253).contains(&prefix.len()) && prefix.chars().all(dns));
    prefix_holds && !name.is_empty() && is_label_value(name)
}

/// Returns true if a text is a label value: empty, or at most 63 letters, digits, `-`, `_`, `.` between two letters or
/// digits.
#[must_use]
pub fn is_label_value(value: &str) -> bool {
    let edge = |byte: Option<u8>| byte.is_none_or(|byte| byte.is_ascii_alphanumeric());
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let bytes = value.as_bytes();
    bytes.len() <= 63 && bytes.iter().copied().all(inner) && edge(bytes.first().copied()) && edge(bytes.last().copied())
}
