//! Members of a parsed document, with their paths in errors.

use std::fmt;

use serde_json::Value;
use thiserror::Error;

/// A member that is missing or has an unexpected value.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{path} {problem}")]
pub struct MemberError {
    /// Path of the member, as in `component.resources[2].access`.
    pub path: String,
    /// The problem, as a predicate.
    pub problem: String,
}

/// An object, with its path in the document.
#[derive(Clone, Debug)]
pub(crate) struct Object<'a> {
    path: String,
    value: &'a Value,
}

impl<'a> Object<'a> {
    /// The document itself.
    pub(crate) fn root(value: &'a Value) -> Result<Self, MemberError> {
        Self::at("the document".to_owned(), value).map(|root| Self { path: String::new(), ..root })
    }

    fn at(path: String, value: &'a Value) -> Result<Self, MemberError> {
        if value.is_object() { Ok(Self { path, value }) } else { Err(unexpected(path, "an object")) }
    }

    /// A member that is neither absent nor null.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|value| !value.is_null())
    }

    /// A required member of any type.
    pub(crate) fn required(&self, key: &str) -> Result<&'a Value, MemberError> {
        self.get(key).ok_or_else(|| self.error(key, "is missing"))
    }

    /// A required string that is not empty.
    pub(crate) fn text(&self, key: &str) -> Result<&'a str, MemberError> {
        let text = self.required(key)?.as_str().ok_or_else(|| unexpected(self.path(key), "a string"))?;
        if text.is_empty() { Err(self.error(key, "is empty")) } else { Ok(text) }
    }

    /// A string; empty if it is absent.
    pub(crate) fn optional_text(&self, key: &str) -> Result<&'a str, MemberError> {
        self.get(key).map_or(Ok(""), |value| value.as_str().ok_or_else(|| unexpected(self.path(key), "a string")))
    }

    /// A required object.
    pub(crate) fn object(&self, key: &str) -> Result<Self, MemberError> {
        Self::at(self.path(key), self.required(key)?)
    }

    /// An object, if it is present.
    pub(crate) fn optional_object(&self, key: &str) -> Result<Option<Self>, MemberError> {
        self.get(key).map(|value| Self::at(self.path(key), value)).transpose()
    }

    /// The objects of a list; none if the list is absent or null.
    pub(crate) fn objects(&self, key: &str) -> Result<Vec<Self>, MemberError> {
        let Some(list) = self.get(key) else { return Ok(Vec::new()) };
        let list = list.as_array().ok_or_else(|| unexpected(self.path(key), "a list"))?;
        let path = self.path(key);
        list.iter().enumerate().map(|(index, value)| Self::at(format!("{path}[{index}]"), value)).collect()
    }

    /// The members that are not null.
    pub(crate) fn members(&self) -> impl Iterator<Item = (&'a String, &'a Value)> + use<'a> {
        self.value.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null())
    }

    /// Fails unless the key is there, with any value.
    pub(crate) fn has(&self, key: &str) -> Result<(), MemberError> {
        if self.value.get(key).is_some() { Ok(()) } else { Err(self.error(key, "is missing")) }
    }

    /// An error about a member.
    pub(crate) fn error(&self, key: &str, problem: impl fmt::Display) -> MemberError {
        MemberError { path: self.path(key), problem: problem.to_string() }
    }

    fn path(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }
}

fn unexpected(path: String, expected: &str) -> MemberError {
    MemberError { path, problem: format!("is not {expected}") }
}
