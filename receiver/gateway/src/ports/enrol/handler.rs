//! Handles requests of the enrolment port.

use std::{
    net::{IpAddr, SocketAddr},
    pin::Pin,
};

use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode, header, request::Parts};
use http_body::Body;
use rustls_pki_types::CertificateDer;
use tidewatch_contract::enrolment::{CERTIFICATES_PATH, CONTENT_TYPE, CertificateRequest, TRUST_PATH};
use tidewatch_kit::variant::VariantName as _;

use crate::{
    bearer::bearer,
    enrolment::{EnrolmentError, EnrolmentService, TokenError},
    http::single_value,
    ports::{
        Now, PortMetrics, Settings,
        head::{check_length, check_plain},
        peer::{Peer, Via},
        refusal::{HttpResponse, Refusal, json},
        service::{Elsewhere, Port, Service},
    },
    relay::{RelayedPort, RelayedRequest, source_of},
};

/// Route of this port. The name is its metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
enum Route {
    /// `POST /v3/certificates`.
    Certificates,
    /// `GET /v3/trust`.
    Trust,
}

impl Route {
    fn of(path: &str) -> Option<Self> {
        match path {
            CERTIFICATES_PATH => Some(Self::Certificates),
            TRUST_PATH => Some(Self::Trust),
            _ => None,
        }
    }
}

/// Sender of a request, which its token authenticates later.
pub struct Sender {
    address: Option<IpAddr>,
    via: Via,
}

/// State that all connections of this port share.
pub struct EnrolmentHandler {
    port: Port,
    enrolments: EnrolmentService,
}

impl EnrolmentHandler {
    /// Handles requests within the limits of `settings`.
    pub fn new(settings: &Settings, enrolments: EnrolmentService, metrics: PortMetrics) -> Self {
        Self { port: Port::new(settings, metrics), enrolments }
    }

    /// Checks a head as far as the routes have it in common.
    fn check_head(&self, parts: &Parts) -> Result<Route, Refusal> {
        let route = Route::of(parts.uri.path()).ok_or(Refusal::Route)?;
        match route {
            Route::Certificates if parts.method != Method::POST => return Err(Refusal::Method),
            Route::Trust if parts.method != Method::GET => return Err(Refusal::GetOnly),
            Route::Certificates | Route::Trust => {}
        }
        check_plain(parts)?;
        check_length(&parts.headers, self.port.settings.max_body)?;
        Ok(route)
    }

    /// Admits a certificate request before its body is read, and returns its token.
    fn admit<'a>(&self, headers: &'a HeaderMap, source: Option<IpAddr>) -> Result<&'a str, Refusal> {
        if single_value(headers, &header::CONTENT_TYPE) != Some(CONTENT_TYPE) {
            return Err(Refusal::ContentType);
        }
        self.enrolments.admit(source)?;
        Ok(bearer(headers).ok_or(EnrolmentError::Token(TokenError::Missing))?)
    }
}

impl Service for EnrolmentHandler {
    type Client = Sender;

    const NEEDS_CERTIFICATE: bool = false;

    fn port(&self) -> &Port {
        &self.port
    }

    fn identify(&self, _: &[CertificateDer<'_>], source: Option<SocketAddr>) -> Peer {
        Peer::Client(source.map(|source| source.ip()))
    }

    fn route(path: &str) -> &'static str {
        Route::of(path).map_or("other", |route| route.as_str())
    }

    /// Authenticates nothing: a token is reviewed with the body.
    fn authenticate(&self, parts: &Parts, peer: &Peer, _: Now) -> Result<Sender, Refusal> {
        match peer {
            Peer::Client(address) => Ok(Sender { address: *address, via: Via::Client }),
            Peer::Replica(_) => Ok(Sender { address: source_of(&parts.headers), via: Via::Replica }),
            Peer::Runtime(..) | Peer::Proxy | Peer::Rejected(_) => Err(Refusal::Internal),
        }
    }

    async fn process<B: Body<Data = Bytes> + Send>(
        &self,
        parts: &Parts,
        body: Pin<&mut B>,
        &Sender { address, via }: &Sender,
        _: Now,
    ) -> Result<HttpResponse, Refusal> {
        match self.check_head(parts)? {
            Route::Trust => Ok(json(StatusCode::OK, CONTENT_TYPE, &self.enrolments.trust())),
            Route::Certificates => {
                let token = self.admit(&parts.headers, address)?;
                // The client is not authenticated yet, so no runtime can be charged: the budget and the limit of
                // connections apply.
                let body = self.port.read_body(body, self.port.settings.max_body, &mut 0, None).await?;
                self.port.metrics.body_bytes.inc_by(body.bytes.len() as u64);
                let request = CertificateRequest::parse(&body.bytes).map_err(|_| Refusal::Malformed)?;
                if let Some(Elsewhere { relay, holder }) = self.port.elsewhere(&request.runtime, via)? {
                    let (body, _share) = body.into_parts();
                    let port = RelayedPort::Enrolment;
                    let authority = holder.name.as_str();
                    let relayed = RelayedRequest {
                        port,
                        parts,
                        authority,
                        leaf: None,
                        intermediates: &[],
                        source: address,
                        body,
                    };
                    return Ok(relay.send(&holder, &request.runtime, relayed).await?);
                }
                drop(body);
                let response = self.enrolments.enrol(token, &request, address).await?;
                Ok(json(StatusCode::OK, CONTENT_TYPE, &response))
            }
        }
    }

    fn record(&self, path: &str, sender: Option<&Sender>, refusal: Refusal) {
        let address = sender.and_then(|sender| sender.address).map(tracing::field::display);
        tracing::debug!(route = Self::route(path), reason = refusal.label(), address, "Enrolment refused");
    }
}
