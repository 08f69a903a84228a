//! What can fail in a sync, object by object.

use std::fmt;

use thiserror::Error;

use super::desired::{ComputeError, Kind, ObjectId};
use crate::{
    queue::Class,
    runtime_access::{self, ListError},
};

/// Failures that are named in words; the others are counted.
const NAMED: usize = 3;

/// Why a sync, or a removal, did not come to its end. What succeeded is done and remembered.
#[derive(Debug, Error)]
pub enum SyncError {
    /// The catalog could not be computed.
    #[error("compute the catalog")]
    Compute(#[from] ComputeError),
    /// A list failed, so nothing is known of that kind; nothing was written.
    #[error("list {kind} in the runtime")]
    List {
        /// Which kind.
        kind: Kind,
        /// Why.
        source: ListError,
    },
    /// Some objects failed; the others were done.
    #[error(transparent)]
    Objects(Failures),
}

/// What was tried with an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// To read it.
    Read,
    /// To apply it.
    Apply,
    /// To delete it.
    Delete,
}

/// One object that failed.
#[derive(Debug)]
pub struct Failure {
    /// Which.
    pub id: ObjectId,
    /// What was tried.
    pub attempt: Attempt,
    /// Why.
    pub source: kube::Error,
}

/// The objects that failed, at least one.
#[derive(Debug)]
pub struct Failures {
    first: Box<Failure>,
    others: Vec<Failure>,
    held: usize,
}

impl Failures {
    /// `None` when nothing failed. `held` counts the objects that waited for one that failed.
    #[must_use]
    pub fn new(failures: Vec<Failure>, held: usize) -> Option<Self> {
        let mut failures = failures.into_iter();
        let first = Box::new(failures.next()?);
        Some(Self { first, others: failures.collect(), held })
    }

    /// Each of them.
    pub fn iter(&self) -> impl Iterator<Item = &Failure> {
        std::iter::once(&*self.first).chain(&self.others)
    }
}

impl fmt::Display for Failures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, failure) in self.iter().take(NAMED).enumerate() {
            let attempt = match failure.attempt {
                Attempt::Read => "read",
                Attempt::Apply => "apply",
                Attempt::Delete => "delete",
            };
            write!(f, "{}{attempt} {}", if index == 0 { "" } else { ", " }, failure.id)?;
        }
        match self.iter().count().saturating_sub(NAMED) {
            0 => {}
            more => write!(f, " and {more} more")?,
        }
        match self.held {
            0 => Ok(()),
            held => write!(f, "; {held} wait for them"),
        }
    }
}

impl std::error::Error for Failures {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.first.source)
    }
}

impl SyncError {
    /// What decides on the delay before the next try. A kind that the runtime does not serve yet comes by itself.
    #[must_use]
    pub fn class(&self) -> Class {
        match self {
            Self::Compute(_) => Class::Ours,
            Self::List { source: ListError::Page(source), .. } => class_of(source),
            Self::List { source: ListError::Late(_), .. } => Class::Transport,
            Self::List { source: ListError::Pages(_) | ListError::Objects(_), .. } => Class::User,
            Self::Objects(failures) => class_of(&failures.first.source),
        }
    }

    /// Whether the runtime said that it does not know an object's kind or namespace: what we remember may be of another life
    /// of it.
    pub(super) fn says_not_found(&self) -> bool {
        let not_found = |error: &kube::Error| matches!(error, kube::Error::Api(status) if status.is_not_found());
        match self {
            Self::Objects(failures) => failures.iter().any(|failure| not_found(&failure.source)),
            Self::List { source: ListError::Page(source), .. } => not_found(source),
            Self::List { .. } | Self::Compute(_) => false,
        }
    }
}

fn class_of(error: &kube::Error) -> Class {
    match error {
        // A custom resource definition that is not established yet.
        kube::Error::Api(status) if status.is_not_found() => Class::Transport,
        error => runtime_access::classify(error),
    }
}
