//! Every way to be refused on this port, as one closed set. The input is never echoed.
//!
//! The incumbent's agent tries again what failed (5xx), and drops for good what was refused (4xx). So whatever may be taken later is told as a
//! failure here, also where other ports say 429 or 408.

use http::{HeaderValue, StatusCode, header};
use tidewatch_shared::problem::{CONTENT_TYPE, Kind, Problem};

use super::take::NotTaken;
use crate::ingress::gateway::refusal::{self as gateway, Answer, json};

/// Why a request of v2 is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// No certificate that counts, on the connection or forwarded.
    Certificate,
    /// A certificate whose common name is empty, or no runtime id.
    Name,
    /// A manager that nobody here knows.
    Manager,
    /// The runtime has spoken v3 and may not go back.
    Superseded,
    /// The other manager did not take the event.
    Unreachable,
    /// What every port of the gateway refuses alike.
    Gateway(gateway::Refusal),
}

impl Refusal {
    const fn told(self) -> Option<(StatusCode, &'static str, &'static str)> {
        use StatusCode as S;
        match self {
            Self::Certificate => Some((S::UNAUTHORIZED, "certificate", "there is no usable client certificate")),
            Self::Name => Some((S::BAD_REQUEST, "name", "the client certificate's common name is no runtime id")),
            Self::Manager => Some((S::NOT_FOUND, "manager", "there is no such manager")),
            Self::Superseded => {
                Some((S::FORBIDDEN, "superseded", "this runtime speaks a newer contract and is not allowed back"))
            }
            Self::Unreachable => Some((S::BAD_GATEWAY, "unreachable", "the manager did not take the event")),
            Self::Gateway(_) => None,
        }
    }

    /// The reason as metrics name it.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Gateway(refusal) => refusal.label(),
            refusal => refusal.told().map_or("other", |(_, label, _)| label),
        }
    }

    /// Whether it was the caller who could not be verified.
    pub(super) const fn is_unverified(self) -> bool {
        matches!(self, Self::Certificate | Self::Name)
    }

    /// The answer, at a time in Unix seconds.
    pub(super) fn answer(self, now: i64) -> Answer {
        let Some((status, _, detail)) = self.told() else {
            return match self {
                Self::Gateway(refusal) => refusal.answer_as_failure(now),
                _ => gateway::Refusal::Fault.answer(now),
            };
        };
        let kind = if status == StatusCode::UNAUTHORIZED { Kind::Certificate } else { Kind::Other };
        let title = status.canonical_reason().unwrap_or("refused");
        let mut answer = json(status, CONTENT_TYPE, &Problem::new(kind, title, status.as_u16(), detail));
        if self == Self::Unreachable {
            answer.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("2"));
        }
        answer
    }
}

impl From<gateway::Refusal> for Refusal {
    fn from(refusal: gateway::Refusal) -> Self {
        Self::Gateway(refusal)
    }
}

impl From<NotTaken> for Refusal {
    fn from(why: NotTaken) -> Self {
        match why {
            NotTaken::NotSynced => Self::Gateway(gateway::Refusal::Unplaced(crate::fleet::hub::Unplaced::NotSynced)),
            NotTaken::Superseded => Self::Superseded,
            NotTaken::Unreachable => Self::Unreachable,
        }
    }
}
