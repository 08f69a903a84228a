//! One request, from its head to its answer. Every judgement is synchronous; only the body is awaited, between the two halves.

use std::{pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, StatusCode, request::Parts};
use http_body::Body;
use rustls_pki_types::CertificateDer;
use tidewatch_shared::{
    certificate::{ReadCertificate, RuntimeCertificate},
    event::{ParseBatch, parse_batch},
    heartbeat::{self, Heartbeat},
    identity::TrustDomain,
    signature,
};

use super::{
    Now, Settings,
    authority::OwnAuthority,
    body::Budget,
    head::{Head, Route},
    intake::{Batch, Intake, Verified},
    metrics::{Metrics, Path, RefusedAs, Why},
    peers::{Pass, Peers},
    refusal::{Answer, Refusal, json},
};

/// Who holds the other end of a connection, read once from its certificate.
pub(super) enum Peer {
    /// A runtime.
    Runtime(RuntimeCertificate),
    /// Somebody whose certificate chains to our roots and names no runtime.
    Nobody(ReadCertificate),
}

impl Peer {
    pub(super) fn read(leaf: &CertificateDer<'_>, domain: &TrustDomain) -> Self {
        RuntimeCertificate::read(leaf, domain).map_or_else(Self::Nobody, Self::Runtime)
    }
}

/// What all connections share.
pub(super) struct Desk<I> {
    intake: I,
    authorities: Vec<OwnAuthority>,
    trust_revision: Option<String>,
    max_body: usize,
    body_deadline: Duration,
    peers: Arc<Peers>,
    budget: Budget,
    metrics: Metrics,
}

/// A request that may send its body.
pub(super) struct Admitted<'a> {
    certificate: &'a RuntimeCertificate,
    head: Head<'a>,
    pass: Pass,
}

impl<I: Intake> Desk<I> {
    pub(super) fn new(settings: &Settings, intake: I, metrics: Metrics) -> Self {
        Self {
            intake,
            authorities: settings.authorities.clone(),
            trust_revision: settings.trust_revision.clone(),
            max_body: settings.max_body,
            body_deadline: settings.body_deadline,
            peers: Peers::new(settings.limits),
            budget: Budget::new(settings.body_budget),
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
        self.metrics.begun.get_or_create(&Path { route }).inc();
        let result = self.judge(&parts, body, peer, begun).await;
        let ended = Now::read();
        let duration = ended.instant.saturating_duration_since(begun.instant);
        self.metrics.duration.get_or_create(&Path { route }).observe(duration.as_secs_f64());
        match result {
            Ok(answer) => {
                self.metrics.accepted.get_or_create(&Path { route }).inc();
                (answer, false)
            }
            Err(refusal) => {
                let reason = refusal.label();
                self.metrics.refused.get_or_create(&RefusedAs { route, reason }).inc();
                tracing::debug!(route, reason, runtime = peer.name(), "Request refused");
                (refusal.answer(ended.unix), refusal.ends_connection())
            }
        }
    }

    async fn judge<B>(&self, parts: &Parts, body: B, peer: &Peer, now: Now) -> Result<Answer, Refusal>
    where
        B: Body<Data = Bytes>,
    {
        let admitted = self.admit(parts, peer, now)?;
        let body = pin!(body);
        let reading = self.budget.read(body, self.max_body);
        let body = tokio::time::timeout(self.body_deadline, reading).await.map_err(|_| Refusal::Slow)??;
        self.conclude(&admitted, &body, Now::read())
    }

    /// Everything that the head and the certificate decide. The rate comes first: what is wrong costs as much as what is right.
    pub(super) fn admit<'a>(&'a self, parts: &'a Parts, peer: &'a Peer, now: Now) -> Result<Admitted<'a>, Refusal> {
        let Peer::Runtime(certificate) = peer else { return Err(Refusal::Identity) };
        let leaf = &certificate.leaf;
        if now.unix < leaf.not_before || now.unix > leaf.not_after {
            return Err(Refusal::Certificate);
        }
        let pass = self.peers.enter(&certificate.runtime, now)?;
        let head = Head::read(parts, &self.authorities, self.max_body)?;
        Ok(Admitted { certificate, head, pass })
    }

    /// Everything that the body decides: signature, nonce, and only then what it says.
    pub(super) fn conclude(&self, admitted: &Admitted<'_>, body: &[u8], now: Now) -> Result<Answer, Refusal> {
        let Admitted { certificate, head, pass } = admitted;
        self.metrics.body_bytes.inc_by(body.len() as u64);
        pass.charge(body.len(), now);
        let verified = signature::verify(&head.signed(body), &certificate.leaf, now.unix)?;
        pass.take(&verified, now)?;
        match head.route {
            Route::Events => self.events(certificate, verified, body),
            Route::Heartbeat => self.heartbeat(certificate, verified, body, now),
        }
    }

    fn events(
        &self,
        certificate: &RuntimeCertificate,
        verified: signature::Verified,
        body: &[u8],
    ) -> Result<Answer, Refusal> {
        let epoch = verified.nonce.epoch;
        let events = parse_batch(body)?;
        if events.is_empty() {
            return Err(ParseBatch::Malformed(None).into());
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
        let batch = Verified::new(certificate.runtime.clone(), verified.created, Batch { epoch, events });
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
        verified: signature::Verified,
        body: &[u8],
        now: Now,
    ) -> Result<Answer, Refusal> {
        let heartbeat: Heartbeat = serde_json::from_slice(body).map_err(|_| Refusal::Malformed)?;
        if heartbeat.watches.len() > heartbeat::MAX_WATCHES {
            return Err(Refusal::Malformed);
        }
        if heartbeat.epoch != verified.nonce.epoch {
            return Err(Refusal::Source);
        }
        let heartbeat = Verified::new(certificate.runtime.clone(), verified.created, heartbeat);
        let mut answer = self.intake.heartbeat(heartbeat, now.unix)?;
        answer.trust_revision = answer.trust_revision.or_else(|| self.trust_revision.clone());
        Ok(json(StatusCode::OK, "application/json", &answer))
    }
}

impl Peer {
    fn name(&self) -> &str {
        match self {
            Self::Runtime(certificate) => certificate.runtime.as_str(),
            Self::Nobody(_) => "",
        }
    }
}

#[cfg(test)]
mod tests;
