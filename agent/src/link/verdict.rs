//! What a refusal means for us. Pure.

use std::time::Duration;

use http::{HeaderMap, HeaderName, StatusCode, header};
use jiff::fmt::rfc2822;
use tidewatch_shared::problem::{Kind, Problem};

use super::client::Answer;
use crate::outbox::Announced;

/// What to do after a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Send fewer events at once; a single one goes as `watch.changed`, or is parked.
    Split,
    /// The same, because the body was too large; with what the receiver says it would take.
    TooLarge(Announced),
    /// Add this to our clock when signing, in seconds, and try at once.
    Clock {
        /// The receiver's clock less ours.
        offset: i64,
    },
    /// Begin a new epoch, once.
    NewEpoch,
    /// The certificate is of no use any more.
    Certificate,
    /// Wait exactly so long.
    Told(Duration),
    /// Wait with jitter, longer each time.
    BackOff,
}

/// Judges an answer that is no success; `now` is our own clock in Unix seconds.
#[must_use]
pub fn judge(answer: &Answer, now: i64) -> Verdict {
    let told = || wait(&answer.headers, now).map_or(Verdict::BackOff, Verdict::Told);
    match answer.status {
        StatusCode::BAD_REQUEST => Verdict::Split,
        // Without limits in it the answer is a proxy's: the request's own size tells enough.
        StatusCode::PAYLOAD_TOO_LARGE => Verdict::TooLarge(serde_json::from_slice(&answer.body).unwrap_or_default()),
        StatusCode::UNAUTHORIZED => match kind(answer) {
            Kind::Clock => {
                let theirs = date(&answer.headers, &header::DATE);
                theirs.map_or(Verdict::BackOff, |theirs| Verdict::Clock { offset: theirs - now })
            }
            Kind::Replay | Kind::Signature => Verdict::NewEpoch,
            Kind::Certificate => Verdict::Certificate,
            Kind::Other => Verdict::BackOff,
        },
        StatusCode::FORBIDDEN => Verdict::BackOff,
        _ => told(),
    }
}

fn kind(answer: &Answer) -> Kind {
    serde_json::from_slice::<Problem>(&answer.body).map_or(Kind::Other, |problem| problem.kind())
}

/// `Retry-After` (RFC 9110, section 10.2.3): seconds, or a date.
pub(super) fn wait(headers: &HeaderMap, now: i64) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok();
    let until = || u64::try_from(date(headers, &header::RETRY_AFTER)? - now).ok();
    // At once, again and again, would be a hot loop.
    seconds.or_else(until).filter(|seconds| *seconds > 0).map(Duration::from_secs)
}

/// A date of RFC 9110, section 5.6.7, in Unix seconds.
pub(crate) fn date(headers: &HeaderMap, name: &HeaderName) -> Option<i64> {
    let text = headers.get(name)?.to_str().ok()?;
    Some(rfc2822::DateTimeParser::new().parse_timestamp(text).ok()?.as_second())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    const NOW: i64 = 784_111_777;

    fn verdict(status: u16, kind: Kind, headers: &[(HeaderName, &'static str)]) -> Verdict {
        let body = serde_json::to_vec(&Problem::new(kind, "t", status, "d")).unwrap().into();
        let headers = headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect();
        judge(&Answer { status: StatusCode::from_u16(status).unwrap(), headers, body }, NOW)
    }

    #[test]
    fn each_refusal_has_its_consequence() {
        use Kind::{Certificate, Clock, Other, Replay, Signature};
        let date = [(header::DATE, "Sun, 06 Nov 1994 08:54:37 GMT")];
        let later = [(header::RETRY_AFTER, "Sun, 06 Nov 1994 08:49:47 GMT")];
        let seconds = [(header::RETRY_AFTER, "7")];
        let told = |seconds| Verdict::Told(Duration::from_secs(seconds));
        for (status, kind, headers, expected) in [
            (400, Other, &[][..], Verdict::Split),
            (413, Other, &[], Verdict::TooLarge(Announced::default())),
            (401, Clock, &date, Verdict::Clock { offset: 300 }),
            (401, Clock, &[], Verdict::BackOff),
            (401, Replay, &[], Verdict::NewEpoch),
            (401, Signature, &[], Verdict::NewEpoch),
            (401, Certificate, &[], Verdict::Certificate),
            (403, Other, &seconds, Verdict::BackOff),
            (404, Other, &seconds, told(7)),
            (409, Other, &[], Verdict::BackOff),
            (429, Other, &seconds, told(7)),
            (503, Other, &later, told(10)),
            (503, Other, &[(header::RETRY_AFTER, "soon")], Verdict::BackOff),
            (503, Other, &[(header::RETRY_AFTER, "0")], Verdict::BackOff),
            (503, Other, &[(header::RETRY_AFTER, "Sun, 06 Nov 1994 08:49:37 GMT")], Verdict::BackOff),
            (500, Other, &[], Verdict::BackOff),
            (302, Other, &[], Verdict::BackOff),
        ] {
            assert_eq!(verdict(status, kind, headers), expected, "{status} {kind:?}");
        }
    }

    #[test]
    fn a_limit_is_read_where_one_is_told() {
        let limits = |body: &'static str| {
            let (status, headers) = (StatusCode::PAYLOAD_TOO_LARGE, HeaderMap::new());
            judge(&Answer { status, headers, body: body.into() }, NOW)
        };
        let announced = |max_bytes, max_events| Verdict::TooLarge(Announced { max_bytes, max_events });
        assert_eq!(limits(r#"{"status":413,"maxBytes":10000}"#), announced(Some(10_000), None));
        assert_eq!(limits(r#"{"maxEvents":7}"#), announced(None, Some(7)));
        for nothing in ["", "<html>", r#"{"maxBytes":-1}"#, "[]"] {
            assert_eq!(limits(nothing), announced(None, None), "{nothing}");
        }
    }
}
