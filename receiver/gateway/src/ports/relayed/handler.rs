//! Handles requests of the relay port.

use std::{net::SocketAddr, pin::Pin, sync::Arc};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, request::Parts};
use http_body::Body;
use http_body_util::Full;
use rustls_pki_types::CertificateDer;
use tidewatch_api::replica::ReplicaName;
use tidewatch_trust::ReplicaTls;

use crate::{
    ports::{
        Intake, Now, PortMetrics, Settings, V3Handler,
        enrol::EnrolmentHandler,
        peer::{ConnectedReplica, Peer},
        refusal::{HttpResponse, Refusal},
        service::{self, Port, Service},
        v2::{V2Handler, V2Intake},
    },
    relay::{
        Answers, LOST_PATH, LostConnection, MAX_LOST_BYTES, MAX_QUESTION_BYTES, QUESTION_PATH, RELAY_FIELD, RelayError,
        RelayedPort,
    },
};

/// Handlers of the ports whose requests may be relayed to this replica, and of the questions of other replicas.
pub struct RelayedHandlers<I, T> {
    /// Event port.
    pub events: Arc<V3Handler<I>>,
    /// Contract v2, if it is served.
    pub v2: Option<Arc<V2Handler<T>>>,
    /// Enrolment port, if it is served.
    pub enrolment: Option<Arc<EnrolmentHandler>>,
    /// Answers of this replica.
    pub answers: Answers,
}

/// State that all connections of this port share.
pub struct RelayHandler<I, T> {
    port: Port,
    tls: ReplicaTls,
    handlers: RelayedHandlers<I, T>,
}

impl<I: Intake, T: V2Intake> RelayHandler<I, T> {
    /// Passes requests to `handlers`. `tls` has the roots of the replicas; `metrics` are those of this port, which count its
    /// connections and its own refusals.
    pub fn new(settings: &Settings, handlers: RelayedHandlers<I, T>, tls: ReplicaTls, metrics: PortMetrics) -> Self {
        Self { port: Port::new(settings, metrics), tls, handlers }
    }
}

impl<I: Intake, T: V2Intake> RelayHandler<I, T> {
    /// Records lost connections of runtimes.
    async fn lost<B: Body<Data = Bytes> + Send>(
        &self,
        parts: &Parts,
        body: Pin<&mut B>,
    ) -> Result<HttpResponse, Refusal> {
        if parts.uri.path() != LOST_PATH {
            return Err(Refusal::Route);
        }
        if parts.method != Method::POST {
            return Err(Refusal::Method);
        }
        let body = self.port.read_body(body, MAX_LOST_BYTES, &mut 0, None).await?;
        let lost = LostConnection::parse(&body.bytes).ok_or(Refusal::Malformed)?;
        self.handlers.events.lost_elsewhere(lost);
        let mut response = Response::new(Full::default());
        *response.status_mut() = StatusCode::NO_CONTENT;
        Ok(response)
    }

    /// Answers a question for the shards of this replica, which it never passes on.
    async fn question<B: Body<Data = Bytes> + Send>(
        &self,
        parts: &Parts,
        body: Pin<&mut B>,
        asking: &ReplicaName,
    ) -> Result<HttpResponse, Refusal> {
        let topic = parts.uri.path().strip_prefix(QUESTION_PATH).and_then(|topic| topic.parse().ok());
        let topic = topic.ok_or(Refusal::Route)?;
        if parts.method != Method::POST {
            return Err(Refusal::Method);
        }
        let body = self.port.read_body(body, MAX_QUESTION_BYTES, &mut 0, None).await?;
        let (question, _share) = body.into_parts();
        Ok(self.handlers.answers.answer_replica(asking, topic, question).await?.into_response())
    }
}

impl<I: Intake, T: V2Intake> Service for RelayHandler<I, T> {
    type Client = ReplicaName;

    fn port(&self) -> &Port {
        &self.port
    }

    fn identify(&self, chain: &[CertificateDer<'_>], source: Option<SocketAddr>) -> Peer {
        let replica = ConnectedReplica::read(chain, &self.port.settings.domain, self.tls.replicas(), Now::read().unix);
        let Some(replica) = replica else {
            tracing::warn!(source = source.map(tracing::field::display), "The client of the relay port is no replica");
            return Peer::Rejected(Refusal::Replica);
        };
        tracing::debug!(replica = %replica.name, "A replica connected");
        Peer::Replica(replica.into())
    }

    fn admits(&self, peer: &Peer) -> bool {
        matches!(peer, Peer::Replica(_))
    }

    fn route(path: &str) -> &'static str {
        match path {
            LOST_PATH => "lost",
            path if path.starts_with(QUESTION_PATH) => "question",
            _ => "other",
        }
    }

    fn authenticate(&self, _: &Parts, peer: &Peer, _: Now) -> Result<ReplicaName, Refusal> {
        match peer {
            Peer::Replica(replica) => Ok(replica.name.clone()),
            Peer::Rejected(refusal) => Err(*refusal),
            Peer::Runtime(..) | Peer::Proxy | Peer::Client(_) => Err(Refusal::Replica),
        }
    }

    /// Processes a request that the other replica makes itself.
    async fn process<B: Body<Data = Bytes> + Send>(
        &self,
        parts: &Parts,
        body: Pin<&mut B>,
        replica: &ReplicaName,
        _: Now,
    ) -> Result<HttpResponse, Refusal> {
        match RelayedPort::of(&parts.headers) {
            Some(RelayedPort::Lost) => self.lost(parts, body).await,
            Some(RelayedPort::Question) => self.question(parts, body, replica).await,
            // A port that this replica does not serve, as while a flag of the installation changes: a later holder may.
            _ if parts.headers.contains_key(RELAY_FIELD) => Err(RelayError::NotHere.into()),
            _ => Err(Refusal::Route),
        }
    }

    fn record(&self, path: &str, _: Option<&ReplicaName>, refusal: Refusal) {
        tracing::debug!(route = Self::route(path), reason = refusal.label(), "Request of a replica refused");
    }

    /// Passes a relayed request on to the handler of the port that accepted it.
    async fn handle<B: Body<Data = Bytes> + Send>(&self, request: Request<B>, peer: &Peer) -> (HttpResponse, bool) {
        let RelayedHandlers { events, v2, enrolment, .. } = &self.handlers;
        let Peer::Replica(replica) = peer else { return service::handle_request(self, request, peer).await };
        if !replica.is_valid(&self.tls.replicas(), Now::read().unix) {
            // The connection ends with the response, and the replica connects again with the certificate that it has now.
            let rejected = Peer::Rejected(RelayError::NotHere.into());
            return service::handle_request(self, request, &rejected).await;
        }
        match (RelayedPort::of(request.headers()), v2, enrolment) {
            (Some(RelayedPort::Event | RelayedPort::Renewal), ..) => events.handle(request, peer).await,
            (Some(RelayedPort::V2), Some(v2), _) => v2.handle(request, peer).await,
            (Some(RelayedPort::Enrolment), _, Some(enrolment)) => enrolment.handle(request, peer).await,
            _ => service::handle_request(self, request, peer).await,
        }
    }
}
