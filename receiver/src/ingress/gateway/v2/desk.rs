//! One request of v2, from its head to its answer.

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
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

use super::{
    Metrics,
    caller::{Callers, Peer, Who},
    refusal::Refusal,
    take::{NotTaken, Take},
};
use crate::ingress::enrolment::Revocations;
use crate::ingress::gateway::{
    self, Now, Settings,
    body::{Budget, discard},
    connection::{Holder, Service},
    head,
    peers::Peers,
    refusal::{self as shared, Answer},
};

/// The route as the gateway's metrics name it.
const ROUTE: &str = "v2";

/// What all connections of v2 share.
pub struct Desk<T> {
    take: T,
    callers: Callers,
    max_body: usize,
    body_deadline: Duration,
    peers: Arc<Peers>,
    revocations: Revocations,
    budget: Budget,
    metrics: Metrics,
    shared: gateway::Metrics,
}

/// In flight until dropped, also when the connection ends first.
struct Pending<'a>(&'a Metrics, Now, bool);

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        let Self(metrics, begun, failed) = self;
        metrics.ended(Now::read().instant.saturating_duration_since(begun.instant), *failed);
    }
}

impl<T: Take> Desk<T> {
    pub(super) fn new(
        settings: &Settings,
        callers: Callers,
        take: T,
        metrics: Metrics,
        shared: gateway::Metrics,
    ) -> Self {
        Self {
            take,
            callers,
            max_body: settings.max_body,
            body_deadline: settings.body_deadline,
            peers: Peers::new(settings.limits),
            revocations: settings.revocations.clone(),
            budget: Budget::new(settings.body_budget),
            metrics,
            shared,
        }
    }

    /// Answers one request, and tells whether the connection has no more to say.
    pub(super) async fn answer<B>(&self, request: Request<B>, peer: &Peer) -> (Answer, bool)
    where
        B: Body<Data = Bytes> + Send,
    {
        let begun = Now::read();
        let (parts, body) = request.into_parts();
        self.shared.request_begun(ROUTE);
        self.metrics.begun();
        let mut pending = Pending(&self.metrics, begun, true);
        let announced = body.size_hint().lower();
        let mut body = pin!(body);
        let caller = self.caller(&parts, peer, begun);
        let result = match &caller {
            Ok((manager, caller)) => self.judge(manager, caller, body.as_mut(), begun).await,
            Err(refusal) => Err(*refusal),
        };
        let ended = Now::read();
        let refused = result.as_ref().err().map(|refusal| refusal.label());
        self.shared.request_ended(ROUTE, ended.instant.saturating_duration_since(begun.instant), refused);
        match result {
            Ok(()) => {
                pending.2 = false;
                (Response::new(Full::default()), false)
            }
            Err(mut refusal) => {
                let is_slow = refusal == Refusal::Gateway(shared::Refusal::Slow);
                let rest = discard(&parts, body, announced, is_slow).await;
                if let (Refusal::Gateway(shared), Ok((_, caller)), true) = (&mut refusal, &caller, rest.bytes > 0) {
                    *shared = shared.dearer_by(self.peers.charge(&caller.runtime, rest.bytes, Now::read()));
                }
                self.count(refusal, parts.uri.path());
                tracing::debug!(route = ROUTE, reason = refusal.label(), "Request refused");
                (refusal.answer(ended.unix), rest.is_over || matches!(peer.0, Who::Nobody(_)))
            }
        }
    }

    fn count(&self, refusal: Refusal, path: &str) {
        if matches!(refusal, Refusal::Gateway(shared::Refusal::TooLarge(_))) {
            self.metrics.too_large();
        }
        if refusal.is_unverified() {
            // A path of anybody's choosing is no label.
            let known = v2::manager_of(path).is_some_and(|manager| self.take.is_manager(manager));
            self.metrics.unverified(known.then_some(path));
        }
    }

    /// For whom a request is, and who makes it.
    fn caller<'a>(&self, parts: &'a Parts, peer: &Peer, now: Now) -> Result<(&'a str, Caller), Refusal> {
        let manager = self.head(parts)?;
        Ok((manager, self.callers.caller(peer, &parts.headers, now.unix)?))
    }

    async fn judge<B>(&self, manager: &str, caller: &Caller, body: Pin<&mut B>, now: Now) -> Result<(), Refusal>
    where
        B: Body<Data = Bytes> + Send,
    {
        if self.revocations.cover_leaf(&caller.runtime, &caller.fingerprint) {
            return Err(shared::Refusal::Revoked.into());
        }
        let event = self.event(manager, caller, body, now).await?;
        // However long the manager takes, neither a place of the runtime's nor any of the budget is held meanwhile.
        Ok(self.take.take(manager, caller, event).await?)
    }

    async fn event<B>(&self, manager: &str, caller: &Caller, body: Pin<&mut B>, now: Now) -> Result<Event, Refusal>
    where
        B: Body<Data = Bytes> + Send,
    {
        let pass = self.peers.enter(&caller.runtime, now)?;
        if !self.take.is_manager(manager) {
            let is_early = self.take.is_starting(&caller.runtime);
            return Err(if is_early { NotTaken::NotSynced.into() } else { Refusal::Manager });
        }
        let mut toll = pass.toll();
        let reading = self.budget.read(body, self.max_body, &mut toll.bytes);
        let body = timeout(self.body_deadline, reading).await.map_err(|_| shared::Refusal::Slow)??;
        Ok(Event::parse(&body).map_err(|_| shared::Refusal::Malformed)?)
    }

    /// What is judged before anybody is asked who they are. Content type and query are none of it: the incumbent never looks.
    fn head<'a>(&self, parts: &'a Parts) -> Result<&'a str, Refusal> {
        let manager = v2::manager_of(parts.uri.path()).ok_or(shared::Refusal::Route)?;
        head::fits(&parts.headers, self.max_body)?;
        if parts.method != Method::POST {
            return Err(shared::Refusal::Method.into());
        }
        Ok(manager)
    }
}

impl<T: Take> Service for Desk<T> {
    type Peer = Peer;

    fn peer(&self, chain: &[CertificateDer<'_>], _: Option<SocketAddr>) -> Peer {
        self.callers.peer(chain.first())
    }

    fn holder<'a>(&self, peer: &'a Peer) -> Holder<'a> {
        match &peer.0 {
            Who::Runtime(caller) => Holder::One(&caller.runtime),
            Who::Proxy => Holder::Many,
            Who::Nobody(_) => Holder::Nobody,
        }
    }

    fn leaf<'a>(&self, peer: &'a Peer) -> Option<&'a str> {
        if let Who::Runtime(caller) = &peer.0 { Some(&caller.fingerprint) } else { None }
    }

    fn moves(&self) -> Option<watch::Receiver<u64>> {
        Some(self.revocations.watch())
    }

    fn is_out(&self, runtime: &RuntimeId, leaf: Option<&str>) -> bool {
        leaf.is_some_and(|leaf| self.revocations.cover_leaf(runtime, leaf)) || self.take.is_gone(runtime)
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

    async fn answer(&self, request: Request<Incoming>, peer: &Peer) -> (Answer, bool) {
        Desk::answer(self, request, peer).await
    }
}
