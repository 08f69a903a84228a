//! One request of the enrolment port, from its head to its answer.

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
    enrolment::{Enrolments, InvalidToken, Refused},
    gateway::{
        Metrics, Now, Settings,
        body::{Budget, discard},
        connection::{Holder, Service},
        head::{fits, plain, single},
        pressure::Pressure,
        refusal::{Answer, Refusal, json},
    },
};

/// The routes of this port.
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

    /// The route as metrics name it.
    const fn label(route: Option<Self>) -> &'static str {
        match route {
            Some(Self::Certificates) => "certificates",
            Some(Self::Trust) => "trust",
            None => "other",
        }
    }
}

/// What all connections of this port share.
pub struct Desk {
    enrolments: Enrolments,
    max_body: usize,
    body_deadline: Duration,
    budget: Budget,
    pressure: Pressure,
    metrics: Metrics,
}

impl Desk {
    pub(super) fn new(settings: &Settings, enrolments: Enrolments, metrics: Metrics) -> Self {
        Self {
            enrolments,
            max_body: settings.max_body,
            body_deadline: settings.body_deadline,
            budget: Budget::new(settings.body_budget),
            pressure: Pressure::new(settings.lag_limit),
            metrics,
        }
    }

    /// Answers one request, and tells whether the connection has no more to say: who is refused makes room for others.
    pub(super) async fn answer<B>(&self, request: Request<B>, from: Option<IpAddr>) -> (Answer, bool)
    where
        B: Body<Data = Bytes> + Send,
    {
        let begun = Now::read();
        let (parts, body) = request.into_parts();
        let route = Route::label(Route::of(parts.uri.path()));
        self.metrics.request_begun(route);
        let announced = body.size_hint().lower();
        let mut body = pin!(body);
        let result = self.judge(&parts, body.as_mut(), from).await;
        let ended = Now::read();
        let refused = result.as_ref().err().map(|refusal| refusal.label());
        self.metrics.request_ended(route, ended.instant.saturating_duration_since(begun.instant), refused);
        match result {
            Ok(answer) => (answer, false),
            Err(refusal) => {
                // Whatever is left: the connection ends.
                discard(&parts, body, announced, refusal == Refusal::Slow).await;
                let reason = refusal.label();
                tracing::debug!(route, reason, address = from.map(tracing::field::display), "Enrolment refused");
                (refusal.answer_after(ended.unix, self.pressure.wait(refusal, ended.instant)), true)
            }
        }
    }

    async fn judge<B>(&self, parts: &Parts, body: Pin<&mut B>, from: Option<IpAddr>) -> Result<Answer, Refusal>
    where
        B: Body<Data = Bytes> + Send,
    {
        match self.head(parts)? {
            Route::Trust => Ok(json(StatusCode::OK, CONTENT_TYPE, &self.enrolments.office().trust())),
            Route::Certificates => {
                let token = self.certificates_head(&parts.headers, from)?;
                // Whoever enrols has no account to charge: what holds them is the budget, and a place in the line.
                let mut came = 0;
                let reading = self.budget.read(body, self.max_body, &mut came);
                let body = timeout(self.body_deadline, reading).await.map_err(|_| Refusal::Slow)??;
                self.metrics.body_bytes.inc_by(body.len() as u64);
                let asked = CertificateRequest::parse(&body).map_err(|_| Refusal::Malformed)?;
                drop(body);
                let answer = self.enrolments.enrol(token, &asked, from).await?;
                Ok(json(StatusCode::OK, CONTENT_TYPE, &answer))
            }
        }
    }

    /// What every request of this port must be.
    fn head(&self, parts: &Parts) -> Result<Route, Refusal> {
        let route = Route::of(parts.uri.path()).ok_or(Refusal::Route)?;
        match route {
            Route::Certificates if parts.method != Method::POST => return Err(Refusal::Method),
            Route::Trust if parts.method != Method::GET => return Err(Refusal::NotGet),
            Route::Certificates | Route::Trust => {}
        }
        plain(parts)?;
        fits(&parts.headers, self.max_body)?;
        Ok(route)
    }

    /// The token of a request for a certificate, before its body is read.
    fn certificates_head<'a>(&self, headers: &'a HeaderMap, from: Option<IpAddr>) -> Result<&'a str, Refusal> {
        if single(headers, &header::CONTENT_TYPE) != Some(CONTENT_TYPE) {
            return Err(Refusal::ContentType);
        }
        self.enrolments.admit(from)?;
        Ok(bearer(headers).ok_or(Refused::Token(InvalidToken::Missing))?)
    }
}

impl Service for Desk {
    /// From where the connection comes.
    type Peer = Option<IpAddr>;

    const NEEDS_CERTIFICATE: bool = false;

    fn peer(&self, _: &[CertificateDer<'_>], source: Option<SocketAddr>) -> Option<IpAddr> {
        source.map(|source| source.ip())
    }

    fn holder<'a>(&self, _: &'a Option<IpAddr>) -> Holder<'a> {
        Holder::Nobody
    }

    async fn answer(&self, request: Request<Incoming>, peer: &Option<IpAddr>) -> (Answer, bool) {
        Desk::answer(self, request, *peer).await
    }
}
