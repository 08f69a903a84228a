//! What can fail in a sync, object by object.

use std::fmt;

use thiserror::Error;

use super::desired::{Kind, ObjectId};
use crate::{
    base::class::Class,
    kube::runtime_access::{self, ListError, describe},
};

/// Failures that are named in words; the others are counted.
const NAMED: usize = 3;

/// Why a sync, or a removal, did not come to its end. What succeeded is done and remembered.
#[derive(Debug, Error)]
pub enum SyncError {
    /// The inventory could not be read, or somebody else wrote it meanwhile; nothing was written.
    #[error("keep the inventory of the catalog in the runtime")]
    Inventory(#[source] kube::Error),
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

/// What something was tried with.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// An object of the catalog.
    Object(ObjectId),
    /// The inventory.
    Inventory,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Object(id) => write!(f, "{id}"),
            Self::Inventory => f.write_str("the inventory"),
        }
    }
}

/// One object that failed.
#[derive(Debug)]
pub struct Failure {
    /// Which.
    pub target: Target,
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
    pub fn new(mut failures: Vec<Failure>, held: usize) -> Option<Self> {
        // In one order, so that the same failures have the same words.
        failures.sort_by(|a, b| a.target.cmp(&b.target));
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
            write!(f, "{}{attempt} {}", if index == 0 { "" } else { ", " }, failure.target)?;
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
            Self::Inventory(source) => class_of(source),
            Self::List { source: ListError::Page(source), .. } => class_of(source),
            Self::List { source: ListError::Late(_), .. } => Class::Transport,
            Self::List { source: ListError::Pages(_) | ListError::Objects(_), .. } => Class::User,
            Self::Objects(failures) => class_of_object(&failures.first.source),
        }
    }

    /// Whether the runtime does not serve a kind: then it has no objects of it.
    pub(super) fn says_not_found(&self) -> bool {
        match self {
            Self::List { source: ListError::Page(kube::Error::Api(status)), .. } => status.is_not_found(),
            Self::List { .. } | Self::Inventory(_) | Self::Objects(_) => false,
        }
    }

    /// Whether the runtime itself is well: nothing but the catalog has to wait for the next try.
    #[must_use]
    pub fn is_of_catalog_alone(&self) -> bool {
        !matches!(self.class(), Class::Transport | Class::Auth)
    }

    /// What failed and why, in one line: the same while the fault is the same.
    #[must_use]
    pub fn words(&self) -> String {
        let why = match self {
            Self::Inventory(source) | Self::List { source: ListError::Page(source), .. } => describe(source),
            Self::List { source, .. } => source.to_string(),
            Self::Objects(failures) => describe(&failures.first.source),
        };
        format!("{self}: {why}")
    }
}

/// An API server that answers about one object is there. Any other status is the word of something that has a say in that object: a
/// webhook of the user's that says no (403, or what it likes), or that cannot be reached (500), a schema, a quota.
fn class_of_object(error: &kube::Error) -> Class {
    match error {
        kube::Error::Api(status) if !matches!(status.code, 401 | 404 | 409 | 429 | 503 | 504) => Class::Refused,
        error => class_of(error),
    }
}

fn class_of(error: &kube::Error) -> Class {
    match error {
        // A custom resource definition that is not established yet.
        kube::Error::Api(status) if status.is_not_found() => Class::Transport,
        // Who may list may not write this one: a webhook of the user's, a quota, a right that was taken away.
        kube::Error::Api(status) if status.code == 403 => Class::Refused,
        // Somebody else wrote meanwhile, or made what was not there.
        kube::Error::Api(status) if status.code == 409 => Class::Ours,
        error => runtime_access::classify(error),
    }
}
