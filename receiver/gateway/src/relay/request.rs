//! Requests between replicas: the parts of the client's request that are passed on, and the fields that the accepting
//! replica adds.

use std::{net::IpAddr, slice};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Version, header, request::Parts};
use rustls_pki_types::CertificateDer;
use strum::VariantArray as _;
use tidewatch_contract::{
    forwarded::{CLIENT_CERT, CLIENT_CERT_CHAIN, client_cert},
    signature::{CONTENT_DIGEST, SIGNATURE, SIGNATURE_INPUT},
};
use tidewatch_fleet::peers::Topic;

use super::RelayError;
use crate::http::single_value;

/// Questions in progress of one topic at most: two callers, or two replicas, that ask at the same time. With all topics,
/// no more than the streams that requests of agents leave on a connection.
pub(super) const PLACES: usize = 2;

/// Header field with the port that accepted the request.
pub(crate) const RELAY_FIELD: &str = "tidewatch-relay";
/// Header field with the address of a client without a certificate.
const SOURCE: &str = "x-forwarded-for";
/// Header field of a W3C trace context.
const TRACEPARENT: &str = "traceparent";

/// Port that accepted a relayed request, which decides its fields and its handler at the holder. The name is the value of
/// [`RELAY_FIELD`] and the metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum RelayedPort {
    /// Events and heartbeats of the event port.
    Event,
    /// Renewals, also of the event port.
    Renewal,
    /// Enrolments.
    Enrolment,
    /// Contract v2.
    V2,
    /// Lost connections of the event port, which the accepting replica itself reports.
    Lost,
    /// Questions, which the other replica itself asks.
    Question,
}

impl RelayedPort {
    /// Number of ports.
    pub(super) const COUNT: usize = 6;

    /// Reads the port from the fields of a relayed request.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        single_value(headers, &HeaderName::from_static(RELAY_FIELD))?.parse().ok()
    }

    /// Requests in flight to one holder at most. Slow ones have places of their own, so that they displace no event. The
    /// HTTP/2 streams of a connection are more than all of them.
    pub(super) const fn slots(self) -> usize {
        match self {
            Self::Event => 512,
            Self::V2 => 256,
            Self::Renewal | Self::Enrolment => 96,
            Self::Lost => 1,
            Self::Question => PLACES * Topic::VARIANTS.len(),
        }
    }

    /// Share of one runtime in the requests in flight: above what an agent has, and above the requests of contract v2
    /// that may wait for another manager.
    pub(super) const SHARE: u32 = 8;

    /// Fields of the client that are passed on; all others are dropped. `traceparent` carries no authority: only events
    /// that a signature covers begin spans.
    const fn fields(self) -> &'static [&'static str] {
        match self {
            Self::Event | Self::Renewal => {
                &["content-type", CONTENT_DIGEST, SIGNATURE_INPUT, SIGNATURE, TRACEPARENT, "tracestate"]
            }
            Self::Enrolment => &["content-type", "authorization", TRACEPARENT, "tracestate"],
            Self::V2 => &["content-type", TRACEPARENT, "tracestate"],
            Self::Lost | Self::Question => &[],
        }
    }
}

/// A request to be relayed.
pub(crate) struct RelayedRequest<'a> {
    /// Port that accepted it.
    pub(crate) port: RelayedPort,
    /// Its head.
    pub(crate) parts: &'a Parts,
    /// Authority that its signature covers; any where nothing is signed.
    pub(crate) authority: &'a str,
    /// Certificate of the client, if it has one.
    pub(crate) leaf: Option<&'a CertificateDer<'static>>,
    /// Certificates between its certificate and a root, without which the holder could not verify it.
    pub(crate) intermediates: &'a [CertificateDer<'static>],
    /// Address of the client, where it limits the client.
    pub(crate) source: Option<IpAddr>,
    /// Its body, unchanged.
    pub(crate) body: Bytes,
}

impl RelayedRequest<'_> {
    /// Builds the request to the holder. Fields are copied by name, so none of the client's can pose as one of a replica.
    pub(super) fn build(self) -> Result<Request<Bytes>, RelayError> {
        let Self { port, parts, authority, leaf, intermediates, source, body } = self;
        let path = parts.uri.path();
        let mut fields = HeaderMap::with_capacity(10);
        for name in port.fields() {
            let name = HeaderName::from_static(name);
            for value in parts.headers.get_all(&name) {
                fields.append(&name, value.clone());
            }
        }
        let name: &'static str = port.into();
        fields.insert(RELAY_FIELD, HeaderValue::from_static(name));
        if let Some(leaf) = leaf {
            let value = HeaderValue::try_from(client_cert(slice::from_ref(leaf)));
            fields.insert(CLIENT_CERT, value.map_err(|_| RelayError::Broken)?);
        }
        if !intermediates.is_empty() {
            let value = HeaderValue::try_from(client_cert(intermediates));
            fields.insert(CLIENT_CERT_CHAIN, value.map_err(|_| RelayError::Broken)?);
        }
        if let Some(source) = source {
            fields.insert(SOURCE, HeaderValue::try_from(source.to_string()).map_err(|_| RelayError::Broken)?);
        }
        fields.insert(header::CONTENT_LENGTH, body.len().into());
        // Nearly all values differ from request to request: a compression table would not hold them long enough.
        for (name, value) in &mut fields {
            value.set_sensitive(*name != header::CONTENT_TYPE && *name != RELAY_FIELD);
        }
        let mut request = Request::new(body);
        *request.method_mut() = parts.method.clone();
        *request.version_mut() = Version::HTTP_2;
        *request.uri_mut() = format!("https://{authority}{path}").parse().map_err(|_| RelayError::Broken)?;
        *request.headers_mut() = fields;
        Ok(request)
    }
}

/// Returns the address of the client of a relayed request.
pub(crate) fn source_of(headers: &HeaderMap) -> Option<IpAddr> {
    single_value(headers, &HeaderName::from_static(SOURCE))?.parse().ok()
}
