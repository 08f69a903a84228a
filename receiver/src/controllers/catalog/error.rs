//! Errors of a sync, per object.

use std::fmt;

use thiserror::Error;

use super::desired::{Kind, ObjectId};
use crate::{
    base::error_class::ErrorClass,
    kube::runtime_access::{self, ListError, describe},
};

/// Failures named in the message; further ones are counted.
const NAMED: usize = 3;

/// Cause of the failure to repair an object whose repairs are reverted.
const CONTESTED: &str = "it is changed again and again in the runtime";

/// Error of a sync or a removal. Successful steps are kept and recorded in the inventory.
#[derive(Debug, Error)]
pub enum SyncError {
    /// The inventory could not be read, or was written concurrently by another process.
    #[error("keep the inventory of the catalog in the runtime")]
    Inventory(#[source] kube::Error),
    /// A list failed, so the objects of that kind are unknown; no object was written.
    #[error("list {kind} in the runtime")]
    List {
        /// Kind that was listed.
        kind: Kind,
        /// Error of the list.
        source: ListError,
    },
    /// Some objects failed; all others were synced.
    #[error(transparent)]
    Objects(ObjectsError),
}

/// Call that was attempted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Attempt {
    /// Read.
    Read,
    /// Apply.
    Apply,
    /// Delete.
    Delete,
}

/// Subject of a failed call.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, strum::Display)]
pub enum Target {
    /// An object of the catalog.
    #[strum(to_string = "{0}")]
    Object(ObjectId),
    /// The inventory.
    #[strum(to_string = "the inventory")]
    Inventory,
}

/// Failure of one call.
#[derive(Debug)]
pub struct ObjectFailure {
    /// Subject of the call.
    pub target: Target,
    /// Call that was attempted.
    pub attempt: Attempt,
    /// Error of the call; `None` if it was not made because a competing writer reverts each repair of the object.
    pub cause: Option<kube::Error>,
}

impl ObjectFailure {
    /// Returns whether the object, its kind or its namespace does not exist.
    pub(super) fn is_not_found(&self) -> bool {
        matches!(&self.cause, Some(kube::Error::Api(status)) if status.is_not_found())
    }
}

/// Failures of a sync, at least one.
#[derive(Debug)]
pub struct ObjectsError {
    first: Box<ObjectFailure>,
    others: Vec<ObjectFailure>,
    blocked: usize,
}

impl ObjectsError {
    /// Collects failures; `None` if there are none. `blocked` counts the objects skipped because one they depend on
    /// failed.
    #[must_use]
    pub fn new(mut failures: Vec<ObjectFailure>, blocked: usize) -> Option<Self> {
        // Sorted, so that equal failures have equal messages.
        failures.sort_by(|a, b| a.target.cmp(&b.target));
        let mut failures = failures.into_iter();
        let first = Box::new(failures.next()?);
        Some(Self { first, others: failures.collect(), blocked })
    }

    /// All failures.
    pub fn iter(&self) -> impl Iterator<Item = &ObjectFailure> {
        std::iter::once(&*self.first).chain(&self.others)
    }
}

impl fmt::Display for ObjectsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, failure) in self.iter().take(NAMED).enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{} {}", failure.attempt, failure.target)?;
        }
        match self.iter().count().saturating_sub(NAMED) {
            0 => {}
            more => write!(f, " and {more} more")?,
        }
        match self.blocked {
            0 => Ok(()),
            blocked => write!(f, "; {blocked} wait for them"),
        }
    }
}

impl std::error::Error for ObjectsError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.first.cause.as_ref().map(|error| error as _)
    }
}

impl SyncError {
    /// Error class, which determines the retry delay. A kind that is not served yet is a transport error: it appears by
    /// itself.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Inventory(source) | Self::List { source: ListError::Page(source), .. } => class_of(source),
            Self::List { source: ListError::Timeout(_), .. } => ErrorClass::Transport,
            Self::List { source: ListError::Pages(_) | ListError::Objects(_), .. } => ErrorClass::User,
            Self::Objects(failures) => failures.first.cause.as_ref().map_or(ErrorClass::Refused, class_of_object),
        }
    }

    /// Returns whether the runtime does not serve the listed kind, and therefore has no objects of it.
    pub(super) fn is_not_served(&self) -> bool {
        matches!(self, Self::List { source: ListError::Page(kube::Error::Api(status)), .. } if status.is_not_found())
    }

    /// Returns whether the runtime itself is reachable, so that only the catalog has to wait for the retry.
    #[must_use]
    pub fn is_catalog_only(&self) -> bool {
        !matches!(self.class(), ErrorClass::Transport | ErrorClass::Auth)
    }

    /// Error with its cause in one line; equal as long as the cause is the same.
    #[must_use]
    pub fn describe(&self) -> String {
        let why = match self {
            Self::Inventory(source) | Self::List { source: ListError::Page(source), .. } => describe(source),
            Self::List { source, .. } => source.to_string(),
            Self::Objects(failures) => failures.first.cause.as_ref().map_or_else(|| CONTESTED.to_owned(), describe),
        };
        format!("{self}: {why}")
    }
}

/// Classifies an error of a call on one object, which proves that the API server is reachable. Most other statuses come
/// from admission: a user's webhook that denies (403 or any other code) or is unreachable (500), schema validation, or
/// a quota.
fn class_of_object(error: &kube::Error) -> ErrorClass {
    match error {
        kube::Error::Api(status) if !matches!(status.code, 401 | 404 | 409 | 429 | 503 | 504) => ErrorClass::Refused,
        error => class_of(error),
    }
}

fn class_of(error: &kube::Error) -> ErrorClass {
    match error {
        // The CRD is not established yet.
        kube::Error::Api(status) if status.is_not_found() => ErrorClass::Transport,
        // The list was allowed, so this is a denial of one object: a user's webhook, a quota, or a revoked permission.
        kube::Error::Api(status) if status.code == 403 => ErrorClass::Refused,
        // A concurrent write or creation.
        kube::Error::Api(status) if status.code == 409 => ErrorClass::Ours,
        error => runtime_access::classify(error),
    }
}
