//! The certificates, trust anchors and issuer that this receiver currently uses.

use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use tidewatch_contract::certificate::KeyId;
use tidewatch_kit::{tls::TlsConfigError, variant::VariantName as _};
use tokio::sync::watch;

use super::{Authority, Metrics, Proxy, Trust, TrustBundle, ca_state::CaState, sources::TlsSnapshot, store::CaSecret};

/// Observed status of the CA's Secret.
#[derive(Clone, Debug)]
pub enum CaSecretStatus {
    /// There is no built-in CA.
    Unused,
    /// The content is in use.
    Good(Arc<CaSecret>),
    /// The Secret is gone; its last content stays in use.
    Lost,
    /// The content is rejected; the last good one stays in use.
    Refused,
}

/// TLS configurations of the ports, current trust, and issuer. Clones share it; [`CertificateReloader`](crate::CertificateReloader) keeps it up to
/// date.
#[derive(Clone)]
pub struct TlsState {
    /// TLS of the event port: clients must present a certificate of the currently accepted roots.
    pub events: Arc<ArcSwap<ServerConfig>>,
    /// TLS of ports where clients present a token.
    pub tokens: Arc<ArcSwap<ServerConfig>>,
    /// TLS of the enrolment port: no client certificate, HTTP/2 and HTTP/1.1.
    pub enrolment: Arc<ArcSwap<ServerConfig>>,
    /// Issuer of the runtimes' certificates; `None` when agents have their certificates from elsewhere.
    pub authority: Option<Authority>,
    /// The proxy that forwards agents' certificates; its roots follow the current trust.
    pub proxy: Option<Proxy>,
    trust: watch::Sender<Arc<Trust>>,
    secret_status: watch::Sender<CaSecretStatus>,
    pub(super) metrics: Metrics,
}

impl TlsState {
    /// Creates the state that begins with a snapshot, under this trust.
    pub(super) fn new(
        snapshot: &TlsSnapshot,
        trust: watch::Sender<Arc<Trust>>,
        authority: Option<Authority>,
        proxy: Option<Proxy>,
        metrics: Metrics,
    ) -> Self {
        Self {
            events: Arc::new(ArcSwap::new(snapshot.identity.config.clone())),
            tokens: Arc::new(ArcSwap::new(snapshot.identity.for_tokens.clone())),
            enrolment: Arc::new(ArcSwap::new(snapshot.identity.config_for_enrolment())),
            trust,
            secret_status: watch::Sender::new(CaSecretStatus::Unused),
            authority,
            proxy,
            metrics,
        }
    }

    /// Current trust, and every change of it.
    pub fn trust(&self) -> watch::Receiver<Arc<Trust>> {
        self.trust.subscribe()
    }

    /// Status of the CA's Secret, and every change of it.
    pub fn secret_status(&self) -> watch::Receiver<CaSecretStatus> {
        self.secret_status.subscribe()
    }

    /// Publishes the status of the CA's Secret.
    pub fn set_secret_status(&self, secret_status: CaSecretStatus) {
        let is_bad = matches!(secret_status, CaSecretStatus::Lost | CaSecretStatus::Refused);
        self.metrics.secret_good.set((!is_bad).into());
        self.secret_status.send_replace(secret_status);
    }

    /// Publishes a snapshot: first the configurations of the ports, then the trust for its subscribers, then the
    /// issuer.
    pub(super) fn publish(&self, snapshot: &TlsSnapshot, state: Option<&CaState>) -> Result<(), TlsConfigError> {
        let Self { events, tokens, enrolment, trust, authority, proxy, metrics, .. } = self;
        if let Some(proxy) = proxy {
            proxy.trust(snapshot.trust.clients.store()?)?;
        }
        events.store(snapshot.identity.config.clone());
        tokens.store(snapshot.identity.for_tokens.clone());
        enrolment.store(snapshot.identity.config_for_enrolment());
        metrics.set_server_certificate(&snapshot.identity);
        trust.send_if_modified(|published| {
            let is_changed = **published != snapshot.trust;
            if is_changed {
                *published = Arc::new(snapshot.trust.clone());
            }
            is_changed
        });
        if let (Some(state), Some(authority)) = (state, authority) {
            authority.set_ca(state.issuing().ca.clone());
        }
        // At the end of a rotation of the built-in CA the clients' roots contain one that is about to be dropped.
        let clients = state.is_none().then_some(&snapshot.trust.clients);
        let ends = [Some(&snapshot.trust.agents), clients].into_iter().flatten().map(TrustBundle::first_end);
        metrics.root_ends.set(ends.flatten().min().unwrap_or(0));
        tracing::info!(
            certificate = snapshot.identity.fingerprint,
            not_after = snapshot.identity.not_after(),
            agents_trust = snapshot.trust.agents.revision(),
            clients_trust = snapshot.trust.clients.revision(),
            issuer = snapshot.trust.issuer.as_ref().map(KeyId::as_str),
            phase = state.map(|state| state.name().as_str()),
            "Certificates are in use"
        );
        Ok(())
    }
}
