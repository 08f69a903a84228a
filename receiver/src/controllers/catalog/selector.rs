//! Label selectors, parsed once and matched often.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use thiserror::Error;

use crate::base::labels::{is_label_key, is_label_value};

/// Error of a label selector that cannot be parsed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SelectorError {
    /// None of `In`, `NotIn`, `Exists`, `DoesNotExist`.
    #[error("the operator {0:?} is none of In, NotIn, Exists, DoesNotExist")]
    Operator(String),
    /// `In` and `NotIn` require values, `Exists` and `DoesNotExist` forbid them.
    #[error("the values for the key {0:?} do not fit its operator")]
    Values(String),
    /// Not a label key, `[prefix/]name`.
    #[error("{0:?} is no label key")]
    Key(String),
    /// Not a label value, or longer than 63 characters.
    #[error("{0:?} is no label value")]
    Value(String),
}

/// A valid label selector; its requirements are ANDed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector(Vec<Requirement>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    operator: Operator,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Operator {
    In(BTreeSet<String>),
    NotIn(BTreeSet<String>),
    Exists,
    DoesNotExist,
}

impl Selector {
    /// Parses a `LabelSelector` (meta/v1) as the API server does.
    ///
    /// # Errors
    /// [`SelectorError`] of the first invalid requirement.
    pub fn parse(selector: &LabelSelector) -> Result<Self, SelectorError> {
        let exact = selector.match_labels.iter().flatten().map(|(key, value)| {
            let operator = Operator::In(BTreeSet::from([checked_value(value)?]));
            Ok(Requirement { key: checked_key(key)?, operator })
        });
        let expressions = selector.match_expressions.iter().flatten().map(|expression| {
            let key = checked_key(&expression.key)?;
            let values = expression.values.iter().flatten().map(|value| checked_value(value));
            let values = values.collect::<Result<BTreeSet<_>, _>>()?;
            let operator = match (expression.operator.as_str(), values.is_empty()) {
                ("In", false) => Operator::In(values),
                ("NotIn", false) => Operator::NotIn(values),
                ("Exists", true) => Operator::Exists,
                ("DoesNotExist", true) => Operator::DoesNotExist,
                ("In" | "NotIn" | "Exists" | "DoesNotExist", _) => return Err(SelectorError::Values(key)),
                (other, _) => return Err(SelectorError::Operator(other.chars().take(63).collect())),
            };
            Ok(Requirement { key, operator })
        });
        exact.chain(expressions).collect::<Result<_, _>>().map(Self)
    }

    /// Returns whether the selector has no requirement.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether all requirements match these labels. An empty selector matches everything here; the caller
    /// decides on its meaning.
    #[must_use]
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|Requirement { key, operator }| match (operator, labels.get(key)) {
            (Operator::In(values), Some(value)) => values.contains(value),
            (Operator::NotIn(values), Some(value)) => !values.contains(value),
            (Operator::Exists, found) => found.is_some(),
            (Operator::DoesNotExist, found) => found.is_none(),
            (Operator::In(_), None) => false,
            (Operator::NotIn(_), None) => true,
        })
    }
}

fn checked_key(key: &str) -> Result<String, SelectorError> {
    is_label_key(key).then(|| key.to_owned()).ok_or_else(|| SelectorError::Key(key.chars().take(63).collect()))
}

fn checked_value(value: &str) -> Result<String, SelectorError> {
    is_label_value(value)
        .then(|| value.to_owned())
        .ok_or_else(|| SelectorError::Value(value.chars().take(63).collect()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(selector: serde_json::Value) -> Result<Selector, SelectorError> {
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
