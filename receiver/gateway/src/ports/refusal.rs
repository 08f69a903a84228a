//! Refusals of requests as one closed set, with status, problem document (RFC 9457) and metric label. Input is never
//! echoed.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde::Serialize;
use tidewatch_contract::{
    event::{MAX_EVENTS, ParseBatchError},
    problem::{CONTENT_TYPE, Kind, Problem},
    signature::{self, VerifyError},
};
use tidewatch_fleet::{peers::AskError, table::PlacementError};
use tidewatch_kit::variant::VariantName as _;
use tidewatch_trust::ParseRequestError;

use crate::{
    enrolment::{EnrolmentError, TokenError},
    http::response,
    relay::RelayError,
};

/// A response of this server.
pub(crate) type HttpResponse = Response<Full<Bytes>>;

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
pub enum Refusal {
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
    /// There is no usable client certificate on the port of v2, neither on the connection nor forwarded.
    NoCertificate,
    /// The certificate's common name, by which v2 identifies a runtime, is empty or not a runtime id.
    CommonName,
    /// Unknown manager of an event of v2.
    Manager,
    /// The runtime has used v3 and may not go back to v2: its Kyma does not allow it.
    Superseded,
    /// The delivery of an event of v2 to another manager failed.
    ManagerUnreachable,
    /// The client of the relay port is no replica.
    Replica,
    /// The runtime belongs to another replica, and the request was not relayed to it.
    Relay(RelayError),
    /// The question of another replica has no answer now.
    Question(AskError),
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

/// Response and metric label of a refusal.
pub(super) struct ProblemSpec {
    status: StatusCode,
    kind: Kind,
    label: &'static str,
    detail: &'static str,
    /// Wait, if a retry can succeed after one.
    pub(super) retry: Option<RetryAfter>,
    /// No further request on the connection can be accepted, or another replica may accept those of the runtime: one that is cut
    /// off from the control plane keeps an old view of the holders, and its clients would never leave it.
    pub(super) closes: bool,
    /// The admitted request itself is at fault, and not a limit, the network or the receiver's state.
    pub(super) is_invalid: bool,
}

impl ProblemSpec {
    const fn kind(self, kind: Kind) -> Self {
        Self { kind, ..self }
    }

    const fn retry(self, after: RetryAfter) -> Self {
        Self { retry: Some(after), ..self }
    }

    const fn closing(self) -> Self {
        Self { closes: true, ..self }
    }
}

const fn problem(status: StatusCode, label: &'static str, detail: &'static str) -> ProblemSpec {
    ProblemSpec { status, kind: Kind::Other, label, detail, retry: None, closes: false, is_invalid: false }
}

/// The problem of a request that is itself at fault.
const fn invalid(status: StatusCode, label: &'static str, detail: &'static str) -> ProblemSpec {
    ProblemSpec { is_invalid: true, ..problem(status, label, detail) }
}

const fn bad_request(label: &'static str, detail: &'static str) -> ProblemSpec {
    problem(StatusCode::BAD_REQUEST, label, detail)
}

const fn unauthorized(label: &'static str, detail: &'static str) -> ProblemSpec {
    problem(StatusCode::UNAUTHORIZED, label, detail)
}

const fn forbidden(label: &'static str, detail: &'static str) -> ProblemSpec {
    problem(StatusCode::FORBIDDEN, label, detail)
}

const fn too_many(label: &'static str, detail: &'static str, after: RetryAfter) -> ProblemSpec {
    problem(StatusCode::TOO_MANY_REQUESTS, label, detail).retry(after)
}

const fn unavailable(label: &'static str, detail: &'static str, after: RetryAfter) -> ProblemSpec {
    problem(StatusCode::SERVICE_UNAVAILABLE, label, detail).retry(after)
}

impl Refusal {
    pub(super) fn problem(self) -> ProblemSpec {
        use RetryAfter::{Exact, Jittered, Staggered};
        use StatusCode as S;
        match self {
            Self::Identity => {
                forbidden("identity", "the client certificate names no runtime of this trust domain").closing()
            }
            Self::Certificate => {
                let detail = "the client certificate is not valid at this time";
                unauthorized("certificate", detail).kind(Kind::Certificate).closing()
            }
            Self::Revoked => {
                unauthorized("revoked", "the client certificate is revoked").kind(Kind::Certificate).closing()
            }
            Self::Proxy => {
                let detail = "the request did not come through the trusted proxy with one client certificate";
                unauthorized("proxy", detail).retry(Jittered(PROXY_WAIT)).closing()
            }
            Self::Rate(wait) => too_many("rate", "this runtime makes too many requests", Exact(wait)),
            Self::Concurrency => {
                let detail = "this runtime makes too many requests at the same time";
                too_many("concurrency", detail, Jittered(SHORT_WAIT))
            }
            Self::Flood(wait) => too_many("flood", "this runtime ignores Retry-After", Exact(wait)).closing(),
            Self::Overloaded => unavailable("late", "the receiver is overloaded", Staggered(SHORT_WAIT)),
            Self::Epochs => too_many("epochs", "this runtime has begun too many epochs", Exact(EPOCHS_WAIT)),
            Self::Busy => unavailable("busy", "the receiver has no room for this request now", Staggered(SHORT_WAIT)),
            Self::Route => invalid(S::NOT_FOUND, "route", "there is no such route"),
            Self::Method => invalid(S::METHOD_NOT_ALLOWED, "method", "this route accepts POST only"),
            Self::Query => invalid(S::BAD_REQUEST, "query", "this route accepts no query string"),
            Self::Encoding => invalid(S::BAD_REQUEST, "encoding", "content encodings are not accepted"),
            Self::TransferEncoding => {
                let detail = "transfer encodings are not accepted; send Content-Length";
                invalid(S::LENGTH_REQUIRED, "length", detail).closing()
            }
            Self::Host => {
                invalid(S::BAD_REQUEST, "host", "the request needs one authority, and Host must agree with it")
            }
            Self::Authority => {
                invalid(S::MISDIRECTED_REQUEST, "authority", "this receiver does not serve that authority")
            }
            Self::ContentType => {
                invalid(S::UNSUPPORTED_MEDIA_TYPE, "content-type", "this route accepts another content type")
            }
            Self::TooLarge(_) => invalid(S::PAYLOAD_TOO_LARGE, "too-large", "the body is larger than a request may be"),
            Self::TooManyEvents(_) => {
                invalid(S::PAYLOAD_TOO_LARGE, "too-many-events", "the batch has more events than a request may carry")
            }
            Self::BodyTimeout => problem(S::REQUEST_TIMEOUT, "slow", "the body did not arrive in time"),
            Self::BodyAborted => bad_request("broken", "the body ended prematurely"),
            Self::Signature(error) => signature_problem(error),
            Self::Replay => invalid(S::UNAUTHORIZED, "replay", "the nonce was already used").kind(Kind::Replay),
            Self::Malformed => invalid(S::BAD_REQUEST, "malformed", "the body is not valid for this route"),
            Self::Source => invalid(S::FORBIDDEN, "source", "the body names another runtime or epoch"),
            Self::Placement(error) => placement_problem(error),
            Self::GetOnly => invalid(S::METHOD_NOT_ALLOWED, "method", "this route accepts GET only"),
            Self::Enrolment(error) => enrolment_problem(error),
            Self::NoCertificate => {
                unauthorized("certificate", "there is no usable client certificate").kind(Kind::Certificate)
            }
            Self::CommonName => bad_request("name", "the client certificate's common name is no runtime id"),
            Self::Manager => problem(S::NOT_FOUND, "manager", "there is no such manager"),
            Self::Superseded => {
                forbidden("superseded", "this runtime uses a newer contract and is not allowed to go back")
            }
            Self::ManagerUnreachable => problem(S::BAD_GATEWAY, "unreachable", "the manager did not accept the event")
                .retry(Jittered(SHORT_WAIT)),
            Self::Replica => forbidden("replica", "the client certificate names no replica of this trust domain"),
            Self::Relay(error) => relay_problem(error),
            Self::Question(_) => {
                unavailable("question", "this replica cannot answer the question now", Jittered(SHORT_WAIT))
            }
            Self::Internal => problem(S::INTERNAL_SERVER_ERROR, "fault", "the receiver failed to handle the request"),
        }
    }

    /// Returns the metric label.
    pub(super) fn label(self) -> &'static str {
        self.problem().label
    }

    /// Adds a charge made since the refusal to the wait, so that a client that honours `Retry-After` is admitted.
    pub(super) const fn extended_by(self, cost: Duration) -> Self {
        if let Self::Rate(wait) = self { Self::Rate(wait.saturating_add(cost)) } else { self }
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
        self.problem().retry.map(|wait| match wait {
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

impl From<RelayError> for Refusal {
    fn from(error: RelayError) -> Self {
        Self::Relay(error)
    }
}

impl From<AskError> for Refusal {
    fn from(error: AskError) -> Self {
        Self::Question(error)
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
    let (label, detail) = match error {
        E::Profile => ("signature-profile", "the signature is missing or not of this profile"),
        E::KeyId => ("signature-keyid", "the signature names another certificate"),
        E::Clock => ("clock", "the signature's time lies outside the window"),
        E::Digest => ("digest", "the body does not match its digest"),
        E::Signature => ("signature", "the signature does not verify"),
    };
    let kind = if error == E::Clock { Kind::Clock } else { Kind::Signature };
    invalid(StatusCode::UNAUTHORIZED, label, detail).kind(kind)
}

fn placement_problem(error: PlacementError) -> ProblemSpec {
    use PlacementError as E;
    use RetryAfter::{Jittered, Staggered};
    use StatusCode as S;
    let (status, label, detail) = match error {
        E::NotSynced => return unavailable("not-synced", "the receiver is starting", Staggered(SHORT_WAIT)),
        E::Elsewhere => {
            let detail = "another replica serves this runtime";
            return unavailable("elsewhere", detail, Staggered(SHORT_WAIT)).closing();
        }
        E::Unknown => (S::NOT_FOUND, "unknown-runtime", "no Kyma has this runtime id"),
        E::Ambiguous => (S::CONFLICT, "ambiguous-runtime", "more than one Kyma has this runtime id"),
    };
    problem(status, label, detail).retry(Jittered(UNPLACED_WAIT))
}

/// A shard has another holder within seconds; at a full or hung one clients return one by one.
fn relay_problem(error: RelayError) -> ProblemSpec {
    use RelayError as E;
    use RetryAfter::{Jittered, Staggered};
    let moving = "the runtime's replica is changing";
    let (label, detail, retry) = match error {
        E::Unknown => return unavailable("relay-unknown", moving, Jittered(SHORT_WAIT)).closing(),
        E::NotHere => return unavailable("relay-not-here", moving, Jittered(SHORT_WAIT)).closing(),
        E::Gone => ("relay-gone", "the runtime's replica is not reachable", Jittered(SHORT_WAIT)),
        E::Full => ("relay-full", "the runtime's replica has no room for this request now", Staggered(SHORT_WAIT)),
        E::Share => ("relay-share", "this runtime has too many requests in flight", Jittered(SHORT_WAIT)),
        E::Late => ("relay-late", "the runtime's replica did not respond in time", Staggered(SHORT_WAIT)),
        E::Broken => ("relay-broken", "the exchange with the runtime's replica failed", Jittered(SHORT_WAIT)),
    };
    unavailable(label, detail, retry)
}

fn enrolment_problem(error: EnrolmentError) -> ProblemSpec {
    use EnrolmentError as E;
    use ParseRequestError as R;
    use RetryAfter::{Exact, Jittered};
    use TokenError as T;
    let dependency = Jittered(DEPENDENCY_WAIT);
    match error {
        E::Placement(error) => placement_problem(error),
        E::Revoked => forbidden("revoked", "the runtime is revoked").retry(Jittered(UNPLACED_WAIT)),
        // The token is authentic; its subject lacks the permission.
        E::Token(token @ (T::Account | T::Unbound | T::Other)) => {
            forbidden(token.as_str(), "the token is not that of a pod of the agent")
        }
        E::Token(token) => unauthorized(token.as_str(), "the token is missing, invalid, or meant for another audience"),
        // Agents enrol after this refusal.
        E::Unattested => {
            unauthorized("token-absent", "a renewal needs the token of the agent's pod").kind(Kind::Certificate)
        }
        E::NoAccess => unavailable("no-access", "the receiver has no access to the runtime", dependency),
        E::Unreachable => unavailable("unreachable", "the runtime could not review the token", dependency),
        E::Rate(wait) => too_many("certificates-rate", "this runtime requests too many certificates", Exact(wait)),
        E::Address(wait) => too_many("address-rate", "too many enrolments come from this address", Exact(wait)),
        E::Request(R::TooLarge | R::Parse) => {
            bad_request("request-malformed", "the certificate request is not readable")
        }
        E::Request(R::Key) => bad_request("request-key", "the certificate request's key must be on P-256"),
        E::Request(R::Signature) => {
            bad_request("request-signature", "the certificate request is not signed by its own key")
        }
        E::Request(R::Authority) => {
            bad_request("request-ca", "the certificate request must not be for a certificate authority")
        }
        E::RequestNames => {
            bad_request("request-names", "the certificate request must name its runtime and nothing else")
        }
        E::Issuer => unavailable("issuer", "no certificate could be issued", dependency),
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
    response(status, content_type, Full::from(body))
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
