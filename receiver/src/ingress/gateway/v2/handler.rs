//! Handles requests of contract v2.

use std::{
    net::SocketAddr,
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, Response, request::Parts};
use http_body::Body;
use http_body_util::Full;
use hyper::body::Incoming;
use rustls_pki_types::CertificateDer;
use tidewatch_shared::{
    identity::RuntimeId,
    v2::{self, Caller, Event},
};
use tokio::time::timeout;

use super::{
    Metrics,
    caller::{CallerVerifier, Peer, PeerKind},
    intake::{IntakeError, V2Intake},
    refusal::Refusal,
};
use crate::ingress::{
    enrolment::Revocations,
    gateway::{
        self, Now, Settings,
        body::{BodyBudget, discard},
        connection::{Owner, Service},
        head,
        refusal::{self as shared, HttpResponse},
        request_limiter::RequestLimiter,
    },
};

/// Label of this port in the gateway's metrics.
const ROUTE: &str = "v2";

/// State that all connections of this port share.
pub struct V2Handler<T> {
    intake: T,
    callers: CallerVerifier,
    max_body: usize,
    body_deadline: Duration,
    limiter: Arc<RequestLimiter>,
    revocations: Revocations,
    budget: BodyBudget,
    metrics: Metrics,
    shared: gateway::PortMetrics,
}

/// Counts a request in flight until dropped, also when the connection ends first.
struct InFlight<'a> {
    metrics: &'a Metrics,
    begun: Now,
    is_error: bool,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        let took = Now::read().instant.saturating_duration_since(self.begun.instant);
        self.metrics.ended(took, self.is_error);
    }
}

impl<T: V2Intake> V2Handler<T> {
    /// Handles requests within the limits of `settings`. `shared` are the metrics of the event port, which count this
    /// port as route `v2`.
    pub fn new(
        settings: &Settings,
        callers: CallerVerifier,
        intake: T,
        metrics: Metrics,
        shared: gateway::PortMetrics,
    ) -> Self {
        Self {
            intake,
            callers,
            max_body: settings.max_body,
            body_deadline: settings.body_deadline,
            limiter: RequestLimiter::new(settings.limits),
            revocations: settings.revocations.clone(),
            budget: BodyBudget::new(settings.body_budget),
            metrics,
            shared,
        }
    }

    /// Handles one request. The flag is true if the connection must close after the response.
    pub(super) async fn handle<B>(&self, request: Request<B>, peer: &Peer) -> (HttpResponse, bool)
    where
        B: Body<Data = Bytes> + Send,
    {
        let begun = Now::read();
        let (parts, body) = request.into_parts();
        self.shared.request_begun(ROUTE);
        self.metrics.begun();
        let mut in_flight = InFlight { metrics: &self.metrics, begun, is_error: true };
        let announced = body.size_hint().lower();
        let mut body = pin!(body);
        let caller = self.caller(&parts, peer, begun);
        let result = match &caller {
            Ok((manager, caller)) => self.process(manager, caller, body.as_mut(), begun).await,
            Err(refusal) => Err(*refusal),
        };
        let ended = Now::read();
        let refused = result.as_ref().err().map(|refusal| refusal.label());
        self.shared.request_ended(ROUTE, ended.instant.saturating_duration_since(begun.instant), refused);
        match result {
            Ok(()) => {
                in_flight.is_error = false;
                (Response::new(Full::default()), false)
            }
            Err(mut refusal) => {
                let is_slow = refusal == Refusal::Gateway(shared::Refusal::BodyTimeout);
                let rest = discard(&parts, body, announced, is_slow).await;
                if let (Refusal::Gateway(shared), Ok((_, caller)), true) = (&mut refusal, &caller, rest.bytes > 0) {
                    *shared = shared.extended_by(self.limiter.charge(&caller.runtime, rest.bytes, Now::read()));
                }
                self.count(refusal, parts.uri.path());
                tracing::debug!(route = ROUTE, reason = refusal.label(), "Request refused");
                (refusal.response(ended.unix), rest.must_close || matches!(peer.0, PeerKind::Rejected(_)))
            }
        }
    }

    fn count(&self, refusal: Refusal, path: &str) {
        if matches!(refusal, Refusal::Gateway(shared::Refusal::TooLarge(_))) {
            self.metrics.too_large();
        }
        if refusal.is_unverified() {
            // An arbitrary path of a client must not become a label.
            let known = v2::manager_of(path).is_some_and(|manager| self.intake.is_manager(manager));
            self.metrics.unverified(known.then_some(path));
        }
    }

    /// Returns manager and caller of a request.
    fn caller<'a>(&self, parts: &'a Parts, peer: &Peer, now: Now) -> Result<(&'a str, Caller), Refusal> {
        let manager = self.check_head(parts)?;
        Ok((manager, self.callers.caller(peer, &parts.headers, now.unix)?))
    }

    async fn process<B>(&self, manager: &str, caller: &Caller, body: Pin<&mut B>, now: Now) -> Result<(), Refusal>
    where
        B: Body<Data = Bytes> + Send,
    {
        if self.revocations.covers_leaf(&caller.runtime, &caller.fingerprint) {
            return Err(shared::Refusal::Revoked.into());
        }
        let event = self.event(manager, caller, body, now).await?;
        // By now the permit of the runtime and the budget are released, however long the manager takes.
        Ok(self.intake.take(manager, caller, event).await?)
    }

    async fn event<B>(&self, manager: &str, caller: &Caller, body: Pin<&mut B>, now: Now) -> Result<Event, Refusal>
    where
        B: Body<Data = Bytes> + Send,
    {
        let permit = self.limiter.acquire(&caller.runtime, now)?;
        if !self.intake.is_manager(manager) {
            let is_early = self.intake.is_starting(&caller.runtime);
            return Err(if is_early { IntakeError::NotSynced.into() } else { Refusal::Manager });
        }
        let mut charge = permit.body_charge();
        let reading = self.budget.read(body, self.max_body, &mut charge.bytes);
        let body = timeout(self.body_deadline, reading).await.map_err(|_| shared::Refusal::BodyTimeout)??;
        Ok(Event::parse(&body).map_err(|_| shared::Refusal::Malformed)?)
    }

    /// Checks the head before authentication, and returns the manager. Like the incumbent it ignores content type and
    /// query.
    fn check_head<'a>(&self, parts: &'a Parts) -> Result<&'a str, Refusal> {
        let manager = v2::manager_of(parts.uri.path()).ok_or(shared::Refusal::Route)?;
        head::check_length(&parts.headers, self.max_body)?;
        if parts.method != Method::POST {
            return Err(shared::Refusal::Method.into());
        }
        Ok(manager)
    }
}

impl<T: V2Intake> Service for V2Handler<T> {
    type Peer = Peer;

    fn identify(&self, chain: &[CertificateDer<'_>], _: Option<SocketAddr>) -> Peer {
        self.callers.identify(chain.first())
    }

    async fn handle(&self, request: Request<Incoming>, peer: &Peer) -> (HttpResponse, bool) {
        Self::handle(self, request, peer).await
    }

    fn owner<'a>(&self, peer: &'a Peer) -> Owner<'a> {
        match &peer.0 {
            PeerKind::Runtime(caller) => Owner::Runtime(&caller.runtime, &caller.fingerprint),
            PeerKind::Proxy => Owner::Shared,
            PeerKind::Rejected(_) => Owner::Unidentified,
        }
    }

    fn is_unknown(&self, runtime: &RuntimeId) -> bool {
        self.intake.is_unknown(runtime)
    }

    fn limiter(&self) -> Option<&RequestLimiter> {
        Some(&self.limiter)
    }
}
