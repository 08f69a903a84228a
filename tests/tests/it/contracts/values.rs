//! Values of a landscape in place of the placeholders `${name}`.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::Expected;

/// Values by the name of their placeholder.
#[derive(Clone, Debug, Default)]
pub(crate) struct Values(BTreeMap<&'static str, String>);

/// A placeholder without a value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no value for ${{{0}}}")]
pub(crate) struct UnknownValue(String);

impl Values {
    /// Sets a value.
    pub(crate) fn set(&mut self, name: &'static str, value: impl Into<String>) {
        self.0.insert(name, value.into());
    }

    /// Fills the placeholders of a text.
    ///
    /// # Errors
    /// A placeholder has no value.
    pub(crate) fn fill(&self, text: &str) -> Result<String, UnknownValue> {
        let mut filled = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            let Some((name, after)) = after.split_once('}') else { break };
            filled.push_str(before);
            filled.push_str(self.0.get(name).ok_or_else(|| UnknownValue(name.to_owned()))?);
            rest = after;
        }
        filled.push_str(rest);
        Ok(filled)
    }

    /// Fills the placeholders of an expectation.
    ///
    /// # Errors
    /// A placeholder has no value.
    pub(crate) fn fill_expected(&self, expected: &Expected) -> Result<Expected, UnknownValue> {
        Ok(match expected {
            Expected::Is(value) => Expected::Is(self.fill_all(value)?),
            Expected::OneOf(values) => {
                Expected::OneOf(values.iter().map(|value| self.fill_all(value)).collect::<Result<_, _>>()?)
            }
            Expected::Contains(line) => Expected::Contains(self.fill(line)?),
            other => other.clone(),
        })
    }

    /// Fills the placeholders in all texts of a value, names of members included.
    ///
    /// # Errors
    /// A placeholder has no value.
    pub(crate) fn fill_all(&self, value: &Value) -> Result<Value, UnknownValue> {
        Ok(match value {
            Value::String(text) => Value::String(self.fill(text)?),
            Value::Array(elements) => {
                Value::Array(elements.iter().map(|element| self.fill_all(element)).collect::<Result<_, _>>()?)
            }
            Value::Object(members) => {
                let filled = members.iter().map(|(name, value)| Ok((self.fill(name)?, self.fill_all(value)?)));
                Value::Object(filled.collect::<Result<Map<_, _>, _>>()?)
            }
            other => other.clone(),
        })
    }
}
