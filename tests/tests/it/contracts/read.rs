//! Reads: a JSONPath into the answer of an API server, and what is expected there.

use std::fmt;

use jsonpath_rust::JsonPath as _;
use serde_json::Value;

/// A read of a program.
#[derive(Clone, Debug)]
pub(crate) struct Read {
    /// Name of the object.
    pub(crate) object: String,
    /// The JSONPath; `$` for the whole object.
    pub(crate) at: String,
    /// What is expected there.
    pub(crate) expected: Expected,
}

/// An expectation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Expected {
    /// Exactly one value, equal to this one.
    Is(Value),
    /// Exactly one value, among these.
    OneOf(Vec<Value>),
    /// At least one value.
    Exists,
    /// No value; the object itself exists.
    Absent,
    /// The object does not exist.
    Gone,
    /// The text contains this line.
    Contains(String),
}

/// A read that does not hold.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Mismatch {
    at: String,
    expected: String,
    found: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}, found {}", self.at, self.expected, self.found)
    }
}

/// Longest part of an answer in a text.
const SHOWN: usize = 400;

impl Read {
    /// A read.
    ///
    /// # Errors
    /// When the JSONPath is malformed, or missing where the expectation needs one.
    pub(crate) fn new(object: String, at: Option<String>, expected: Expected) -> Result<Self, String> {
        let needs_path = !matches!(expected, Expected::Gone | Expected::Exists | Expected::Contains(_));
        let at = match at {
            None if needs_path => return Err(format!("a read of {object} has no path")),
            at => at.unwrap_or_else(|| "$".to_owned()),
        };
        // Placeholders stand in texts, where they disturb no path.
        Value::Null.query(&at).map_err(|error| format!("a read of {object}: {at}: {error}"))?;
        Ok(Self { object, at, expected })
    }

    /// Compares an answer, `None` for an object that does not exist.
    ///
    /// # Errors
    /// The difference.
    pub(crate) fn check(&self, answer: Option<&Value>) -> Result<(), Mismatch> {
        let Some(answer) = answer else {
            let is_gone = self.expected == Expected::Gone;
            return if is_gone { Ok(()) } else { Err(self.mismatch("no such object")) };
        };
        let found = answer.query(&self.at).map_err(|error| self.mismatch(&error.to_string()))?;
        let holds = match (&self.expected, found.as_slice()) {
            (Expected::Is(wanted), [only]) => *only == wanted,
            (Expected::OneOf(wanted), [only]) => wanted.contains(*only),
            (Expected::Exists, found) => !found.is_empty(),
            (Expected::Absent, found) => found.is_empty(),
            (Expected::Contains(line), [Value::String(text)]) => text.lines().any(|found| found.contains(line)),
            _ => false,
        };
        if holds {
            return Ok(());
        }
        if matches!(self.expected, Expected::Contains(_)) {
            return Err(self.mismatch("other lines"));
        }
        let found: Vec<_> = found.into_iter().map(Value::to_string).collect();
        Err(self.mismatch(&format!("[{}]", found.join(", "))))
    }

    fn mismatch(&self, found: &str) -> Mismatch {
        let expected = match &self.expected {
            Expected::Is(wanted) => format!("is not {wanted}"),
            Expected::OneOf(wanted) => format!("is none of {}", Value::Array(wanted.clone())),
            Expected::Exists => "has no value".to_owned(),
            Expected::Absent => "has a value".to_owned(),
            Expected::Gone => "still exists".to_owned(),
            Expected::Contains(line) => format!("has no line with {line}"),
        };
        let found = found.chars().take(SHOWN).collect();
        Mismatch { at: format!("{} {}", self.object, self.at), expected, found }
    }
}
