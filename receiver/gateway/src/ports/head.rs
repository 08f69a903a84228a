//! Checks of a request's head, before any byte of its body is read, and the authorities of this receiver (`--authority`).

use std::str::FromStr;

use http::{HeaderMap, HeaderName, Method, Uri, header, request::Parts, uri::Authority};
use thiserror::Error;
use tidewatch_contract::{
    enrolment::{self, CERTIFICATES_PATH},
    event::BATCH_CONTENT_TYPE,
    exchange::{EVENTS_PATH, HEARTBEAT_PATH},
    signature::{CONTENT_DIGEST, Message, SIGNATURE, SIGNATURE_INPUT, SignedRequest, VerifyError},
};

use super::refusal::Refusal;
use crate::http::single_value;

/// Error of parsing an [`OwnAuthority`].
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("an authority is <host> or <host>:<port>, without user or scheme")]
pub struct ParseAuthorityError;

/// `Host` or `:authority` as signatures cover it: lower case, without port 443 (RFC 9421, section 2.2.3).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OwnAuthority(String);

impl OwnAuthority {
    /// Returns the form of a signature base.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the host without the port: a name, or an address without brackets.
    pub fn host(&self) -> &str {
        let port = self.0.rfind(':').filter(|at| !self.0[*at..].contains(']'));
        self.0[..port.unwrap_or(self.0.len())].trim_start_matches('[').trim_end_matches(']')
    }

    /// Replaces port 0 by the bound port.
    pub(super) fn at(&self, port: u16) -> Self {
        self.0.strip_suffix(":0").map_or_else(|| self.clone(), |host| Self(normalize(&format!("{host}:{port}"))))
    }
}

impl FromStr for OwnAuthority {
    type Err = ParseAuthorityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let authority: Authority = text.parse().map_err(|_| ParseAuthorityError)?;
        let has_user = authority.as_str().contains('@');
        // An empty or non-numeric port is certainly a mistake.
        let has_bad_port = authority.port_u16().is_none() && authority.host().len() != authority.as_str().len();
        if has_user || has_bad_port || authority.host().is_empty() {
            return Err(ParseAuthorityError);
        }
        Ok(Self(normalize(authority.as_str())))
    }
}

/// Route of the event port. The name is its metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(super) enum Route {
    /// `POST /v3/events`.
    Events,
    /// `POST /v3/heartbeat`.
    Heartbeat,
    /// `POST /v3/certificates`: renewal.
    Certificates,
}

impl Route {
    pub(super) fn of(path: &str) -> Option<Self> {
        match path {
            EVENTS_PATH => Some(Self::Events),
            HEARTBEAT_PATH => Some(Self::Heartbeat),
            CERTIFICATES_PATH => Some(Self::Certificates),
            _ => None,
        }
    }

    const fn content_type(self) -> &'static str {
        match self {
            Self::Events => BATCH_CONTENT_TYPE,
            Self::Heartbeat => "application/json",
            Self::Certificates => enrolment::CONTENT_TYPE,
        }
    }

    /// Returns the limit of the route's bodies in bytes; `max` is the limit of the port.
    pub(super) fn max_body(self, max: usize) -> usize {
        match self {
            Self::Events | Self::Heartbeat => max,
            Self::Certificates => max.min(enrolment::MAX_REQUEST_BYTES),
        }
    }
}

/// A valid head. Body and signature are yet to be checked.
#[derive(Debug)]
pub(super) struct Head<'a> {
    pub(super) route: Route,
    path: &'a str,
    authority: &'a OwnAuthority,
    content_digest: &'a str,
    signature_input: &'a str,
    signature: &'a str,
}

impl<'a> Head<'a> {
    pub(super) fn read(parts: &'a Parts, own: &'a [OwnAuthority], max_body: usize) -> Result<Self, Refusal> {
        let headers = &parts.headers;
        let path = parts.uri.path();
        let route = Route::of(path).ok_or(Refusal::Route)?;
        if parts.method != Method::POST {
            return Err(Refusal::Method);
        }
        check_plain(parts)?;
        let authority = find_authority(own, &parts.uri, headers)?;
        if single_value(headers, &header::CONTENT_TYPE) != Some(route.content_type()) {
            return Err(Refusal::ContentType);
        }
        check_length(headers, route.max_body(max_body))?;
        let field = |name: &'static str| {
            single_value(headers, &HeaderName::from_static(name)).ok_or(Refusal::Signature(VerifyError::Profile))
        };
        let content_digest = field(CONTENT_DIGEST)?;
        let signature_input = field(SIGNATURE_INPUT)?;
        Ok(Self { route, path, authority, content_digest, signature_input, signature: field(SIGNATURE)? })
    }

    /// Returns the authority of the request, as its signature covers it.
    pub(super) fn authority(&self) -> &'a str {
        self.authority.as_str()
    }

    /// Returns the components that the signature must cover.
    pub(super) fn signed<'b>(&'b self, body: &'b [u8]) -> SignedRequest<'b> {
        let Self { route, path, authority, content_digest, signature_input, signature } = self;
        let message =
            Message { method: "POST", authority: authority.as_str(), path, content_type: route.content_type() };
        SignedRequest { message, content_digest, signature_input, signature, body }
    }
}

/// Finds the authority of a request among the own ones. `Host` may be absent only if `:authority` is present.
fn find_authority<'a>(own: &'a [OwnAuthority], uri: &Uri, headers: &HeaderMap) -> Result<&'a OwnAuthority, Refusal> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let host = hosts.next().map(|host| host.to_str().map_err(|_| Refusal::Host)).transpose()?;
    if hosts.next().is_some() {
        return Err(Refusal::Host);
    }
    let authority = match (uri.authority().map(Authority::as_str), host) {
        (Some(authority), Some(host)) if normalize(authority) != normalize(host) => return Err(Refusal::Host),
        (Some(authority), _) => authority,
        (None, Some(host)) => host,
        (None, None) => return Err(Refusal::Host),
    };
    let authority = normalize(authority);
    own.iter().find(|own| own.0 == authority).ok_or(Refusal::Authority)
}

fn normalize(text: &str) -> String {
    let lower = text.to_ascii_lowercase();
    lower.strip_suffix(":443").map_or(lower.clone(), str::to_owned)
}

/// Refuses a query string, content encodings and transfer encodings, which no route of v3 accepts.
pub(super) fn check_plain(parts: &Parts) -> Result<(), Refusal> {
    if parts.uri.query().is_some() {
        return Err(Refusal::Query);
    }
    if parts.headers.contains_key(header::CONTENT_ENCODING) {
        return Err(Refusal::Encoding);
    }
    if parts.headers.contains_key(header::TRANSFER_ENCODING) {
        return Err(Refusal::TransferEncoding);
    }
    Ok(())
}

/// Refuses an announced length above `max` bytes. Received bytes are counted in any case. The HTTP library has already
/// checked that the field is a single number.
pub(super) fn check_length(headers: &HeaderMap, max: usize) -> Result<(), Refusal> {
    let length = single_value(headers, &header::CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok());
    if length.is_some_and(|length| length > max as u64) { Err(Refusal::TooLarge(max)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authorities_are_normalized() {
        for (text, expected) in
            [("KCP.test:8443", "kcp.test:8443"), ("kcp.test:443", "kcp.test"), ("[::1]:1", "[::1]:1")]
        {
            assert_eq!(text.parse::<OwnAuthority>().unwrap().as_str(), expected);
        }
        let any: OwnAuthority = "kcp.test:0".parse().unwrap();
        assert_eq!((any.at(8443).as_str(), any.at(443).as_str()), ("kcp.test:8443", "kcp.test"));
        for bad in ["", "https://kcp.test", "user@kcp.test", "kcp.test:", "kcp.test:99999", "a b", ":80"] {
            assert_eq!(bad.parse::<OwnAuthority>(), Err(ParseAuthorityError), "{bad}");
        }
    }

    #[test]
    fn request_needs_exactly_one_own_authority() {
        let own = ["kcp.test:8443".parse().unwrap(), "127.0.0.1:8443".parse().unwrap()];
        let check = |uri: &str, hosts: &[&str]| {
            let mut headers = HeaderMap::new();
            for host in hosts {
                headers.append(header::HOST, host.parse().unwrap());
            }
            find_authority(&own, &uri.parse().unwrap(), &headers).map(OwnAuthority::as_str)
        };
        assert_eq!(check("/x", &["KCP.test:8443"]), Ok("kcp.test:8443"));
        assert_eq!(check("https://127.0.0.1:8443/x", &[]), Ok("127.0.0.1:8443"));
        assert_eq!(check("https://kcp.test:8443/x", &["kcp.test:8443"]), Ok("kcp.test:8443"));
        assert_eq!(check("https://kcp.test:8443/x", &["127.0.0.1:8443"]), Err(Refusal::Host));
        assert_eq!(check("/x", &[]), Err(Refusal::Host));
        assert_eq!(check("/x", &["kcp.test:8443", "kcp.test:8443"]), Err(Refusal::Host));
        assert_eq!(check("/x", &["kcp.test"]), Err(Refusal::Authority));
    }
}
