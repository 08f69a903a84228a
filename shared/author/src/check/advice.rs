//! Suggestions that repair a finding.

use jiff::civil::Date;
use serde_json::Value;

use super::document::Content;

/// Fields with a pattern or format in the CRDs: name, description and a valid example.
pub(super) const FIELD_FORMATS: [(&str, &str, &str); 8] = [
    ("moduleName", "words of at least three lower-case letters with hyphens between them", "api-gateway"),
    ("version", "three numbers with dots between them, and a word after a hyphen if need be", "1.2.3-rc"),
    ("channel", "at least three lower-case letters", "regular"),
    ("ocmComponentName", "a domain and a path", "kyma-project.io/module/keda"),
    ("deprecationDate", "a day as YYYY-MM-DD", "2027-01-31"),
    ("date", "a day as YYYY-MM-DD", "2027-01-31"),
    ("replacement", "three numbers with dots between them, and a word after a hyphen if need be", "1.2.4"),
    ("link", "a URI", "https://example.com/docs"),
];

/// Description of a field's format, with an example.
pub(super) fn field_format(field: &str) -> Option<String> {
    let (_, words, example) = FIELD_FORMATS.iter().find(|(name, ..)| *name == field)?;
    Some(format!("{words}, as {example}"))
}

/// Suggestion for a value of the wrong type.
pub(super) fn type_advice(expected: &str, found: &Content) -> String {
    match (expected, found) {
        (_, Content::Null) => format!("remove it, or write {expected}"),
        ("a string", Content::Number(_) | Content::Bool(_)) => "put it in quotes".to_owned(),
        ("a boolean", Content::Text(text)) if matches!(text.as_str(), "true" | "false") => {
            format!("write {text} without quotes")
        }
        ("a boolean", _) => "write true or false".to_owned(),
        ("a whole number" | "a number", Content::Text(text)) if text.parse::<i64>().is_ok() => {
            format!("write {text} without quotes")
        }
        ("a list", Content::Object(_)) => "begin each entry with a hyphen".to_owned(),
        ("a list", _) => "begin it with a hyphen, as the only entry".to_owned(),
        ("an object", _) => "write each of its fields as name: value, and no hyphen before".to_owned(),
        _ => format!("write {expected}"),
    }
}

/// Finds a valid text that differs from an invalid one by a common mistake.
pub(super) fn repair(text: &str, is_right: impl Fn(&str) -> bool) -> Option<String> {
    let text = text.trim();
    let begins_with_digit = |text: &str| text.starts_with(|char: char| char.is_ascii_digit());
    let bare = text.strip_prefix(['v', 'V']).filter(|rest| begins_with_digit(rest)).unwrap_or(text);
    let mut others = vec![text.to_owned(), bare.to_owned(), bare.to_ascii_lowercase()];
    if begins_with_digit(bare) {
        others.extend(numbers(bare));
        others.extend(day(bare));
    }
    others.push(text.replace(' ', "%20"));
    if text.contains('.') && !text.contains([' ', ':']) {
        others.push(format!("https://{text}"));
    }
    for kept in ["./-_", ".-_", ".-", "-"] {
        let joined = |char: char| if char.is_ascii_alphanumeric() || kept.contains(char) { char } else { '-' };
        let joined: String = bare.chars().map(joined).collect();
        let joined = joined.trim_matches(['-', '.', '_', '/']);
        others.extend([joined.to_owned(), joined.to_ascii_lowercase()]);
    }
    others.into_iter().find(|other| !other.is_empty() && is_right(other))
}

/// Candidates for a version given as a bare number, or as a semantic version with more parts than allowed.
fn numbers(text: &str) -> Vec<String> {
    let released = text.split_once('+').map_or(text, |(released, _)| released);
    let mut versions = vec![released.to_owned()];
    if released.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
        versions.extend([format!("{released}.0"), format!("{released}.0.0")]);
    }
    if let Some((numbers, word)) = released.split_once('-') {
        let word = word.replace('.', "-");
        versions.extend([format!("{numbers}-{word}"), format!("{numbers}-{word}").to_ascii_lowercase()]);
    }
    versions
}

/// Date given as year, month and day, in this order, with any separators; `None` if it is ambiguous.
fn day(text: &str) -> Option<String> {
    let text = text.split_once(['T', ' ']).map_or(text, |(day, _)| day);
    let is_compact = text.len() == 8 && text.bytes().all(|byte| byte.is_ascii_digit());
    let parts: Vec<_> =
        if is_compact { vec![&text[..4], &text[4..6], &text[6..]] } else { text.split(['-', '/', '.']).collect() };
    let [year, month, day] = parts[..] else { return None };
    let date = Date::new(year.parse().ok()?, month.parse().ok()?, day.parse().ok()?).ok()?;
    (year.len() == 4).then(|| date.to_string())
}

/// Closest of a few names, if it is close enough to be a misspelling; letter case is ignored.
pub(super) fn closest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Two differences in a name of three letters or fewer would make another name.
    let is_close = |known: &str| distance(name, known) <= if known.len() > 3 { 2 } else { 1 };
    known.into_iter().filter(|known| is_close(known)).min_by_key(|known| distance(name, known))
}

/// Levenshtein distance, ignoring ASCII letter case.
fn distance(name: &str, known: &str) -> usize {
    // Names are short; a longer text is not a misspelt one.
    if name.len() > 64 {
        return usize::MAX;
    }
    strsim::levenshtein(&name.to_ascii_lowercase(), &known.to_ascii_lowercase())
}

/// Path and size, in bytes of JSON, of an object's largest field.
pub(super) fn largest(object: &Value) -> Option<(String, usize)> {
    let fields = ["metadata", "spec"].into_iter().flat_map(|part| {
        let members = object.get(part).and_then(Value::as_object).into_iter().flatten();
        members.map(move |(name, value)| (format!("{part}.{name}"), value.to_string().len()))
    });
    fields.max_by_key(|(_, bytes)| *bytes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tidewatch_select::catalog::retirement::parse_date;

    use super::*;

    #[test]
    fn misspelt_names_have_a_closest_match() {
        assert_eq!(distance("chanels", "channels"), 1);
        assert_eq!(distance("modulename", "moduleName"), 0);
        assert_eq!(distance("abc", ""), 3);
        assert!(distance("descriptor", "data") > 2);
        let operators = ["In", "NotIn", "Exists", "DoesNotExist"];
        assert_eq!(closest("in", operators), Some("In"));
        assert_eq!(closest("Exist", operators), Some("Exists"));
        assert_eq!(closest("!=", operators), None);
        assert_eq!(closest("Like", operators), None);
    }

    #[test]
    fn common_mistakes_are_repaired() {
        let version = |text: &str| {
            let dotted = |text: &str| text.split('.').count() == 3 && semver::Version::parse(text).is_ok();
            repair(text, |text| {
                dotted(text.split_once('-').map_or(text, |(numbers, _)| numbers)) && !text.contains('+')
            })
        };
        for (text, meant) in [
            ("v1.2.3", Some("1.2.3")),
            ("1.2", Some("1.2.0")),
            ("1", Some("1.0.0")),
            ("1.2.3+build", Some("1.2.3")),
            (" 1.2.3 ", Some("1.2.3")),
            ("latest", None),
            ("", None),
        ] {
            assert_eq!(version(text).as_deref(), meant, "{text}");
        }
        let no_dots = |text: &str| text.starts_with("1.0.0-") && !text[6..].contains('.');
        assert_eq!(repair("1.0.0-rc.1", no_dots).as_deref(), Some("1.0.0-rc-1"));
        for (text, meant) in [
            ("2026-2-3", Some("2026-02-03")),
            ("20260203", Some("2026-02-03")),
            ("2026/02/03", Some("2026-02-03")),
            ("2026-02-03T00:00:00Z", Some("2026-02-03")),
            ("1.2.2027", None),
            ("2026-02-30", None),
            ("soon", None),
        ] {
            assert_eq!(repair(text, |text| parse_date(text).is_some()).as_deref(), meant, "{text}");
        }
        let lower = |text: &str| text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-');
        assert_eq!(repair("Api_Gateway", lower).as_deref(), Some("api-gateway"));
        assert_eq!(repair("example.com/x", |text| text.contains("://")).as_deref(), Some("https://example.com/x"));
    }

    #[test]
    fn type_advice_depends_on_the_found_value() {
        let text = |text: &str| Content::Text(text.to_owned());
        for (expected, found, advice) in [
            ("a string", Content::Bool(true), "put it in quotes"),
            ("a string", Content::List(Vec::new()), "write a string"),
            ("a boolean", text("true"), "write true without quotes"),
            ("a boolean", text("yes"), "write true or false"),
            ("a whole number", text("5"), "write 5 without quotes"),
            ("a whole number", text("five"), "write a whole number"),
            ("a list", Content::Object(Vec::new()), "begin each entry with a hyphen"),
            ("a list", text("x"), "begin it with a hyphen, as the only entry"),
            ("an object", Content::Null, "remove it, or write an object"),
        ] {
            assert_eq!(type_advice(expected, &found), advice);
        }
    }

    #[test]
    fn largest_field_is_found() {
        let object = json!({"metadata": {"name": "a"}, "spec": {"version": "1.0.0", "descriptor": {"x": "yyyyyyyy"}}});
        assert_eq!(largest(&object), Some(("spec.descriptor".to_owned(), 16)));
        assert_eq!(largest(&json!({})), None);
    }
}
