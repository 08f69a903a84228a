//! What a failed call to a runtime means: how soon to try again, and what to tell people.

use std::{error::Error, fmt::Write, io};

use kube::core::Status;
use rustls::AlertDescription;

use super::{addresses::Forbidden, answer::CutOff, chain};
use crate::base::class::Class;

/// Characters of a runtime's words that we pass on; they end in conditions and logs.
const MAX_WORDS: usize = 300;

/// The class of a failed call to a runtime.
#[must_use]
pub fn classify(error: &kube::Error) -> Class {
    use kube::Error as E;
    match error {
        E::Api(status) => of_status(status),
        E::Service(_) | E::HyperError(_) | E::ReadEvents(_) => of_transport(error),
        // The runtime's words make no sense to us; saying the same again soon will not change that.
        E::SerdeError(_) | E::FromUtf8(_) | E::LinesCodecMaxLineLengthExceeded | E::Discovery(_) => Class::Refused,
        E::Auth(_) => Class::Auth,
        // The others can only come from a request that we built wrongly.
        _ => Class::Ours,
    }
}

fn of_status(status: &Status) -> Class {
    match status.code {
        401 | 403 => Class::Auth,
        // The API server is there but not well, which is no better than not being there.
        408 | 500..=599 => Class::Transport,
        _ => Class::Refused,
    }
}

fn of_transport(error: &kube::Error) -> Class {
    // Like credentials that are not accepted: only a changed Secret helps.
    if forbidden_address(error).is_some() {
        return Class::Auth;
    }
    match cut_off(error) {
        Some(CutOff::TooLarge(_) | CutOff::Status(_)) => return Class::Refused,
        Some(CutOff::HeadLate(_) | CutOff::Late(_)) => return Class::Transport,
        None => {}
    }
    // One side does not accept the other's certificate: only a changed Secret or certificate helps.
    let refused = chain::causes(error).any(|cause| match cause.downcast_ref::<rustls::Error>() {
        Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented) => true,
        Some(rustls::Error::AlertReceived(alert)) => ALERTS.contains(alert),
        Some(_) => false,
        // With TLS 1.3 the server judges us after our handshake has ended, and HTTP/2 keeps only the text of what it read.
        None => {
            cause.is::<io::Error>()
                && ALERTS.iter().any(|a| cause.to_string() == rustls::Error::AlertReceived(*a).to_string())
        }
    });
    if refused { Class::Auth } else { Class::Transport }
}

/// What a server says of a certificate that it does not accept.
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

/// The forbidden address that a call would have gone to.
#[must_use]
pub fn forbidden_address(error: &kube::Error) -> Option<Forbidden> {
    chain::find::<Forbidden>(error).copied()
}

/// Whether and why the answer was cut off.
#[must_use]
pub fn cut_off(error: &kube::Error) -> Option<CutOff> {
    chain::find::<CutOff>(error).copied()
}

/// One bounded line about a failed call, for conditions and logs: a runtime's words can be of any length and kind.
#[must_use]
pub fn describe(error: &kube::Error) -> String {
    let mut words = String::new();
    match error {
        kube::Error::Api(status) => {
            // Writing to a String does not fail.
            let _ = write!(words, "{} ({} {})", status.message, status.code, status.reason);
        }
        // The others print their source themselves.
        kube::Error::Service(source) => join(&mut words, source.as_ref()),
        kube::Error::HyperError(source) => join(&mut words, source),
        other => words = other.to_string(),
    }
    let clean = words.chars().map(|c| if c.is_control() { ' ' } else { c });
    clean.take(MAX_WORDS).collect()
}

fn join(words: &mut String, first: &(dyn Error + 'static)) {
    let mut next = Some(first);
    while let Some(error) = next {
        let text = error.to_string();
        if !words.ends_with(&text) {
            if !words.is_empty() {
                words.push_str(": ");
            }
            words.push_str(&text);
        }
        // A chain is short; this only ends one that is not.
        next = if words.len() > 4 * MAX_WORDS { None } else { error.source() };
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::kube::runtime_access::addresses::Why;

    fn api(code: u16) -> kube::Error {
        kube::Error::Api(Status::failure("no", "Reason").with_code(code).boxed())
    }

    fn service(error: impl Into<tower::BoxError>) -> kube::Error {
        kube::Error::Service(error.into())
    }

    #[test]
    fn each_failure_has_its_class() {
        let forbidden = Forbidden { address: "127.0.0.1".parse().unwrap(), why: Why::Loopback };
        for (error, class) in [
            (api(401), Class::Auth),
            (api(403), Class::Auth),
            (api(400), Class::Refused),
            (api(404), Class::Refused),
            (api(422), Class::Refused),
            (api(409), Class::Refused),
            (api(429), Class::Refused),
            (api(500), Class::Transport),
            (api(503), Class::Transport),
            (service(forbidden), Class::Auth),
            (service(io::Error::other(forbidden)), Class::Auth),
            (service(CutOff::TooLarge(1)), Class::Refused),
            (service(CutOff::HeadLate(Duration::from_secs(1))), Class::Transport),
            (service(CutOff::Late(Duration::from_secs(1))), Class::Transport),
            (service(io::Error::from(io::ErrorKind::ConnectionRefused)), Class::Transport),
            (service(io::Error::other(rustls::Error::NoCertificatesPresented)), Class::Auth),
            (
                service(io::Error::other(rustls::Error::AlertReceived(AlertDescription::CertificateRequired))),
                Class::Auth,
            ),
            (
                service(io::Error::other(rustls::Error::AlertReceived(AlertDescription::InternalError))),
                Class::Transport,
            ),
            (kube::Error::SerdeError(serde_json::from_str::<()>("x").unwrap_err()), Class::Refused),
            (kube::Error::TlsRequired, Class::Ours),
        ] {
            assert_eq!(classify(&error), class, "{error:?}");
        }
    }

    #[test]
    fn descriptions_are_short_and_plain() {
        assert_eq!(describe(&api(403)), "no (403 Reason)");
        let long = kube::Error::Api(Status::failure(&"x\n\u{1b}".repeat(1000), "").with_code(500).boxed());
        let words = describe(&long);
        assert_eq!(words.chars().count(), MAX_WORDS);
        assert!(!words.contains(char::is_control));
        let late = service(io::Error::other(CutOff::HeadLate(Duration::from_secs(20))));
        assert_eq!(describe(&late), "the runtime did not answer within 20s");
    }
}
