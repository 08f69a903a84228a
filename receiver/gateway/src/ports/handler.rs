//! Handles requests of the event port (contract v3). All checks are synchronous, in two halves; only the body between
//! them is awaited.

use std::{
    net::SocketAddr,
    pin::Pin,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{StatusCode, request::Parts};
use http_body::Body;
use rustls_pki_types::CertificateDer;
use tidewatch_api::identity::RuntimeId;
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
    head::{Head, Route},
    intake::Intake,
    metrics::{Metrics, ReasonLabel},
    peer::{Peer, Sender, Via},
    proxy::{self, ForwardedClients},
    refusal::{HttpResponse, Refusal, json},
    replay::{Fork, UsedLeaf},
    request_limiter::{BodyCharge, RequestPermit},
    service::{Port, Service},
};
use crate::{
    enrolment::{EnrolmentService, LeafRefusal},
    relay::{Holder, LostConnection, RelayedPort},
};

/// State that all connections of the event port share.
pub struct V3Handler<I> {
    port: Port,
    /// The [`RuntimeTable`](tidewatch_fleet::table::RuntimeTable), except in tests.
    intake: I,
    /// Present where a proxy terminates TLS.
    proxied: Option<(ProxyIdentity, ForwardedClients)>,
    /// Present where other replicas relay requests.
    relayed: Option<ForwardedClients>,
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
        Self { port: Port::new(settings, metrics.port.clone()), intake, proxied, relayed, metrics }
    }

    /// Performs all checks of certificate and head. The rate limit precedes the head, since invalid requests cost as
    /// much as valid ones.
    pub(super) fn admit<'a>(
        &'a self,
        parts: &'a Parts,
        certificate: &'a RuntimeCertificate,
        now: Now,
    ) -> Result<Admitted<'a>, Refusal> {
        let Settings { revocations, authorities, max_body, enrolments, .. } = &self.port.settings;
        let leaf = &certificate.leaf;
        if now.unix < leaf.not_before || now.unix > leaf.not_after {
            return Err(Refusal::Certificate);
        }
        if revocations.covers_leaf(&certificate.runtime, leaf) {
            return Err(Refusal::Revoked);
        }
        if !self.port.trusts(leaf.authority.as_ref()) {
            return Err(Refusal::Certificate);
        }
        let permit = self.port.limiter.acquire(&certificate.runtime, now)?;
        let head = Head::read(parts, authorities, *max_body)?;
        if head.route == Route::Certificates && enrolments.is_none() {
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
                let revocations = &self.port.settings.revocations;
                revocations.refuse_leaf(&certificate.runtime, fingerprint, not_after, LeafRefusal::Fork);
            }
            return Err(Refusal::Revoked);
        }
        match head.route {
            Route::Events => self.events(certificate, verified, body, *begun, now).map(Processed::Response),
            Route::Heartbeat => self.heartbeat(certificate, verified, body, now).map(Processed::Response),
            Route::Certificates => self.renewal(certificate, body),
        }
    }

    /// Records that runtimes of this replica lost their connections to another one.
    pub(super) fn lost_elsewhere(&self, lost: Vec<LostConnection>) {
        let now = Instant::now();
        for LostConnection { runtime, silent_millis } in lost {
            let since = now.checked_sub(Duration::from_millis(silent_millis)).unwrap_or(now);
            if self.port.settings.relay.as_ref().is_none_or(|relay| relay.find(&runtime) == Holder::Here) {
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
        Ok(Processed::Renewal(self.port.settings.enrolments.as_ref().ok_or(Refusal::Route)?, request))
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
    type Client = Sender;

    fn port(&self) -> &Port {
        &self.port
    }

    fn identify(&self, chain: &[CertificateDer<'_>], _: Option<SocketAddr>) -> Peer {
        if let Some((identity, _)) = &self.proxied {
            let is_proxy = chain.first().is_some_and(|leaf| identity.is_named_by(leaf));
            return if is_proxy { Peer::Proxy } else { Peer::Rejected(Refusal::Proxy) };
        }
        let leaf = chain.first().ok_or(ReadCertificateError::Parse);
        match leaf.and_then(|leaf| RuntimeCertificate::read(leaf, &self.port.settings.domain)) {
            Ok(certificate) => Peer::Runtime(certificate.into(), proxy::intermediates(chain)),
            Err(error) => {
                tracing::debug!(%error, "Client certificate identifies no runtime");
                Peer::Rejected(Refusal::Identity)
            }
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
            (Peer::Replica(_), _, Some(clients)) => (clients.read(&parts.headers, now)?, None, Via::Replica),
            (Peer::Rejected(refusal), ..) => return Err(*refusal),
            (Peer::Runtime(..) | Peer::Proxy | Peer::Replica(_) | Peer::Client(_), ..) => return Err(Refusal::Proxy),
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
        let Sender { certificate, via, .. } = sender;
        let admitted = self.admit(parts, certificate, now)?;
        if self.port.shedder.sheds(admitted.head.route) {
            return Err(Refusal::Overloaded);
        }
        // Before the body is read, which a runtime without holder would send in vain.
        let elsewhere = self.port.elsewhere(&certificate.runtime, *via)?;
        let mut charge = BodyCharge { permit: &admitted.permit, bytes: 0 };
        let limit = admitted.head.route.max_body(self.port.settings.max_body);
        let body = self.port.read_body(body, limit, &mut charge.bytes, Some(&admitted.permit)).await?;
        drop(charge);
        if let Some(elsewhere) = elsewhere {
            let Admitted { head, .. } = &admitted;
            self.port.metrics.body_bytes.inc_by(body.bytes.len() as u64);
            let port = if head.route == Route::Certificates { RelayedPort::Renewal } else { RelayedPort::Event };
            return self.port.relay(&elsewhere, port, parts, head.authority(), sender, body).await;
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
        let Some(relay) = &self.port.settings.relay else { return self.intake.connection_lost(runtime, since) };
        match relay.find(runtime) {
            Holder::Here => self.intake.connection_lost(runtime, since),
            Holder::At(holder) => relay.report_lost(holder, runtime.clone(), since),
            Holder::Unknown => {}
        }
    }
}

#[cfg(test)]
mod tests;
