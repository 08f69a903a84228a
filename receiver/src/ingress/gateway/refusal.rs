//! Every way to be refused, as one closed set: status, words, label. The input is never echoed.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde::Serialize;
use tidewatch_shared::{
    event::MAX_EVENTS,
    problem::{CONTENT_TYPE, Kind, Problem},
    signature,
};

use crate::{fleet::hub::Unplaced, ingress::enrolment::Refused};

/// A body as this server answers.
pub(super) type Answer = Response<Full<Bytes>>;

/// How long an agent whose Kyma is unknown or ambiguous waits; a new runtime appears within it, and agents wait five minutes at most.
const UNPLACED_WAIT: Duration = Duration::from_secs(60);
/// A proxy's mistake, or that of who set it up, is mended by hand.
const PROXY_WAIT: Duration = Duration::from_secs(30);
/// A runtime that cannot be asked, or an issuer that does not issue, may be well again soon.
const ASKED_WAIT: Duration = Duration::from_secs(10);
/// Caches sync in seconds, and a full table or budget empties as fast.
const SHORT_WAIT: Duration = Duration::from_secs(2);
/// What epochs are kept for; one that is out of the window makes room.
const EPOCHS_WAIT: Duration = Duration::from_secs(signature::WINDOW_SECONDS.cast_unsigned());

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The certificate of this connection names no runtime.
    Identity,
    /// The certificate of this connection, or the one that the proxy tells, does not hold at this time, or chains to nobody's.
    Certificate,
    /// The certificate, or its runtime, stands in the revocation list.
    Revoked,
    /// The connection is not the proxy's, or the proxy tells not exactly one certificate.
    Proxy,
    /// More requests than one runtime may make; how long until the next.
    Rate(Duration),
    /// More requests at once than one runtime may make.
    Concurrency,
    /// The runtime did not wait as it was told; how long it is shut out.
    Flood(Duration),
    /// Answers lag, and this request is not the most urgent one.
    Late,
    /// More epochs than are kept for one runtime.
    Epochs,
    /// No room for the body or for one more runtime.
    Busy,
    /// No such route.
    Route,
    /// The route has `POST` only.
    Method,
    /// A query string.
    Query,
    /// A content encoding.
    Encoding,
    /// A transfer encoding: two who disagree on where a body ends disagree on what the next request is.
    Length,
    /// `Host` is missing or doubled, or does not agree with `:authority`.
    Host,
    /// An authority that is not ours.
    Authority,
    /// A content type that is missing, doubled, or not that of the route.
    ContentType,
    /// A body above the limit, in bytes.
    TooLarge(usize),
    /// More events than a batch may have.
    TooManyEvents(usize),
    /// The body did not come in time.
    Slow,
    /// The body broke off.
    Broken,
    /// What the signature says.
    Signature(signature::VerifyError),
    /// The nonce was used.
    Replay,
    /// The body is not what the route takes.
    Malformed,
    /// The body names another runtime, or another life of it than the signature.
    Source,
    /// The receiver cannot place the runtime.
    Unplaced(Unplaced),
    /// The route has `GET` only.
    NotGet,
    /// There is no certificate for whoever asks.
    Certificates(Refused),
    /// A defect of ours.
    Fault,
}

/// How long somebody who is refused should wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// What it owes itself, and nobody else.
    Exactly(Duration),
    /// So long, more or less: many may be told it, at different times.
    About(Duration),
    /// At least so long, and then one after the other: many are told it at once.
    InTurn(Duration),
}

struct Told {
    status: StatusCode,
    kind: Kind,
    label: &'static str,
    detail: &'static str,
}

const fn told(status: StatusCode, label: &'static str, detail: &'static str) -> Told {
    Told { status, kind: Kind::Other, label, detail }
}

const fn unauthorized(kind: Kind, label: &'static str, detail: &'static str) -> Told {
    Told { status: StatusCode::UNAUTHORIZED, kind, label, detail }
}

impl Refusal {
    fn told(self) -> Told {
        use StatusCode as S;
        match self {
            Self::Identity => {
                told(S::FORBIDDEN, "identity", "the client certificate names no runtime of this trust domain")
            }
            Self::Certificate => {
                unauthorized(Kind::Certificate, "certificate", "the client certificate is not valid at this time")
            }
            Self::Revoked => unauthorized(Kind::Certificate, "revoked", "the client certificate is revoked"),
            Self::Proxy => unauthorized(
                Kind::Other,
                "proxy",
                "the request did not come through the trusted proxy with one client certificate",
            ),
            Self::Flood(_) => told(S::TOO_MANY_REQUESTS, "flood", "this runtime does not wait as it is told"),
            Self::Late => told(S::SERVICE_UNAVAILABLE, "late", "the receiver has too much to do now"),
            Self::Length => told(S::LENGTH_REQUIRED, "length", "transfer encodings are not taken; say the length"),
            Self::Rate(_) => told(S::TOO_MANY_REQUESTS, "rate", "this runtime makes too many requests"),
            Self::Concurrency => {
                told(S::TOO_MANY_REQUESTS, "concurrency", "this runtime makes too many requests at the same time")
            }
            Self::Epochs => told(S::TOO_MANY_REQUESTS, "epochs", "this runtime has begun too many epochs"),
            Self::Busy => told(S::SERVICE_UNAVAILABLE, "busy", "the receiver has no room for this request now"),
            Self::Route => told(S::NOT_FOUND, "route", "there is no such route"),
            Self::Method => told(S::METHOD_NOT_ALLOWED, "method", "this route takes POST only"),
            Self::Query => told(S::BAD_REQUEST, "query", "this route takes no query string"),
            Self::Encoding => told(S::BAD_REQUEST, "encoding", "content encodings are not taken"),
            Self::Host => told(S::BAD_REQUEST, "host", "the request needs one authority, and Host must agree with it"),
            Self::Authority => {
                told(S::MISDIRECTED_REQUEST, "authority", "this receiver does not answer for that authority")
            }
            Self::ContentType => {
                told(S::UNSUPPORTED_MEDIA_TYPE, "content-type", "this route takes another content type")
            }
            Self::TooLarge(_) => told(S::PAYLOAD_TOO_LARGE, "too-large", "the body is larger than a request may be"),
            Self::TooManyEvents(_) => {
                told(S::PAYLOAD_TOO_LARGE, "too-many-events", "the batch has more events than a request may carry")
            }
            Self::Slow => told(S::REQUEST_TIMEOUT, "slow", "the body did not arrive in time"),
            Self::Broken => told(S::BAD_REQUEST, "broken", "the body broke off"),
            Self::Signature(refusal) => signature_told(refusal),
            Self::Replay => unauthorized(Kind::Replay, "replay", "the nonce was used"),
            Self::Malformed => told(S::BAD_REQUEST, "malformed", "the body is not what this route takes"),
            Self::Source => told(S::FORBIDDEN, "source", "the body speaks for another runtime or epoch"),
            Self::Unplaced(Unplaced::NotSynced) => {
                told(S::SERVICE_UNAVAILABLE, "not-synced", "the receiver is starting")
            }
            Self::Unplaced(Unplaced::Unknown) => told(S::NOT_FOUND, "unknown-runtime", "no Kyma has this runtime id"),
            Self::Unplaced(Unplaced::Ambiguous) => {
                told(S::CONFLICT, "ambiguous-runtime", "more than one Kyma has this runtime id")
            }
            Self::NotGet => told(S::METHOD_NOT_ALLOWED, "method", "this route takes GET only"),
            Self::Certificates(refused) => certificates_told(refused),
            Self::Fault => told(S::INTERNAL_SERVER_ERROR, "fault", "the receiver could not answer"),
        }
    }

    /// The reason as metrics name it.
    pub(super) fn label(self) -> &'static str {
        self.told().label
    }

    /// Whether nothing that this connection's certificate says can ever be taken.
    pub(super) const fn ends_connection(self) -> bool {
        matches!(self, Self::Identity | Self::Certificate | Self::Revoked | Self::Proxy | Self::Flood(_) | Self::Length)
    }

    /// The same for a runtime that came to owe more meanwhile: who waits as it is told is let in.
    pub(super) const fn dearer_by(self, price: Duration) -> Self {
        if let Self::Rate(wait) = self { Self::Rate(wait.saturating_add(price)) } else { self }
    }

    /// How long to wait is told where waiting helps.
    pub(super) const fn wait(self) -> Option<Wait> {
        match self {
            Self::Rate(wait) | Self::Flood(wait) => Some(Wait::Exactly(wait)),
            Self::Busy | Self::Late | Self::Unplaced(Unplaced::NotSynced) => Some(Wait::InTurn(SHORT_WAIT)),
            Self::Concurrency => Some(Wait::About(SHORT_WAIT)),
            Self::Epochs => Some(Wait::Exactly(EPOCHS_WAIT)),
            Self::Unplaced(Unplaced::Unknown | Unplaced::Ambiguous) => Some(Wait::About(UNPLACED_WAIT)),
            Self::Proxy => Some(Wait::About(PROXY_WAIT)),
            Self::Certificates(Refused::Rate(wait) | Refused::Address(wait)) => Some(Wait::Exactly(wait)),
            Self::Certificates(Refused::NoAccess | Refused::Unreachable | Refused::Issuer) => {
                Some(Wait::About(ASKED_WAIT))
            }
            Self::Certificates(Refused::Revoked) => Some(Wait::About(UNPLACED_WAIT)),
            _ => None,
        }
    }

    /// The answer, at a time in Unix seconds, with the wait as it is for one alone.
    pub(super) fn answer(self, now: i64) -> Answer {
        self.answer_after(now, self.wait_alone())
    }

    /// The same for somebody who tries again what failed (5xx) and never what was refused (4xx): what is only too much for now has failed.
    pub(super) fn answer_as_failure(self, now: i64) -> Answer {
        let told = self.told();
        if !matches!(told.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT) {
            return self.answer(now);
        }
        let told = Told { status: StatusCode::SERVICE_UNAVAILABLE, ..told };
        self.write(&told, now, self.wait_alone().or(Some(SHORT_WAIT)))
    }

    fn wait_alone(self) -> Option<Duration> {
        self.wait().map(|wait| match wait {
            Wait::Exactly(wait) | Wait::About(wait) | Wait::InTurn(wait) => wait,
        })
    }

    /// The answer, at a time in Unix seconds, with a wait that was decided.
    pub(super) fn answer_after(self, now: i64, wait: Option<Duration>) -> Answer {
        self.write(&self.told(), now, wait)
    }

    fn write(self, told: &Told, now: i64, wait: Option<Duration>) -> Answer {
        let Told { status, kind, detail, .. } = *told;
        let title = status.canonical_reason().unwrap_or("refused");
        let problem = Limited {
            problem: Problem::new(kind, title, status.as_u16(), detail),
            max_bytes: if let Self::TooLarge(limit) = self { Some(limit) } else { None },
            max_events: if let Self::TooManyEvents(limit) = self { Some(limit) } else { None },
        };
        let mut answer = json(status, CONTENT_TYPE, &problem);
        let headers = answer.headers_mut();
        if let Some(wait) = wait {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds_up(wait)));
        }
        if matches!(self, Self::Method | Self::NotGet) {
            let allowed = if self == Self::Method { "POST" } else { "GET" };
            headers.insert(header::ALLOW, HeaderValue::from_static(allowed));
        }
        if self == Self::Signature(signature::VerifyError::Clock)
            && let Some(date) = http_date(now)
        {
            headers.insert(header::DATE, date);
        }
        answer
    }
}

impl From<signature::VerifyError> for Refusal {
    fn from(refusal: signature::VerifyError) -> Self {
        Self::Signature(refusal)
    }
}

impl From<Unplaced> for Refusal {
    fn from(unplaced: Unplaced) -> Self {
        Self::Unplaced(unplaced)
    }
}

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        if let Refused::Unplaced(unplaced) = refused { unplaced.into() } else { Self::Certificates(refused) }
    }
}

impl From<tidewatch_shared::event::ParseBatchError> for Refusal {
    fn from(error: tidewatch_shared::event::ParseBatchError) -> Self {
        match error {
            tidewatch_shared::event::ParseBatchError::TooMany => Self::TooManyEvents(MAX_EVENTS),
            tidewatch_shared::event::ParseBatchError::Malformed(_) => Self::Malformed,
        }
    }
}

fn signature_told(refusal: signature::VerifyError) -> Told {
    use signature::VerifyError as R;
    match refusal {
        R::Profile => {
            unauthorized(Kind::Signature, "signature-profile", "the signature is missing or not of this profile")
        }
        R::KeyId => unauthorized(Kind::Signature, "signature-keyid", "the signature names another certificate"),
        R::Clock => unauthorized(Kind::Clock, "clock", "the signature's time lies outside the window"),
        R::Digest => unauthorized(Kind::Signature, "digest", "the body does not match its digest"),
        R::Signature => unauthorized(Kind::Signature, "signature", "the signature does not verify"),
    }
}

fn certificates_told(refused: Refused) -> Told {
    use crate::ingress::enrolment::InvalidToken as T;
    use Refused as R;
    use StatusCode as S;
    match refused {
        R::Unplaced(unplaced) => Refusal::Unplaced(unplaced).told(),
        R::Revoked => told(S::FORBIDDEN, "revoked", "the runtime is revoked"),
        // Who it is, is known; it may not have what it asks for.
        R::Token(token @ (T::Account | T::Unbound | T::Other)) => {
            told(S::FORBIDDEN, token.label(), "the token is not that of a pod of the agent")
        }
        R::Token(token) => unauthorized(
            Kind::Other,
            token.label(),
            "the token is missing, does not hold, or is meant for somebody else",
        ),
        R::NoAccess => told(S::SERVICE_UNAVAILABLE, "no-access", "the receiver has no access to the runtime"),
        R::Unreachable => told(S::SERVICE_UNAVAILABLE, "unreachable", "the runtime could not be asked about the token"),
        R::Rate(_) => told(S::TOO_MANY_REQUESTS, "certificates-rate", "this runtime asks for too many certificates"),
        R::Address(_) => told(S::TOO_MANY_REQUESTS, "address-rate", "too many enrolments come from this address"),
        R::Request => told(S::BAD_REQUEST, "request-malformed", "the certificate request is not readable"),
        R::RequestKey => told(S::BAD_REQUEST, "request-key", "the certificate request's key must be on P-256"),
        R::RequestSignature => {
            told(S::BAD_REQUEST, "request-signature", "the certificate request is not signed by its own key")
        }
        R::RequestAuthority => {
            told(S::BAD_REQUEST, "request-ca", "the certificate request must not ask for a certificate authority")
        }
        R::RequestNames => {
            told(S::BAD_REQUEST, "request-names", "the certificate request must name its runtime and nothing else")
        }
        R::Issuer => told(S::SERVICE_UNAVAILABLE, "issuer", "no certificate could be issued"),
    }
}

/// A problem that tells the limits as well (RFC 9457, section 3.2: extension members).
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Limited {
    #[serde(flatten)]
    problem: Problem,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_bytes: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_events: Option<usize>,
}

/// An answer of JSON. What we answer always serialises; were it not so, the peer sees an empty 500.
pub(super) fn json(status: StatusCode, content_type: &'static str, value: &impl Serialize) -> Answer {
    let Ok(body) = serde_json::to_vec(value) else {
        let mut answer = Response::new(Full::default());
        *answer.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        return answer;
    };
    let mut answer = Response::new(Full::from(body));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer
}

fn seconds_up(wait: Duration) -> u64 {
    (wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1)
}

/// RFC 9110, section 5.6.7.
pub(super) fn http_date(now: i64) -> Option<HeaderValue> {
    let now = jiff::Timestamp::from_second(now).ok()?;
    let text = jiff::fmt::rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&now).ok()?;
    HeaderValue::try_from(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_for_the_clock_tells_the_time() {
        let answer = Refusal::Signature(signature::VerifyError::Clock).answer(784_111_777);
        assert_eq!(answer.headers()[header::DATE], "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(answer.status(), 401);
    }

    #[test]
    fn waits_are_told_in_whole_seconds_and_never_as_none() {
        for (wait, told) in [(0, "1"), (1, "1"), (1_000, "1"), (1_001, "2")] {
            let answer = Refusal::Rate(Duration::from_millis(wait)).answer(0);
            assert_eq!(answer.headers()[header::RETRY_AFTER], told);
        }
        for unplaced in [Unplaced::Unknown, Unplaced::Ambiguous] {
            let answer = Refusal::Unplaced(unplaced).answer(0);
            let wait: u64 = answer.headers()[header::RETRY_AFTER].to_str().unwrap().parse().unwrap();
            assert!(wait <= 300);
        }
    }
}
