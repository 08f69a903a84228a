//! One request, from its head to its answer. Every judgement is synchronous; only the body is awaited, between the two halves.

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
};
use tokio::{sync::watch, time::Instant};

use super::{
    Now, Settings,
    authority::OwnAuthority,
    body::{Budget, discard},
    connection::{Holder, Service},
    head::{Head, Route},
    intake::{Batch, Intake, Verified},
    metrics::{Metrics, Why},
    peers::{Pass, Peers},
    pressure::Pressure,
    proxy::Clients,
    refusal::{Answer, Refusal, json},
};
use crate::ingress::enrolment::{Office, Revocations};

/// Who holds the other end of a connection, read once from its certificate.
pub enum Peer {
    /// A runtime.
    Runtime(Arc<RuntimeCertificate>),
    /// Somebody whose certificate chains to our roots and names no runtime.
    Nobody(ReadCertificateError),
    /// The trusted proxy: each request tells its runtime.
    Proxy,
    /// Somebody else, where only the proxy may connect.
    NotProxy,
}

impl Peer {
    pub(super) fn read(leaf: &CertificateDer<'_>, domain: &TrustDomain) -> Self {
        RuntimeCertificate::read(leaf, domain)
            .map_or_else(Self::Nobody, |certificate| Self::Runtime(certificate.into()))
    }
}

/// What all connections of v3 share.
pub struct Desk<I> {
    intake: I,
    domain: TrustDomain,
    /// Where a proxy ends TLS.
    clients: Option<Clients>,
    authorities: Vec<OwnAuthority>,
    revocations: Revocations,
    /// Where certificates are renewed.
    office: Option<Office>,
    max_body: usize,
    body_deadline: Duration,
    peers: Arc<Peers>,
    budget: Budget,
    pressure: Pressure,
    metrics: Metrics,
}

/// A request that may send its body.
pub(super) struct Admitted<'a> {
    certificate: &'a RuntimeCertificate,
    head: Head<'a>,
    pass: Pass,
    /// When its head had arrived.
    begun: Instant,
}

/// What a request that was proven comes to.
pub(super) enum Concluded<'a> {
    /// It is answered.
    Answered(Answer),
    /// A certificate request, in PEM, which the office takes its time for.
    Renewal(&'a Office, String),
}

impl<I: Intake> Desk<I> {
    pub(super) fn new(settings: &Settings, intake: I, metrics: Metrics) -> Self {
        Self {
            intake,
            domain: settings.domain.clone(),
            clients: settings.proxy.clone().map(|proxy| Clients::new(proxy, settings.domain.clone())),
            authorities: settings.authorities.clone(),
            revocations: settings.revocations.clone(),
            office: settings.office.clone(),
            max_body: settings.max_body,
            body_deadline: settings.body_deadline,
            peers: Peers::new(settings.limits),
            budget: Budget::new(settings.body_budget),
            pressure: Pressure::new(settings.lag_limit),
            metrics,
        }
    }

    /// Answers one request, and tells whether the connection has no more to say.
    pub(super) async fn answer<B>(&self, request: Request<B>, peer: &Peer) -> (Answer, bool)
    where
        B: Body<Data = Bytes>,
    {
        let begun = Now::read();
        let (parts, body) = request.into_parts();
        let route = Route::label(Route::of(parts.uri.path()));
        self.metrics.request_begun(route);
        let speaker = self.speaker(&parts, peer, begun);
        let announced = body.size_hint().lower();
        let mut body = pin!(body);
        let result = match &speaker {
            Ok(certificate) => self.judge(&parts, body.as_mut(), certificate, begun).await,
            Err(refusal) => Err(*refusal),
        };
        let ended = Now::read();
        let refused = result.as_ref().err().map(|refusal| refusal.label());
        self.metrics.request_ended(route, ended.instant.saturating_duration_since(begun.instant), refused);
        match result {
            Ok(answer) => (answer, false),
            Err(mut refusal) => {
                let rest = discard(&parts, body, announced, refusal == Refusal::Slow).await;
                if rest.bytes > 0
                    && let Ok(certificate) = &speaker
                {
                    refusal = refusal.dearer_by(self.peers.charge(&certificate.runtime, rest.bytes, Now::read()));
                }
                let reason = refusal.label();
                let runtime = speaker.as_ref().map_or("", |certificate| certificate.runtime.as_str());
                tracing::debug!(route, reason, runtime, "Request refused");
                let wait = self.pressure.wait(refusal, ended.instant);
                // A proxy's connection is that of many, and the next one may be as it should.
                let is_last = refusal.ends_connection() && !matches!(peer, Peer::Proxy);
                (refusal.answer_after(ended.unix, wait), is_last || rest.is_over)
            }
        }
    }

    /// Who makes a request: whom the connection's certificate names, or the one that the proxy tells.
    pub(super) fn speaker(&self, parts: &Parts, peer: &Peer, now: Now) -> Result<Arc<RuntimeCertificate>, Refusal> {
        match (peer, &self.clients) {
            (Peer::Runtime(certificate), None) => Ok(certificate.clone()),
            (Peer::Proxy, Some(clients)) => clients.read(&parts.headers, now),
            (Peer::Nobody(_), _) => Err(Refusal::Identity),
            (Peer::Runtime(_) | Peer::NotProxy | Peer::Proxy, _) => Err(Refusal::Proxy),
        }
    }

    async fn judge<B>(
        &self,
        parts: &Parts,
        body: Pin<&mut B>,
        certificate: &RuntimeCertificate,
        now: Now,
    ) -> Result<Answer, Refusal>
    where
        B: Body<Data = Bytes>,
    {
        let admitted = self.admit(parts, certificate, now)?;
        if self.pressure.sheds(admitted.head.route) {
            return Err(Refusal::Late);
        }
        let mut toll = admitted.pass.toll();
        let reading = self.budget.read(body, admitted.head.route.max_body(self.max_body), &mut toll.bytes);
        let body = tokio::time::timeout(self.body_deadline, reading).await.map_err(|_| Refusal::Slow)??;
        drop(toll);
        let concluded = self.conclude(&admitted, &body, Now::read())?;
        // Its share of the budget is for others while the issuer takes its time.
        drop(body);
        match concluded {
            Concluded::Answered(answer) => Ok(answer),
            Concluded::Renewal(office, request) => {
                let answer = office.renew(&certificate.runtime, &request).await?;
                Ok(json(StatusCode::OK, enrolment::CONTENT_TYPE, &answer))
            }
        }
    }

    /// Everything that the head and the certificate decide. The rate comes first: what is wrong costs as much as what is right.
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
        if self.revocations.cover(certificate) {
            return Err(Refusal::Revoked);
        }
        let pass = self.peers.enter(&certificate.runtime, now)?;
        let head = Head::read(parts, &self.authorities, self.max_body)?;
        if head.route == Route::Certificates && self.office.is_none() {
            return Err(Refusal::Route);
        }
        Ok(Admitted { certificate, head, pass, begun: now.instant })
    }

    /// Everything that the body decides: signature, nonce, and only then what it says.
    pub(super) fn conclude(&self, admitted: &Admitted<'_>, body: &[u8], now: Now) -> Result<Concluded<'_>, Refusal> {
        let Admitted { certificate, head, pass, begun } = admitted;
        self.metrics.body_bytes.inc_by(body.len() as u64);
        let verified = signature::verify(&head.signed(body), &certificate.leaf, now.unix)?;
        pass.take(&verified, now)?;
        match head.route {
            Route::Events => self.events(certificate, verified, body, *begun).map(Concluded::Answered),
            Route::Heartbeat => self.heartbeat(certificate, verified, body, now).map(Concluded::Answered),
            Route::Certificates => self.renewal(certificate, body),
        }
    }

    /// Nobody renews for another.
    fn renewal(&self, certificate: &RuntimeCertificate, body: &[u8]) -> Result<Concluded<'_>, Refusal> {
        let asked = CertificateRequest::parse(body).map_err(|_| Refusal::Malformed)?;
        if asked.runtime != certificate.runtime {
            return Err(Refusal::Source);
        }
        Ok(Concluded::Renewal(self.office.as_ref().ok_or(Refusal::Route)?, asked.request))
    }

    fn events(
        &self,
        certificate: &RuntimeCertificate,
        verified: signature::VerifiedSignature,
        body: &[u8],
        begun: Instant,
    ) -> Result<Answer, Refusal> {
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
        // Only what is signed makes a span, so that nobody makes them for others.
        let span = trace::span(
            "receive events",
            SystemTime::now().checked_sub(begun.elapsed()),
            events.iter().flatten().filter_map(|event| event.traceparent.as_deref()),
        );
        let traceparent = span.as_ref().map(trace::Span::traceparent);
        let batch = Verified::new(certificate.runtime.clone(), verified.created, Batch { epoch, events, traceparent });
        let batch = batch.with_leaf(certificate.leaf.der.clone());
        let answer = self.intake.events(batch)?;
        self.metrics.events.inc_by(count);
        for refused in &answer.refused {
            self.metrics.events_refused.get_or_create(&Why { reason: refused.reason.as_str() }).inc();
        }
        Ok(json(StatusCode::ACCEPTED, "application/json", &answer))
    }

    fn heartbeat(
        &self,
        certificate: &RuntimeCertificate,
        verified: signature::VerifiedSignature,
        body: &[u8],
        now: Now,
    ) -> Result<Answer, Refusal> {
        let heartbeat = Heartbeat::parse(body).map_err(|_| Refusal::Malformed)?;
        if heartbeat.epoch != verified.nonce.epoch {
            return Err(Refusal::Source);
        }
        let heartbeat = Verified::new(certificate.runtime.clone(), verified.created, heartbeat);
        let heartbeat = heartbeat.with_authority(certificate.leaf.authority.clone());
        let answer = self.intake.heartbeat(heartbeat, now.unix)?;
        Ok(json(StatusCode::OK, "application/json", &answer))
    }
}

impl<I: Intake> Service for Desk<I> {
    type Peer = Peer;

    fn peer(&self, chain: &[CertificateDer<'_>], _: Option<SocketAddr>) -> Peer {
        if let Some(clients) = &self.clients {
            let is_proxy = chain.first().is_some_and(|leaf| clients.proxy().identity().is_named_by(leaf));
            return if is_proxy { Peer::Proxy } else { Peer::NotProxy };
        }
        let peer =
            chain.first().map_or(Peer::Nobody(ReadCertificateError::Parse), |leaf| Peer::read(leaf, &self.domain));
        if let Peer::Nobody(why) = &peer {
            tracing::debug!(%why, "Client certificate names no runtime");
        }
        peer
    }

    async fn answer(&self, request: Request<Incoming>, peer: &Peer) -> (Answer, bool) {
        Desk::answer(self, request, peer).await
    }

    fn holder<'a>(&self, peer: &'a Peer) -> Holder<'a> {
        match peer {
            Peer::Runtime(certificate) => Holder::One(&certificate.runtime),
            Peer::Proxy => Holder::Many,
            Peer::Nobody(_) | Peer::NotProxy => Holder::Nobody,
        }
    }

    fn leaf<'a>(&self, peer: &'a Peer) -> Option<&'a str> {
        if let Peer::Runtime(certificate) = peer { Some(&certificate.leaf.fingerprint) } else { None }
    }

    fn moves(&self) -> Option<watch::Receiver<u64>> {
        Some(self.revocations.watch())
    }

    fn is_out(&self, runtime: &RuntimeId, leaf: Option<&str>) -> bool {
        leaf.is_some_and(|leaf| self.revocations.cover_leaf(runtime, leaf)) || self.intake.is_gone(runtime)
    }

    fn shut_until(&self, runtime: &RuntimeId, now: Instant) -> Option<Instant> {
        self.peers.shut_until(runtime, now)
    }

    fn shut(&self, runtime: &RuntimeId, now: Instant) {
        self.peers.shut(runtime, now);
    }

    fn strike(&self, runtime: &RuntimeId, now: Instant) {
        self.peers.strike(runtime, now);
    }

    fn closed(&self, runtime: &RuntimeId, since: Instant) {
        self.intake.closed(runtime, since);
    }

    fn observe_lag(&self, lag: Duration) {
        self.pressure.observe(lag);
    }
}

#[cfg(test)]
mod tests;
