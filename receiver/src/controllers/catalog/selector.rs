//! Label selectors, read once and matched often.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use thiserror::Error;

/// Why a selector cannot be read.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum MalformedSelector {
    /// None of `In`, `NotIn`, `Exists`, `DoesNotExist`.
    #[error("the operator {0:?} is none of In, NotIn, Exists, DoesNotExist")]
    Operator(String),
    /// `In` and `NotIn` need values, the others must have none.
    #[error("the values for the key {0:?} do not fit its operator")]
    Values(String),
    /// Not `[prefix/]name` as labels have it.
    #[error("{0:?} is no label key")]
    Key(String),
    /// Not at most 63 characters of what label values may hold.
    #[error("{0:?} is no label value")]
    Value(String),
}

/// A label selector that holds; its requirements are ANDed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector(Vec<Requirement>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    In(BTreeSet<String>),
    NotIn(BTreeSet<String>),
    Exists,
    DoesNotExist,
}

impl Selector {
    /// Reads a `LabelSelector` (meta/v1) as the API server would.
    ///
    /// # Errors
    /// [`MalformedSelector`]; a selector is taken whole or not at all.
    pub fn parse(selector: &LabelSelector) -> Result<Self, MalformedSelector> {
        let exact = selector.match_labels.iter().flatten().map(|(key, value)| {
            let test = Test::In(BTreeSet::from([checked_value(value)?]));
            Ok(Requirement { key: checked_key(key)?, test })
        });
        let expressions = selector.match_expressions.iter().flatten().map(|expression| {
            let key = checked_key(&expression.key)?;
            let values = expression.values.iter().flatten().map(|value| checked_value(value));
            let values = values.collect::<Result<BTreeSet<_>, _>>()?;
            let test = match (expression.operator.as_str(), values.is_empty()) {
                ("In", false) => Test::In(values),
                ("NotIn", false) => Test::NotIn(values),
                ("Exists", true) => Test::Exists,
                ("DoesNotExist", true) => Test::DoesNotExist,
                ("In" | "NotIn" | "Exists" | "DoesNotExist", _) => return Err(MalformedSelector::Values(key)),
                (other, _) => return Err(MalformedSelector::Operator(other.chars().take(63).collect())),
            };
            Ok(Requirement { key, test })
        });
        exact.chain(expressions).collect::<Result<_, _>>().map(Self)
    }

    /// Whether it has no requirement at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether every requirement holds for these labels. An empty selector matches everything here; what it means is the
    /// caller's to say.
    #[must_use]
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|Requirement { key, test }| match (test, labels.get(key)) {
            (Test::In(values), Some(value)) => values.contains(value),
            (Test::NotIn(values), Some(value)) => !values.contains(value),
            (Test::Exists, found) => found.is_some(),
            (Test::DoesNotExist, found) => found.is_none(),
            (Test::In(_), None) => false,
            (Test::NotIn(_), None) => true,
        })
    }
}

/// Whether a text is a label key: a name, or a DNS prefix of at most 253 characters, a slash and a name.
#[must_use]
pub fn is_label_key(key: &str) -> bool {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    let dns = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
    let prefix_holds = prefix.is_none_or(|prefix| (1..=253).contains(&prefix.len()) && prefix.chars().all(dns));
    prefix_holds && !name.is_empty() && is_label_value(name)
}

/// Whether a text is a label value: empty, or at most 63 letters, digits, `-`, `_`, `.` between two letters or digits.
#[must_use]
pub fn is_label_value(value: &str) -> bool {
    let edge = |byte: Option<u8>| byte.is_none_or(|byte| byte.is_ascii_alphanumeric());
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let bytes = value.as_bytes();
    bytes.len() <= 63 && bytes.iter().copied().all(inner) && edge(bytes.first().copied()) && edge(bytes.last().copied())
}

fn checked_key(key: &str) -> Result<String, MalformedSelector> {
    is_label_key(key).then(|| key.to_owned()).ok_or_else(|| MalformedSelector::Key(key.chars().take(63).collect()))
}

fn checked_value(value: &str) -> Result<String, MalformedSelector> {
    is_label_value(value)
        .then(|| value.to_owned())
        .ok_or_else(|| MalformedSelector::Value(value.chars().take(63).collect()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(selector: serde_json::Value) -> Result<Selector, MalformedSelector> {
        Selector::parse(&serde_json::from_value(selector).unwrap())
    }

    #[test]
    fn requirements_match_as_in_the_api_server() {
        let labels = BTreeMap::from([("a".to_owned(), "1".to_owned()), ("x.y/b".to_owned(), String::new())]);
        let expression = |key: &str, operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
        for (selector, matches) in [
            (json!({}), true),
            (json!({"matchLabels": {"a": "1"}}), true),
            (json!({"matchLabels": {"a": "2"}}), false),
            (json!({"matchLabels": {"a": "1", "c": "1"}}), false),
            (json!({"matchLabels": {"x.y/b": ""}}), true),
            (expression("a", "In", &["0", "1"]), true),
            (expression("a", "In", &["0"]), false),
            (expression("c", "In", &["0"]), false),
            (expression("a", "NotIn", &["1"]), false),
            (expression("a", "NotIn", &["0"]), true),
            (expression("c", "NotIn", &["0"]), true),
            (expression("a", "Exists", &[]), true),
            (expression("c", "Exists", &[]), false),
            (expression("a", "DoesNotExist", &[]), false),
            (expression("c", "DoesNotExist", &[]), true),
            (json!({"matchLabels": {"a": "1"}, "matchExpressions": [{"key": "c", "operator": "Exists"}]}), false),
        ] {
            assert_eq!(parse(selector.clone()).unwrap().matches(&labels), matches, "{selector}");
        }
    }

    #[test]
    fn malformed_selectors_are_refused() {
        for (key, operator, values) in [
            ("a", "Is", vec!["1"]),
            ("a", "in", vec!["1"]),
            ("a", "In", vec![]),
            ("a", "NotIn", vec![]),
            ("a", "Exists", vec!["1"]),
            ("a", "DoesNotExist", vec!["1"]),
            ("", "Exists", vec![]),
            ("a b", "Exists", vec![]),
            ("A/b/c", "Exists", vec![]),
            ("a", "In", vec!["not a value"]),
        ] {
            let selector = json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
            assert!(parse(selector).is_err(), "{key} {operator} {values:?}");
        }
        assert!(parse(json!({"matchLabels": {"a,b": "1"}})).is_err());
    }
}
