//! A light fake API server: thousands of runtimes behind one port of this process, distinguished by the path prefix in
//! their kubeconfigs.
//!
//! It serves the requests of the receiver and of an agent: discovery, get, list in pages, watch with bookmarks and 410,
//! create, update, merge patch, apply, delete, status subresources, metadata-only forms, and custom resources only
//! while their definition exists. Each runtime signs the tokens of its agent with a key of its own, serves that key and
//! reviews its tokens, so that agents can enrol. It approximates where real API servers would cost too much:
//!
//! * an apply is a merge: field ownership is recorded (`managedFields` names the applier) and never consulted, so
//!   fields that an applier drops stay, and lists are atomic;
//! * nothing is validated, defaulted or authorised beyond the one token;
//! * one version of each kind, no required namespaces, no garbage collection;
//! * a definition is established at once, and a Deployment is available, or without pods if those are to be refused.
//!
//! Texts that objects of many runtimes share (definitions, plans, catalogs) are stored once.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use aws_lc_rs::rand::{SecureRandom as _, SystemRandom};
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use parking_lot::Mutex;
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::{
    ServerConfig,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
    version::TLS13,
};
use tokio::net::TcpListener;

use crate::{control_plane::credentials, proxy::Proxy};

mod calls;
mod cluster;
mod hostile;
mod path;
mod select;
mod serve;
mod store;
mod tokens;
mod watch;

pub use calls::Calls;
pub use cluster::FakeCluster;
pub use serve::Answer;
use store::{RefusedPods, TextPool};

/// See the module. Dropping it ends the server.
pub struct FakeApiServer {
    address: SocketAddr,
    proxy: Option<Proxy>,
    authority: String,
    token: String,
    shared: Arc<Shared>,
    serving: tokio::task::JoinHandle<()>,
}

/// State shared by all runtimes of a fake.
pub(crate) struct Shared {
    clusters: Mutex<HashMap<String, FakeCluster>>,
    texts: Arc<TextPool>,
    authorization: String,
    calls: AtomicU64,
    /// Each connection holds a clone, so the reference count is their number plus one.
    open: Arc<()>,
    delay: Mutex<Duration>,
}

impl FakeApiServer {
    /// Listens on a free port of loopback and serves from now on, on the caller's tokio executor.
    ///
    /// # Errors
    /// When no certificate can be made or no port is free.
    pub async fn start() -> Result<Self> {
        let (tls, authority) = tls().context("make the fake API server's certificate")?;
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.context("listen for the fake API server")?;
        let address = listener.local_addr()?;
        let mut random = [0; 16];
        SystemRandom::new().fill(&mut random).ok().context("draw a token")?;
        let token = BASE64_URL_SAFE_NO_PAD.encode(random);
        let shared = Arc::new(Shared {
            clusters: Mutex::default(),
            texts: Arc::default(),
            authorization: format!("Bearer {token}"),
            calls: AtomicU64::new(0),
            open: Arc::default(),
            delay: Mutex::default(),
        });
        let serving = tokio::spawn(serve::run(listener, tls, shared.clone()));
        Ok(Self { address, proxy: None, authority, token, shared, serving })
    }

    /// As [`FakeApiServer::start`], with a [`Proxy`] in front of it, to which its kubeconfigs lead.
    ///
    /// # Errors
    /// As [`FakeApiServer::start`].
    pub async fn start_behind_proxy() -> Result<Self> {
        let mut this = Self::start().await?;
        this.proxy = Some(Proxy::start(this.address).await.context("start a proxy in front of the fake API server")?);
        Ok(this)
    }

    /// The proxy in front of it, if there is one.
    pub fn proxy(&self) -> Option<&Proxy> {
        self.proxy.as_ref()
    }

    /// The runtime of that name, which is served from the first call on. A name consists of letters, digits, dashes and
    /// dots.
    pub fn cluster(&self, name: &str) -> FakeCluster {
        let mut clusters = self.shared.clusters.lock();
        clusters.entry(name.to_owned()).or_insert_with(|| FakeCluster::new(self.shared.texts.clone())).clone()
    }

    /// A kubeconfig in JSON for the runtime of that name: for an access Secret, and for an agent.
    pub fn kubeconfig(&self, name: &str) -> String {
        let address = self.proxy.as_ref().map_or(self.address, Proxy::address);
        let server = format!("https://{address}/clusters/{name}");
        credentials::kubeconfig("fake", &server, self.authority.as_bytes(), &self.token).to_string()
    }

    /// Refuses the pods of all further Deployments whose specs contain this text, such as the tag of an image, in every
    /// so many of the known runtimes: in the first that has such a Deployment, and so on.
    pub fn refuse_pods(&self, text: &str, every: usize) {
        let runtimes = Arc::default();
        for cluster in self.shared.clusters.lock().values() {
            cluster.write(|store| store.refuse_pods(RefusedPods::new(text, every, Arc::clone(&runtimes))));
        }
    }

    /// Delays every response except the lines of a watch from now on, like a busy API server.
    pub fn set_delay(&self, delay: Duration) {
        *self.shared.delay.lock() = delay;
    }

    /// Requests to all runtimes so far, refused ones included.
    pub fn calls(&self) -> u64 {
        self.shared.calls.load(Ordering::Relaxed)
    }

    /// Open connections to all runtimes.
    pub fn connections(&self) -> usize {
        Arc::strong_count(&self.shared.open) - 1
    }
}

impl Drop for FakeApiServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Shared {
    fn cluster(&self, name: &str) -> Option<FakeCluster> {
        self.clusters.lock().get(name).cloned()
    }

    fn delay(&self) -> Duration {
        *self.delay.lock()
    }
}

/// A server configuration of a new CA, and the CA's certificate in PEM.
fn tls() -> Result<(Arc<ServerConfig>, String)> {
    let authority_key = KeyPair::generate()?;
    let mut params = CertificateParams::new(Vec::<String>::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let authority = params.self_signed(&authority_key)?;
    let key = KeyPair::generate()?;
    let mut leaf = CertificateParams::new(vec!["127.0.0.1".to_owned()])?;
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let leaf = leaf.signed_by(&key, &Issuer::from_params(&params, &authority_key))?;
    let mut config = ServerConfig::builder_with_provider(tidewatch_kit::tls::provider())
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_single_cert(
            vec![leaf.der().clone()],
            PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())),
        )?;
    // Session tickets for thousands of clients that never resume would only cost memory.
    config.send_tls13_tickets = 0;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok((Arc::new(config), authority.pem()))
}

#[cfg(test)]
mod tests;
