//! TLS configuration of the gateway: its certificate, and the client certificates that it requires.

use std::sync::Arc;

use rustls::ServerConfig;
use tidewatch_contract::certificate::{Leaf, fingerprint};
use tidewatch_kit::tls::{self, ClientKind, Identity, TlsConfigError};

use super::TrustBundle;

/// Seconds before notAfter from which a certificate counts as close to expiry, at most: 14 days.
const CLOSE_TO_EXPIRY: i64 = 14 * 86_400;

/// A server's chain and key with the bundle to which clients must chain: validated together, published together.
#[derive(Clone)]
pub struct ServerIdentity {
    /// TLS configuration: TLS 1.3, client certificate required, HTTP/1.1 and HTTP/2 by ALPN.
    pub config: Arc<ServerConfig>,
    /// TLS configuration with the same certificate for clients with a token: TLS 1.3, no client certificate, HTTP/1.1.
    pub(super) for_tokens: Arc<ServerConfig>,
    /// Hex SHA-256 of the server's certificate, for the log.
    pub fingerprint: String,
    validity: Option<(i64, i64)>,
}

impl ServerIdentity {
    /// Builds it from a parsed identity.
    ///
    /// # Errors
    /// [`TlsConfigError`]: also when key and certificate do not belong together. A reload then keeps the last good one.
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

    /// Offers a proxy the ALPN protocols of a connection that carries many clients.
    #[must_use]
    pub fn behind_proxy(mut self) -> Self {
        Arc::make_mut(&mut self.config).alpn_protocols = ClientKind::Proxy.alpn_protocols();
        self
    }

    /// TLS configuration with the same certificate for agents that enrol: as for clients with a token, with HTTP/2 as well.
    pub fn config_for_enrolment(&self) -> Arc<ServerConfig> {
        let mut config = ServerConfig::clone(&self.for_tokens);
        config.alpn_protocols = ClientKind::Agents.alpn_protocols();
        Arc::new(config)
    }

    /// notAfter of the server's certificate in Unix seconds; `None` when its key is not P-256, as may be with a foreign
    /// CA.
    pub fn not_after(&self) -> Option<i64> {
        self.validity.map(|(_, end)| end)
    }

    /// Unix time from which the certificate counts as close to expiry; `None` like [`not_after`](Self::not_after). Two
    /// weeks before notAfter, as with lifecycle-manager; at most a sixth of the validity, because a short-lived certificate
    /// is renewed later than that.
    pub fn close_from(&self) -> Option<i64> {
        self.validity.map(|(begin, end)| end - CLOSE_TO_EXPIRY.min((end - begin) / 6))
    }
}
