//! Handling of one request. Its steps are those of every port; a [`Service`] has what differs.

use std::{
    net::SocketAddr,
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http::{Request, request::Parts};
use http_body::Body;
use rustls_pki_types::CertificateDer;
use tidewatch_api::identity::RuntimeId;
use tidewatch_contract::certificate::KeyId;
use tidewatch_trust::Trust;
use tokio::{
    sync::{broadcast, watch},
    time::{Instant, timeout},
};

use super::{
    Now, PortMetrics, Settings,
    body::{BodyBudget, BufferedBody, discard},
    connection_limiter::ClientLeaf,
    load_shedder::LoadShedder,
    refusal::{HttpResponse, Refusal},
    request_limiter::{RequestLimiter, RequestPermit},
};
use crate::{
    enrolment::Revocations,
    relay::{Relay, RelayError, RelayedResponse, Replica, mark_last},
};

/// Metric label of a request that another replica refused; that one counts the reason.
const RELAYED: &str = "relayed";

/// Handler of a port's requests. Connections and the steps of a request are the same on every port; authentication and
/// processing differ: `V3Handler` (event port), `V2Handler` (contract v2), `EnrolmentHandler` and `RelayHandler`.
pub trait Service: Sized + Send + Sync + 'static {
    /// Identity of a connection's client.
    type Peer: Send + Sync + 'static;
    /// Sender of a request, after its authentication.
    type Client: Send + Sync;

    /// Closes connections without a client certificate.
    const NEEDS_CERTIFICATE: bool = true;
    /// Closes the connection of a single runtime after a refusal that each further request would get as well.
    const CLOSES_REFUSED: bool = true;

    /// Returns the state that this port has in common with the others.
    fn port(&self) -> &Port;

    /// Identifies the client once per connection, by its certificate chain (leaf first, verified by the handshake) and
    /// its address, if known.
    fn identify(&self, chain: &[CertificateDer<'_>], source: Option<SocketAddr>) -> Self::Peer;

    /// Returns the owner of a connection.
    fn owner<'a>(&self, _: &'a Self::Peer) -> Owner<'a> {
        Owner::Unidentified
    }

    /// False for a client none of whose requests is served; its connection ends without a response.
    fn admits(&self, _: &Self::Peer) -> bool {
        true
    }

    /// Returns the metric label of a path's route.
    fn route(path: &str) -> &'static str;

    /// Returns the sender of a request, from its head and the client of its connection.
    fn authenticate(&self, parts: &Parts, peer: &Self::Peer, now: Now) -> Result<Self::Client, Refusal>;

    /// Processes a request whose head arrived at `now`.
    fn process<B: Body<Data = Bytes> + Send>(
        &self,
        parts: &Parts,
        body: Pin<&mut B>,
        client: &Self::Client,
        now: Now,
    ) -> impl Future<Output = Result<HttpResponse, Refusal>> + Send;

    /// Returns the runtime that is charged for the discarded body of a refused request.
    fn charged(_: &Self::Client, _: Refusal) -> Option<&RuntimeId> {
        None
    }

    /// Records a refusal; `client` is present if the request was authenticated.
    fn record(&self, path: &str, client: Option<&Self::Client>, refusal: Refusal);

    /// Returns the response to a request that was refused at `now`, of this runtime if it was authenticated.
    fn refuse(&self, refusal: Refusal, runtime: Option<&RuntimeId>, now: Now) -> HttpResponse {
        refusal.response_with_wait(now.unix, self.port().shedder.retry_after(refusal, runtime, now.instant))
    }

    /// Handles one request. The flag is true if the connection must close after the response.
    fn handle<B: Body<Data = Bytes> + Send>(
        &self,
        request: Request<B>,
        peer: &Self::Peer,
    ) -> impl Future<Output = (HttpResponse, bool)> + Send {
        handle_request(self, request, peer)
    }

    /// Reports that a runtime closed or lost its last connection at this time, or that the next heartbeat over one is
    /// overdue since then. Not called for connections that the receiver closes.
    fn connection_lost(&self, _: &RuntimeId, _since: Instant) {}
}

/// Owner of a connection, which decides its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner<'a> {
    /// A single runtime, with its client certificate. The number of its connections is limited.
    Runtime(&'a RuntimeId, ClientLeaf),
    /// A proxy on behalf of many runtimes. The number of connections is not limited.
    Shared,
    /// Another replica, which accepted the requests of many runtimes.
    Replica,
    /// A client without a certificate, or with one that is refused with its first request.
    Unidentified,
}

/// Way by which a request arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Via {
    /// Its client, or a proxy in front of this replica, sent it.
    Client,
    /// Another replica accepted and relayed it.
    Replica,
}

/// Limits, state and metrics of one port.
pub struct Port {
    /// Bytes of a body at most.
    pub(super) max_body: usize,
    body_deadline: Duration,
    budget: BodyBudget,
    pub(super) limiter: RequestLimiter,
    pub(super) revocations: Revocations,
    /// Roots of the client certificates; `None` where the handshake alone decides.
    trust: Option<watch::Receiver<Arc<Trust>>>,
    pub(super) shedder: LoadShedder,
    /// Present where other replicas hold some of the runtimes.
    pub(super) relay: Option<Relay>,
    pub(super) metrics: PortMetrics,
}

impl Port {
    pub(super) fn new(settings: &Settings, metrics: PortMetrics) -> Self {
        Self {
            max_body: settings.max_body,
            body_deadline: settings.body_deadline,
            budget: BodyBudget::new(settings.body_budget),
            limiter: RequestLimiter::new(settings.limits),
            revocations: settings.revocations.clone(),
            trust: settings.trust.clone(),
            shedder: LoadShedder::new(settings.lag_limit),
            relay: settings.relay.clone(),
            metrics,
        }
    }

    /// True if a certificate of this issuing key is still trusted: the roots may have changed since the handshake.
    pub(super) fn trusts(&self, authority: Option<&KeyId>) -> bool {
        self.trust.as_ref().is_none_or(|trust| trust.borrow().accepts(authority))
    }

    /// Returns the relay and the replica to which a request of a runtime must be relayed; `None` if this replica
    /// processes it.
    pub(super) fn elsewhere(
        &self,
        runtime: &RuntimeId,
        via: Via,
    ) -> Result<Option<(&Relay, Arc<Replica>)>, RelayError> {
        let Some(relay) = &self.relay else { return Ok(None) };
        Ok(relay.holder(runtime, via == Via::Replica)?.map(|holder| (relay, holder)))
    }

    /// Reads a body of at most `limit` bytes within its deadline and the budget of all bodies. Adds all received bytes
    /// to `received`, also on errors. A runtime can have one large body at a time.
    pub(super) async fn read_body<B: Body<Data = Bytes>>(
        &self,
        body: Pin<&mut B>,
        limit: usize,
        received: &mut usize,
        permit: Option<&RequestPermit<'_>>,
    ) -> Result<BufferedBody, Refusal> {
        let reading = self.budget.read(body, limit, received, || match permit {
            Some(permit) => permit.begin_large_body(),
            None => Ok(()),
        });
        timeout(self.body_deadline, reading).await.map_err(|_| Refusal::BodyTimeout)?
    }
}

/// Counts, authenticates and processes one request; after a refusal discards the rest of its body and charges its
/// runtime. The flag is true if the connection must close after the response.
pub(super) async fn handle_request<S: Service, B: Body<Data = Bytes> + Send>(
    service: &S,
    request: Request<B>,
    peer: &S::Peer,
) -> (HttpResponse, bool) {
    let begun = Now::read();
    let (parts, body) = request.into_parts();
    let port = service.port();
    let route = S::route(parts.uri.path());
    port.metrics.request_begun(route);
    let announced = body.size_hint().lower();
    let mut body = pin!(body);
    let client = service.authenticate(&parts, peer, begun);
    let result = match &client {
        Ok(client) => service.process(&parts, body.as_mut(), client, begun).await,
        Err(refusal) => Err(*refusal),
    };
    let ended = Now::read();
    let relayed = result.as_ref().ok().and_then(|response| response.extensions().get::<RelayedResponse>().copied());
    let refused = match &result {
        Ok(response) if relayed.is_some() && !response.status().is_success() => Some(RELAYED),
        Ok(_) => None,
        Err(refusal) => Some(refusal.label()),
    };
    port.metrics.request_ended(route, ended.instant.saturating_duration_since(begun.instant), refused);
    let mut refusal = match result {
        Ok(response) => {
            return (response, relayed.is_some_and(|relayed| ends_with(service.owner(peer), refused, relayed)));
        }
        Err(refusal) => refusal,
    };
    let client = client.as_ref().ok();
    let runtime = client.and_then(|client| S::charged(client, refusal));
    let rest = discard(&parts, body, announced, refusal == Refusal::BodyTimeout).await;
    if let Some(runtime) = runtime {
        if rest.bytes > 0 {
            refusal = refusal.extended_by(port.limiter.charge(runtime, rest.bytes, Now::read()));
        }
        if refusal.problem().is_invalid {
            port.limiter.count_invalid_request(runtime, ended.instant);
        }
    }
    service.record(parts.uri.path(), client, refusal);
    let closes = S::CLOSES_REFUSED && refusal.problem().closes;
    let is_last = match peer {
        Peer::Runtime(..) => closes,
        // Many runtimes share the connection, and their requests may be valid.
        Owner::Shared | Owner::Replica => false,
        // Frees the connection for another client.
        Owner::Unidentified => true,
    };
    let mut response = service.refuse(refusal, runtime, ended);
    if closes && service.owner(peer) == Owner::Replica {
        mark_last(&mut response);
    }
    (response, is_last || rest.must_close)
}

/// True if the client's connection ends with the response of another replica, as it would with the same of this one.
fn ends_with(owner: Owner<'_>, refused: Option<&'static str>, relayed: RelayedResponse) -> bool {
    match owner {
        Owner::Runtime(..) => relayed.is_last,
        Owner::Shared | Owner::Replica => false,
        Owner::Unidentified => refused.is_some(),
    }
}
