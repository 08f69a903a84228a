//! Error of the readers of a cache that needs the body of an object and has only its facts.

use thiserror::Error;

/// An object exists, and the cache has only its facts, because it concerned a runtime in another replica's shard until a moment
/// ago. Says nothing about the content of the object, and nothing that users have to know: the reader tries again.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("the cache has no body of the {kind} {key} yet")]
pub struct BodyMissingError {
    /// Kind of the object, as in a sentence.
    pub kind: &'static str,
    /// Namespace and name of the object, separated by a slash.
    pub key: String,
}
