//! Classifies refusals of the receiver. Pure.

use std::time::Duration;

use http::{HeaderMap, HeaderName, StatusCode, header};
use jiff::fmt::rfc2822;
use strum::IntoStaticStr;
use tidewatch_contract::problem::{Kind, Problem};

use super::client::BufferedResponse;
use crate::outbox::AnnouncedLimits;

/// Reaction to a refusal; the name of a variant is its value in logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum RefusalAction {
    /// Send fewer events at once; a single one is replaced by a `watch.changed`, or parked.
    Split,
    /// Like [`Self::Split`], for a body above the limits that the receiver announces.
    TooLarge(AnnouncedLimits),
    /// Correct the clock for signatures and retry without delay.
    Clock {
        /// Receiver's time minus local time, in seconds.
        offset: i64,
    },
    /// Start a new epoch, once.
    NewEpoch,
    /// Replace the certificate.
    Certificate,
    /// Retry after this delay.
    RetryAfter(Duration),
    /// Retry with exponential backoff.
    BackOff,
}

impl RefusalAction {
    /// Delay that the receiver requested.
    pub(crate) const fn retry_after(self) -> Option<Duration> {
        match self {
            Self::RetryAfter(wait) => Some(wait),
            _ => None,
        }
    }
}

/// Classifies an unsuccessful response; `now` is local time in Unix seconds.
pub fn classify_refusal(response: &BufferedResponse, now: i64) -> RefusalAction {
    match response.status {
        StatusCode::BAD_REQUEST => RefusalAction::Split,
        // A response without limits is from a proxy; the outbox then derives a limit from the size of the request.
        StatusCode::PAYLOAD_TOO_LARGE => {
            RefusalAction::TooLarge(serde_json::from_slice(&response.body).unwrap_or_default())
        }
        StatusCode::UNAUTHORIZED => {
            match serde_json::from_slice(&response.body).as_ref().map_or(Kind::Other, Problem::kind) {
                Kind::Clock => {
                    let theirs = date(&response.headers, &header::DATE);
                    theirs.map_or(RefusalAction::BackOff, |theirs| RefusalAction::Clock { offset: theirs - now })
                }
                Kind::Replay | Kind::Signature => RefusalAction::NewEpoch,
                Kind::Certificate => RefusalAction::Certificate,
                Kind::Other => RefusalAction::BackOff,
            }
        }
        StatusCode::FORBIDDEN => RefusalAction::BackOff,
        _ => wait(&response.headers, now).map_or(RefusalAction::BackOff, RefusalAction::RetryAfter),
    }
}

/// `Retry-After` (RFC 9110, section 10.2.3): seconds, or a date.
fn wait(headers: &HeaderMap, now: i64) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok();
    let until = || u64::try_from(date(headers, &header::RETRY_AFTER)? - now).ok();
    // A delay of zero would cause a hot loop.
    seconds.or_else(until).filter(|seconds| *seconds > 0).map(Duration::from_secs)
}

/// An HTTP date (RFC 9110, section 5.6.7) in Unix seconds.
pub(crate) fn date(headers: &HeaderMap, name: &HeaderName) -> Option<i64> {
    let text = headers.get(name)?.to_str().ok()?;
    Some(rfc2822::DateTimeParser::new().parse_timestamp(text).ok()?.as_second())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    const NOW: i64 = 784_111_777;

    fn action(status: u16, kind: Kind, headers: &[(HeaderName, &'static str)]) -> RefusalAction {
        let body = serde_json::to_vec(&Problem::new(kind, "t", status, "d")).unwrap().into();
        let headers = headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect();
        classify_refusal(&BufferedResponse { status: StatusCode::from_u16(status).unwrap(), headers, body }, NOW)
    }

    #[test]
    fn each_refusal_maps_to_its_action() {
        use Kind::{Certificate, Clock, Other, Replay, Signature};
        let date = [(header::DATE, "Sun, 06 Nov 1994 08:54:37 GMT")];
        let later = [(header::RETRY_AFTER, "Sun, 06 Nov 1994 08:49:47 GMT")];
        let seconds = [(header::RETRY_AFTER, "7")];
        let retry_after = |seconds| RefusalAction::RetryAfter(Duration::from_secs(seconds));
        for (status, kind, headers, expected) in [
            (400, Other, &[][..], RefusalAction::Split),
            (413, Other, &[], RefusalAction::TooLarge(AnnouncedLimits::default())),
            (401, Clock, &date, RefusalAction::Clock { offset: 300 }),
            (401, Clock, &[], RefusalAction::BackOff),
            (401, Replay, &[], RefusalAction::NewEpoch),
            (401, Signature, &[], RefusalAction::NewEpoch),
            (401, Certificate, &[], RefusalAction::Certificate),
            (403, Other, &seconds, RefusalAction::BackOff),
            (404, Other, &seconds, retry_after(7)),
            (409, Other, &[], RefusalAction::BackOff),
            (429, Other, &seconds, retry_after(7)),
            (503, Other, &later, retry_after(10)),
            (503, Other, &[(header::RETRY_AFTER, "soon")], RefusalAction::BackOff),
            (503, Other, &[(header::RETRY_AFTER, "0")], RefusalAction::BackOff),
            (503, Other, &[(header::RETRY_AFTER, "Sun, 06 Nov 1994 08:49:37 GMT")], RefusalAction::BackOff),
            (500, Other, &[], RefusalAction::BackOff),
            (302, Other, &[], RefusalAction::BackOff),
        ] {
            assert_eq!(action(status, kind, headers), expected, "{status} {kind:?}");
        }
    }

    #[test]
    fn announced_limits_are_parsed() {
        let limits = |body: &'static str| {
            let status = StatusCode::PAYLOAD_TOO_LARGE;
            let headers = HeaderMap::new();
            classify_refusal(&BufferedResponse { status, headers, body: body.into() }, NOW)
        };
        let announced = |max_bytes, max_events| RefusalAction::TooLarge(AnnouncedLimits { max_bytes, max_events });
        assert_eq!(limits(r#"{"status":413,"maxBytes":10000}"#), announced(Some(10_000), None));
        assert_eq!(limits(r#"{"maxEvents":7}"#), announced(None, Some(7)));
        for nothing in ["", "<html>", r#"{"maxBytes":-1}"#, "[]"] {
            assert_eq!(limits(nothing), announced(None, None), "{nothing}");
        }
    }
}
