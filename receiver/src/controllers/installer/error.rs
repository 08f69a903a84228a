//! What can keep a part from being installed.

use std::fmt;

use thiserror::Error;

use super::{Part, part::Kind};
use crate::{
    base::class::Class,
    kube::object,
    kube::runtime_access::{classify, describe},
};

/// An object, as texts name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    kind: &'static str,
    name: &'static str,
}

impl Object {
    pub(super) const fn new(kind: Kind, name: &'static str) -> Self {
        Self { kind: kind.kind, name }
    }

    pub(super) const fn of(part: Part) -> Self {
        Self::new(part.kind(), part.name())
    }
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.name)
    }
}

/// Why an object is not as it shall be.
#[derive(Debug, Error)]
pub enum Error {
    /// It could not be read.
    #[error("read the {object} in the runtime")]
    Read {
        /// Which.
        object: Object,
        /// Why not.
        source: kube::Error,
    },
    /// It could not be written.
    #[error("write the {object} in the runtime")]
    Write {
        /// Which.
        object: Object,
        /// Why not.
        source: kube::Error,
    },
    /// It could not be deleted.
    #[error("delete the {object} in the runtime")]
    Delete {
        /// Which.
        object: Object,
        /// Why not.
        source: kube::Error,
    },
    /// Somebody deletes it and a finalizer holds it; when it is gone, it is made again.
    #[error("the {0} is being deleted in the runtime")]
    Terminating(Object),
    /// It was mended too often in a short time.
    #[error("the {0} is changed again and again in the runtime")]
    Contested(Object),
}

/// A part that could not be installed.
#[derive(Debug, Error)]
#[error("install the agent")]
pub struct Failure {
    /// Which.
    pub part: Part,
    /// Why not.
    #[source]
    pub error: Error,
}

impl Error {
    /// The failed call; `None` when it was none.
    #[must_use]
    pub const fn call(&self) -> Option<&kube::Error> {
        match self {
            Self::Read { source, .. } | Self::Write { source, .. } | Self::Delete { source, .. } => Some(source),
            Self::Terminating(_) | Self::Contested(_) => None,
        }
    }

    /// What decides on the delay before the next try.
    #[must_use]
    pub fn class(&self) -> Class {
        match self.call() {
            Some(call) if object::is_conflict(call) => Class::Ours,
            // A kind that is not served, or a namespace that went.
            Some(kube::Error::Api(status)) if status.code == 404 => Class::Transport,
            // A right that the control plane's account has not, or a policy of the user's: its words are for the user.
            Some(kube::Error::Api(status)) if status.code == 403 => Class::Refused,
            Some(call) => classify(call),
            None => Class::Refused,
        }
    }

    /// Whether it is of no use to ask this runtime for anything else now.
    pub(super) fn is_of_all(&self) -> bool {
        match self.call() {
            Some(kube::Error::Api(status)) => matches!(status.code, 401 | 429 | 503 | 504),
            Some(_) => true,
            None => false,
        }
    }

    /// One line for a status.
    pub(crate) fn line(&self) -> String {
        match self.call() {
            Some(call) => format!("failed to {self}: {}", describe(call)),
            None => self.to_string(),
        }
    }

    /// Why, as a word of a closed set.
    pub(super) fn reason(&self) -> &'static str {
        let quota = |call: &kube::Error| matches!(call, kube::Error::Api(status) if status.code == 403 && status.message.contains("exceeded quota"));
        match self {
            Self::Terminating(_) => "Terminating",
            Self::Contested(_) => "Contested",
            _ if self.call().is_some_and(quota) => "Quota",
            _ => "Refused",
        }
    }
}
