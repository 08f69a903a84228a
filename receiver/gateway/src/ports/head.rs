//! Checks of a request's head, before any byte of its body is read.

use http::{HeaderMap, HeaderName, Method, header, request::Parts};
use tidewatch_contract::{
    enrolment::{self, CERTIFICATES_PATH},
    event::BATCH_CONTENT_TYPE,
    exchange::{EVENTS_PATH, HEARTBEAT_PATH},
    signature::{CONTENT_DIGEST, Message, SIGNATURE, SIGNATURE_INPUT, SignedRequest, VerifyError},
};

use super::{
    authority::{self, OwnAuthority},
    refusal::Refusal,
};
use crate::http::single_value;

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
        let authority = authority::find(own, &parts.uri, headers)?;
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
