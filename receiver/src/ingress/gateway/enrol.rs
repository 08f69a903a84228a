//! The enrolment port: TLS without client certificates, because whoever comes has none yet. What proves a runtime here is
//! decided by [`Enrolments`]; connections are those of the gateway, with limits of their own, so that a flood here disturbs no event.

mod desk;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use tidewatch_shared::{enrolment::MAX_REQUEST_BYTES, identity::TrustDomain};

pub use desk::Desk;

use super::{Bind, Gateway, Metrics, Settings};
use crate::ingress::enrolment::Enrolments;

/// Bytes of a request's head: a token, and what else stands there.
const MAX_HEAD_BYTES: u32 = 16 << 10;

/// The settings of this port. Nobody stays: an agent comes once, and then uses the event port. When all agents of a large fleet come in one
/// moment, those beyond the connections wait in the system's backlog, or try again with jitter where that is full too.
#[must_use]
pub fn settings(address: SocketAddr, domain: TrustDomain) -> Settings {
    Settings {
        max_connections: 4_096,
        max_handshakes: 256,
        head_deadline: Duration::from_secs(5),
        body_deadline: Duration::from_secs(5),
        // The runtime is asked twice, and then the issuer.
        answer_deadline: Duration::from_secs(40),
        idle: Duration::from_secs(5),
        max_age: Duration::from_secs(60),
        max_head: MAX_HEAD_BYTES,
        max_body: MAX_REQUEST_BYTES,
        body_budget: 16 << 20,
        ..Settings::new(address, Vec::new(), domain)
    }
}

impl Gateway<Desk> {
    /// Listens for those who enrol. `tls` must ask for no client certificate.
    ///
    /// # Errors
    /// [`Bind`].
    pub async fn bind_enrolment(
        settings: Settings,
        tls: Arc<ArcSwap<ServerConfig>>,
        enrolments: Enrolments,
        metrics: Metrics,
    ) -> Result<Self, Bind> {
        let desk = |settings: &Settings| Desk::new(settings, enrolments, metrics.clone());
        Self::listen(settings, tls, desk, metrics.clone()).await
    }
}

#[cfg(test)]
mod tests;
