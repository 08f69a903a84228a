//! Reads the YAML and JSON documents of a text as kubectl does, with limits.
//!
//! `stream` splits a text into documents, `tree` builds the value of one, `scalar` gives each scalar its type. kubectl reads
//! YAML 1.1 with `go.yaml.in/yaml/v2`, and converts it to JSON: `0644` is 420, `yes` is true, `1.0` is 1. A parser of YAML 1.2
//! reads other values, so the types are decided here, and only the syntax is left to a library.

mod scalar;
mod stream;
mod tree;

use serde_json::Value;
use thiserror::Error;

/// Maximum nesting depth of a value; a property of a CRD's schema takes two levels. An API server returns objects as JSON,
/// of which `serde_json` reads at most 128 levels.
const MAX_DEPTH: usize = 120;
/// Maximum number of documents per text, empty ones included.
const MAX_DOCUMENTS: usize = 20_000;
/// Maximum number of bytes in strings that anchors keep and aliases repeat.
const MAX_REPEATED_BYTES: usize = 16 << 20;

/// A document of a text; none of them is empty.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Document {
    /// Line of its first value, counted from 1.
    pub(super) line: usize,
    /// Its value. Numbers are `i64`, or `f64` if they have a fraction or exceed `i64`.
    pub(super) value: Value,
}

/// A text that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(super) enum YamlError {
    /// The text is neither YAML nor JSON, or has a value that JSON lacks.
    #[error("line {line}, column {column}: {reason}")]
    Syntax {
        /// Line, counted from 1.
        line: usize,
        /// Column, counted from 1, in characters.
        column: usize,
        /// Cause in one sentence.
        reason: String,
    },
    /// A value is nested deeper than [`MAX_DEPTH`].
    #[error("line {line}: more than {MAX_DEPTH} levels of nested lists and objects")]
    TooDeep {
        /// Line, counted from 1.
        line: usize,
    },
    /// The text has too many values; keys, and repetitions by aliases, count.
    #[error("line {line}: more than {limit} values, keys and repetitions by aliases included")]
    TooManyValues {
        /// Line, counted from 1.
        line: usize,
        /// The limit.
        limit: usize,
    },
    /// The strings that aliases repeat exceed [`MAX_REPEATED_BYTES`].
    #[error("line {line}: anchors and aliases repeat more than {MAX_REPEATED_BYTES} bytes")]
    TooLargeAliases {
        /// Line, counted from 1.
        line: usize,
    },
    /// The text has more than [`MAX_DOCUMENTS`].
    #[error("more than {MAX_DOCUMENTS} documents")]
    TooManyDocuments,
}

/// What is left of the limits of a text.
#[derive(Debug)]
struct Budget {
    limit: usize,
    values: usize,
    repeated_bytes: usize,
}

impl Budget {
    fn spend_values(&mut self, count: usize, line: usize) -> Result<(), YamlError> {
        let too_many = YamlError::TooManyValues { line, limit: self.limit };
        self.values = self.values.checked_sub(count).ok_or(too_many)?;
        Ok(())
    }

    fn spend_repeated_bytes(&mut self, count: usize, line: usize) -> Result<(), YamlError> {
        self.repeated_bytes = self.repeated_bytes.checked_sub(count).ok_or(YamlError::TooLargeAliases { line })?;
        Ok(())
    }
}

/// Reads every document of a text, with at most `max_values` values in all, keys and repeated values included.
///
/// # Errors
/// [`YamlError`].
pub(super) fn read(text: &str, max_values: usize) -> Result<Vec<Document>, YamlError> {
    let mut budget = Budget { limit: max_values, values: max_values, repeated_bytes: MAX_REPEATED_BYTES };
    let mut documents = Vec::new();
    let mut count = 0;
    stream::each(text, |part| {
        count += 1;
        if count > MAX_DOCUMENTS {
            return Err(YamlError::TooManyDocuments);
        }
        let document = match part {
            stream::Part::Json { line, text } => tree::of_json(text, line, &mut budget)?,
            stream::Part::Yaml { line, text } => tree::of_yaml(text, line, &mut budget)?,
        };
        documents.extend(document);
        Ok(())
    })?;
    Ok(documents)
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

    fn error(text: &str) -> String {
        read(text, 1_000).unwrap_err().to_string()
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
            ("9223372036854775807", json!(i64::MAX)),
            ("9007199254740993", json!(9_007_199_254_740_993_i64)),
            ("18446744073709551615", json!(u64::MAX as f64)),
            ("1e999", json!("1e999")),
            ("1152921504606846976.0", json!(1_152_921_504_606_847_000_i64)),
            ("1e21", json!(1e21)),
            ("tRue", json!("tRue")),
            ("nULL", json!("nULL")),
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
        for text in [".inf", "-.inf", ".nan"] {
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
        let merged = one("base: &b {p: 1, q: 1}\nafter: {<<: *b, q: 2}\nbefore: {q: 2, <<: *b}\n");
        assert_eq!(merged["after"], json!({"p": 1, "q": 2}));
        assert_eq!(merged["before"], json!({"p": 1, "q": 1}), "Go's parser merges in the order of the text");
        for text in ["a: {<<: 1}", "a: {<<: [1]}"] {
            assert!(error(text).contains("<< needs an object"), "{text}");
        }
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
    fn streams_of_json_and_yaml_are_split() {
        let values = |text: &str| {
            let documents = read(text, 1_000).unwrap();
            documents.into_iter().map(|document| (document.line, document.value["a"].clone())).collect::<Vec<_>>()
        };
        let [one, two, three] = [1, 2, 3].map(|value| json!(value));
        assert_eq!(
            values("{\"a\": 1}{\"a\": 2}\n\n{\"a\": 3}"),
            [(1, one.clone()), (1, two.clone()), (3, three.clone())]
        );
        assert_eq!(values("{\"a\": 1}\n---\na: 2\n---\na: 3\n"), [(1, one.clone()), (3, two.clone()), (5, three)]);
        assert_eq!(values("{a: 1}\n---\n{a: 2}\n"), [(1, one.clone()), (3, two.clone())]);
        assert_eq!(values("a: 1\n...\na: 3\n---\n\u{feff}a: 2\n"), [(1, one), (5, two)], "nothing follows the end");
        assert!(error("{\"a\": 1}\n{\"a\": 2}\n---\na: 3\n").starts_with("line 3, column "));
        assert!(error("a: 1\n--- b\n").starts_with("line 2, column 4: only a comment may follow ---"));
        assert!(error("a: 1\n---\na: 2\nb: [\n").starts_with("line "), "{}", error("a: 1\n---\nb: [\n"));
        assert!(error("\ta: 1\nb: 2\n").starts_with("line 2, "), "nothing of a document is lost");
    }

    #[test]
    fn number_of_values_is_bounded() {
        let list = |count: usize| format!("[{}]", "1,".repeat(count));
        let json = |count: usize| format!("{{\"a\": [{}1]}}", "1,".repeat(count));
        assert!(read(&list(99), 100).is_ok());
        for text in [&*list(100), &json(100), &"[1]\n---\n".repeat(60)] {
            assert!(matches!(read(text, 100), Err(YamlError::TooManyValues { limit: 100, .. })), "{:.20}", text);
        }
        assert_eq!(read(&list(100), 100).unwrap_err().to_string().lines().count(), 1);
        let many = "a\n---\n".repeat(MAX_DOCUMENTS + 1);
        assert_eq!(read(&many, 1_000_000), Err(YamlError::TooManyDocuments));
    }

    #[test]
    fn alias_bomb_is_refused() {
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..12 {
            let before = level - 1;
            bomb += &format!("a{level}: &a{level} [{}]\n", format!("*a{before}, ").repeat(10));
        }
        assert!(matches!(read(&bomb, 1_000_000), Err(YamlError::TooManyValues { .. })));
        let long = format!("a: &a {}\nb: [{}]\n", "x".repeat(100_000), "*a, ".repeat(1_000));
        assert!(matches!(read(&long, 1_000_000), Err(YamlError::TooLargeAliases { .. })), "100 MB of repeated text");
        let nested = format!("{}1{}", "&a [".repeat(100), "]".repeat(100));
        assert!(matches!(read(&nested, 1_000), Err(YamlError::TooManyValues { .. })), "each anchor keeps a copy");
        let mut chain = "a0: &a0 [x]\n".to_owned();
        for level in 1..500 {
            chain += &format!("a{level}: &a{level} [*a{}]\n", level - 1);
        }
        assert!(matches!(read(&chain, 1_000_000), Err(YamlError::TooDeep { .. })), "aliases add depth");
        let harmless = format!("a: &a {{x: 1}}\nb: [{}]\n", "*a, ".repeat(500));
        assert_eq!(one_of(&harmless)["b"].as_array().map(Vec::len), Some(500));
        assert!(error("a: &a [*a]\n").contains("alias"), "an alias of itself");
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
            assert!(matches!(read(&text, 1_000), Err(YamlError::TooDeep { .. })), "{:.20}", text);
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
            let error = error(text);
            assert!(error.starts_with("line "), "{text:?}: {error}");
        }
    }

    #[test]
    fn line_break_of_yaml_1_1_outside_quotes_is_refused_where_it_stands() {
        assert_eq!(one("a: \"b\u{2028}c\""), json!({"a": "b\u{2028}c"}));
        assert_eq!(one("a: '\u{85}'\nb: 1"), json!({"a": "\u{85}", "b": 1}));
        for text in ["a: 1\n# x\u{2028}b: 2", "a: 1\nb: é\u{2028}", "a: |\n  b\u{2028}c", "a: 1\nb: \u{2028}\"c\""] {
            let error = error(text);
            assert!(error.starts_with("line 2, column "), "{error}");
            assert!(error.contains("U+2028"), "{error}");
        }
        assert_eq!(one("a: 1\n...\n# \u{2028}"), json!({"a": 1}), "beyond the end of the document");
    }
}
