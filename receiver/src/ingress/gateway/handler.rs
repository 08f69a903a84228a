//! Handles requests of the event port (contract v3). All checks are synchronous, in two halves; only the body between
//! them is awaited.

use std::{
    net::SocketAddr,
    pin::{Pin, pin},
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{Request, StatusCode, request::Parts};
use http_body::Body;
use hyper::body::Incoming;
use rustls_pki_types::CertificateDer;
use tidewatch_shared::{
    certificate::{ReadCertificateError, RuntimeCertificate},
    enrolment::{self, CertificateRequest},
    event::{ParseBatchError, parse_batch},
    heartbeat::Heartbeat,
    identity::{RuntimeId, TrustDomain},
    signature, trace,
    variant::VariantName as _,
};
use tokio::time::Instant;

use super::{
    Now, Settings,
    authority::OwnAuthority,
    body::{BodyBudget, discard},
    connection::{Owner, Service},
    head::{Head, Route},
    intake::Intake,
    load_shedder::LoadShedder,
    metrics::{Metrics, ReasonLabel},
    proxy::ForwardedClients,
    refusal::{HttpResponse, Refusal, json},
    request_limiter::{RequestLimiter, RequestPermit},
};
use crate::{
    fleet::{EventBatch, Verified},
    ingress::enrolment::{CertificateIssuer, Revocations},
};

/// Client of a connection, identified once by its certificate.
pub enum Peer {
    /// A runtime.
    Runtime(Arc<RuntimeCertificate>),
    /// A client with a certificate that chains to the trusted roots and identifies no runtime.
    Unidentified(ReadCertificateError),
    /// The trusted proxy, which forwards a certificate with each request.
    Proxy,
    /// Another client, where only the proxy may connect.
    NotProxy,
}

impl Peer {
    pub(super) fn read(leaf: &CertificateDer<'_>, domain: &TrustDomain) -> Self {
        RuntimeCertificate::read(leaf, domain)
            .map_or_else(Self::Unidentified, |certificate| Self::Runtime(certificate.into()))
    }
}

/// State that all connections of the event port share.
pub struct V3Handler<I> {
    intake: I,
    domain: TrustDomain,
    /// Present where a proxy terminates TLS.
    clients: Option<ForwardedClients>,
    authorities: Vec<OwnAuthority>,
    revocations: Revocations,
    /// Present where certificates are renewed.
    issuer: Option<CertificateIssuer>,
    max_body: usize,
    body_deadline: Duration,
    limiter: Arc<RequestLimiter>,
    budget: BodyBudget,
    shedder: LoadShedder,
    metrics: Metrics,
}

/// A request with checked head, ready to read its body.
pub(super) struct Admitted<'a> {
    certificate: &'a RuntimeCertificate,
    head: Head<'a>,
    permit: RequestPermit,
    /// Arrival of the head.
    begun: Instant,
}

/// Result of a verified request.
pub(super) enum Processed<'a> {
    Response(HttpResponse),
    /// A certificate request in PEM, which the issuer signs asynchronously.
    Renewal(&'a CertificateIssuer, String),
}

impl<I: Intake> V3Handler<I> {
    /// Handles requests within the limits of `settings`, and passes verified input to `intake`.
    pub fn new(settings: &Settings, intake: I, metrics: Metrics) -> Self {
        Self {
            intake,
            domain: settings.domain.clone(),
            clients: settings.proxy.clone().map(|proxy| ForwardedClients::new(proxy, settings.domain.clone())),
            authorities: settings.authorities.clone(),
            revocations: settings.revocations.clone(),
            issuer: settings.issuer.clone(),
            max_body: settings.max_body,
            body_deadline: settings.body_deadline,
            limiter: RequestLimiter::new(settings.limits),
            budget: BodyBudget::new(settings.body_budget),
            shedder: LoadShedder::new(settings.lag_limit),
            metrics,
        }
    }

    /// Handles one request. The flag is true if the connection must close after the response.
    pub(super) async fn handle<B>(&self, request: Request<B>, peer: &Peer) -> (HttpResponse, bool)
    where
        B: Body<Data = Bytes>,
    {
        let begun = Now::read();
        let (parts, body) = request.into_parts();
        let route = Route::label(Route::of(parts.uri.path()));
        self.metrics.port.request_begun(route);
        let client = self.authenticate(&parts, peer, begun);
        let announced = body.size_hint().lower();
        let mut body = pin!(body);
        let result = match &client {
            Ok(certificate) => self.process(&parts, body.as_mut(), certificate, begun).await,
            Err(refusal) => Err(*refusal),
        };
        let ended = Now::read();
        let refused = result.as_ref().err().map(|refusal| refusal.label());
        self.metrics.port.request_ended(route, ended.instant.saturating_duration_since(begun.instant), refused);
        match result {
            Ok(response) => (response, false),
            Err(mut refusal) => {
                let rest = discard(&parts, body, announced, refusal == Refusal::BodyTimeout).await;
                if rest.bytes > 0
                    && let Ok(certificate) = &client
                {
                    refusal = refusal.extended_by(self.limiter.charge(&certificate.runtime, rest.bytes, Now::read()));
                }
                let reason = refusal.label();
                let runtime = client.as_ref().map_or("", |certificate| certificate.runtime.as_str());
                tracing::debug!(route, reason, runtime, "Request refused");
                let wait = self.shedder.retry_after(refusal, ended.instant);
                // Many runtimes share a proxy's connection, and their requests may be valid.
                let is_last = refusal.closes_connection() && !matches!(peer, Peer::Proxy);
                (refusal.response_with_wait(ended.unix, wait), is_last || rest.must_close)
            }
        }
    }

    /// Returns the certificate of the client: that of the connection, or the one that the proxy forwards.
    pub(super) fn authenticate(
        &self,
        parts: &Parts,
        peer: &Peer,
        now: Now,
    ) -> Result<Arc<RuntimeCertificate>, Refusal> {
        match (peer, &self.clients) {
            (Peer::Runtime(certificate), None) => Ok(certificate.clone()),
            (Peer::Proxy, Some(clients)) => clients.read(&parts.headers, now),
            (Peer::Unidentified(_), _) => Err(Refusal::Identity),
            (Peer::Runtime(_) | Peer::NotProxy | Peer::Proxy, _) => Err(Refusal::Proxy),
        }
    }

    async fn process<B>(
        &self,
        parts: &Parts,
        body: Pin<&mut B>,
        certificate: &RuntimeCertificate,
        now: Now,
    ) -> Result<HttpResponse, Refusal>
    where
        B: Body<Data = Bytes>,
    {
        let admitted = self.admit(parts, certificate, now)?;
        if self.shedder.sheds(admitted.head.route) {
            return Err(Refusal::Overloaded);
        }
        let mut charge = admitted.permit.body_charge();
        let reading = self.budget.read(body, admitted.head.route.max_body(self.max_body), &mut charge.bytes);
        let body = tokio::time::timeout(self.body_deadline, reading).await.map_err(|_| Refusal::BodyTimeout)??;
        drop(charge);
        let processed = self.process_body(&admitted, &body, Now::read())?;
        // Releases its share of the budget before the issuer is awaited.
        drop(body);
        match processed {
            Processed::Response(response) => Ok(response),
            Processed::Renewal(issuer, request) => {
                let response = issuer.renew(&certificate.runtime, &request).await?;
                Ok(json(StatusCode::OK, enrolment::CONTENT_TYPE, &response))
            }
        }
    }

    /// Performs all checks of certificate and head. The rate limit precedes the head, since invalid requests cost as
    /// much as valid ones.
    pub(super) fn admit<'a>(
        &'a self,
        parts: &'a Parts,
        certificate: &'a RuntimeCertificate,
        now: Now,
    ) -> Result<Admitted<'a>, Refusal> {
        let leaf = &certificate.leaf;
        if now.unix < leaf.not_before || now.unix > leaf.not_after {
            return Err(Refusal::Certificate);
        }
        if self.revocations.covers(certificate) {
            return Err(Refusal::Revoked);
        }
        let permit = self.limiter.acquire(&certificate.runtime, now)?;
        let head = Head::read(parts, &self.authorities, self.max_body)?;
        if head.route == Route::Certificates && self.issuer.is_none() {
            return Err(Refusal::Route);
        }
        Ok(Admitted { certificate, head, permit, begun: now.instant })
    }

    /// Performs all checks of the body: signature, then nonce, and only then its content.
    pub(super) fn process_body(
        &self,
        admitted: &Admitted<'_>,
        body: &[u8],
        now: Now,
    ) -> Result<Processed<'_>, Refusal> {
        let Admitted { certificate, head, permit, begun } = admitted;
        self.metrics.port.body_bytes.inc_by(body.len() as u64);
        let verified = signature::verify(&head.signed(body), &certificate.leaf, now.unix)?;
        permit.use_nonce(&verified, now)?;
        match head.route {
            Route::Events => self.events(certificate, verified, body, *begun).map(Processed::Response),
            Route::Heartbeat => self.heartbeat(certificate, verified, body, now).map(Processed::Response),
            Route::Certificates => self.renewal(certificate, body),
        }
    }

    /// Parses a renewal. A runtime can renew its own certificate only.
    fn renewal(&self, certificate: &RuntimeCertificate, body: &[u8]) -> Result<Processed<'_>, Refusal> {
        let request = CertificateRequest::parse(body).map_err(|_| Refusal::Malformed)?;
        if request.runtime != certificate.runtime {
            return Err(Refusal::Source);
        }
        Ok(Processed::Renewal(self.issuer.as_ref().ok_or(Refusal::Route)?, request.request))
    }

    fn events(
        &self,
        certificate: &RuntimeCertificate,
        verified: signature::VerifiedSignature,
        body: &[u8],
        begun: Instant,
    ) -> Result<HttpResponse, Refusal> {
        let epoch = verified.nonce.epoch;
        let events = parse_batch(body)?;
        if events.is_empty() {
            return Err(ParseBatchError::Malformed(None).into());
        }
        for event in &events {
            let (id, source) = match event {
                Ok(event) => (event.id, Some(&event.source)),
                Err((id, _)) => (*id, None),
            };
            if id.epoch != epoch || source.is_some_and(|source| *source != certificate.runtime) {
                return Err(Refusal::Source);
            }
        }
        let count = events.len() as u64;
        // Only verified events create a span, so that no client can create spans in the name of another.
        let span = trace::span(
            "receive events",
            SystemTime::now().checked_sub(begun.elapsed()),
            events.iter().flatten().filter_map(|event| event.traceparent.as_deref()),
        );
        let traceparent = span.as_ref().map(trace::Span::traceparent);
        let batch = Verified::new(certificate.runtime.clone(), verified, EventBatch { events, traceparent });
        let response = self.intake.events(batch.with_leaf(certificate.leaf.der.clone()))?;
        self.metrics.events.inc_by(count);
        for refused in &response.refused {
            self.metrics.events_refused.get_or_create(&ReasonLabel { reason: refused.reason.as_str() }).inc();
        }
        Ok(json(StatusCode::ACCEPTED, "application/json", &response))
    }

    fn heartbeat(
        &self,
        certificate: &RuntimeCertificate,
        verified: signature::VerifiedSignature,
        body: &[u8],
        now: Now,
    ) -> Result<HttpResponse, Refusal> {
        let heartbeat = Heartbeat::parse(body).map_err(|_| Refusal::Malformed)?;
        if heartbeat.epoch != verified.nonce.epoch {
            return Err(Refusal::Source);
        }
        let heartbeat = Verified::new(certificate.runtime.clone(), verified, heartbeat);
        let heartbeat = heartbeat.with_authority(certificate.leaf.authority.clone());
        let response = self.intake.heartbeat(heartbeat, now.unix)?;
        Ok(json(StatusCode::OK, "application/json", &response))
    }
}

impl<I: Intake> Service for V3Handler<I> {
    type Peer = Peer;

    fn identify(&self, chain: &[CertificateDer<'_>], _: Option<SocketAddr>) -> Peer {
        if let Some(clients) = &self.clients {
            let is_proxy = chain.first().is_some_and(|leaf| clients.proxy().identity().is_named_by(leaf));
            return if is_proxy { Peer::Proxy } else { Peer::NotProxy };
        }
        let peer = chain
            .first()
            .map_or(Peer::Unidentified(ReadCertificateError::Parse), |leaf| Peer::read(leaf, &self.domain));
        if let Peer::Unidentified(error) = &peer {
            tracing::debug!(%error, "Client certificate identifies no runtime");
        }
        peer
    }

    async fn handle(&self, request: Request<Incoming>, peer: &Peer) -> (HttpResponse, bool) {
        Self::handle(self, request, peer).await
    }

    fn owner<'a>(&self, peer: &'a Peer) -> Owner<'a> {
        match peer {
            Peer::Runtime(certificate) => Owner::Runtime(&certificate.runtime, &certificate.leaf.fingerprint),
            Peer::Proxy => Owner::Shared,
            Peer::Unidentified(_) | Peer::NotProxy => Owner::Unidentified,
        }
    }

    fn is_unknown(&self, runtime: &RuntimeId) -> bool {
        self.intake.is_unknown(runtime)
    }

    fn limiter(&self) -> Option<&RequestLimiter> {
        Some(&self.limiter)
    }

    fn connection_lost(&self, runtime: &RuntimeId, since: Instant) {
        self.intake.connection_lost(runtime, since);
    }

    fn observe_lag(&self, lag: Duration) {
        self.shedder.observe(lag);
    }
}

#[cfg(test)]
mod tests;
