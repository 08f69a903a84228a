//! Parses YAML as the Go libraries of Kubernetes do, with limits.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Number, Value};
use serde_saphyr::{Options, Spanned, alias_limits, budget, options, options::DuplicateKeyPolicy};
use tidewatch_shared::json::normalize_numbers;

use super::excerpt::message;

/// Maximum nesting depth of a value; a property of a CRD's schema takes two levels. The parser recurses, and without
/// optimisation 100 levels exhaust the stack of a worker thread, 2 MiB.
const MAX_DEPTH: usize = 80;
/// Maximum number of documents per text, empty ones included.
const MAX_DOCUMENTS: usize = 20_000;
/// Maximum number of values that aliases of one document repeat.
const MAX_REPEATED: usize = 200_000;

/// A document of a text; none of them is empty.
#[derive(Debug, PartialEq)]
pub(super) struct Document {
    /// Line of its first value, counted from 1.
    pub(super) line: u64,
    /// Its value. Floating-point numbers without a fraction are integers.
    pub(super) value: Value,
}

/// Parses every document of a text, with at most `max_values` values in all, keys and repeated values included.
///
/// # Errors
/// The message of the parser, which names line and column.
pub(super) fn read(text: &str, max_values: usize) -> Result<Vec<Document>, String> {
    let documents = serde_saphyr::from_multiple_with_options::<Spanned<Tree>>(text, yaml_options(max_values));
    let documents = documents.map_err(|error| message(&error))?;
    let document = |Spanned { value: Tree(mut value), referenced, .. }: Spanned<Tree>| {
        normalize_numbers(&mut value);
        Document { line: referenced.line(), value }
    };
    Ok(documents.into_iter().map(document).collect())
}

/// Parser options equal to those of Go: `0644` is an octal number, `yes` is a boolean, and the last of several equal keys
/// wins. The ratio of aliases to anchors is not bounded, since repeated values count as values.
fn yaml_options(max_values: usize) -> Options {
    options! {
        budget: budget! {
            max_depth: MAX_DEPTH, max_documents: MAX_DOCUMENTS, max_nodes: max_values,
            max_events: max_values.saturating_mul(4), enforce_alias_anchor_ratio: false,
        },
        alias_limits: alias_limits! { max_total_replayed_events: MAX_REPEATED },
        duplicate_keys: DuplicateKeyPolicy::LastWins,
        legacy_octal_numbers: true,
        with_snippet: false,
    }
}

/// A value whose keys need not be strings in the text.
struct Tree(Value);

/// A key as Go spells it in JSON: `yes` is `true`, `0x10` is `16`.
struct Key(String);

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TreeVisitor).map(Self)
    }
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(KeyVisitor).map(Self)
    }
}

struct TreeVisitor;

impl<'de> Visitor<'de> for TreeVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        number(value)
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(Tree(item)) = seq.next_element()? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut members = Map::new();
        while let Some((Key(key), Tree(value))) = map.next_entry()? {
            members.insert(key, value);
        }
        Ok(Value::Object(members))
    }
}

struct KeyVisitor;

impl Visitor<'_> for KeyVisitor {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, number or boolean as a key")
    }

    fn visit_bool<E>(self, key: bool) -> Result<String, E> {
        Ok(key.to_string())
    }

    fn visit_i64<E>(self, key: i64) -> Result<String, E> {
        Ok(key.to_string())
    }

    fn visit_u64<E>(self, key: u64) -> Result<String, E> {
        Ok(key.to_string())
    }

    fn visit_f64<E: serde::de::Error>(self, key: f64) -> Result<String, E> {
        let mut key = number(key)?;
        normalize_numbers(&mut key);
        Ok(key.to_string())
    }

    fn visit_str<E>(self, key: &str) -> Result<String, E> {
        Ok(key.to_owned())
    }
}

fn number<E: serde::de::Error>(value: f64) -> Result<Value, E> {
    Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("JSON has no such number"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn one(text: &str) -> Value {
        let mut documents = read(text, 1_000).unwrap();
        assert_eq!(documents.len(), 1, "{text}");
        documents.remove(0).value
    }

    #[test]
    fn scalars_are_those_of_go() {
        for (text, value) in [
            ("0644", json!(420)),
            ("-010", json!(-8)),
            ("0o17", json!(15)),
            ("0x1F", json!(31)),
            ("08", json!(8)),
            ("1_000", json!(1000)),
            ("18446744073709551615", json!(u64::MAX)),
            ("1.0", json!(1)),
            ("1e3", json!(1000)),
            ("1.5", json!(1.5)),
            ("yes", json!(true)),
            ("Off", json!(false)),
            ("n", json!(false)),
            ("~", Value::Null),
            ("'0644'", json!("0644")),
            ("\"yes\"", json!("yes")),
            ("!!str 1", json!("1")),
            ("1.2.3", json!("1.2.3")),
            ("100m", json!("100m")),
            ("12:30", json!("12:30")),
            ("2026-01-01", json!("2026-01-01")),
            ("inf", json!("inf")),
            ("\"\\ud83d\\ude00 \\/\"", json!("\u{1f600} /")),
        ] {
            assert_eq!(one(&format!("a: {text}")), json!({"a": value}), "{text}");
        }
        for text in [".inf", "-.inf", ".nan", "1e999"] {
            assert!(read(&format!("a: {text}"), 100).is_err(), "JSON has no number {text}");
        }
    }

    #[test]
    fn keys_are_those_of_go() {
        let value = one("1: a\nyes: b\n'no': c\n0x10: d\n1.5: e\n\"x y\": f\n");
        assert_eq!(value, json!({"1": "a", "true": "b", "no": "c", "16": "d", "1.5": "e", "x y": "f"}));
        for text in ["~: a", "[1]: a", "{b: 1}: a"] {
            assert!(read(text, 100).is_err(), "{text}");
        }
    }

    #[test]
    fn last_of_equal_keys_wins_and_merge_keys_are_resolved() {
        assert_eq!(one("a: 1\nb: 2\na: 3\n"), json!({"a": 3, "b": 2}));
        assert_eq!(one("1: v\n1: w\n"), json!({"1": "w"}));
        let merged = one("base: &b {p: 1, q: 1}\nuse: {<<: *b, q: 2}\n");
        assert_eq!(merged["use"], json!({"p": 1, "q": 2}));
    }

    #[test]
    fn documents_have_their_line_and_empty_ones_are_skipped() {
        let text = "# only a comment\n---\n---\na: 1\n---\n~\n--- # comment\n\nb: 2\n...\n";
        let documents = read(text, 100).unwrap();
        let found: Vec<_> = documents.iter().map(|document| (document.line, &document.value)).collect();
        assert_eq!(found, [(4, &json!({"a": 1})), (9, &json!({"b": 2}))]);
        assert_eq!(read("", 100), Ok(Vec::new()));
        assert_eq!(one("\u{feff}a: 1"), json!({"a": 1}), "a byte order mark is no content");
    }

    #[test]
    fn number_of_values_is_bounded() {
        let text = format!("[{}]", "1,".repeat(98));
        assert!(read(&text, 100).is_ok());
        assert!(read(&text, 98).unwrap_err().contains("nodes"));
        let split = "[1]\n---\n".repeat(60);
        assert!(read(&split, 100).unwrap_err().contains("nodes"), "over all documents");
        let many = "a\n---\n".repeat(MAX_DOCUMENTS + 1);
        assert!(read(&many, 1_000_000).unwrap_err().contains("documents"));
    }

    #[test]
    fn alias_bomb_is_refused() {
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..12 {
            let before = level - 1;
            bomb += &format!("a{level}: &a{level} [{}]\n", format!("*a{before}, ").repeat(10));
        }
        assert!(read(&bomb, 1_000_000).is_err());
        let long = format!("a: &a {}\nb: [{}]\n", "x".repeat(100_000), "*a, ".repeat(1_000));
        assert!(read(&long, 1_000_000).is_err(), "100 MB of repeated text");
        let harmless = format!("a: &a {{x: 1}}\nb: [{}]\n", "*a, ".repeat(500));
        assert_eq!(one_of(&harmless)["b"].as_array().map(Vec::len), Some(500));
        assert!(read("a: &a [*a]\n", 100).is_err(), "an alias of itself");
    }

    fn one_of(text: &str) -> Value {
        read(text, 10_000).unwrap().remove(0).value
    }

    #[test]
    fn nesting_is_bounded() {
        let flow = |depth: usize| format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
        let block = |depth: usize| (0..depth).map(|level| format!("{}a:\n", " ".repeat(level))).collect::<String>();
        let lists = |depth: usize| "- ".repeat(depth);
        for text in [flow(MAX_DEPTH), block(MAX_DEPTH), lists(MAX_DEPTH)] {
            assert_eq!(read(&text, 1_000).map(|documents| documents.len()), Ok(1));
        }
        for text in [flow(MAX_DEPTH + 1), block(MAX_DEPTH + 1), lists(MAX_DEPTH + 1)] {
            assert!(read(&text, 1_000).unwrap_err().contains("depth"));
        }
    }

    #[test]
    fn extreme_nesting_is_an_error() {
        for text in ["[".repeat(100_000), "{a: ".repeat(100_000), "- ".repeat(100_000), "? ".repeat(100_000)] {
            assert!(read(&text, 1_000_000).is_err(), "{:.10}", text);
        }
    }

    #[test]
    fn errors_have_a_position() {
        for text in ["a: 1\nb: [1,\n", "a: \"x\n\n", "a: b: c\n", "a: *b\n", "a: \0\n"] {
            let error = read(text, 100).unwrap_err();
            assert!(error.contains("line"), "{text:?}: {error}");
        }
    }
}
