//! Builds the client of one runtime: HTTP/2 where the server offers it, over its own connector and response limits.
//!
//! kube's own stack is not used here: it retries every method, reads without limits, opens one HTTP/1.1 connection per
//! call, and cannot check resolved addresses.

use std::{sync::Arc, time::Duration};

use http::HeaderValue;
use hyper_util::{
    client::legacy,
    rt::{TokioExecutor, TokioTimer},
};
use kube::{Client, client::middleware::BaseUriLayer};
use rustls::{ClientConfig, RootCertStore, client::Resumption, crypto::CryptoProvider};
use tidewatch_kit::tls::Identity;
use tower::Layer;

use super::{
    budget::Account,
    connector::{self, AddressGuard, Connector, Protocols},
    kubeconfig::{KubeconfigError, Roots, RuntimeKubeconfig, literal},
    response::{BoundedService, Limits},
    usage::Usage,
};
use crate::leader::WriteFence;

/// Idle connections are closed and idle clients evicted after this: with thousands of quiet runtimes they dominate the
/// memory.
pub(super) const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval and timeout of HTTP/2 pings while a request is pending on a silent connection, so that a broken one fails
/// well before the timeout of the response's head, and leaves the pool.
const PING_INTERVAL: Duration = Duration::from_secs(5);

/// HTTP/2 flow-control windows: bytes that a runtime may send before they are read, per stream and per connection.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 2 << 20;

/// Parts that all clients share.
pub(super) struct ClientParts {
    pub(super) guard: AddressGuard,
    pub(super) limits: Limits,
    pub(super) provider: Arc<CryptoProvider>,
    /// Roots for kubeconfigs without own ones.
    pub(super) public_roots: Arc<RootCertStore>,
    pub(super) fence: WriteFence,
}

/// A client with its usage.
pub(super) struct CachedClient {
    pub(super) client: Client,
    pub(super) usage: Arc<Usage>,
}

/// Builds a client, which connects on its first use; the memory of its responses counts on `account`. Must be called
/// inside a tokio executor, on which it spawns a task.
///
/// # Errors
/// [`KubeconfigError::ForbiddenAddress`], [`KubeconfigError::NoPublicRoots`] and [`KubeconfigError::ClientCertificate`].
pub(super) fn build(
    parts: &ClientParts,
    account: &Account,
    kubeconfig: &RuntimeKubeconfig,
) -> Result<CachedClient, KubeconfigError> {
    let ClientParts { guard, limits, fence, .. } = parts;
    let (connector, authorization) = connector(parts, kubeconfig, Protocols::All)?;
    let client = legacy::Client::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE_TIMEOUT)
        .pool_max_idle_per_host(2)
        .http2_initial_stream_window_size(STREAM_WINDOW)
        .http2_initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keep_alive_interval(PING_INTERVAL)
        .http2_keep_alive_timeout(PING_INTERVAL)
        .build(connector);
    let usage = Arc::new(Usage::new(limits.concurrent));
    let service = BoundedService {
        client,
        authorization,
        usage: usage.clone(),
        limits: *limits,
        account: account.clone(),
        metrics: guard.metrics.clone(),
        fence: fence.clone(),
    };
    guard.metrics.clients.inc();
    Ok(CachedClient {
        client: Client::new(BaseUriLayer::new(kubeconfig.server.clone()).layer(service), "default"),
        usage,
    })
}

/// Builds the connector, and the value of the header `Authorization` if the credentials have a token.
///
/// # Errors
/// [`KubeconfigError::ForbiddenAddress`], [`KubeconfigError::NoPublicRoots`] and [`KubeconfigError::ClientCertificate`].
pub(super) fn connector(
    parts: &ClientParts,
    kubeconfig: &RuntimeKubeconfig,
    protocols: Protocols,
) -> Result<(Connector, Option<HeaderValue>), KubeconfigError> {
    let ClientParts { guard, limits, provider, public_roots, .. } = parts;
    let RuntimeKubeconfig { server, server_name, roots, credentials } = kubeconfig;
    if let Some(address) = literal(server) {
        guard.rules.check(address).map_err(KubeconfigError::ForbiddenAddress)?;
    }
    let roots = match roots {
        Roots::Own(roots) => roots,
        Roots::Public if public_roots.is_empty() => return Err(KubeconfigError::NoPublicRoots),
        Roots::Public => public_roots,
    };
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|_| KubeconfigError::Ca)?
        .with_root_certificates(roots.clone());
    let mut tls = match &credentials.certificate {
        None => builder.with_no_client_auth(),
        Some(Identity { chain, key }) => builder
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(|_| KubeconfigError::ClientCertificate)?,
    };
    // A client is dropped with its credentials, so a resumed session never outlives them.
    tls.resumption = Resumption::in_memory_sessions(4);
    let connector = connector::build(guard.clone(), tls, server_name.clone(), limits.connect, protocols);
    Ok((connector, credentials.authorization.clone()))
}
