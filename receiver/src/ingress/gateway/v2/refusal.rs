//! Refusals of this port as one closed set. Input is never echoed.
//!
//! The incumbent's agent retries 5xx and drops events for good on 4xx. Temporary refusals are therefore a 5xx here,
//! also where other ports respond with 429 or 408.

use http::{HeaderValue, StatusCode, header};
use tidewatch_shared::problem::{CONTENT_TYPE, Kind, Problem};

use super::intake::IntakeError;
use crate::{
    fleet::table::PlacementError,
    ingress::gateway::refusal::{self as gateway, HttpResponse, json},
};

/// Reason of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// There is no usable client certificate, neither on the connection nor forwarded.
    Certificate,
    /// The certificate's common name is empty or not a runtime id.
    Name,
    /// Unknown manager.
    Manager,
    /// The runtime has used v3 and may not go back.
    Superseded,
    /// The delivery to another manager failed.
    Unreachable,
    /// A refusal common to all ports.
    Gateway(gateway::Refusal),
}

impl Refusal {
    /// Returns status, metric label and detail, unless the refusal is a common one.
    const fn problem(self) -> Result<(StatusCode, &'static str, &'static str), gateway::Refusal> {
        use StatusCode as S;
        Ok(match self {
            Self::Certificate => (S::UNAUTHORIZED, "certificate", "there is no usable client certificate"),
            Self::Name => (S::BAD_REQUEST, "name", "the client certificate's common name is no runtime id"),
            Self::Manager => (S::NOT_FOUND, "manager", "there is no such manager"),
            Self::Superseded => {
                (S::FORBIDDEN, "superseded", "this runtime uses a newer contract and is not allowed to go back")
            }
            Self::Unreachable => (S::BAD_GATEWAY, "unreachable", "the manager did not accept the event"),
            Self::Gateway(refusal) => return Err(refusal),
        })
    }

    /// Returns the metric label.
    pub(super) fn label(self) -> &'static str {
        self.problem().map_or_else(gateway::Refusal::label, |(_, label, _)| label)
    }

    /// True if the caller could not be verified.
    pub(super) const fn is_unverified(self) -> bool {
        matches!(self, Self::Certificate | Self::Name)
    }

    /// Returns the response at a time in Unix seconds.
    pub(super) fn response(self, now: i64) -> HttpResponse {
        let (status, detail) = match self.problem() {
            Ok((status, _, detail)) => (status, detail),
            Err(refusal) => return refusal.response_as_unavailable(now),
        };
        let kind = if status == StatusCode::UNAUTHORIZED { Kind::Certificate } else { Kind::Other };
        let title = status.canonical_reason().unwrap_or("refused");
        let mut response = json(status, CONTENT_TYPE, &Problem::new(kind, title, status.as_u16(), detail));
        if self == Self::Unreachable {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("2"));
        }
        response
    }
}

impl From<gateway::Refusal> for Refusal {
    fn from(refusal: gateway::Refusal) -> Self {
        Self::Gateway(refusal)
    }
}

impl From<IntakeError> for Refusal {
    fn from(error: IntakeError) -> Self {
        match error {
            IntakeError::NotSynced => Self::Gateway(PlacementError::NotSynced.into()),
            IntakeError::Superseded => Self::Superseded,
            IntakeError::Unreachable => Self::Unreachable,
        }
    }
}
