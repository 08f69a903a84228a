//! Errors of installing or removing a component.

use std::fmt;

use thiserror::Error;
use tidewatch_cluster::{
    error_class::ErrorClass,
    object::{self, WriteError},
    runtime_access::{classify, describe},
};

use super::{Component, component::Kind};

/// Kind and name of an object, as shown in messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectName {
    kind: &'static str,
    name: &'static str,
}

impl ObjectName {
    pub(super) const fn new(kind: Kind, name: &'static str) -> Self {
        Self { kind: kind.kind, name }
    }

    pub(super) const fn of(component: Component) -> Self {
        Self::new(component.kind(), component.name())
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.name)
    }
}

/// Failure to reconcile or delete an object.
#[derive(Debug, Error)]
pub enum Error {
    /// A request failed.
    #[error("{verb} the {object} in the runtime")]
    Request {
        /// The operation: read, write or delete.
        verb: &'static str,
        /// The object.
        object: ObjectName,
        /// Cause.
        source: kube::Error,
    },
    /// A dry run of the agent's pod failed, before it replaces the one of lifecycle-manager.
    #[error("start the agent in a dry run, so the one of lifecycle-manager stays")]
    Trial(#[source] kube::Error),
    /// The object is being deleted and a finalizer blocks it; it is created again once it is gone.
    #[error("the {0} is being deleted in the runtime")]
    Terminating(ObjectName),
    /// The object was repaired too often within a short time.
    #[error("the {0} is changed again and again in the runtime")]
    Contested(ObjectName),
}

/// Failure of one component.
#[derive(Debug, Error)]
#[error("install the agent")]
pub struct ComponentError {
    /// The component.
    pub component: Component,
    /// Cause.
    #[source]
    pub error: Error,
}

impl ComponentError {
    /// Returns whether the runtime refuses an object that the agent does not need.
    pub fn is_of_additional(&self) -> bool {
        self.component.is_additional() && self.error.class() == ErrorClass::Refused
    }
}

impl Error {
    /// Maps the error of a request on an object.
    pub(super) const fn request(verb: &'static str, object: ObjectName) -> impl Fn(kube::Error) -> Self {
        move |source| Self::Request { verb, object, source }
    }

    /// Maps the error of a convergence of an object.
    pub(super) fn write(object: ObjectName) -> impl Fn(WriteError) -> Self {
        move |error| {
            let verb = if matches!(error, WriteError::Delete(_)) { "delete" } else { "write" };
            match error.request() {
                Some(source) => Self::Request { verb, object, source },
                None => Self::Contested(object),
            }
        }
    }

    /// Returns the failed request, if a request failed.
    pub const fn call(&self) -> Option<&kube::Error> {
        match self {
            Self::Request { source, .. } | Self::Trial(source) => Some(source),
            Self::Terminating(_) | Self::Contested(_) => None,
        }
    }

    /// Class of the error, which selects the delay before the next attempt.
    pub fn class(&self) -> ErrorClass {
        match self.call() {
            Some(call) if object::is_conflict(call) => ErrorClass::Conflict,
            // The API does not serve the kind, or the namespace was deleted.
            Some(kube::Error::Api(status)) if status.code == 404 => ErrorClass::Transport,
            // The account in the access Secret lacks a right, or a policy of the user denies the request: the user sees
            // the message.
            Some(kube::Error::Api(status)) if status.code == 403 => ErrorClass::Refused,
            Some(call) => classify(call),
            None => ErrorClass::Refused,
        }
    }

    /// Returns whether further requests to this runtime would fail as well.
    pub(super) fn affects_all(&self) -> bool {
        match self.call() {
            Some(kube::Error::Api(status)) => matches!(status.code, 401 | 429 | 503 | 504),
            Some(_) => true,
            None => false,
        }
    }

    /// One line for a status.
    pub fn line(&self) -> String {
        match self.call() {
            Some(call) => format!("failed to {self}: {}", describe(call)),
            None => self.to_string(),
        }
    }

    /// Reason for the condition `SKRWebhook`, from a closed set.
    pub(super) fn reason(&self) -> &'static str {
        match self {
            Self::Terminating(_) => "Terminating",
            Self::Contested(_) => "Contested",
            Self::Request { source: kube::Error::Api(status), .. }
                if status.code == 403 && status.message.contains("exceeded quota") =>
            {
                "Quota"
            }
            Self::Request { .. } | Self::Trial(_) => "Refused",
        }
    }
}
