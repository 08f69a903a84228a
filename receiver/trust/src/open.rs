//! Opens the certificates at start: reads the files, and reads or fills the CA's Secret.

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use arc_swap::ArcSwap;
use kube::Client;
use rustls_pki_types::ServerName;
use tidewatch_api::identity::TrustDomain;
use tidewatch_kit::last_good::{LastGood, RETRY_READS};
use tokio::sync::watch;

use super::{
    Authority, CertManager, CertificateReloader, Flags, IssuerName, Metrics, Proxy, ProxyIdentity, TlsFlags, TlsState,
    authority::Issuer,
    ca_state::{CaState, Phase, Root},
    reloader::ServerLeaf,
    sources::Sources,
    store::{CaSecret, Store},
    tls_state::CaSecretStatus,
};

/// Parameters of [`open`].
pub struct Setup<'a> {
    /// Flags of the certificates.
    pub flags: &'a Flags,
    /// Files of the event port.
    pub tls: &'a TlsFlags,
    /// Names and addresses under which agents reach this receiver.
    pub names: Vec<ServerName<'static>>,
    /// Trust domain of the runtimes that certificates are issued to.
    pub domain: &'a TrustDomain,
    /// Namespace of the CA's Secret.
    pub namespace: &'a str,
}

/// Reads the files, and reads or fills the CA's Secret. Fails unless all of it is usable. The client must be able
/// to write without a fence: of several replicas that start at once one fills the Secret, and all use it. Their requests to
/// cert-manager do not affect each other.
///
/// # Errors
/// Flags that contradict each other; files or a Secret that are unusable.
pub async fn open(
    setup: Setup<'_>,
    client: Client,
    metrics: Metrics,
) -> anyhow::Result<(TlsState, CertificateReloader)> {
    let Setup { flags, tls, names, domain, namespace } = setup;
    let sources = Sources::new(flags, tls, names)?;
    let now = jiff::Timestamp::now().as_second();
    let mut store = None;
    let mut secret = None;
    if sources.clients.is_none() {
        let new_store = Store::new(client.clone(), flags.ca_namespace(namespace));
        let read = new_store.read_or_fill(|| Ok(CaState::steady(Root::generate(flags.ca_validity, now)?, now))).await;
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
    let issuer = match (&flags.issuer, state) {
        (IssuerName::Builtin, state) => state.map(|state| Issuer::Builtin(ArcSwap::new(state.issuing().ca.clone()))),
        (IssuerName::CertManager { kind, name }, _) => {
            Some(Issuer::CertManager(Box::new(CertManager::new(client, namespace, kind, name))))
        }
    };
    let trust = watch::Sender::new(Arc::new(snapshot.trust.clone()));
    let new_proxy = |identity: &ProxyIdentity| Proxy::new(identity.clone(), snapshot.trust.clients.store()?);
    let proxy = tls.proxy_identity.as_ref().map(new_proxy).transpose()?;
    let authority =
        issuer.map(|issuer| Authority::new(issuer, domain.clone(), flags.certificate_validity, trust.clone()));
    let tls_state = TlsState::new(&snapshot, trust, authority, proxy, metrics);
    tls_state.publish(&snapshot, state)?;
    if let Some(secret) = &secret {
        tls_state.set_secret_status(CaSecretStatus::Good(secret.clone()));
    }
    let reloader = CertificateReloader {
        tls_state: tls_state.clone(),
        sources,
        files: LastGood::new("Certificate files", contents).retrying(RETRY_READS),
        server_leaf,
        secret,
        store,
        server_validity: flags.server_certificate_validity,
        rejected: None,
        unused: None,
    };
    Ok((tls_state, reloader))
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
            CaState::steady(Root::generate(validity, now)?, now)
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
