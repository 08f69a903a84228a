//! The certificates, trust anchors and issuer that this receiver currently uses.

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use arc_swap::ArcSwap;
use kube::Client;
use rustls::ServerConfig;
use tidewatch_shared::{certificate::KeyId, identity::TrustDomain, tls::TlsConfigError, variant::VariantName as _};
use tokio::sync::watch;

use super::{
    Authority, Ca, CertManager, CertificateReloader, Flags, Metrics, PkiError, Proxy, ProxyIdentity, ServerName,
    TlsFlags, Trust, TrustBundle,
    authority::Issuer,
    ca_state::{CaState, Phase, Root},
    reloader::ServerLeaf,
    sources::{ClientRoots, Sources, TlsSnapshot},
    store::{CaSecret, Store},
};
use crate::base::last_good::LastGood;

/// Common name in the certificate of a root.
const ROOT_NAME: &str = "Tidewatch CA";

/// Parameters of [`TlsState::open`].
pub struct Setup<'a> {
    /// Flags of the certificates.
    pub flags: &'a Flags,
    /// Files of the event port.
    pub tls: &'a TlsFlags,
    /// Names and addresses under which agents reach this receiver.
    pub names: Vec<ServerName>,
    /// Trust domain of the runtimes that certificates are issued to.
    pub domain: &'a TrustDomain,
    /// Namespace of the CA's Secret.
    pub namespace: &'a str,
}

/// Observed status of the CA's Secret.
#[derive(Clone, Debug)]
pub(crate) enum CaSecretStatus {
    /// There is no built-in CA.
    Unused,
    /// The content is in use.
    Good(Arc<CaSecret>),
    /// The Secret is gone; its last content stays in use.
    Lost,
    /// The content is rejected; the last good one stays in use.
    Refused,
}

/// TLS configurations of the ports, current trust, and issuer. Clones share it; [`CertificateReloader`] keeps it up to
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
    /// Reads the files, and reads or fills the CA's Secret. Fails unless all of it is usable. The client must be able
    /// to write before this receiver is active: of several replicas that start at once one fills the Secret, and all
    /// use it. `fenced` writes the requests to cert-manager, which only the active receiver may make.
    ///
    /// # Errors
    /// Flags that contradict each other; files or a Secret that are unusable.
    pub async fn open(
        setup: Setup<'_>,
        client: Client,
        fenced: Client,
        metrics: Metrics,
    ) -> anyhow::Result<(Self, CertificateReloader)> {
        let Setup { flags, tls, names, domain, namespace } = setup;
        let sources = Sources::new(flags, tls, names)?;
        let now = jiff::Timestamp::now().as_second();
        let (mut store, mut secret) = (None, None);
        if sources.clients == ClientRoots::Builtin {
            let new_store = Store::new(client.clone(), flags.ca_namespace(namespace));
            let read =
                new_store.read_or_fill(|| Ok(CaState::steady(generate_root(flags.ca_validity, now)?, now))).await;
            secret = Some(replace_expired(&new_store, read.context("open the CA")?, flags.ca_validity, now).await?);
            store = Some(new_store);
        }
        let contents = sources.read()?;
        let secret = secret.map(Arc::new);
        let state = secret.as_deref().map(|secret| &secret.state);
        let issue = |state| ServerLeaf::issue(state, &sources.names, flags.server_certificate_validity, now);
        let server_leaf = state.filter(|_| sources.server.is_none()).map(issue).transpose();
        let server_leaf = server_leaf.context("issue the receiver's certificate")?;
        let snapshot = sources.combine(&contents, state, server_leaf.as_ref().map(|leaf| &leaf.pem), now)?;
        let issuer = match (&sources.clients, state) {
            (ClientRoots::Builtin, Some(state)) => Some(Issuer::Builtin(ArcSwap::new(state.issuing().ca.clone()))),
            (ClientRoots::CertManager { kind, name, .. }, _) => {
                Some(Issuer::CertManager(Box::new(CertManager::new(fenced, namespace, kind, name))))
            }
            _ => None,
        };
        let trust = watch::Sender::new(Arc::new(snapshot.trust.clone()));
        let new_proxy = |identity: &ProxyIdentity| Proxy::new(identity.clone(), snapshot.trust.clients.store()?);
        let proxy = tls.proxy_identity.as_ref().map(new_proxy).transpose()?;
        let authority =
            issuer.map(|issuer| Authority::new(issuer, domain.clone(), flags.certificate_validity, trust.clone()));
        let tls_state = Self {
            events: Arc::new(ArcSwap::new(snapshot.identity.config.clone())),
            tokens: Arc::new(ArcSwap::new(snapshot.identity.for_tokens.clone())),
            enrolment: Arc::new(ArcSwap::new(snapshot.identity.config_for_enrolment())),
            trust,
            secret_status: watch::Sender::new(CaSecretStatus::Unused),
            authority,
            proxy,
            metrics,
        };
        tls_state.publish(&snapshot, state)?;
        if let Some(secret) = &secret {
            tls_state.set_secret_status(CaSecretStatus::Good(secret.clone()));
        }
        let reloader = CertificateReloader {
            tls_state: tls_state.clone(),
            sources,
            files: LastGood::new("Certificate files", contents).retrying(),
            server_leaf,
            secret,
            store,
            server_validity: flags.server_certificate_validity,
            rejected: None,
            unused: None,
        };
        Ok((tls_state, reloader))
    }

    /// Current trust, and every change of it.
    #[must_use]
    pub fn trust(&self) -> watch::Receiver<Arc<Trust>> {
        self.trust.subscribe()
    }

    pub(crate) fn secret_status(&self) -> watch::Receiver<CaSecretStatus> {
        self.secret_status.subscribe()
    }

    pub(crate) fn set_secret_status(&self, secret_status: CaSecretStatus) {
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

/// Generates a root.
pub(crate) fn generate_root(validity: Duration, now: i64) -> Result<Root, PkiError> {
    Root::new(Ca::generate(ROOT_NAME, now, validity)?).ok_or(PkiError::NotCa)
}

/// Replaces a CA that expired while no receiver ran: it can sign nothing, not even this receiver's certificate. If only the old
/// root of a rotation expired, no valid certificate depends on it, and the new one takes its place.
async fn replace_expired(
    store: &Store,
    mut secret: CaSecret,
    validity: Duration,
    now: i64,
) -> anyhow::Result<CaSecret> {
    while secret.state.root.ca.not_after() <= now {
        tracing::warn!(root = %secret.state.root.id, "The CA has expired; a new one takes its place");
        let next = secret.state.target().clone();
        let new = if secret.state.has_expired(now) {
            CaState::steady(generate_root(validity, now)?, now)
        } else {
            let phase = Phase::Retire { old: secret.state.root.ca.trust_bundle(), leaves_end: now };
            CaState { root: next, phase, since: now, force_after: secret.state.force_after }
        };
        secret = match store.replace(&secret, &new).await? {
            Some(secret) => secret,
            None => store.read_or_fill(|| Ok(new.clone())).await?,
        };
    }
    Ok(secret)
}
