//! What is judged before a byte of the body is read.

use http::{HeaderMap, HeaderName, Method, header, request::Parts};
use tidewatch_shared::{
    enrolment::{self, CERTIFICATES_PATH},
    event::BATCH_CONTENT_TYPE,
    exchange::{EVENTS_PATH, HEARTBEAT_PATH},
    signature::{self, CONTENT_DIGEST, Message, SIGNATURE, SIGNATURE_INPUT, SignedRequest},
};

use super::{
    authority::{self, OwnAuthority},
    refusal::Refusal,
};

/// The routes of this port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

    /// The route as metrics name it.
    pub(super) const fn label(route: Option<Self>) -> &'static str {
        match route {
            Some(Self::Events) => "events",
            Some(Self::Heartbeat) => "heartbeat",
            Some(Self::Certificates) => "certificates",
            None => "other",
        }
    }

    const fn path(self) -> &'static str {
        match self {
            Self::Events => EVENTS_PATH,
            Self::Heartbeat => HEARTBEAT_PATH,
            Self::Certificates => CERTIFICATES_PATH,
        }
    }

    const fn content_type(self) -> &'static str {
        match self {
            Self::Events => BATCH_CONTENT_TYPE,
            Self::Heartbeat => "application/json",
            Self::Certificates => enrolment::CONTENT_TYPE,
        }
    }

    /// Bytes of its body, at most, where bodies may have `most`.
    pub(super) fn max_body(self, most: usize) -> usize {
        match self {
            Self::Events | Self::Heartbeat => most,
            Self::Certificates => most.min(enrolment::MAX_REQUEST_BYTES),
        }
    }
}

/// A request whose head is as it should be: only the body and its signature are missing.
#[derive(Debug)]
pub(super) struct Head<'a> {
    pub(super) route: Route,
    authority: &'a OwnAuthority,
    content_digest: &'a str,
    signature_input: &'a str,
    signature: &'a str,
}

impl<'a> Head<'a> {
    pub(super) fn read(parts: &'a Parts, own: &'a [OwnAuthority], max_body: usize) -> Result<Self, Refusal> {
        let headers = &parts.headers;
        let route = Route::of(parts.uri.path()).ok_or(Refusal::Route)?;
        if parts.method != Method::POST {
            return Err(Refusal::Method);
        }
        plain(parts)?;
        let authority = authority::find(own, &parts.uri, headers)?;
        if single(headers, &header::CONTENT_TYPE) != Some(route.content_type()) {
            return Err(Refusal::ContentType);
        }
        fits(headers, route.max_body(max_body))?;
        let field = |name: &'static str| {
            single(headers, &HeaderName::from_static(name)).ok_or(Refusal::Signature(signature::VerifyError::Profile))
        };
        let (content_digest, signature_input) = (field(CONTENT_DIGEST)?, field(SIGNATURE_INPUT)?);
        Ok(Self { route, authority, content_digest, signature_input, signature: field(SIGNATURE)? })
    }

    /// What the signature must cover.
    pub(super) fn signed<'b>(&'b self, body: &'b [u8]) -> SignedRequest<'b> {
        let Self { route, authority, content_digest, signature_input, signature } = self;
        let message = Message {
            method: "POST",
            authority: authority.as_str(),
            path: route.path(),
            content_type: route.content_type(),
        };
        SignedRequest { message, content_digest, signature_input, signature, body }
    }
}

/// What no request on our own ports may have, whatever its route.
pub(super) fn plain(parts: &Parts) -> Result<(), Refusal> {
    if parts.uri.query().is_some() {
        return Err(Refusal::Query);
    }
    if parts.headers.contains_key(header::CONTENT_ENCODING) {
        return Err(Refusal::Encoding);
    }
    if parts.headers.contains_key(header::TRANSFER_ENCODING) {
        return Err(Refusal::Length);
    }
    Ok(())
}

/// Whether the length that the sender announces, if it does, is at most so many bytes. What is sent is counted anyway.
pub(super) fn fits(headers: &HeaderMap, most: usize) -> Result<(), Refusal> {
    if announced(headers).is_some_and(|length| length > most as u64) { Err(Refusal::TooLarge(most)) } else { Ok(()) }
}

/// The value of a field that stands once; `None` when it is missing, doubled, or no text.
pub(super) fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(value)
}

/// The HTTP library has checked that it is one number.
fn announced(headers: &HeaderMap) -> Option<u64> {
    single(headers, &header::CONTENT_LENGTH)?.parse().ok()
}
