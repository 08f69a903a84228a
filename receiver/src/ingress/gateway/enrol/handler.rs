//! Handles requests of the enrolment port.

use std::{
    net::{IpAddr, SocketAddr},
    pin::{Pin, pin},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode, header, request::Parts};
use http_body::Body;
use hyper::body::Incoming;
use rustls_pki_types::CertificateDer;
use tidewatch_shared::enrolment::{CERTIFICATES_PATH, CONTENT_TYPE, CertificateRequest, TRUST_PATH};
use tokio::time::timeout;

use crate::ingress::{
    bearer::bearer,
    enrolment::{EnrolmentError, EnrolmentService, TokenError},
    gateway::{
        Now, PortMetrics, Settings,
        body::{BodyBudget, discard},
        connection::{Owner, Service},
        head::{check_length, check_plain, single_value},
        load_shedder::LoadShedder,
        refusal::{HttpResponse, Refusal, json},
    },
};

/// Route of this port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

    /// Returns the metric label.
    const fn label(route: Option<Self>) -> &'static str {
        match route {
            Some(Self::Certificates) => "certificates",
            Some(Self::Trust) => "trust",
            None => "other",
        }
    }
}

/// State that all connections of this port share.
pub struct EnrolmentHandler {
    enrolments: EnrolmentService,
    max_body: usize,
    body_deadline: Duration,
    budget: BodyBudget,
    shedder: LoadShedder,
    metrics: PortMetrics,
}

impl EnrolmentHandler {
    /// Handles requests within the limits of `settings`.
    pub fn new(settings: &Settings, enrolments: EnrolmentService, metrics: PortMetrics) -> Self {
        Self {
            enrolments,
            max_body: settings.max_body,
            body_deadline: settings.body_deadline,
            budget: BodyBudget::new(settings.body_budget),
            shedder: LoadShedder::new(settings.lag_limit),
            metrics,
        }
    }

    /// Handles one request. The flag is true if the connection must close after the response: any refusal closes it, to
    /// free its slot.
    pub(super) async fn handle<B>(&self, request: Request<B>, source: Option<IpAddr>) -> (HttpResponse, bool)
    where
        B: Body<Data = Bytes> + Send,
    {
        let begun = Now::read();
        let (parts, body) = request.into_parts();
        let route = Route::label(Route::of(parts.uri.path()));
        self.metrics.request_begun(route);
        let announced = body.size_hint().lower();
        let mut body = pin!(body);
        let result = self.process(&parts, body.as_mut(), source).await;
        let ended = Now::read();
        let refused = result.as_ref().err().map(|refusal| refusal.label());
        self.metrics.request_ended(route, ended.instant.saturating_duration_since(begun.instant), refused);
        match result {
            Ok(response) => (response, false),
            Err(refusal) => {
                // Its result is irrelevant, as the connection closes.
                discard(&parts, body, announced, refusal == Refusal::BodyTimeout).await;
                let reason = refusal.label();
                tracing::debug!(route, reason, address = source.map(tracing::field::display), "Enrolment refused");
                (refusal.response_with_wait(ended.unix, self.shedder.retry_after(refusal, ended.instant)), true)
            }
        }
    }

    async fn process<B>(
        &self,
        parts: &Parts,
        body: Pin<&mut B>,
        source: Option<IpAddr>,
    ) -> Result<HttpResponse, Refusal>
    where
        B: Body<Data = Bytes> + Send,
    {
        match self.check_head(parts)? {
            Route::Trust => Ok(json(StatusCode::OK, CONTENT_TYPE, &self.enrolments.certificate_issuer().trust())),
            Route::Certificates => {
                let token = self.admit(&parts.headers, source)?;
                // The client is not authenticated yet, so no runtime can be charged: the budget and the limit of
                // connections apply.
                let mut received = 0;
                let reading = self.budget.read(body, self.max_body, &mut received);
                let body = timeout(self.body_deadline, reading).await.map_err(|_| Refusal::BodyTimeout)??;
                self.metrics.body_bytes.inc_by(body.len() as u64);
                let request = CertificateRequest::parse(&body).map_err(|_| Refusal::Malformed)?;
                drop(body);
                let response = self.enrolments.enrol(token, &request, source).await?;
                Ok(json(StatusCode::OK, CONTENT_TYPE, &response))
            }
        }
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
        check_length(&parts.headers, self.max_body)?;
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
    /// Address of the client.
    type Peer = Option<IpAddr>;

    const NEEDS_CERTIFICATE: bool = false;

    fn identify(&self, _: &[CertificateDer<'_>], source: Option<SocketAddr>) -> Option<IpAddr> {
        source.map(|source| source.ip())
    }

    async fn handle(&self, request: Request<Incoming>, peer: &Option<IpAddr>) -> (HttpResponse, bool) {
        Self::handle(self, request, *peer).await
    }

    fn owner<'a>(&self, _: &'a Option<IpAddr>) -> Owner<'a> {
        Owner::Unidentified
    }
}
