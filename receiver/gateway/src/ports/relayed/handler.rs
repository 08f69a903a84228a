//! Handles requests of the relay port.

use std::{
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, request::Parts};
use http_body::Body;
use http_body_util::Full;
use parking_lot::Mutex;
use rustls_pki_types::{CertificateDer, UnixTime};
use tidewatch_api::{identity::TrustDomain, replica::ReplicaName};
use tidewatch_contract::certificate::Leaf;
use tidewatch_trust::{ReplicaTls, Verifier, replica_of};

use crate::{
    ports::{
        Intake, Now, PortMetrics, Settings, V3Handler,
        enrol::{self, EnrolmentHandler},
        handler,
        refusal::{HttpResponse, Refusal},
        service::{self, Owner, Port, Service},
        v2::{self, V2Handler, V2Intake},
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
    domain: TrustDomain,
    tls: ReplicaTls,
    handlers: RelayedHandlers<I, T>,
}

/// Client of a connection.
pub enum Peer {
    /// Another replica.
    Replica(ConnectedReplica),
    /// A client whose certificate names no replica, such as an agent's. Its connection ends at once.
    Stranger,
}

/// Another replica, by the certificate of its connection.
pub struct ConnectedReplica {
    name: ReplicaName,
    chain: Vec<CertificateDer<'static>>,
    /// End of its validity, in Unix seconds.
    not_after: i64,
    /// Verifier that last accepted the chain; another one has other roots.
    verifier: Mutex<Arc<Verifier>>,
    /// A request found the certificate no longer valid.
    is_rejected: AtomicBool,
}

impl ConnectedReplica {
    /// Identifies a replica by the chain of its handshake, leaf first, which is verified again: the roots may have been replaced
    /// since the handshake began.
    pub(super) fn read(
        chain: &[CertificateDer<'_>],
        domain: &TrustDomain,
        verifier: Arc<Verifier>,
        now: i64,
    ) -> Option<Self> {
        let leaf = chain.first()?;
        let name = replica_of(leaf, domain)?;
        let not_after = Leaf::read(leaf).ok()?.not_after;
        let chain: Vec<_> = chain.iter().map(|certificate| certificate.clone().into_owned()).collect();
        is_verified(&chain, &verifier, now).then(|| Self {
            name,
            chain,
            not_after,
            verifier: Mutex::new(verifier),
            is_rejected: AtomicBool::new(false),
        })
    }

    /// True while its certificate is valid by this verifier. A connection outlives many requests, and no root that was removed is
    /// trusted over one.
    pub(super) fn is_valid(&self, verifier: &Arc<Verifier>, now: i64) -> bool {
        let mut last = self.verifier.lock();
        let is_valid =
            now <= self.not_after && (Arc::ptr_eq(&last, verifier) || is_verified(&self.chain, verifier, now));
        if is_valid {
            last.clone_from(verifier);
        } else {
            self.is_rejected.store(true, Ordering::Relaxed);
        }
        is_valid
    }
}

fn is_verified(chain: &[CertificateDer<'_>], verifier: &Verifier, now: i64) -> bool {
    let time = UnixTime::since_unix_epoch(Duration::from_secs(now.try_into().unwrap_or(0)));
    chain.split_first().is_some_and(|(leaf, rest)| verifier.verify_client_cert(leaf, rest, time).is_ok())
}

impl<I: Intake, T: V2Intake> RelayHandler<I, T> {
    /// Passes requests to `handlers`. `tls` has the roots of the replicas; `metrics` are those of this port, which count its
    /// connections and its own refusals.
    pub fn new(settings: &Settings, handlers: RelayedHandlers<I, T>, tls: ReplicaTls, metrics: PortMetrics) -> Self {
        Self { port: Port::new(settings, metrics), domain: settings.domain.clone(), tls, handlers }
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
    type Peer = Peer;
    type Client = ReplicaName;

    fn port(&self) -> &Port {
        &self.port
    }

    fn identify(&self, chain: &[CertificateDer<'_>], source: Option<SocketAddr>) -> Peer {
        let replica = ConnectedReplica::read(chain, &self.domain, self.tls.replicas(), Now::read().unix);
        let Some(replica) = replica else {
            tracing::warn!(source = source.map(tracing::field::display), "The client of the relay port is no replica");
            return Peer::Stranger;
        };
        tracing::debug!(replica = %replica.name, "A replica connected");
        Peer::Replica(replica)
    }

    fn admits(&self, peer: &Peer) -> bool {
        matches!(peer, Peer::Replica(_))
    }

    fn owner<'a>(&self, peer: &'a Peer) -> Owner<'a> {
        match peer {
            Peer::Replica(replica) if !replica.is_rejected.load(Ordering::Relaxed) => Owner::Replica,
            // The connection ends with the response.
            Peer::Replica(_) | Peer::Stranger => Owner::Unidentified,
        }
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
            // The replica connects again with the certificate that it has now.
            Peer::Replica(replica) if replica.is_rejected.load(Ordering::Relaxed) => Err(RelayError::NotHere.into()),
            Peer::Replica(replica) => Ok(replica.name.clone()),
            Peer::Stranger => Err(Refusal::Replica),
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
        let port = match peer {
            Peer::Replica(replica) if replica.is_valid(&self.tls.replicas(), Now::read().unix) => {
                RelayedPort::of(request.headers())
            }
            Peer::Replica(_) | Peer::Stranger => None,
        };
        match (port, v2, enrolment) {
            (Some(RelayedPort::Event | RelayedPort::Renewal), ..) => {
                events.handle(request, &handler::Peer::Replica).await
            }
            (Some(RelayedPort::V2), Some(v2), _) => v2.handle(request, &v2::Peer::Replica).await,
            (Some(RelayedPort::Enrolment), _, Some(enrolment)) => {
                enrolment.handle(request, &enrol::Peer::Replica).await
            }
            _ => service::handle_request(self, request, peer).await,
        }
    }
}
