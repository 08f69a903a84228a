//! Handles requests of the event port (contract v3). All checks are synchronous, in two halves; only the body between
//! them is awaited.

use std::{
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{StatusCode, request::Parts};
use http_body::Body;
use rustls_pki_types::CertificateDer;
use tidewatch_api::identity::{RuntimeId, TrustDomain};
use tidewatch_contract::{
    certificate::{ReadCertificateError, RuntimeCertificate},
    enrolment::{self, RenewalRequest},
    event::{ParseBatchError, parse_batch},
    heartbeat::Heartbeat,
    signature,
};
use tidewatch_fleet::{EventBatch, Verified};
use tidewatch_kit::{trace, variant::VariantName as _};
use tidewatch_trust::ProxyIdentity;
use tokio::time::Instant;

use super::{
    Now, Settings,
    body::BufferedBody,
    connection_limiter::ClientLeaf,
    head::{Head, OwnAuthority, Route},
    intake::Intake,
    metrics::{Metrics, ReasonLabel},
    proxy::{self, ForwardedClients, Intermediates},
    refusal::{HttpResponse, Refusal, json},
    replay::{Fork, UsedLeaf},
    request_limiter::{BodyCharge, RequestPermit},
    service::{Owner, Port, Service, Via},
};
use crate::{
    enrolment::{EnrolmentService, LeafRefusal},
    relay::{Holder, LostConnection, Relay, RelayedPort, RelayedRequest, RelayedResponse, Replica},
};

/// Client of a connection, identified once by its certificate.
pub enum Peer {
    /// A runtime, and the certificates between its own and a root.
    Runtime(Arc<RuntimeCertificate>, Intermediates),
    /// A client with a certificate that chains to the trusted roots and identifies no runtime.
    Unidentified(ReadCertificateError),
    /// The trusted proxy, which forwards a certificate with each request.
    Proxy,
    /// Another client, where only the proxy may connect.
    NotProxy,
    /// Another replica, which passes the client's certificate on with each request. Only the relay port identifies one.
    Replica,
}

/// Sender of a request.
pub struct Sender {
    pub(super) certificate: Arc<RuntimeCertificate>,
    intermediates: Intermediates,
    via: Via,
}

impl Peer {
    /// Identifies the client by its verified chain, leaf first.
    pub(super) fn read(chain: &[CertificateDer<'_>], domain: &TrustDomain) -> Self {
        let leaf = chain.first().ok_or(ReadCertificateError::Parse);
        leaf.and_then(|leaf| RuntimeCertificate::read(leaf, domain)).map_or_else(Self::Unidentified, |certificate| {
            Self::Runtime(certificate.into(), proxy::intermediates(chain))
        })
    }
}

/// State that all connections of the event port share.
pub struct V3Handler<I> {
    port: Port,
    /// The [`RuntimeTable`](tidewatch_fleet::table::RuntimeTable), except in tests.
    intake: I,
    domain: TrustDomain,
    /// Present where a proxy terminates TLS.
    proxied: Option<(ProxyIdentity, ForwardedClients)>,
    /// Present where other replicas relay requests.
    relayed: Option<ForwardedClients>,
    authorities: Vec<OwnAuthority>,
    /// Present where certificates are renewed.
    enrolments: Option<EnrolmentService>,
    metrics: Metrics,
}

/// A request with checked head, ready to read its body.
pub(super) struct Admitted<'a> {
    certificate: &'a RuntimeCertificate,
    head: Head<'a>,
    permit: RequestPermit<'a>,
    /// Arrival of the head.
    begun: Instant,
}

/// Result of a verified request.
pub(super) enum Processed<'a> {
    Response(HttpResponse),
    /// A renewal, which the runtime and the issuer answer asynchronously.
    Renewal(&'a EnrolmentService, RenewalRequest),
}

impl<I: Intake> V3Handler<I> {
    /// Handles requests within the limits of `settings`, and passes verified input to `intake`.
    pub fn new(settings: &Settings, intake: I, metrics: Metrics) -> Self {
        let proxied = settings.proxy.clone().map(|proxy| {
            let identity = proxy.identity.clone();
            (identity, ForwardedClients::new(move || proxy.verifier(), settings.domain.clone()))
        });
        let relayed = settings.relay.clone().map(|relay| {
            let tls = relay.tls().clone();
            ForwardedClients::new(move || tls.agents(), settings.domain.clone())
        });
        Self {
            port: Port::new(settings, metrics.port.clone()),
            intake,
            domain: settings.domain.clone(),
            proxied,
            relayed,
            authorities: settings.authorities.clone(),
            enrolments: settings.enrolments.clone(),
            metrics,
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
        if self.port.revocations.covers_leaf(&certificate.runtime, leaf.into()) {
            return Err(Refusal::Revoked);
        }
        if !self.port.trusts(leaf.authority.as_ref()) {
            return Err(Refusal::Certificate);
        }
        let permit = self.port.limiter.acquire(&certificate.runtime, now)?;
        let head = Head::read(parts, &self.authorities, self.port.max_body)?;
        if head.route == Route::Certificates && self.enrolments.is_none() {
            return Err(Refusal::Route);
        }
        Ok(Admitted { certificate, head, permit, begun: now.instant })
    }

    /// Verifies the body, and processes it: signature, then nonce, and only then its content.
    pub(super) fn process_body(
        &self,
        admitted: &Admitted<'_>,
        body: &[u8],
        now: Now,
    ) -> Result<Processed<'_>, Refusal> {
        let Admitted { certificate, head, permit, begun } = admitted;
        self.port.metrics.body_bytes.inc_by(body.len() as u64);
        let verified = signature::verify(&head.signed(body), &certificate.leaf, now.unix)?;
        permit.use_nonce(&verified, now)?;
        if let Err(Fork(leaves)) = permit.observe(&verified, &certificate.leaf, now) {
            for UsedLeaf { fingerprint, not_after } in leaves {
                self.port.revocations.refuse_leaf(&certificate.runtime, fingerprint, not_after, LeafRefusal::Fork);
            }
            return Err(Refusal::Revoked);
        }
        match head.route {
            Route::Events => self.events(certificate, verified, body, *begun, now).map(Processed::Response),
            Route::Heartbeat => self.heartbeat(certificate, verified, body, now).map(Processed::Response),
            Route::Certificates => self.renewal(certificate, body),
        }
    }

    /// Relays an admitted request with its complete body to the holder of its runtime. The body keeps its share of the
    /// budget until the response.
    async fn relay(
        &self,
        relay: &Relay,
        holder: &Arc<Replica>,
        parts: &Parts,
        admitted: &Admitted<'_>,
        intermediates: &Intermediates,
        body: BufferedBody,
    ) -> Result<HttpResponse, Refusal> {
        let Admitted { certificate, head, .. } = admitted;
        self.port.metrics.body_bytes.inc_by(body.bytes.len() as u64);
        let (body, _share) = body.into_parts();
        let request = RelayedRequest {
            port: if head.route == Route::Certificates { RelayedPort::Renewal } else { RelayedPort::Event },
            parts,
            authority: head.authority(),
            leaf: Some(&certificate.leaf.der),
            intermediates: intermediates.as_deref().unwrap_or_default(),
            source: None,
            body,
        };
        let response = relay.send(holder, &certificate.runtime, request).await?;
        if RelayedResponse::is_invalid_request(response.status()) {
            // Otherwise each one costs two replicas as much as a valid one.
            self.port.limiter.count_invalid_request(&certificate.runtime, Instant::now());
        }
        Ok(response)
    }

    /// Records that runtimes of this replica lost their connections to another one.
    pub(super) fn lost_elsewhere(&self, lost: Vec<LostConnection>) {
        let now = Instant::now();
        for LostConnection { runtime, silent_millis } in lost {
            let since = now.checked_sub(Duration::from_millis(silent_millis)).unwrap_or(now);
            if self.port.relay.as_ref().is_none_or(|relay| relay.find(&runtime) == Holder::Here) {
                self.intake.connection_lost(&runtime, since);
            }
        }
    }

    /// Parses a renewal. A runtime can renew its own certificate only.
    fn renewal(&self, certificate: &RuntimeCertificate, body: &[u8]) -> Result<Processed<'_>, Refusal> {
        let request = RenewalRequest::parse(body).map_err(|_| Refusal::Malformed)?;
        if request.certificate.runtime != certificate.runtime {
            return Err(Refusal::Source);
        }
        Ok(Processed::Renewal(self.enrolments.as_ref().ok_or(Refusal::Route)?, request))
    }

    /// Parses the events of a verified batch, and hands them to the intake.
    fn events(
        &self,
        certificate: &RuntimeCertificate,
        verified: signature::VerifiedSignature,
        body: &[u8],
        begun: Instant,
        now: Now,
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
        let response = self.intake.events(batch.with_leaf(certificate.leaf.der.clone()), now.unix)?;
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
        let heartbeat = Heartbeat::parse(body).ok_or(Refusal::Malformed)?;
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
    type Client = Sender;

    fn port(&self) -> &Port {
        &self.port
    }

    fn identify(&self, chain: &[CertificateDer<'_>], _: Option<SocketAddr>) -> Peer {
        if let Some((identity, _)) = &self.proxied {
            let is_proxy = chain.first().is_some_and(|leaf| identity.is_named_by(leaf));
            return if is_proxy { Peer::Proxy } else { Peer::NotProxy };
        }
        let peer = Peer::read(chain, &self.domain);
        if let Peer::Unidentified(error) = &peer {
            tracing::debug!(%error, "Client certificate identifies no runtime");
        }
        peer
    }

    fn owner<'a>(&self, peer: &'a Peer) -> Owner<'a> {
        match peer {
            Peer::Runtime(certificate, _) => Owner::Runtime(&certificate.runtime, ClientLeaf::of(&certificate.leaf)),
            Peer::Proxy => Owner::Shared,
            Peer::Replica => Owner::Replica,
            Peer::Unidentified(_) | Peer::NotProxy => Owner::Unidentified,
        }
    }

    fn route(path: &str) -> &'static str {
        Route::of(path).map_or("other", |route| route.as_str())
    }

    /// Returns the certificate of the connection, or the one that the proxy or another replica forwards.
    fn authenticate(&self, parts: &Parts, peer: &Peer, now: Now) -> Result<Sender, Refusal> {
        let (certificate, intermediates, via) = match (peer, &self.proxied, &self.relayed) {
            (Peer::Runtime(certificate, rest), None, _) => (certificate.clone(), rest.clone(), Via::Client),
            (Peer::Proxy, Some((_, clients)), _) => {
                let rest = proxy::forwarded_intermediates(&parts.headers).ok_or(Refusal::Proxy)?;
                let rest = (!rest.is_empty()).then(|| rest.into());
                (clients.read(&parts.headers, now)?, rest, Via::Client)
            }
            // It is relayed only once.
            (Peer::Replica, _, Some(clients)) => (clients.read(&parts.headers, now)?, None, Via::Replica),
            (Peer::Unidentified(_), ..) => return Err(Refusal::Identity),
            (Peer::Runtime(..) | Peer::NotProxy | Peer::Proxy | Peer::Replica, ..) => return Err(Refusal::Proxy),
        };
        Ok(Sender { certificate, intermediates, via })
    }

    async fn process<B: Body<Data = Bytes> + Send>(
        &self,
        parts: &Parts,
        body: Pin<&mut B>,
        sender: &Sender,
        now: Now,
    ) -> Result<HttpResponse, Refusal> {
        let Sender { certificate, intermediates, via } = sender;
        let admitted = self.admit(parts, certificate, now)?;
        if self.port.shedder.sheds(admitted.head.route) {
            return Err(Refusal::Overloaded);
        }
        // Before the body is read, which a runtime without holder would send in vain.
        let elsewhere = self.port.elsewhere(&certificate.runtime, *via)?;
        let mut charge = BodyCharge { permit: &admitted.permit, bytes: 0 };
        let limit = admitted.head.route.max_body(self.port.max_body);
        let body = self.port.read_body(body, limit, &mut charge.bytes, Some(&admitted.permit)).await?;
        drop(charge);
        if let Some((relay, holder)) = elsewhere {
            return self.relay(relay, &holder, parts, &admitted, intermediates, body).await;
        }
        let processed = self.process_body(&admitted, &body.bytes, Now::read())?;
        // Releases its share of the budget before runtime and issuer are awaited.
        drop(body);
        match processed {
            Processed::Response(response) => Ok(response),
            Processed::Renewal(enrolments, request) => {
                let response = enrolments.renew(&request, &certificate.leaf).await?;
                Ok(json(StatusCode::OK, enrolment::CONTENT_TYPE, &response))
            }
        }
    }

    fn charged(sender: &Sender, _: Refusal) -> Option<&RuntimeId> {
        Some(&sender.certificate.runtime)
    }

    fn record(&self, path: &str, sender: Option<&Sender>, refusal: Refusal) {
        let route = Self::route(path);
        let reason = refusal.label();
        let runtime = sender.map_or("", |sender| sender.certificate.runtime.as_str());
        tracing::debug!(route, reason, runtime, "Request refused");
    }

    /// Reports it to the holder of the runtime, if there is one.
    fn connection_lost(&self, runtime: &RuntimeId, since: Instant) {
        let Some(relay) = &self.port.relay else { return self.intake.connection_lost(runtime, since) };
        match relay.find(runtime) {
            Holder::Here => self.intake.connection_lost(runtime, since),
            Holder::At(holder) => relay.report_lost(holder, runtime.clone(), since),
            Holder::Unknown => {}
        }
    }
}

#[cfg(test)]
mod tests;
