//! Handles requests of contract v2.

use std::{net::SocketAddr, pin::Pin};

use bytes::Bytes;
use http::{Method, Request, Response, request::Parts};
use http_body::Body;
use http_body_util::Full;
use rustls_pki_types::CertificateDer;
use tidewatch_api::identity::RuntimeId;
use tidewatch_contract::v2::{self, Event};
use tidewatch_fleet::table::PlacementError;
use tokio::time::Instant;

use super::{Metrics, caller::CallerVerifier, intake::V2Intake};
use crate::{
    ports::{
        self, Now, Settings,
        body::BufferedBody,
        head,
        peer::{Peer, Sender},
        refusal::{HttpResponse, Refusal},
        request_limiter::BodyCharge,
        service::{self, Elsewhere, Port, Service},
    },
    relay::RelayedPort,
};

/// Label of this port in the gateway's metrics.
const ROUTE: &str = "v2";

/// State that all connections of this port share.
pub struct V2Handler<T> {
    port: Port,
    intake: T,
    callers: CallerVerifier,
    metrics: Metrics,
}

/// Counts a request in flight until dropped, also when the connection ends first.
struct InFlight<'a> {
    metrics: &'a Metrics,
    begun: Instant,
    is_error: bool,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.metrics.ended(self.begun.elapsed(), self.is_error);
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
        shared: ports::PortMetrics,
    ) -> Self {
        Self { port: Port::new(settings, shared), intake, callers, metrics }
    }

    /// Reads the body of a request within the limits of its runtime, and returns the replica to which it must be relayed.
    async fn body<B: Body<Data = Bytes> + Send>(
        &self,
        manager: &str,
        Sender { certificate, via, .. }: &Sender,
        body: Pin<&mut B>,
        now: Now,
    ) -> Result<(BufferedBody, Option<Elsewhere<'_>>), Refusal> {
        let permit = self.port.limiter.acquire(&certificate.runtime, now)?;
        if !self.intake.is_manager(manager) {
            let is_early = self.intake.is_starting(&certificate.runtime);
            return Err(if is_early { PlacementError::NotSynced.into() } else { Refusal::Manager });
        }
        let elsewhere = self.port.elsewhere(&certificate.runtime, *via)?;
        let mut charge = BodyCharge { permit: &permit, bytes: 0 };
        let limit = self.port.settings.max_body;
        let body = self.port.read_body(body, limit, &mut charge.bytes, Some(&permit)).await?;
        Ok((body, elsewhere))
    }

    /// Checks the head before authentication, and returns the manager. Like lifecycle-manager it ignores content type and
    /// query.
    fn check_head<'a>(&self, parts: &'a Parts) -> Result<&'a str, Refusal> {
        let manager = v2::manager_of(parts.uri.path()).ok_or(Refusal::Route)?;
        head::check_length(&parts.headers, self.port.settings.max_body)?;
        if parts.method != Method::POST {
            return Err(Refusal::Method);
        }
        Ok(manager)
    }
}

impl<T: V2Intake> Service for V2Handler<T> {
    type Client = Sender;

    const CLOSES_REFUSED: bool = false;

    fn port(&self) -> &Port {
        &self.port
    }

    fn identify(&self, chain: &[CertificateDer<'_>], _: Option<SocketAddr>) -> Peer {
        self.callers.identify(chain)
    }

    fn route(_: &str) -> &'static str {
        ROUTE
    }

    fn authenticate(&self, parts: &Parts, peer: &Peer, now: Now) -> Result<Sender, Refusal> {
        self.check_head(parts)?;
        self.callers.sender(peer, &parts.headers, now.unix)
    }

    async fn process<B: Body<Data = Bytes> + Send>(
        &self,
        parts: &Parts,
        body: Pin<&mut B>,
        sender: &Sender,
        now: Now,
    ) -> Result<HttpResponse, Refusal> {
        let caller = &sender.certificate;
        let manager = v2::manager_of(parts.uri.path()).ok_or(Refusal::Route)?;
        if self.port.settings.revocations.covers_leaf(&caller.runtime, &caller.leaf) {
            return Err(Refusal::Revoked);
        }
        let (body, elsewhere) = self.body(manager, sender, body, now).await?;
        if let Some(elsewhere) = elsewhere {
            // Any authority: nothing is signed.
            let authority = elsewhere.holder.name.as_str();
            return self.port.relay(&elsewhere, RelayedPort::V2, parts, authority, sender, body).await;
        }
        let event = Event::parse(&body.bytes).ok_or(Refusal::Malformed)?;
        drop(body);
        // By now the permit of the runtime and the budget are released, however long the manager takes.
        self.intake.take(manager, caller, event).await?;
        Ok(Response::new(Full::default()))
    }

    /// Discarded bytes of a request to an unknown manager are not charged.
    fn charged(sender: &Sender, refusal: Refusal) -> Option<&RuntimeId> {
        (refusal != Refusal::Manager).then_some(&sender.certificate.runtime)
    }

    /// Also counts the refusal as lifecycle-manager does.
    fn record(&self, path: &str, _: Option<&Sender>, refusal: Refusal) {
        if matches!(refusal, Refusal::TooLarge(_)) {
            self.metrics.too_large();
        }
        if matches!(refusal, Refusal::NoCertificate | Refusal::CommonName) {
            // An arbitrary path of a client must not become a label.
            let known = v2::manager_of(path).is_some_and(|manager| self.intake.is_manager(manager));
            self.metrics.unverified(known.then_some(path));
        }
        tracing::debug!(route = ROUTE, reason = refusal.label(), "Request refused");
    }

    fn refuse(&self, refusal: Refusal, _: Option<&RuntimeId>, now: Now) -> HttpResponse {
        refusal.response_as_unavailable(now.unix)
    }

    async fn handle<B: Body<Data = Bytes> + Send>(&self, request: Request<B>, peer: &Peer) -> (HttpResponse, bool) {
        self.metrics.begun();
        let mut in_flight = InFlight { metrics: &self.metrics, begun: Instant::now(), is_error: true };
        let (response, is_last) = service::handle_request(self, request, peer).await;
        in_flight.is_error = !response.status().is_success();
        (response, is_last)
    }
}
