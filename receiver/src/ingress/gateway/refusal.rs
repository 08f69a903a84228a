//! Refusals of requests as one closed set, with status, problem document (RFC 9457) and metric label. Input is never
//! echoed.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde::Serialize;
use tidewatch_shared::{
    event::{MAX_EVENTS, ParseBatchError},
    problem::{CONTENT_TYPE, Kind, Problem},
    signature::{self, VerifyError},
};

use crate::{
    fleet::table::PlacementError,
    ingress::enrolment::{EnrolmentError, TokenError},
};

/// A response of this server.
pub(super) type HttpResponse = Response<Full<Bytes>>;

/// Wait of an agent with an unknown or ambiguous Kyma: new Kymas appear within it, and agents wait five minutes at
/// most.
const UNPLACED_WAIT: Duration = Duration::from_secs(60);
/// Wait after a misconfiguration of the proxy, which needs an operator.
const PROXY_WAIT: Duration = Duration::from_secs(30);
/// Wait for an unreachable runtime or a failing certificate issuer, which may recover soon.
const DEPENDENCY_WAIT: Duration = Duration::from_secs(10);
/// Wait for caches to sync, or for space in a full table or memory budget: a matter of seconds.
const SHORT_WAIT: Duration = Duration::from_secs(2);
/// Wait for an epoch to leave the signature window, which makes room for another one.
const EPOCHS_WAIT: Duration = Duration::from_secs(signature::WINDOW_SECONDS.cast_unsigned());

/// Reason of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The client certificate identifies no runtime of the trust domain.
    Identity,
    /// The client certificate, or the forwarded one, is not valid at this time or does not chain to a trusted root.
    Certificate,
    /// The certificate or its runtime is revoked.
    Revoked,
    /// The connection is not the proxy's, or the proxy did not forward exactly one certificate.
    Proxy,
    /// The runtime exceeds its rate; with the time until its next request is admitted.
    Rate(Duration),
    /// The runtime exceeds its requests in flight.
    Concurrency,
    /// The runtime ignores `Retry-After`; with the rest of its block.
    Flood(Duration),
    /// The executor lags, and the request is shed.
    Overloaded,
    /// The runtime has too many epochs in the signature window.
    Epochs,
    /// The memory budget of bodies or the table of runtimes is full.
    Busy,
    /// Unknown route.
    Route,
    /// The route accepts POST only.
    Method,
    /// The request has a query string.
    Query,
    /// The request has a content encoding.
    Encoding,
    /// The request has a transfer encoding. Parties that disagree on the end of a body disagree on the next request
    /// (request smuggling).
    TransferEncoding,
    /// `Host` is missing or repeated, or contradicts `:authority`.
    Host,
    /// The authority is not one of this receiver.
    Authority,
    /// The content type is missing, repeated, or not that of the route.
    ContentType,
    /// The body exceeds this limit in bytes.
    TooLarge(usize),
    /// The batch exceeds this limit of events.
    TooManyEvents(usize),
    /// The body did not arrive within its deadline.
    BodyTimeout,
    /// The body ended prematurely.
    BodyAborted,
    /// The signature was not verified.
    Signature(VerifyError),
    /// The nonce was already used.
    Replay,
    /// The body does not parse.
    Malformed,
    /// The body names another runtime than the certificate, or another epoch than the signature.
    Source,
    /// The runtime has no place in the table of runtimes.
    Placement(PlacementError),
    /// The route accepts GET only.
    GetOnly,
    /// Enrolment or renewal was refused.
    Enrolment(EnrolmentError),
    /// A defect of the receiver.
    Internal,
}

/// Time after which a refused client should retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RetryAfter {
    /// Specific to the client, as computed from its own debt.
    Exact(Duration),
    /// Approximate: many clients may be refused, at different times.
    Jittered(Duration),
    /// At least this long, and then one client after the other: many are refused at once.
    Staggered(Duration),
}

struct ProblemSpec {
    status: StatusCode,
    kind: Kind,
    label: &'static str,
    detail: &'static str,
}

const fn problem(status: StatusCode, label: &'static str, detail: &'static str) -> ProblemSpec {
    ProblemSpec { status, kind: Kind::Other, label, detail }
}

const fn unauthorized(kind: Kind, label: &'static str, detail: &'static str) -> ProblemSpec {
    ProblemSpec { status: StatusCode::UNAUTHORIZED, kind, label, detail }
}

impl Refusal {
    fn problem(self) -> ProblemSpec {
        use PlacementError as P;
        use StatusCode as S;
        match self {
            Self::Identity => {
                problem(S::FORBIDDEN, "identity", "the client certificate names no runtime of this trust domain")
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
            Self::Flood(_) => problem(S::TOO_MANY_REQUESTS, "flood", "this runtime ignores Retry-After"),
            Self::Overloaded => problem(S::SERVICE_UNAVAILABLE, "late", "the receiver is overloaded"),
            Self::TransferEncoding => {
                problem(S::LENGTH_REQUIRED, "length", "transfer encodings are not accepted; send Content-Length")
            }
            Self::Rate(_) => problem(S::TOO_MANY_REQUESTS, "rate", "this runtime makes too many requests"),
            Self::Concurrency => {
                problem(S::TOO_MANY_REQUESTS, "concurrency", "this runtime makes too many requests at the same time")
            }
            Self::Epochs => problem(S::TOO_MANY_REQUESTS, "epochs", "this runtime has begun too many epochs"),
            Self::Busy => problem(S::SERVICE_UNAVAILABLE, "busy", "the receiver has no room for this request now"),
            Self::Route => problem(S::NOT_FOUND, "route", "there is no such route"),
            Self::Method => problem(S::METHOD_NOT_ALLOWED, "method", "this route accepts POST only"),
            Self::Query => problem(S::BAD_REQUEST, "query", "this route accepts no query string"),
            Self::Encoding => problem(S::BAD_REQUEST, "encoding", "content encodings are not accepted"),
            Self::Host => {
                problem(S::BAD_REQUEST, "host", "the request needs one authority, and Host must agree with it")
            }
            Self::Authority => {
                problem(S::MISDIRECTED_REQUEST, "authority", "this receiver does not serve that authority")
            }
            Self::ContentType => {
                problem(S::UNSUPPORTED_MEDIA_TYPE, "content-type", "this route accepts another content type")
            }
            Self::TooLarge(_) => problem(S::PAYLOAD_TOO_LARGE, "too-large", "the body is larger than a request may be"),
            Self::TooManyEvents(_) => {
                problem(S::PAYLOAD_TOO_LARGE, "too-many-events", "the batch has more events than a request may carry")
            }
            Self::BodyTimeout => problem(S::REQUEST_TIMEOUT, "slow", "the body did not arrive in time"),
            Self::BodyAborted => problem(S::BAD_REQUEST, "broken", "the body ended prematurely"),
            Self::Signature(error) => signature_problem(error),
            Self::Replay => unauthorized(Kind::Replay, "replay", "the nonce was already used"),
            Self::Malformed => problem(S::BAD_REQUEST, "malformed", "the body is not valid for this route"),
            Self::Source => problem(S::FORBIDDEN, "source", "the body names another runtime or epoch"),
            Self::Placement(P::NotSynced) => problem(S::SERVICE_UNAVAILABLE, "not-synced", "the receiver is starting"),
            Self::Placement(P::Unknown) => problem(S::NOT_FOUND, "unknown-runtime", "no Kyma has this runtime id"),
            Self::Placement(P::Ambiguous) => {
                problem(S::CONFLICT, "ambiguous-runtime", "more than one Kyma has this runtime id")
            }
            Self::GetOnly => problem(S::METHOD_NOT_ALLOWED, "method", "this route accepts GET only"),
            Self::Enrolment(error) => enrolment_problem(error),
            Self::Internal => problem(S::INTERNAL_SERVER_ERROR, "fault", "the receiver failed to handle the request"),
        }
    }

    /// Returns the metric label.
    pub(super) fn label(self) -> &'static str {
        self.problem().label
    }

    /// True if no further request on the connection can be accepted.
    pub(super) const fn closes_connection(self) -> bool {
        matches!(
            self,
            Self::Identity | Self::Certificate | Self::Revoked | Self::Proxy | Self::Flood(_) | Self::TransferEncoding
        )
    }

    /// Adds a charge made since the refusal to the wait, so that a client that honours `Retry-After` is admitted.
    pub(super) const fn extended_by(self, cost: Duration) -> Self {
        if let Self::Rate(wait) = self { Self::Rate(wait.saturating_add(cost)) } else { self }
    }

    /// Returns the wait, if a retry can succeed after one.
    pub(super) const fn retry_after(self) -> Option<RetryAfter> {
        use EnrolmentError as E;
        use PlacementError as P;
        Some(match self {
            Self::Rate(wait) | Self::Flood(wait) | Self::Enrolment(E::Rate(wait) | E::Address(wait)) => {
                RetryAfter::Exact(wait)
            }
            Self::Epochs => RetryAfter::Exact(EPOCHS_WAIT),
            Self::Busy | Self::Overloaded | Self::Placement(P::NotSynced) => RetryAfter::Staggered(SHORT_WAIT),
            Self::Concurrency => RetryAfter::Jittered(SHORT_WAIT),
            Self::Placement(P::Unknown | P::Ambiguous) | Self::Enrolment(E::Revoked) => {
                RetryAfter::Jittered(UNPLACED_WAIT)
            }
            Self::Proxy => RetryAfter::Jittered(PROXY_WAIT),
            Self::Enrolment(E::NoAccess | E::Unreachable | E::Issuer) => RetryAfter::Jittered(DEPENDENCY_WAIT),
            _ => return None,
        })
    }

    /// Returns the response at a time in Unix seconds, with the wait as is, without jitter.
    pub(super) fn response(self, now: i64) -> HttpResponse {
        self.response_with_wait(now, self.nominal_wait())
    }

    /// Returns the response to a client that retries 5xx and drops 4xx: temporary refusals become a 503.
    pub(super) fn response_as_unavailable(self, now: i64) -> HttpResponse {
        let spec = self.problem();
        if !matches!(spec.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT) {
            return self.response(now);
        }
        let spec = ProblemSpec { status: StatusCode::SERVICE_UNAVAILABLE, ..spec };
        self.write(&spec, now, self.nominal_wait().or(Some(SHORT_WAIT)))
    }

    fn nominal_wait(self) -> Option<Duration> {
        self.retry_after().map(|wait| match wait {
            RetryAfter::Exact(wait) | RetryAfter::Jittered(wait) | RetryAfter::Staggered(wait) => wait,
        })
    }

    /// Returns the response at a time in Unix seconds, with this wait.
    pub(super) fn response_with_wait(self, now: i64, wait: Option<Duration>) -> HttpResponse {
        self.write(&self.problem(), now, wait)
    }

    fn write(self, spec: &ProblemSpec, now: i64, wait: Option<Duration>) -> HttpResponse {
        let ProblemSpec { status, kind, detail, .. } = *spec;
        let title = status.canonical_reason().unwrap_or("refused");
        let problem = LimitProblem {
            problem: Problem::new(kind, title, status.as_u16(), detail),
            max_bytes: if let Self::TooLarge(limit) = self { Some(limit) } else { None },
            max_events: if let Self::TooManyEvents(limit) = self { Some(limit) } else { None },
        };
        let mut response = json(status, CONTENT_TYPE, &problem);
        let headers = response.headers_mut();
        if let Some(wait) = wait {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(ceil_seconds(wait)));
        }
        if matches!(self, Self::Method | Self::GetOnly) {
            let allowed = if self == Self::Method { "POST" } else { "GET" };
            headers.insert(header::ALLOW, HeaderValue::from_static(allowed));
        }
        if self == Self::Signature(VerifyError::Clock)
            && let Some(date) = http_date(now)
        {
            headers.insert(header::DATE, date);
        }
        response
    }
}

impl From<VerifyError> for Refusal {
    fn from(error: VerifyError) -> Self {
        Self::Signature(error)
    }
}

impl From<PlacementError> for Refusal {
    fn from(error: PlacementError) -> Self {
        Self::Placement(error)
    }
}

impl From<EnrolmentError> for Refusal {
    fn from(error: EnrolmentError) -> Self {
        if let EnrolmentError::Placement(error) = error { error.into() } else { Self::Enrolment(error) }
    }
}

impl From<ParseBatchError> for Refusal {
    fn from(error: ParseBatchError) -> Self {
        match error {
            ParseBatchError::TooMany => Self::TooManyEvents(MAX_EVENTS),
            ParseBatchError::Malformed(_) => Self::Malformed,
        }
    }
}

fn signature_problem(error: VerifyError) -> ProblemSpec {
    use VerifyError as E;
    match error {
        E::Profile => {
            unauthorized(Kind::Signature, "signature-profile", "the signature is missing or not of this profile")
        }
        E::KeyId => unauthorized(Kind::Signature, "signature-keyid", "the signature names another certificate"),
        E::Clock => unauthorized(Kind::Clock, "clock", "the signature's time lies outside the window"),
        E::Digest => unauthorized(Kind::Signature, "digest", "the body does not match its digest"),
        E::Signature => unauthorized(Kind::Signature, "signature", "the signature does not verify"),
    }
}

fn enrolment_problem(error: EnrolmentError) -> ProblemSpec {
    use EnrolmentError as E;
    use StatusCode as S;
    use TokenError as T;
    match error {
        E::Placement(error) => Refusal::Placement(error).problem(),
        E::Revoked => problem(S::FORBIDDEN, "revoked", "the runtime is revoked"),
        // The token is authentic; its subject lacks the permission.
        E::Token(token @ (T::Account | T::Unbound | T::Other)) => {
            problem(S::FORBIDDEN, token.label(), "the token is not that of a pod of the agent")
        }
        E::Token(token) => {
            unauthorized(Kind::Other, token.label(), "the token is missing, invalid, or meant for another audience")
        }
        E::NoAccess => problem(S::SERVICE_UNAVAILABLE, "no-access", "the receiver has no access to the runtime"),
        E::Unreachable => problem(S::SERVICE_UNAVAILABLE, "unreachable", "the runtime could not review the token"),
        E::Rate(_) => problem(S::TOO_MANY_REQUESTS, "certificates-rate", "this runtime requests too many certificates"),
        E::Address(_) => problem(S::TOO_MANY_REQUESTS, "address-rate", "too many enrolments come from this address"),
        E::Request => problem(S::BAD_REQUEST, "request-malformed", "the certificate request is not readable"),
        E::RequestKey => problem(S::BAD_REQUEST, "request-key", "the certificate request's key must be on P-256"),
        E::RequestSignature => {
            problem(S::BAD_REQUEST, "request-signature", "the certificate request is not signed by its own key")
        }
        E::RequestAuthority => {
            problem(S::BAD_REQUEST, "request-ca", "the certificate request must not be for a certificate authority")
        }
        E::RequestNames => {
            problem(S::BAD_REQUEST, "request-names", "the certificate request must name its runtime and nothing else")
        }
        E::Issuer => problem(S::SERVICE_UNAVAILABLE, "issuer", "no certificate could be issued"),
    }
}

/// A problem with the exceeded limit as extension member (RFC 9457, section 3.2).
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct LimitProblem {
    #[serde(flatten)]
    problem: Problem,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_bytes: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_events: Option<usize>,
}

/// Returns a JSON response. Serialisation of our own types does not fail; if it did, the client would get an empty 500.
pub(super) fn json(status: StatusCode, content_type: &'static str, value: &impl Serialize) -> HttpResponse {
    let Ok(body) = serde_json::to_vec(value) else {
        let mut response = Response::new(Full::default());
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        return response;
    };
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Rounds up, to one second at least.
fn ceil_seconds(wait: Duration) -> u64 {
    (wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1)
}

/// Formats a time in Unix seconds (RFC 9110, section 5.6.7).
pub(super) fn http_date(now: i64) -> Option<HeaderValue> {
    let now = jiff::Timestamp::from_second(now).ok()?;
    let text = jiff::fmt::rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&now).ok()?;
    HeaderValue::try_from(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_refusal_has_a_date() {
        let response = Refusal::Signature(signature::VerifyError::Clock).response(784_111_777);
        assert_eq!(response.headers()[header::DATE], "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(response.status(), 401);
    }

    #[test]
    fn retry_after_is_in_whole_seconds_and_at_least_one() {
        for (wait, expected) in [(0, "1"), (1, "1"), (1_000, "1"), (1_001, "2")] {
            let response = Refusal::Rate(Duration::from_millis(wait)).response(0);
            assert_eq!(response.headers()[header::RETRY_AFTER], expected);
        }
        for unplaced in [PlacementError::Unknown, PlacementError::Ambiguous] {
            let response = Refusal::Placement(unplaced).response(0);
            let wait: u64 = response.headers()[header::RETRY_AFTER].to_str().unwrap().parse().unwrap();
            assert!(wait <= 300);
        }
    }
}
