//! Classifies failed calls to a runtime, which determines the backoff, and describes them for conditions and logs.

use std::{error::Error, io};

use kube::core::Status;
use rustls::AlertDescription;
use tidewatch_kit::foreign_text;

use super::{addresses::ForbiddenAddressError, chain, response::LimitError};
use crate::error_class::ErrorClass;

/// Longest description, in characters. It contains text of the runtime, and ends up in conditions and logs.
const MAX_DESCRIPTION_CHARS: usize = 300;
/// Causes of one refusal that a description names at most.
const MAX_CAUSES: usize = 4;
/// Longest reason of an error response, in characters; those of Kubernetes are shorter.
const MAX_REASON_CHARS: usize = 40;
/// Reason that kube gives to an error response that is no `Status` of Kubernetes.
pub(super) const UNPARSED: &str = "Failed to parse error data";

/// ErrorClass of a failed call to a runtime.
pub fn classify(error: &kube::Error) -> ErrorClass {
    use kube::Error as E;
    match error {
        E::Api(status) => match status.code {
            401 | 403 => ErrorClass::Auth,
            // The API server, or a proxy before it, had no answer in time, which counts as unreachable.
            408 | 502..=504 => ErrorClass::Transport,
            // Not the words of an API server.
            500..=599 if status.reason == UNPARSED => ErrorClass::Transport,
            // The API server answered: most often an admission webhook of the user fails, and the message names it.
            _ => ErrorClass::Refused,
        },
        E::Service(_) | E::HyperError(_) | E::ReadEvents(_) => of_transport(error),
        // The response cannot be parsed; repeating the request soon will not change that.
        E::SerdeError(_) | E::FromUtf8(_) | E::LinesCodecMaxLineLengthExceeded | E::Discovery(_) => ErrorClass::Refused,
        E::Auth(_) => ErrorClass::Auth,
        // The others only result from a request that this receiver built wrongly.
        _ => ErrorClass::Ours,
    }
}

fn of_transport(error: &kube::Error) -> ErrorClass {
    // Like rejected credentials: only a changed Secret helps.
    if forbidden_address(error).is_some() {
        return ErrorClass::Auth;
    }
    match limit_error(error) {
        Some(LimitError::TooLarge(_) | LimitError::TooComplex(_) | LimitError::UnexpectedStatus(_)) => {
            return ErrorClass::Refused;
        }
        // Other runtimes hold the memory, or this one does.
        Some(LimitError::NoMemory(_)) => return ErrorClass::Ours,
        Some(LimitError::HeadTimeout(_) | LimitError::Timeout(_)) => return ErrorClass::Transport,
        None => {}
    }
    // The server rejects the client certificate: only a changed Secret helps. A server whose own certificate is not trusted was
    // not reached.
    let refused = chain::causes(error).any(|cause| match cause.downcast_ref::<rustls::Error>() {
        Some(rustls::Error::AlertReceived(alert)) => ALERTS.contains(alert),
        Some(_) => false,
        // With TLS 1.3 the server verifies the client certificate after the client's handshake has ended, and HTTP/2
        // keeps only the text of the alert.
        None => {
            cause.is::<io::Error>()
                && ALERTS.iter().any(|a| cause.to_string() == rustls::Error::AlertReceived(*a).to_string())
        }
    });
    if refused { ErrorClass::Auth } else { ErrorClass::Transport }
}

/// TLS alerts of a server that rejects the client certificate.
const ALERTS: [AlertDescription; 8] = [
    AlertDescription::BadCertificate,
    AlertDescription::UnsupportedCertificate,
    AlertDescription::CertificateRevoked,
    AlertDescription::CertificateExpired,
    AlertDescription::CertificateUnknown,
    AlertDescription::CertificateRequired,
    AlertDescription::UnknownCA,
    AlertDescription::AccessDenied,
];

/// The forbidden address of the call, if that is the cause.
pub fn forbidden_address(error: &kube::Error) -> Option<ForbiddenAddressError> {
    chain::find::<ForbiddenAddressError>(error).copied()
}

/// The violated limit of the response, if that is the cause.
pub fn limit_error(error: &kube::Error) -> Option<LimitError> {
    chain::find::<LimitError>(error).copied()
}

/// Describes a failed call in one bounded line, for conditions and logs: text of a runtime can have any length and
/// content. A text that is too long loses its middle: its end says why.
pub fn describe(error: &kube::Error) -> String {
    let text = match error {
        kube::Error::Api(status) => return describe_status(status),
        // The other variants include their source in their text.
        kube::Error::Service(source) => describe_chain(source.as_ref()),
        kube::Error::HyperError(source) => describe_chain(source),
        other => other.to_string(),
    };
    foreign_text::shortened(&text, MAX_DESCRIPTION_CHARS)
}

/// Message, code and reason of an error response.
fn describe_status(status: &Status) -> String {
    let code = match &*status.reason {
        "" | UNPARSED => format!(" ({})", status.code),
        reason => format!(" ({} {})", status.code, foreign_text::line(reason, MAX_REASON_CHARS)),
    };
    let room = MAX_DESCRIPTION_CHARS.saturating_sub(code.chars().count());
    let causes = status.details.as_ref().map(|details| details.causes.as_slice()).unwrap_or_default();
    let message = if status.message.chars().count() > room && causes.len() > 1 {
        // Each is shortened by itself, so that none hides the others. Some contain the value of the field.
        let named = causes.len().min(MAX_CAUSES);
        let each = room / named - 2;
        let texts = causes
            .iter()
            .take(named)
            .map(|cause| foreign_text::shortened(&format!("{}: {}", cause.field, cause.message), each));
        texts.collect::<Vec<_>>().join("; ")
    } else {
        foreign_text::shortened(&status.message, room)
    };
    message + &code
}

/// Joins the texts of an error and its sources, without those that the text before already ends with.
fn describe_chain(first: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    for cause in chain::causes(first).map(ToString::to_string) {
        // Bounds the text; real chains are shorter.
        if text.len() > 4 * MAX_DESCRIPTION_CHARS {
            break;
        }
        if !text.ends_with(&cause) {
            let separator = if text.is_empty() { "" } else { ": " };
            text = text + separator + &cause;
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustls::CertificateError;
    use serde_json::json;

    use super::*;
    use crate::runtime_access::addresses::ForbiddenReason;

    fn api(code: u16) -> kube::Error {
        kube::Error::Api(Status::failure("no", "Reason").with_code(code).boxed())
    }

    /// An error page of a proxy.
    fn unparsed(code: u16) -> kube::Error {
        kube::Error::Api(Status::failure("<html>", UNPARSED).with_code(code).boxed())
    }

    fn service(error: impl Into<tower::BoxError>) -> kube::Error {
        kube::Error::Service(error.into())
    }

    #[test]
    fn each_failure_has_its_class() {
        let forbidden =
            ForbiddenAddressError { address: "127.0.0.1".parse().unwrap(), reason: ForbiddenReason::Loopback };
        for (error, class) in [
            (api(401), ErrorClass::Auth),
            (api(403), ErrorClass::Auth),
            (api(400), ErrorClass::Refused),
            (api(404), ErrorClass::Refused),
            (api(422), ErrorClass::Refused),
            (api(409), ErrorClass::Refused),
            (api(429), ErrorClass::Refused),
            (api(500), ErrorClass::Refused),
            (api(501), ErrorClass::Refused),
            (api(408), ErrorClass::Transport),
            (api(502), ErrorClass::Transport),
            (api(503), ErrorClass::Transport),
            (api(504), ErrorClass::Transport),
            (unparsed(500), ErrorClass::Transport),
            (unparsed(404), ErrorClass::Refused),
            (service(forbidden), ErrorClass::Auth),
            (service(io::Error::other(forbidden)), ErrorClass::Auth),
            (service(LimitError::TooLarge(1)), ErrorClass::Refused),
            (service(LimitError::TooComplex(1)), ErrorClass::Refused),
            (service(LimitError::NoMemory(Duration::from_secs(1))), ErrorClass::Ours),
            (service(LimitError::HeadTimeout(Duration::from_secs(1))), ErrorClass::Transport),
            (service(LimitError::Timeout(Duration::from_secs(1))), ErrorClass::Transport),
            (service(io::Error::from(io::ErrorKind::ConnectionRefused)), ErrorClass::Transport),
            (service(io::Error::other(rustls::Error::NoCertificatesPresented)), ErrorClass::Transport),
            (service(io::Error::other(rustls::Error::from(CertificateError::Expired))), ErrorClass::Transport),
            (
                service(io::Error::other(rustls::Error::AlertReceived(AlertDescription::CertificateRequired))),
                ErrorClass::Auth,
            ),
            (
                service(io::Error::other(rustls::Error::AlertReceived(AlertDescription::InternalError))),
                ErrorClass::Transport,
            ),
            (kube::Error::SerdeError(serde_json::from_str::<()>("x").unwrap_err()), ErrorClass::Refused),
            (kube::Error::TlsRequired, ErrorClass::Ours),
        ] {
            assert_eq!(classify(&error), class, "{error:?}");
        }
    }

    #[test]
    fn descriptions_are_short_and_plain() {
        assert_eq!(describe(&api(403)), "no (403 Reason)");
        assert_eq!(describe(&unparsed(500)), "<html> (500)");
        let long = kube::Error::Api(Status::failure(&"x\n\u{1b}".repeat(1000), "").with_code(500).boxed());
        let text = describe(&long);
        assert_eq!(text.chars().count(), MAX_DESCRIPTION_CHARS);
        assert!(!text.contains(char::is_control) && text.ends_with(" (500)"), "{text}");
        let late = service(io::Error::other(LimitError::HeadTimeout(Duration::from_secs(20))));
        assert_eq!(describe(&late), "the runtime did not answer within 20s");
    }

    #[test]
    fn long_refusal_keeps_its_end_and_each_of_its_causes() {
        let value = "x".repeat(5_000);
        let refusal = |causes: &[&str]| {
            let texts: Vec<_> =
                causes.iter().map(|field| format!("{field}: Invalid value: {value}: field is immutable")).collect();
            let message = format!("Job.batch \"j\" is invalid: [{}]", texts.join(", "));
            let causes: Vec<_> = causes
                .iter()
                .map(|field| json!({"field": field, "message": format!("Invalid value: {value}: field is immutable")}))
                .collect();
            let status = json!({"message": message, "reason": "Invalid", "code": 422, "details": {"causes": causes}});
            describe(&kube::Error::Api(serde_json::from_value(status).unwrap()))
        };
        let one = refusal(&["spec.template"]);
        assert!(one.starts_with("Job.batch \"j\" is invalid: [spec.template: Invalid value: xx"), "{one}");
        assert!(one.ends_with("xx: field is immutable] (422 Invalid)"), "{one}");
        let two = refusal(&["spec.template", "spec.selector"]);
        assert_eq!(two.matches(": field is immutable").count(), 2, "{two}");
        assert!(two.contains("; spec.selector: Invalid value: xx") && two.ends_with(" (422 Invalid)"), "{two}");
        let many = refusal(&["a", "b", "c", "d", "e", "f"]);
        for text in [one, two, many] {
            assert!(text.chars().count() <= MAX_DESCRIPTION_CHARS, "{text}");
        }
    }
}
