//! Syntax and values of labels.

use std::collections::BTreeMap;

pub use tidewatch_kit::foreign_text::is_dns_subdomain;

/// Returns true if a label is `true` in any letter case.
pub fn is_true(labels: Option<&BTreeMap<String, String>>, key: &str) -> bool {
    labels.and_then(|labels| labels.get(key)).is_some_and(|value| value.eq_ignore_ascii_case("true"))
}

/// Returns true if a text is a label key: a name, or a DNS subdomain, a slash and a name.
pub fn is_label_key(key: &str) -> bool {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    prefix.is_none_or(is_dns_subdomain) && !name.is_empty() && is_label_value(name)
}

/// Returns true if a text is a label value: empty, or at most 63 letters, digits, `-`, `_`, `.` between two letters or
/// digits.
pub fn is_label_value(value: &str) -> bool {
    let edge = |byte: Option<u8>| byte.is_none_or(|byte| byte.is_ascii_alphanumeric());
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let bytes = value.as_bytes();
    bytes.len() <= 63 && bytes.iter().copied().all(inner) && edge(bytes.first().copied()) && edge(bytes.last().copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The API server answers a list whose selector has another key or value with 400.
    #[test]
    fn keys_and_values_are_those_of_the_api_server() {
        let long_part = "p".repeat(200);
        let longest_prefix = format!("{}.{}/x", "p".repeat(126), "q".repeat(126));
        let longest_name = "n".repeat(63);
        for key in
            ["a", "A_b.c-D1", "example.com/a", "1.x/a", &longest_name, &longest_prefix, &format!("{long_part}/x")]
        {
            assert!(is_label_key(key), "{key}");
        }
        let long_prefix = format!("{}.{}/x", "p".repeat(126), "q".repeat(127));
        let long_name = "n".repeat(64);
        let prefixes = ["", "-a", "a-", ".a", "a.", "a..b", "a.-b", "a-.b", "A", "a_b", "é", "a b", "a,b", "a/b"];
        for prefix in prefixes {
            assert!(!is_label_key(&format!("{prefix}/x")), "{prefix:?}");
        }
        for key in ["", "/", "a/", "-a", "a-", "_a", "a.", "a b", "a=b", "é", "a/b/c", &long_name, &long_prefix] {
            assert!(!is_label_key(key), "{key}");
        }
        for value in ["", "a", "A_b.c-D1", "1", &longest_name] {
            assert!(is_label_value(value), "{value}");
        }
        for value in ["-a", "a-", "_", ".", "a b", "a/b", "a,b!=c", "é", "a\n", &long_name] {
            assert!(!is_label_value(value), "{value}");
        }
    }
}
