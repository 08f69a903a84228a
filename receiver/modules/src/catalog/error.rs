//! Errors of a sync, per object.

use thiserror::Error;
use tidewatch_cluster::{
    error_class::ErrorClass,
    runtime_access::{self, ListError, describe},
};
use tidewatch_select::catalog::desired::{Kind, ObjectId};

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
    #[error("{text}")]
    Objects {
        /// The first failed calls, and the number of the others.
        text: String,
        /// Error of the first one; `None` if it was not made because a competing writer reverts each repair of the object.
        #[source]
        cause: Option<CallError>,
    },
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

/// A failed call on one object. It keeps no part of the response: a runtime can answer each of thousands of calls with
/// a long message.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{text}")]
pub struct CallError {
    class: ErrorClass,
    is_not_found: bool,
    /// See [`runtime_access::is_unreached`].
    is_unreached: bool,
    /// Description in one bounded line.
    text: Box<str>,
}

impl From<kube::Error> for CallError {
    fn from(error: kube::Error) -> Self {
        let is_not_found = matches!(&error, kube::Error::Api(status) if status.is_not_found());
        Self {
            class: class_of_object(&error),
            is_not_found,
            is_unreached: runtime_access::is_unreached(&error),
            text: describe(&error).into(),
        }
    }
}

/// Failure of one call.
#[derive(Debug)]
struct ObjectFailure {
    id: ObjectId,
    attempt: Attempt,
    /// See [`SyncError::Objects`].
    cause: Option<CallError>,
}

/// Failures of a running sync. The first ones in the order of their objects are kept, so that equal failures have equal
/// messages; the others are counted.
#[derive(Debug, Default)]
pub(super) struct Failures {
    /// Failed objects in order, at most [`NAMED`].
    objects: Vec<ObjectFailure>,
    /// Further failed objects.
    more: usize,
    /// Failure to write the inventory.
    inventory: Option<CallError>,
    /// A failed object, its kind or its namespace does not exist.
    is_any_missing: bool,
}

impl Failures {
    pub(super) fn add(&mut self, id: ObjectId, attempt: Attempt, cause: Option<CallError>) {
        self.is_any_missing |= cause.as_ref().is_some_and(|cause| cause.is_not_found);
        let at = self.objects.partition_point(|known| known.id <= id);
        self.objects.insert(at, ObjectFailure { id, attempt, cause });
        if self.objects.len() > NAMED {
            self.objects.truncate(NAMED);
            self.more += 1;
        }
    }

    /// Sets the result of the last write of the inventory.
    pub(super) fn set_inventory(&mut self, failure: Option<CallError>) {
        self.inventory = failure;
    }

    /// Returns whether no object failed.
    pub(super) fn are_without_objects(&self) -> bool {
        self.objects.is_empty()
    }

    /// Returns whether an object, its kind or its namespace does not exist.
    pub(super) fn has_missing(&self) -> bool {
        self.is_any_missing || self.inventory.as_ref().is_some_and(|cause| cause.is_not_found)
    }

    /// Converts them into an error; `None` if there are none. `blocked` counts the objects skipped because one they
    /// depend on failed.
    pub(super) fn into_error(self, blocked: usize) -> Option<SyncError> {
        let Self { objects, more, inventory, .. } = self;
        let failed = objects.iter().map(|failure| format!("{} {}", failure.attempt, failure.id));
        let failed: Vec<_> = failed.chain(inventory.as_ref().map(|_| "apply the inventory".to_owned())).collect();
        let named = &failed[..failed.len().min(NAMED)];
        let more = failed.len() - named.len() + more;
        let cause = match objects.into_iter().next() {
            Some(first) => first.cause,
            None => Some(inventory?),
        };
        let mut text = named.join(", ");
        if more > 0 {
            text += &format!(" and {more} more");
        }
        if blocked > 0 {
            text += &format!("; {blocked} wait for them");
        }
        Some(SyncError::Objects { text, cause })
    }
}

impl SyncError {
    /// Error class, which determines the retry delay. A kind that is not served yet is a transport error: it appears by
    /// itself.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Inventory(source) | Self::List { source: ListError::Page(source), .. } => class_of(source),
            Self::List { source: ListError::Timeout(_), .. } => ErrorClass::Transport,
            Self::List { source: ListError::Pages(_) | ListError::Objects(_), .. } => ErrorClass::User,
            Self::Objects { cause, .. } => cause.as_ref().map_or(ErrorClass::Refused, |cause| cause.class),
        }
    }

    /// Returns whether the runtime does not serve the listed kind, and therefore has no objects of it.
    pub(super) fn is_not_served(&self) -> bool {
        matches!(self, Self::List { source: ListError::Page(kube::Error::Api(status)), .. } if status.is_not_found())
    }

    /// Returns whether the API server of the runtime was not reached. Of a list that takes too long, some pages were read.
    pub fn is_unreached(&self) -> bool {
        match self {
            Self::Inventory(source) | Self::List { source: ListError::Page(source), .. } => {
                runtime_access::is_unreached(source)
            }
            Self::List { .. } => false,
            Self::Objects { cause, .. } => cause.as_ref().is_some_and(|cause| cause.is_unreached),
        }
    }

    /// Returns whether the runtime itself is reachable, so that only the catalog has to wait for the retry.
    pub fn is_catalog_only(&self) -> bool {
        !matches!(self.class(), ErrorClass::Transport | ErrorClass::Auth)
    }

    /// Error with its cause in one line; equal as long as the cause is the same.
    pub fn describe(&self) -> String {
        let why = match self {
            Self::Inventory(source) | Self::List { source: ListError::Page(source), .. } => describe(source),
            Self::List { source, .. } => source.to_string(),
            Self::Objects { cause, .. } => cause.as_ref().map_or_else(|| CONTESTED.to_owned(), ToString::to_string),
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
        kube::Error::Api(status) if status.code == 409 => ErrorClass::Conflict,
        error => runtime_access::classify(error),
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    fn call_error(code: u16, message: &str) -> CallError {
        kube::Error::Api(
            Status::failure(message, if code == 404 { "NotFound" } else { "InternalError" }).with_code(code).boxed(),
        )
        .into()
    }

    fn id(n: usize) -> ObjectId {
        ObjectId::new(Kind::Template, &format!("t-{n:04}"))
    }

    #[test]
    fn thousands_of_failures_are_counted_and_three_are_kept() {
        let mut failures = Failures::default();
        for n in (0..5_000).rev() {
            failures.add(id(n), Attempt::Apply, Some(call_error(500, &format!("{n}{}", "x".repeat(1_000)))));
        }
        failures.set_inventory(Some(call_error(503, "no")));
        assert!(!failures.are_without_objects() && !failures.has_missing());
        let error = failures.into_error(2).unwrap();
        let named = [0, 1, 2].map(|n| format!("apply {}", id(n))).join(", ");
        assert_eq!(error.to_string(), format!("{named} and 4998 more; 2 wait for them"), "with the inventory");
        let text = error.describe();
        assert!(text.contains(": 0xxx") && text.len() < 600, "{text}");
    }

    #[test]
    fn cause_is_one_short_line() {
        let cause = call_error(422, &"\u{1b}[31m\n".repeat(16_000)).to_string();
        assert!(cause.len() < 500 && !cause.contains(char::is_control), "{cause:?}");
    }

    #[test]
    fn missing_object_is_known_even_if_it_is_only_counted() {
        let mut failures = Failures::default();
        for n in 0..10 {
            failures.add(id(n), Attempt::Apply, Some(call_error(if n == 9 { 404 } else { 500 }, "")));
        }
        assert!(failures.has_missing());
        let mut failures = Failures::default();
        failures.set_inventory(Some(call_error(404, "")));
        assert!(failures.has_missing() && failures.are_without_objects());
        failures.set_inventory(None);
        assert!(!failures.has_missing() && failures.into_error(0).is_none());
    }
}
