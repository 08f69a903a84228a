//! What the gateway presents and demands.

use std::sync::Arc;

use rustls::ServerConfig;
use tidewatch_shared::{
    certificate::{Leaf, fingerprint},
    tls::{self, ClientKind, Identity, TlsConfigError},
};

use super::TrustBundle;

/// The end of a certificate is close so many seconds before it, at most: 14 days.
const CLOSE: i64 = 14 * 86_400;

/// A server's chain and key with the bundle that clients must chain to: checked together, published together.
#[derive(Clone)]
pub struct ServerIdentity {
    config: Arc<ServerConfig>,
    for_tokens: Arc<ServerConfig>,
    fingerprint: String,
    validity: Option<(i64, i64)>,
}

impl ServerIdentity {
    /// Builds it from PEM bytes.
    ///
    /// # Errors
    /// [`TlsConfigError`]: also when key and certificate do not belong together. Whoever reloads keeps the last good one.
    pub fn from_pem(chain: &[u8], key: &[u8], clients: &TrustBundle) -> Result<Self, TlsConfigError> {
        Self::new(&Identity::from_pem(chain, key)?, clients)
    }

    /// Builds it from what was read.
    ///
    /// # Errors
    /// [`TlsConfigError`].
    pub fn new(identity: &Identity, clients: &TrustBundle) -> Result<Self, TlsConfigError> {
        let config = Arc::new(tls::server(identity, clients.store()?)?);
        let for_tokens = Arc::new(tls::server_without_client_auth(identity)?);
        let leaf = identity.chain.first().ok_or(TlsConfigError::Empty("the certificate chain"))?;
        Ok(Self {
            config,
            for_tokens,
            fingerprint: fingerprint(leaf),
            validity: Leaf::read(leaf).ok().map(|leaf| (leaf.not_before, leaf.not_after)),
        })
    }

    /// The same for a proxy, which speaks for many.
    #[must_use]
    pub fn behind_proxy(mut self) -> Self {
        Arc::make_mut(&mut self.config).alpn_protocols = ClientKind::Proxy.alpn_protocols();
        self
    }

    /// The TLS configuration: TLS 1.3, a client certificate required, HTTP/1.1 and HTTP/2 by ALPN.
    #[must_use]
    pub fn config(&self) -> Arc<ServerConfig> {
        self.config.clone()
    }

    /// The same certificate for clients that show a token: TLS 1.3, no client certificate, HTTP/1.1.
    #[must_use]
    pub fn config_for_tokens(&self) -> Arc<ServerConfig> {
        self.for_tokens.clone()
    }

    /// As [`config_for_tokens`](Self::config_for_tokens), with HTTP/2 as well: for agents that enrol.
    #[must_use]
    pub fn config_for_enrolment(&self) -> Arc<ServerConfig> {
        let mut config = ServerConfig::clone(&self.for_tokens);
        config.alpn_protocols = ClientKind::Agents.alpn_protocols();
        Arc::new(config)
    }

    /// Hex SHA-256 of the server's certificate, for the log.
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// End of the server's certificate in Unix seconds; `None` when its key is not P-256 (a certificate of somebody else's CA).
    #[must_use]
    pub fn not_after(&self) -> Option<i64> {
        self.validity.map(|(_, end)| end)
    }

    /// From when on its end is called close, in Unix seconds; `None` as above. Two weeks before it, as with the incumbent; a certificate of
    /// short life is renewed later than that, so for it no more than a sixth of its life.
    #[must_use]
    pub fn close_from(&self) -> Option<i64> {
        self.validity.map(|(begin, end)| end - CLOSE.min((end - begin) / 6))
    }
}
