//! TLS configurations of our own hop, built from bytes: TLS 1.3 only, client certificate required, hybrid post-quantum
//! key exchange first, no session resumption (a resumed session would skip revocation and keep an old certificate).

use std::sync::Arc;

use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::Resumption,
    crypto::{CryptoProvider, aws_lc_rs},
    server::{NoServerSessionStorage, WebPkiClientVerifier},
    version::TLS13,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject};
use thiserror::Error;

/// Why no configuration was built.
#[derive(Debug, Error)]
pub enum TlsConfig {
    /// The PEM file of certificates.
    #[error("the certificates are not readable PEM")]
    Certificates(#[source] rustls_pki_types::pem::Error),
    /// The PEM file of the key.
    #[error("the key is not readable PKCS#8 PEM")]
    Key(#[source] rustls_pki_types::pem::Error),
    /// No certificate in the chain, or none in the trust bundle.
    #[error("{0} is empty")]
    Empty(&'static str),
    /// A certificate of the trust bundle.
    #[error("a root of the trust bundle is not usable")]
    Root(#[source] rustls::Error),
    /// The verifier of client certificates.
    #[error("the client verifier could not be built")]
    Verifier(#[source] rustls::server::VerifierBuilderError),
    /// Key and certificate do not belong together, or rustls refuses them.
    #[error("certificate and key are not usable together")]
    Pair(#[source] rustls::Error),
}

/// A chain, leaf first, with the leaf's key.
#[derive(Debug)]
pub struct Identity {
    /// Leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    /// PKCS#8.
    pub key: PrivatePkcs8KeyDer<'static>,
}

impl Identity {
    /// Reads a chain and a key from PEM.
    ///
    /// # Errors
    /// [`TlsConfig`].
    pub fn from_pem(chain: &[u8], key: &[u8]) -> Result<Self, TlsConfig> {
        let chain = certificates(chain)?;
        if chain.is_empty() {
            return Err(TlsConfig::Empty("the certificate chain"));
        }
        Ok(Self { chain, key: PrivatePkcs8KeyDer::from_pem_slice(key).map_err(TlsConfig::Key)? })
    }

    fn key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(self.key.clone_key())
    }
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        Self { chain: self.chain.clone(), key: self.key.clone_key() }
    }
}

/// Reads all certificates of a PEM file.
///
/// # Errors
/// [`TlsConfig::Certificates`].
pub fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsConfig> {
    CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().map_err(TlsConfig::Certificates)
}

/// Makes a trust store of a bundle.
///
/// # Errors
/// [`TlsConfig::Empty`] and [`TlsConfig::Root`]: a bundle is taken whole or not at all.
pub fn roots(bundle: &[CertificateDer<'static>]) -> Result<RootCertStore, TlsConfig> {
    if bundle.is_empty() {
        return Err(TlsConfig::Empty("the trust bundle"));
    }
    let mut store = RootCertStore::empty();
    bundle.iter().try_for_each(|root| store.add(root.clone())).map_err(TlsConfig::Root)?;
    Ok(store)
}

/// The one crypto provider: passed to builders here, installed by `main` for libraries that ask for the default.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// The agent's side.
///
/// # Errors
/// [`TlsConfig`].
pub fn client(identity: &Identity, roots: RootCertStore) -> Result<ClientConfig, TlsConfig> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(TlsConfig::Pair)?
        .with_root_certificates(roots)
        .with_client_auth_cert(identity.chain.clone(), identity.key())
        .map_err(TlsConfig::Pair)?;
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// A client that shows no certificate, for what is asked with a token.
///
/// # Errors
/// [`TlsConfig`].
pub fn client_without_identity(roots: RootCertStore) -> Result<ClientConfig, TlsConfig> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(TlsConfig::Pair)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// A server that asks for no certificate, because its clients show a token: HTTP/1.1 alone.
///
/// # Errors
/// [`TlsConfig`].
pub fn server_without_clients(identity: &Identity) -> Result<ServerConfig, TlsConfig> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(TlsConfig::Pair)?
        .with_no_client_auth()
        .with_single_cert(identity.chain.clone(), identity.key())
        .map_err(TlsConfig::Pair)?;
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// Whose connections a server takes, which decides what is spoken with those who offer both protocols.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clients {
    /// Agents: HTTP/1.1. An agent has one request at a time, and a quiet connection costs the receiver 7 KiB less than with HTTP/2.
    Agents,
    /// A proxy: HTTP/2, since it needs a connection for each request in flight otherwise.
    Proxy,
}

impl Clients {
    /// What is offered them. The server's order decides (RFC 7301, section 3.2).
    #[must_use]
    pub fn protocols(self) -> Vec<Vec<u8>> {
        let (http1, http2) = (b"http/1.1".to_vec(), b"h2".to_vec());
        match self {
            Self::Agents => vec![http1, http2],
            Self::Proxy => vec![http2, http1],
        }
    }
}

/// The receiver's side: a client certificate that chains to `roots` is required in the handshake. For [`Clients::Agents`].
///
/// # Errors
/// [`TlsConfig`].
pub fn server(identity: &Identity, roots: RootCertStore) -> Result<ServerConfig, TlsConfig> {
    let provider = provider();
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .build()
        .map_err(TlsConfig::Verifier)?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(TlsConfig::Pair)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(identity.chain.clone(), identity.key())
        .map_err(TlsConfig::Pair)?;
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.alpn_protocols = Clients::Agents.protocols();
    Ok(config)
}
