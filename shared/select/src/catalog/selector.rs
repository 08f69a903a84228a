//! Label selectors, parsed once and matched often.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::{Expression, SelectorExt as _};
use thiserror::Error;
use tidewatch_api::labels::{is_label_key, is_label_value};

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
pub struct Selector(Vec<Expression>);

impl Selector {
    /// Parses a `LabelSelector` (meta/v1) as the API server does.
    ///
    /// # Errors
    /// [`SelectorError`] of the first invalid requirement.
    pub fn parse(selector: &LabelSelector) -> Result<Self, SelectorError> {
        let exact = selector.match_labels.iter().flatten().map(|(key, value)| {
            let value = checked_value(value)?;
            Ok(Expression::In(checked_key(key)?, BTreeSet::from([value])))
        });
        let expressions = selector.match_expressions.iter().flatten().map(|expression| {
            let key = checked_key(&expression.key)?;
            let values = expression.values.iter().flatten().map(|value| checked_value(value));
            let values = values.collect::<Result<BTreeSet<_>, _>>()?;
            match (expression.operator.as_str(), values.is_empty()) {
                ("In", false) => Ok(Expression::In(key, values)),
                ("NotIn", false) => Ok(Expression::NotIn(key, values)),
                ("Exists", true) => Ok(Expression::Exists(key)),
                ("DoesNotExist", true) => Ok(Expression::DoesNotExist(key)),
                ("In" | "NotIn" | "Exists" | "DoesNotExist", _) => Err(SelectorError::Values(key)),
                (other, _) => Err(SelectorError::Operator(prefix(other))),
            }
        });
        exact.chain(expressions).collect::<Result<_, _>>().map(Self)
    }

    /// Returns whether the selector has no requirement.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether all requirements match these labels. An empty selector matches everything here; the caller
    /// decides on its meaning.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|expression| expression.matches(labels))
    }
}

fn checked_key(key: &str) -> Result<String, SelectorError> {
    if is_label_key(key) { Ok(key.to_owned()) } else { Err(SelectorError::Key(prefix(key))) }
}

fn checked_value(value: &str) -> Result<String, SelectorError> {
    if is_label_value(value) { Ok(value.to_owned()) } else { Err(SelectorError::Value(prefix(value))) }
}

/// Beginning of a text for an error message.
fn prefix(text: &str) -> String {
    text.chars().take(63).collect()
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
