//! A failed request on an object of a module. Pure.

use kube::core::Status;
use tidewatch_cluster::{
    error_class::ErrorClass,
    kinds::is_unserved,
    runtime_access::{classify, describe},
};

use super::own_webhook::is_of_webhook;

/// Effect of a refusal on the next attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Retry {
    /// As the class of the error says.
    Soon,
    /// It may end by itself, but seldom soon: an admission webhook denies the object.
    Later,
    /// The API server would refuse the same object again.
    WithOtherContent,
}

impl Retry {
    pub(super) fn of(refusal: &Status) -> Self {
        let causes = refusal.details.as_ref().map(|details| details.causes.as_slice()).unwrap_or_default();
        let is_leaving = causes.iter().any(|cause| cause.reason == "NamespaceTerminating");
        match refusal.code {
            400 | 403 | 422 if is_of_webhook(refusal) => Self::Later,
            403 if is_leaving => Self::Soon,
            400 | 403 | 422 => Self::WithOtherContent,
            // An apply that cannot be merged, as with two elements of one key.
            500 if refusal.reason.is_empty() => Self::WithOtherContent,
            _ => Self::Soon,
        }
    }
}

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
            class: classify(error),
            is_transient: is_unserved || matches!(code, 409 | 429),
            is_unserved,
            is_invalid: code == 422,
            retry: refusal.map_or(Retry::Soon, |refusal| Retry::of(refusal)),
            ..Self::because(operation, &describe(error))
        }
    }

    /// Conversion of a failed request, given its operation.
    pub(super) fn during(operation: String) -> impl FnOnce(kube::Error) -> Self {
        move |error| Self::new(operation, &error)
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

    pub(super) fn line(&self) -> String {
        format!("failed to {}: {}", self.operation, self.cause)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refusal(code: u16, reason: &str, message: &str) -> Status {
        Status::failure(message, reason).with_code(code)
    }

    #[test]
    fn refusal_for_the_content_is_told_from_one_that_may_end() {
        let leaving = json!({"message": "namespaces \"n\" is being terminated", "reason": "Forbidden", "code": 403,
            "details": {"causes": [{"reason": "NamespaceTerminating"}]}});
        let leaving: Status = serde_json::from_value(leaving).unwrap();
        for (refusal, expected) in [
            (
                refusal(422, "Invalid", "Deployment.apps \"d\" is invalid: spec.selector: field is immutable"),
                Retry::WithOtherContent,
            ),
            (refusal(403, "Forbidden", "ValidatingAdmissionPolicy 'p' denied request"), Retry::WithOtherContent),
            (refusal(400, "BadRequest", "strict decoding error"), Retry::WithOtherContent),
            (refusal(500, "", "failed to create typed patch object: duplicate entries"), Retry::WithOtherContent),
            (refusal(403, "Forbidden", "admission webhook \"w.test\" denied the request: no"), Retry::Later),
            (refusal(500, "InternalError", "failed calling webhook \"w.test\": refused"), Retry::Soon),
            (refusal(409, "Conflict", "changed"), Retry::Soon),
            (refusal(503, "ServiceUnavailable", "later"), Retry::Soon),
            (leaving, Retry::Soon),
        ] {
            assert_eq!(Retry::of(&refusal), expected, "{}", refusal.message);
        }
    }
}
