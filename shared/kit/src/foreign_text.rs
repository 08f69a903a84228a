//! Bounds on text of a runtime cluster or an agent, which can have any length and content.

/// Maximum bytes of an object's name: a DNS subdomain (RFC 1123, section 2.1, as Kubernetes bounds it).
pub const MAX_NAME_BYTES: usize = 253;
/// Maximum bytes of an opaque identifier that an API server assigns. A uid is a UUID of 36 characters, a
/// resourceVersion an integer of at most 20 digits.
pub const MAX_IDENTIFIER_BYTES: usize = 64;

/// Returns the first `max` characters of a text as one line, for conditions, logs and Events: a space replaces each
/// control character, line separator, and formatting character that reorders or hides the text around it.
pub fn line(text: &str, max: usize) -> String {
    text.chars().take(max).map(|char| if is_printable(char) { char } else { ' ' }).collect()
}

/// Returns a text as [`line`] does, but of a longer one the first and the last characters, `max` with the mark of the
/// gap: the end of a refusal often says why.
pub fn shortened(text: &str, max: usize) -> String {
    const GAP: &str = " … ";
    let length = text.chars().count();
    if length <= max {
        return line(text, max);
    }
    let kept = max.saturating_sub(GAP.chars().count());
    let end = kept / 2;
    let head: String = text.chars().take(kept - end).collect();
    let tail: String = text.chars().skip(length - end).collect();
    line(&(head + GAP + &tail), max)
}

/// Returns a uid or resourceVersion; empty if it is missing, or longer than any that an API server assigns.
pub fn identifier(text: Option<&str>) -> &str {
    text.filter(|text| text.len() <= MAX_IDENTIFIER_BYTES).unwrap_or_default()
}

/// Returns whether a text can be the name of an object: its length and characters are those of a DNS subdomain.
pub fn is_name(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
    (1..=MAX_NAME_BYTES).contains(&text.len()) && text.bytes().all(is_allowed)
}

/// Returns true if a text is a DNS subdomain (RFC 1123) of at most [`MAX_NAME_BYTES`], as the API server bounds it: parts
/// of lower-case letters, digits and `-` between two letters or digits, with dots between them.
pub fn is_dns_subdomain(text: &str) -> bool {
    let alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let edge = |byte: Option<u8>| byte.is_some_and(alphanumeric);
    let is_part = |part: &str| {
        let bytes = part.as_bytes();
        let inner = bytes.iter().all(|byte| alphanumeric(*byte) || *byte == b'-');
        inner && edge(bytes.first().copied()) && edge(bytes.last().copied())
    };
    text.len() <= MAX_NAME_BYTES && text.split('.').all(is_part)
}

/// Control characters, line separators, zero-width characters and bidirectional controls are not printable.
fn is_printable(char: char) -> bool {
    let is_format = matches!(char,
        '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    !char.is_control() && !is_format
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_short_and_has_no_control_characters() {
        assert_eq!(line("a\r\n\u{1b}[31mb\u{9b}c\u{202e}d\u{2028}e", 100), "a   [31mb c d e");
        assert_eq!(line("äöü", 2), "äö");
        assert_eq!(line(&"x\n".repeat(1_000), 5), "x x x");
    }

    #[test]
    fn text_that_is_too_long_loses_its_middle() {
        assert_eq!(shortened("abcdefghij", 10), "abcdefghij");
        assert_eq!(shortened("abcdefghijk", 9), "abc … ijk");
        assert_eq!(shortened("äb\ndefghijklö", 9), "äb  … klö");
        assert_eq!(shortened("abc", 2), " …");
    }

    #[test]
    fn identifier_that_is_too_long_counts_as_missing() {
        let uuid = "0f8fad5b-d9cb-469f-a165-70867728950e";
        let longest = "9".repeat(MAX_IDENTIFIER_BYTES);
        for (text, expected) in [(Some(uuid), uuid), (Some(&*longest), &*longest), (None, "")] {
            assert_eq!(identifier(text), expected);
        }
        assert_eq!(identifier(Some(&"9".repeat(MAX_IDENTIFIER_BYTES + 1))), "");
    }

    #[test]
    fn name_is_a_dns_subdomain() {
        let longest = "n".repeat(MAX_NAME_BYTES);
        assert!(["a", "keda-1.0.0", &*longest].into_iter().all(is_name));
        let long = "n".repeat(MAX_NAME_BYTES + 1);
        assert!(!["", "A", "a b", "a\n", "a/b", "ä", &*long].into_iter().any(is_name));
    }
}
