//! Handling of one request. Its steps are those of every port; a [`Service`] has what differs.

use std::{
    net::SocketAddr,
    pin::{Pin, pin},
    sync::Arc,
};

use bytes::Bytes;
use http::{Request, request::Parts};
use http_body::Body;
use rustls_pki_types::CertificateDer;
use tidewatch_api::identity::RuntimeId;
use tidewatch_contract::certificate::KeyId;
use tokio::time::{Instant, timeout};

use super::{
    Now, PortMetrics, Settings,
    body::{BodyBudget, BufferedBody, discard},
    load_shedder::LoadShedder,
    peer::{Peer, Sender, Via},
    refusal::{HttpResponse, Refusal},
    request_limiter::{RequestLimiter, RequestPermit},
};
use crate::relay::{Relay, RelayError, RelayedPort, RelayedRequest, RelayedResponse, Replica, mark_last};

/// Metric label of a request that another replica refused; that one counts the reason.
const RELAYED: &str = "relayed";

/// Handler of a port's requests. Connections and the steps of a request are the same on every port; authentication and
/// processing differ: `V3Handler` (event port), `V2Handler` (contract v2), `EnrolmentHandler` and `RelayHandler`.
pub trait Service: Sized + Send + Sync + 'static {
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
    fn identify(&self, chain: &[CertificateDer<'_>], source: Option<SocketAddr>) -> Peer;

    /// False for a client none of whose requests is served; its connection ends without a response.
    fn admits(&self, _: &Peer) -> bool {
        true
    }

    /// Returns the metric label of a path's route.
    fn route(path: &str) -> &'static str;

    /// Returns the sender of a request, from its head and the client of its connection.
    fn authenticate(&self, parts: &Parts, peer: &Peer, now: Now) -> Result<Self::Client, Refusal>;

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
        peer: &Peer,
    ) -> impl Future<Output = (HttpResponse, bool)> + Send {
        handle_request(self, request, peer)
    }

    /// Reports that a runtime closed or lost its last connection at this time, or that the next heartbeat over one is
    /// overdue since then. Not called for connections that the receiver closes.
    fn connection_lost(&self, _: &RuntimeId, _since: Instant) {}
}

/// Settings, state and metrics of one port.
pub struct Port {
    pub(super) settings: Settings,
    budget: BodyBudget,
    pub(super) limiter: RequestLimiter,
    pub(super) shedder: LoadShedder,
    pub(super) metrics: PortMetrics,
}

/// Replica to which a request must be relayed.
pub(super) struct Elsewhere<'a> {
    pub(super) relay: &'a Relay,
    pub(super) holder: Arc<Replica>,
}

impl Port {
    pub(super) fn new(settings: &Settings, metrics: PortMetrics) -> Self {
        Self {
            settings: settings.clone(),
            budget: BodyBudget::new(settings.body_budget),
            limiter: RequestLimiter::new(settings.limits),
            shedder: LoadShedder::new(settings.lag_limit),
            metrics,
        }
    }

    /// True if a certificate of this issuing key is still trusted: the roots may have changed since the handshake.
    pub(super) fn trusts(&self, authority: Option<&KeyId>) -> bool {
        self.settings.trust.as_ref().is_none_or(|trust| trust.borrow().accepts(authority))
    }

    /// Returns the replica to which a request of a runtime must be relayed; `None` if this replica processes it.
    pub(super) fn elsewhere(&self, runtime: &RuntimeId, via: Via) -> Result<Option<Elsewhere<'_>>, RelayError> {
        let Some(relay) = &self.settings.relay else { return Ok(None) };
        Ok(relay.holder(runtime, via == Via::Replica)?.map(|holder| Elsewhere { relay, holder }))
    }

    /// Relays an admitted request with its complete body to the holder of its runtime. The body keeps its share of the
    /// budget until the response.
    pub(super) async fn relay(
        &self,
        Elsewhere { relay, holder }: &Elsewhere<'_>,
        port: RelayedPort,
        parts: &Parts,
        authority: &str,
        sender: &Sender,
        body: BufferedBody,
    ) -> Result<HttpResponse, Refusal> {
        let Sender { certificate, intermediates, .. } = sender;
        let (body, _share) = body.into_parts();
        let leaf = Some(&certificate.leaf.der);
        let intermediates = intermediates.as_deref().unwrap_or_default();
        let request = RelayedRequest { port, parts, authority, leaf, intermediates, source: None, body };
        let response = relay.send(holder, &certificate.runtime, request).await?;
        if RelayedResponse::is_invalid_request(response.status()) {
            // Otherwise each one costs two replicas as much as a valid one.
            self.limiter.count_invalid_request(&certificate.runtime, Instant::now());
        }
        Ok(response)
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
        timeout(self.settings.body_deadline, reading).await.map_err(|_| Refusal::BodyTimeout)?
    }
}

/// Counts, authenticates and processes one request; after a refusal discards the rest of its body and charges its
/// runtime. The flag is true if the connection must close after the response.
pub(super) async fn handle_request<S: Service, B: Body<Data = Bytes> + Send>(
    service: &S,
    request: Request<B>,
    peer: &Peer,
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
            return (response, relayed.is_some_and(|relayed| ends_with(peer, refused, relayed)));
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
        Peer::Proxy | Peer::Replica(_) => false,
        // Frees the connection for another client.
        Peer::Client(_) | Peer::Rejected(_) => true,
    };
    let mut response = service.refuse(refusal, runtime, ended);
    if closes && matches!(peer, Peer::Replica(_)) {
        mark_last(&mut response);
    }
    (response, is_last || rest.must_close)
}

/// True if the client's connection ends with the response of another replica, as it would with the same of this one.
fn ends_with(peer: &Peer, refused: Option<&'static str>, relayed: RelayedResponse) -> bool {
    match peer {
        Peer::Runtime(..) => relayed.is_last,
        Peer::Proxy | Peer::Replica(_) => false,
        Peer::Client(_) | Peer::Rejected(_) => refused.is_some(),
    }
}
