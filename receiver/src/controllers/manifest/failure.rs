//! A failed request on an object of a module. Pure.

use super::refusals::Retry;
use crate::{
    base::error_class::ErrorClass,
    kube::{
        kinds::is_unserved,
        runtime_access::{classify, describe},
    },
};

/// A failed request on an object of the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    /// Operation and object, as in `apply Deployment kyma-system/x`.
    pub(super) operation: String,
    /// Error of the API server, in one bounded line.
    pub(super) cause: String,
    pub(super) class: ErrorClass,
    /// Another attempt is likely to succeed soon: a conflict, or a rate limit.
    pub(super) is_transient: bool,
    /// The runtime does not serve the kind.
    pub(super) is_unserved: bool,
    /// The API server refuses the content of the object.
    pub(super) is_invalid: bool,
    /// The module's own webhook, which does not answer, caused it.
    pub(super) is_guarded: bool,
    /// Effect on the next attempt.
    pub(super) retry: Retry,
}

impl Failure {
    pub(super) fn new(operation: String, error: &kube::Error) -> Self {
        let refusal = if let kube::Error::Api(status) = error { Some(status) } else { None };
        let code = refusal.map_or(0, |refusal| refusal.code);
        let is_unserved = is_unserved(error);
        Self {
            operation,
            cause: describe(error),
            class: classify(error),
            is_transient: is_unserved || matches!(code, 409 | 429),
            is_unserved,
            is_invalid: code == 422,
            is_guarded: false,
            retry: refusal.map_or(Retry::Soon, |refusal| Retry::of(refusal)),
        }
    }

    /// A failure without a failed request.
    pub(super) fn because(operation: String, cause: &str) -> Self {
        Self {
            operation,
            cause: cause.to_owned(),
            class: ErrorClass::Refused,
            is_transient: false,
            is_unserved: false,
            is_invalid: false,
            is_guarded: false,
            retry: Retry::Soon,
        }
    }

    pub(super) const fn is_unserved(&self) -> bool {
        self.is_unserved
    }

    pub(super) fn line(&self) -> String {
        format!("failed to {}: {}", self.operation, self.cause)
    }
}
