//! The certificate by which this replica authenticates to the others, as server of the relay port and as its client.
//!
//! Its key stays in memory. The issuer of the agents' certificates issues it as well, under a URI that no agent gets:
//! the built-in CA writes the names itself, and a request to cert-manager that is not for exactly one runtime is refused
//! before it is made. Where agents have their certificates from elsewhere, it comes from files with roots of their own.

pub(super) mod accepted;
mod verifier;

use std::{path::PathBuf, sync::Arc};

use anyhow::Context as _;
use arc_swap::ArcSwap;
use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use rustls::{ClientConfig, RootCertStore, ServerConfig, client::Resumption, version::TLS13};
use rustls_pki_types::UnixTime;
use tidewatch_api::{identity::TrustDomain, replica::ReplicaName};
use tidewatch_contract::certificate::Leaf;
use tidewatch_kit::{
    last_good::{LastGood, RETRY_READS, read_file},
    metric_set,
    metrics::OutcomeLabel,
    tls::{self, Identity, TlsConfigError},
};
use tokio::sync::watch;

use self::{accepted::check, verifier::ReplicaVerifier};
use super::{Authority, Trust, TrustBundle, Verifier, proxy, reloader::check_ticks};

pub use self::{accepted::ReplicaError, verifier::replica_of};

/// Pause after a failed renewal, in seconds.
const RETRY_SECONDS: i64 = 5;

/// Files of a replica's certificate, where another issuer provides it. All are reloaded on change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaFiles {
    /// PEM file with the chain, leaf first. Its only URI names the replica; its usages are those of a client and a server.
    pub certificate: PathBuf,
    /// PEM file with the key.
    pub key: PathBuf,
    /// PEM file with the roots of the certificates of all replicas.
    pub roots: PathBuf,
}

/// Source of the replica's certificate.
pub enum ReplicaSource {
    /// The issuer of the agents' certificates: the built-in CA, or cert-manager.
    Issuer(Authority),
    /// Files.
    Files(ReplicaFiles),
}

metric_set! {
    /// Metrics of the replica's certificate.
    #[derive(Debug)]
    pub struct ReplicaMetrics {
        /// Expiry of the certificate by which this replica authenticates to others, Unix time.
        ends: Gauge = "relay_certificate_end_timestamp_seconds",
        /// Renewals of that certificate, by outcome: issued or failed.
        renewals: Family<OutcomeLabel, Counter> = "relay_certificate_renewals",
    }
}

impl ReplicaMetrics {
    fn renewed(&self, outcome: &'static str) {
        self.renewals.get_or_create(&OutcomeLabel { outcome }).inc();
    }
}

/// TLS of the connections between replicas. Clones share it; [`ReplicaCertificate`] keeps it up to date.
#[derive(Clone)]
pub struct ReplicaTls {
    /// TLS 1.3 and HTTP/2 of the relay port. The handshake requires a client certificate that chains to the roots of the
    /// replicas, and the port ends the connection of one that names no replica: an agent's may chain to the same roots.
    pub server: Arc<ArcSwap<ServerConfig>>,
    client: Arc<ArcSwap<ReplicaClient>>,
    agents: Arc<ArcSwap<Verifier>>,
    replicas: Arc<ArcSwap<Verifier>>,
    domain: TrustDomain,
}

impl ReplicaTls {
    /// Current identity for connections to other replicas; replaced with each renewal and each change of the roots.
    pub fn client(&self) -> Arc<ReplicaClient> {
        self.client.load_full()
    }

    /// Verifier of the agents' certificates that a replica passes on.
    pub fn agents(&self) -> Arc<Verifier> {
        self.agents.load_full()
    }

    /// Verifier of the certificates of other replicas as clients; replaced with each change of their roots.
    pub fn replicas(&self) -> Arc<Verifier> {
        self.replicas.load_full()
    }
}

/// Identity of this replica as a client of others.
pub struct ReplicaClient {
    pub(super) identity: Identity,
    pub(super) roots: Arc<RootCertStore>,
    pub(super) domain: TrustDomain,
}

impl ReplicaClient {
    /// Returns the configuration of connections to exactly this replica.
    pub fn config(&self, replica: &ReplicaName) -> Result<ClientConfig, TlsConfigError> {
        let verifier = ReplicaVerifier::new(self.roots.clone(), self.domain.clone(), replica.clone());
        let chain = self.identity.chain.clone();
        let key = self.identity.key.clone_key();
        let mut config = ClientConfig::builder_with_provider(tls::provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(TlsConfigError::Pair)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_auth_cert(chain, key)
            .map_err(TlsConfigError::Pair)?;
        config.resumption = Resumption::disabled();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }
}

/// Keeps the certificate of this replica: issues it, renews it after two thirds of its life and when the issuing key
/// changes, and follows the roots of a CA rotation.
pub struct ReplicaCertificate {
    name: ReplicaName,
    source: Source,
    trust: watch::Receiver<Arc<Trust>>,
    tls: ReplicaTls,
    current: Current,
    /// No renewal before it, in Unix seconds.
    retry_at: i64,
    metrics: ReplicaMetrics,
}

enum Source {
    Issuer(Authority),
    Files(ReplicaFiles, Box<LastGood<Contents>>),
}

/// Contents of the files: chain, key, roots.
type Contents = [Vec<u8>; 3];

/// Certificate and roots in use.
#[derive(Clone)]
struct Current {
    identity: Identity,
    leaf: Leaf,
    roots: TrustBundle,
    /// Roots of the agents.
    clients: TrustBundle,
    /// Time of the renewal, in Unix seconds.
    renew_at: i64,
}

impl Current {
    fn new(
        identity: Identity,
        roots: TrustBundle,
        clients: TrustBundle,
        name: &ReplicaName,
        domain: &TrustDomain,
    ) -> Result<Self, ReplicaError> {
        let now = UnixTime::now();
        let leaf = check(&identity, name, domain, &roots, now)?;
        let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        let renew_at = now.saturating_add(leaf.not_after.saturating_sub(now) / 3 * 2);
        Ok(Self { identity, leaf, roots, clients, renew_at })
    }

    fn server(&self) -> Result<Arc<ServerConfig>, TlsConfigError> {
        let mut config = tls::server(&self.identity, self.roots.store()?)?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Arc::new(config))
    }

    fn client(&self, domain: &TrustDomain) -> Result<Arc<ReplicaClient>, TlsConfigError> {
        let identity = self.identity.clone();
        let roots = Arc::new(self.roots.store()?);
        Ok(Arc::new(ReplicaClient { identity, roots, domain: domain.clone() }))
    }
}

impl ReplicaCertificate {
    /// Obtains the first certificate. `trust` is the current trust of the receiver, whose clients' roots are those of
    /// the replicas as well unless files provide others. With cert-manager the client of the issuer must be able to
    /// write by now.
    ///
    /// # Errors
    /// The issuer did not issue, or a file is unusable.
    pub async fn open(
        name: ReplicaName,
        domain: TrustDomain,
        source: ReplicaSource,
        mut trust: watch::Receiver<Arc<Trust>>,
        metrics: ReplicaMetrics,
    ) -> anyhow::Result<(ReplicaTls, Self)> {
        let clients = trust.borrow_and_update().clients.clone();
        let (source, identity, roots) = match source {
            ReplicaSource::Issuer(authority) => {
                let issued = authority.issue_replica(&name).await.context("issue the replica's certificate")?;
                (Source::Issuer(authority), issued.identity()?, clients.clone())
            }
            ReplicaSource::Files(files) => {
                let contents = files.read()?;
                let (identity, roots) = parse(&contents)?;
                (
                    Source::Files(
                        files,
                        Box::new(LastGood::new("Files of the replica's certificate", contents).retrying(RETRY_READS)),
                    ),
                    identity,
                    roots,
                )
            }
        };
        let current =
            Current::new(identity, roots, clients, &name, &domain).context("use the replica's certificate")?;
        let verifier = proxy::verifier(current.clients.store()?)?;
        let tls = ReplicaTls {
            server: Arc::new(ArcSwap::new(current.server()?)),
            client: Arc::new(ArcSwap::new(current.client(&domain)?)),
            agents: Arc::new(ArcSwap::from_pointee(verifier)),
            replicas: Arc::new(ArcSwap::from_pointee(proxy::verifier(current.roots.store()?)?)),
            domain,
        };
        metrics.ends.set(current.leaf.not_after);
        Ok((tls.clone(), Self { name, source, trust, tls, current, retry_at: 0, metrics }))
    }

    /// Runs for ever; returns only if the trust ends, which is a fault.
    pub async fn run(mut self) -> &'static str {
        let [mut age, mut poll] = check_ticks();
        loop {
            let now = || jiff::Timestamp::now().as_second();
            tokio::select! {
                changed = self.trust.changed() => {
                    if changed.is_err() {
                        return "trust of the replica's certificate";
                    }
                    self.refresh(now()).await;
                }
                _ = age.tick() => self.refresh(now()).await,
                _ = poll.tick() => self.reload_files(),
            }
        }
    }

    /// Takes changed roots into use, and renews the certificate if it is due.
    pub async fn refresh(&mut self, now: i64) {
        let trust = self.trust.borrow_and_update().clone();
        let is_issued = matches!(self.source, Source::Issuer(_));
        if self.current.clients != trust.clients {
            let clients = trust.clients.clone();
            let roots = if is_issued { clients.clone() } else { self.current.roots.clone() };
            // Also with a certificate that does not chain to them: others have to be accepted.
            if let Err(error) = self.publish(Current { roots, clients, ..self.current.clone() }) {
                tracing::error!(error = format!("{error:#}"), "The roots of the replicas could not be taken into use");
            }
        }
        let Source::Issuer(authority) = &self.source else { return };
        let has_other_issuer = trust.issuer.is_some() && self.current.leaf.authority != trust.issuer;
        let is_due = now >= self.current.renew_at || has_other_issuer || !self.is_accepted();
        if !is_due || now < self.retry_at {
            return;
        }
        let issued = authority.issue_replica(&self.name).await.map_err(anyhow::Error::new);
        let renewed = issued.and_then(|issued| {
            let Current { roots, clients, .. } = self.current.clone();
            let current = Current::new(issued.identity()?, roots, clients, &self.name, &self.tls.domain)?;
            Ok(self.publish(current)?)
        });
        self.metrics.renewed(if renewed.is_ok() { "issued" } else { "failed" });
        if let Err(error) = renewed {
            self.retry_at = now + RETRY_SECONDS;
            tracing::error!(
                error = format!("{error:#}"),
                "The certificate of this replica could not be renewed; the last one stays"
            );
        }
    }

    /// True if the certificate names one of the roots as its issuer, or may chain to one through an intermediate.
    fn is_accepted(&self) -> bool {
        let Current { leaf, roots, identity, .. } = &self.current;
        identity.chain.len() > 1 || leaf.authority.as_ref().is_none_or(|authority| roots.has_authority(authority))
    }

    fn publish(&mut self, current: Current) -> Result<(), TlsConfigError> {
        let server = current.server()?;
        let client = current.client(&self.tls.domain)?;
        if current.clients != self.current.clients {
            self.tls.agents.store(Arc::new(proxy::verifier(current.clients.store()?)?));
        }
        if current.roots != self.current.roots {
            self.tls.replicas.store(Arc::new(proxy::verifier(current.roots.store()?)?));
        }
        self.tls.server.store(server);
        self.tls.client.store(client);
        self.metrics.ends.set(current.leaf.not_after);
        tracing::info!(
            replica = %self.name,
            certificate = current.leaf.fingerprint,
            not_after = current.leaf.not_after,
            trust = current.roots.revision(),
            "The certificate of this replica is in use"
        );
        self.current = current;
        Ok(())
    }

    /// Takes files into use that changed and are valid.
    pub fn reload_files(&mut self) {
        let Source::Files(files, known) = &mut self.source else { return };
        let Some(contents) = known.changed(files.read()) else { return };
        let clients = self.current.clients.clone();
        let current = parse(&contents)
            .and_then(|(identity, roots)| Current::new(identity, roots, clients, &self.name, &self.tls.domain));
        let published =
            current.map_err(anyhow::Error::new).and_then(|current| self.publish(current).map_err(Into::into));
        self.metrics.renewed(if published.is_ok() { "issued" } else { "failed" });
        if let Source::Files(_, known) = &mut self.source {
            known.record(contents, published);
        }
    }
}

impl ReplicaFiles {
    fn read(&self) -> Result<Contents, ReplicaError> {
        Ok([read_file(&self.certificate)?, read_file(&self.key)?, read_file(&self.roots)?])
    }
}

fn parse([chain, key, roots]: &Contents) -> Result<(Identity, TrustBundle), ReplicaError> {
    Ok((Identity::from_pem(chain, key)?, TrustBundle::from_pem(roots)?))
}

#[cfg(test)]
mod tests;
