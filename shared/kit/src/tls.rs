//! TLS configurations for connections between agent and receiver, built from bytes: TLS 1.3 only, client certificate
//! required, hybrid post-quantum key exchange preferred, no session resumption (a resumed session would bypass
//! revocation and keep an old certificate).

use std::sync::Arc;

use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::Resumption,
    crypto::{CryptoProvider, aws_lc_rs},
    server::{NoClientAuth, NoServerSessionStorage, WebPkiClientVerifier, danger::ClientCertVerifier},
    version::TLS13,
};
use rustls_pki_types::{
    CertificateDer, PrivateKeyDer,
    pem::{self, PemObject},
};
use thiserror::Error;

/// The error of building a configuration.
#[derive(Debug, Error)]
pub enum TlsConfigError {
    /// The certificates are not valid PEM.
    #[error("the certificates are not readable PEM")]
    Certificates(#[source] PemError),
    /// The key is not valid PEM.
    #[error("the key is not readable PEM of PKCS#8, PKCS#1 or SEC1")]
    Key(#[source] PemError),
    /// The chain or the trust bundle contains no certificate.
    #[error("{0} is empty")]
    Empty(&'static str),
    /// A certificate of the trust bundle cannot be a root.
    #[error("a root of the trust bundle is not usable")]
    Root(#[source] rustls::Error),
    /// The verifier of client certificates cannot be built.
    #[error("the client verifier could not be built")]
    Verifier(#[source] rustls::server::VerifierBuilderError),
    /// Key and certificate do not match, or rustls rejects them.
    #[error("certificate and key are not usable together")]
    Pair(#[source] rustls::Error),
}

/// Fault of a PEM text (RFC 7468), without its content: a line may be of any length, and part of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct PemError(&'static str);

impl From<pem::Error> for PemError {
    fn from(error: pem::Error) -> Self {
        Self(match error {
            pem::Error::IllegalSectionStart { .. } => "illegal section start",
            pem::Error::MissingSectionEnd { .. } => "missing section end",
            pem::Error::Base64Decode(_) => "base64 decode error",
            pem::Error::NoItemsFound => "no items found",
            _ => "it cannot be read, or a section is too large",
        })
    }
}

/// A chain, leaf first, with the leaf's key.
#[derive(Debug)]
pub struct Identity {
    /// The certificates, leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    /// The private key of the leaf: PKCS#8, PKCS#1 (RFC 8017) or SEC1 (RFC 5915).
    pub key: PrivateKeyDer<'static>,
}

impl Identity {
    /// Parses a chain and a key from PEM.
    ///
    /// # Errors
    /// [`TlsConfigError`].
    pub fn from_pem(chain: &[u8], key: &[u8]) -> Result<Self, TlsConfigError> {
        let chain = certificates(chain)?;
        if chain.is_empty() {
            return Err(TlsConfigError::Empty("the certificate chain"));
        }
        Ok(Self { chain, key: PrivateKeyDer::from_pem_slice(key).map_err(|error| TlsConfigError::Key(error.into()))? })
    }
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        Self { chain: self.chain.clone(), key: self.key.clone_key() }
    }
}

/// Parses all certificates of a PEM file.
///
/// # Errors
/// [`TlsConfigError::Certificates`].
pub fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsConfigError> {
    CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|error| TlsConfigError::Certificates(error.into()))
}

/// Creates a trust store from a bundle of our own.
///
/// # Errors
/// [`TlsConfigError::Empty`] and [`TlsConfigError::Root`]: one invalid root invalidates the bundle as a whole.
pub fn roots(bundle: &[CertificateDer<'static>]) -> Result<RootCertStore, TlsConfigError> {
    if bundle.is_empty() {
        return Err(TlsConfigError::Empty("the trust bundle"));
    }
    let mut store = RootCertStore::empty();
    store.roots.reserve_exact(bundle.len());
    bundle.iter().try_for_each(|root| store.add(root.clone())).map_err(TlsConfigError::Root)?;
    Ok(store)
}

/// Roots of a bundle that others write.
#[derive(Debug)]
pub struct UsableRoots {
    /// At least one root.
    pub store: RootCertStore,
    /// Number of entries that are not roots: they cannot be decoded or parsed.
    pub skipped: usize,
}

/// Reads the roots of a bundle that others write, such as the roots of a cluster or a registry. As in Go, an entry that is not
/// a root is skipped: it can only be trusted less.
///
/// # Errors
/// The first error of an entry, or [`TlsConfigError::Empty`], if no entry is a root.
pub fn usable_roots(pem: &[u8]) -> Result<UsableRoots, TlsConfigError> {
    let mut store = RootCertStore::empty();
    let mut errors = Vec::new();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let certificate = certificate.map_err(|error| TlsConfigError::Certificates(error.into()));
        errors.extend(certificate.and_then(|root| store.add(root).map_err(TlsConfigError::Root)).err());
    }
    let skipped = errors.len();
    match errors.into_iter().next() {
        Some(error) if store.is_empty() => Err(error),
        None if store.is_empty() => Err(TlsConfigError::Empty("the trust bundle")),
        _ => Ok(UsableRoots { store, skipped }),
    }
}

/// The only crypto provider: passed to the builders here, and installed by `main` for libraries that use the process
/// default.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// A client configuration with a client certificate, or without one for requests that authenticate with a token.
///
/// # Errors
/// [`TlsConfigError::Pair`].
pub fn client(identity: Option<&Identity>, roots: RootCertStore) -> Result<ClientConfig, TlsConfigError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(TlsConfigError::Pair)?
        .with_root_certificates(roots);
    let mut config = match identity {
        Some(Identity { chain, key }) => {
            builder.with_client_auth_cert(chain.clone(), key.clone_key()).map_err(TlsConfigError::Pair)?
        }
        None => builder.with_no_client_auth(),
    };
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// A server configuration without client certificates, for clients that authenticate with a token: HTTP/1.1 only.
///
/// # Errors
/// [`TlsConfigError`].
pub fn server_without_client_auth(identity: &Identity) -> Result<ServerConfig, TlsConfigError> {
    server_config(identity, Arc::new(NoClientAuth), vec![b"http/1.1".to_vec()])
}

/// The kind of clients of a server, which determines its ALPN preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientKind {
    /// Agents: HTTP/1.1. An agent has one request in flight at a time, and over HTTP/1.1 an idle connection of the receiver
    /// has no HTTP buffers.
    Agents,
    /// A proxy: HTTP/2, because HTTP/1.1 would need one connection per request in flight.
    Proxy,
}

impl ClientKind {
    /// The ALPN protocols in order of preference. The server's order decides (RFC 7301, section 3.2).
    pub fn alpn_protocols(self) -> Vec<Vec<u8>> {
        let http1 = b"http/1.1".to_vec();
        let http2 = b"h2".to_vec();
        match self {
            Self::Agents => vec![http1, http2],
            Self::Proxy => vec![http2, http1],
        }
    }
}

/// The receiver's configuration: the handshake requires a client certificate that chains to `roots`. ALPN is that of
/// [`ClientKind::Agents`].
///
/// # Errors
/// [`TlsConfigError`].
pub fn server(identity: &Identity, roots: RootCertStore) -> Result<ServerConfig, TlsConfigError> {
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider())
        .build()
        .map_err(TlsConfigError::Verifier)?;
    server_config(identity, verifier, ClientKind::Agents.alpn_protocols())
}

fn server_config(
    identity: &Identity,
    verifier: Arc<dyn ClientCertVerifier>,
    alpn_protocols: Vec<Vec<u8>>,
) -> Result<ServerConfig, TlsConfigError> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(TlsConfigError::Pair)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(identity.chain.clone(), identity.key.clone_key())
        .map_err(TlsConfigError::Pair)?;
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.alpn_protocols = alpn_protocols;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::{roots as roots_of_ours, *};

    #[test]
    fn error_of_pem_contains_nothing_of_it() {
        let secret = "c2VjcmV0".repeat(1_000);
        for (pem, cause) in [
            (format!("-----BEGIN CERTIFICATE{secret}\n"), "illegal section start"),
            (format!("-----BEGIN CERTIFICATE-----\n{secret}\n"), "missing section end"),
            ("-----BEGIN CERTIFICATE-----\n*secret*\n-----END CERTIFICATE-----\n".to_owned(), "base64 decode error"),
        ] {
            let error = certificates(pem.as_bytes()).unwrap_err();
            assert_eq!(error.source().unwrap().to_string(), cause);
            assert!(!format!("{error:?}").contains("99, 50, 86"), "{cause}");
        }
        let error = Identity::from_pem(b"", b"").map(drop).unwrap_err();
        assert!(matches!(error, TlsConfigError::Empty(_)), "{error:?}");
    }

    #[test]
    fn bundle_of_others_loses_only_what_is_no_root() {
        let root = || rcgen::generate_simple_self_signed(["root".to_owned()]).unwrap().cert.pem();
        let section = |content: &str| format!("-----BEGIN CERTIFICATE-----\n{content}\n-----END CERTIFICATE-----\n");
        for (bundle, count, skipped) in [
            (root(), 1, 0),
            (format!("comment\n{}{}{}", root(), section("AAAA"), root()), 2, 1),
            (format!("{}{}{}", root(), section("*"), root()), 2, 1),
            (format!("{}-----BEGIN CERTIFICATE-----\nAAAA", root()), 1, 1),
        ] {
            let roots = usable_roots(bundle.as_bytes()).unwrap();
            assert_eq!((roots.store.len(), roots.skipped), (count, skipped), "{bundle}");
            let ours = certificates(bundle.as_bytes()).and_then(|certificates| roots_of_ours(&certificates));
            assert_eq!(ours.is_ok(), skipped == 0, "a bundle of our own is exact: {bundle}");
        }
        for bundle in [String::new(), "no PEM".into(), section("AAAA"), section("*")] {
            assert!(usable_roots(bundle.as_bytes()).is_err(), "{bundle}");
        }
    }
}
