//! Proof of a failed call about the API server of a runtime: whether it was reached, whether anything answered, and the reason
//! for which its certificate is not trusted.

use http_body_util::LengthLimitError;
use rustls::CertificateError;
use strum::Display;

use super::{
    chain,
    classify::{classify, limit_error},
    list::ListError,
};
use crate::{error_class::ErrorClass, leader::NotLeaderError};

/// Reason for which the certificate of an API server is not trusted. The texts are fixed: that of rustls has the time and the
/// names of the server, so it would change with each attempt, and quote the runtime.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq)]
pub enum Untrusted {
    /// No root that is trusted for the runtime issued it.
    #[strum(to_string = "none of the trusted roots issued it")]
    Issuer,
    /// It is of another name or address.
    #[strum(to_string = "it is not valid for the server's name")]
    Name,
    /// It was valid in the past.
    #[strum(to_string = "it has expired")]
    Expired,
    /// It will be valid.
    #[strum(to_string = "it is not valid yet")]
    NotYetValid,
    /// It is missing, malformed, revoked, or of another purpose.
    #[strum(to_string = "it cannot be verified")]
    Other,
}

impl From<&CertificateError> for Untrusted {
    fn from(error: &CertificateError) -> Self {
        use CertificateError as E;
        match error {
            // A root of the same name with another key shows as a wrong signature.
            E::UnknownIssuer | E::BadSignature => Self::Issuer,
            E::NotValidForName | E::NotValidForNameContext { .. } => Self::Name,
            E::Expired | E::ExpiredContext { .. } => Self::Expired,
            E::NotValidYet | E::NotValidYetContext { .. } => Self::NotYetValid,
            _ => Self::Other,
        }
    }
}

/// Reason for which the certificate of the API server is not trusted, if that is the cause.
pub fn untrusted_server(error: &kube::Error) -> Option<Untrusted> {
    match chain::find::<rustls::Error>(error)? {
        rustls::Error::InvalidCertificate(cause) => Some(cause.into()),
        rustls::Error::NoCertificatesPresented => Some(Untrusted::Other),
        _ => None,
    }
}

/// Returns whether the API server of the runtime was not reached: there was no connection to it, no answer in time, or only the
/// answer of a proxy before it.
pub fn is_unreached(error: &kube::Error) -> bool {
    classify(error) == ErrorClass::Transport && !is_ended_here(error)
}

/// Returns whether nothing answered at all: the connection, TLS or the response failed. Whether the request was executed is
/// unknown. A late answer is not included: an admission webhook of the user may delay one request alone.
pub fn is_unanswered(error: &kube::Error) -> bool {
    use kube::Error as E;
    let has_no_answer = matches!(error, E::Service(_) | E::HyperError(_) | E::ReadEvents(_));
    has_no_answer && limit_error(error).is_none() && is_unreached(error)
}

/// Returns whether this receiver ended the call: its write fence is closed, or a list exceeds its limits. Neither says anything
/// about the API server, although both come as failures of the client.
fn is_ended_here(error: &kube::Error) -> bool {
    chain::find::<NotLeaderError>(error).is_some()
        || chain::find::<ListError>(error).is_some()
        || chain::find::<LengthLimitError>(error).is_some()
}

#[cfg(test)]
mod tests {
    use std::{io, time::Duration};

    use futures::FutureExt as _;
    use http_body_util::BodyExt as _;
    use kube::core::Status;
    use rustls::AlertDescription;
    use rustls_pki_types::{ServerName, UnixTime};

    use super::*;
    use crate::runtime_access::{
        LimitError,
        addresses::{ForbiddenAddressError, ForbiddenReason},
        classify::UNPARSED,
    };

    const S: Duration = Duration::from_secs(1);

    fn service(error: impl Into<tower::BoxError>) -> kube::Error {
        kube::Error::Service(error.into())
    }

    fn tls(error: rustls::Error) -> kube::Error {
        service(io::Error::other(error))
    }

    fn api(code: u16, reason: &str) -> kube::Error {
        kube::Error::Api(Status::failure("no", reason).with_code(code).boxed())
    }

    fn too_long() -> tower::BoxError {
        let body = http_body_util::Limited::new(http_body_util::Full::<&[u8]>::new(b"long"), 1);
        body.collect().now_or_never().unwrap().unwrap_err()
    }

    #[test]
    fn reach_is_judged_by_what_came_back() {
        let refused = || service(io::Error::from(io::ErrorKind::ConnectionRefused));
        let forbidden =
            ForbiddenAddressError { address: "127.0.0.1".parse().unwrap(), reason: ForbiddenReason::Loopback };
        for (error, unreached, unanswered) in [
            (refused(), true, true),
            (kube::Error::ReadEvents(io::ErrorKind::UnexpectedEof.into()), true, true),
            (tls(rustls::Error::NoCertificatesPresented), true, true),
            (tls(CertificateError::Expired.into()), true, true),
            (ListError::Page(refused()).into(), true, true),
            (service(LimitError::HeadTimeout(S)), true, false),
            (service(LimitError::Timeout(S)), true, false),
            (api(408, "Timeout"), true, false),
            (api(503, "ServiceUnavailable"), true, false),
            (api(500, UNPARSED), true, false),
            (tls(rustls::Error::AlertReceived(AlertDescription::CertificateRequired)), false, false),
            (service(forbidden), false, false),
            (service(LimitError::TooLarge(1)), false, false),
            (service(LimitError::NoMemory(S)), false, false),
            (service(NotLeaderError), false, false),
            (ListError::Timeout(S).into(), false, false),
            (ListError::Objects(1).into(), false, false),
            (service(too_long()), false, false),
            (api(401, "Unauthorized"), false, false),
            (api(404, "NotFound"), false, false),
            (api(429, "TooManyRequests"), false, false),
            (api(500, "InternalError"), false, false),
            (kube::Error::TlsRequired, false, false),
        ] {
            assert_eq!((is_unreached(&error), is_unanswered(&error)), (unreached, unanswered), "{error:?}");
        }
    }

    #[test]
    fn each_rejected_certificate_has_a_fixed_text() {
        let time = UnixTime::since_unix_epoch(S);
        let other_name = CertificateError::NotValidForNameContext {
            expected: ServerName::try_from("runtime").unwrap(),
            presented: vec!["hostile".to_owned()],
        };
        for (error, untrusted, text) in [
            (CertificateError::UnknownIssuer, Untrusted::Issuer, "none of the trusted roots issued it"),
            (CertificateError::BadSignature, Untrusted::Issuer, "none of the trusted roots issued it"),
            (other_name, Untrusted::Name, "it is not valid for the server's name"),
            (CertificateError::ExpiredContext { time, not_after: time }, Untrusted::Expired, "it has expired"),
            (
                CertificateError::NotValidYetContext { time, not_before: time },
                Untrusted::NotYetValid,
                "it is not valid yet",
            ),
            (CertificateError::Revoked, Untrusted::Other, "it cannot be verified"),
        ] {
            let error = tls(error.into());
            assert_eq!(untrusted_server(&error), Some(untrusted), "{error:?}");
            assert_eq!(untrusted.to_string(), text);
        }
        assert_eq!(untrusted_server(&tls(rustls::Error::NoCertificatesPresented)), Some(Untrusted::Other));
        let rejected = rustls::Error::AlertReceived(AlertDescription::CertificateExpired);
        assert_eq!(untrusted_server(&tls(rejected)), None, "the server rejects ours");
        assert_eq!(untrusted_server(&api(401, "Unauthorized")), None);
    }
}
