//! What the gateway presents and demands.

use std::sync::Arc;

use rustls::ServerConfig;
use tidewatch_shared::{
    certificate::{Leaf, fingerprint},
    tls::{self, Identity, TlsConfig},
};

use super::TrustBundle;

/// A server's chain and key with the bundle that clients must chain to: checked together, published together.
#[derive(Clone)]
pub struct ServerIdentity {
    config: Arc<ServerConfig>,
    for_tokens: Arc<ServerConfig>,
    fingerprint: String,
    not_after: Option<i64>,
    trust_revision: String,
}

impl ServerIdentity {
    /// Builds it from PEM bytes.
    ///
    /// # Errors
    /// [`TlsConfig`]: also when key and certificate do not belong together. Whoever reloads keeps the last good one.
    pub fn from_pem(chain: &[u8], key: &[u8], clients: &TrustBundle) -> Result<Self, TlsConfig> {
        Self::new(&Identity::from_pem(chain, key)?, clients)
    }

    /// Builds it from PEM bytes for a port behind a proxy: whoever connects must chain to the roots of the proxy, but the
    /// revision is that of the agents' roots.
    ///
    /// # Errors
    /// [`TlsConfig`].
    pub fn behind(chain: &[u8], key: &[u8], proxy: &TrustBundle, clients: &TrustBundle) -> Result<Self, TlsConfig> {
        let server = Self::from_pem(chain, key, proxy)?;
        Ok(Self { trust_revision: clients.revision().to_owned(), ..server })
    }

    /// Builds it from what was read.
    ///
    /// # Errors
    /// [`TlsConfig`].
    pub fn new(identity: &Identity, clients: &TrustBundle) -> Result<Self, TlsConfig> {
        let config = Arc::new(tls::server(identity, clients.store()?)?);
        let for_tokens = Arc::new(tls::server_without_clients(identity)?);
        let leaf = identity.chain.first().ok_or(TlsConfig::Empty("the certificate chain"))?;
        Ok(Self {
            config,
            for_tokens,
            fingerprint: fingerprint(leaf),
            not_after: Leaf::read(leaf).ok().map(|leaf| leaf.not_after),
            trust_revision: clients.revision().to_owned(),
        })
    }

    /// The TLS configuration: TLS 1.3, a client certificate required, HTTP/2 and HTTP/1.1 by ALPN.
    #[must_use]
    pub fn config(&self) -> Arc<ServerConfig> {
        self.config.clone()
    }

    /// The same certificate for clients that show a token: TLS 1.3, no client certificate, HTTP/1.1.
    #[must_use]
    pub fn config_for_tokens(&self) -> Arc<ServerConfig> {
        self.for_tokens.clone()
    }

    /// Hex SHA-256 of the server's certificate, for the log.
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// End of the server's certificate in Unix seconds; `None` when its key is not P-256 (a certificate of somebody else's CA).
    #[must_use]
    pub fn not_after(&self) -> Option<i64> {
        self.not_after
    }

    /// Revision of the bundle that agents must chain to.
    #[must_use]
    pub fn trust_revision(&self) -> &str {
        &self.trust_revision
    }
}
