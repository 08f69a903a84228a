//! Builds the client of one runtime: HTTP/2 where the server offers it, over our own connector and bounds.
//!
//! kube's own stack is not used here: it retries every method, reads without limits, opens one HTTP/1.1 connection per
//! call, and cannot judge resolved addresses.

use std::{sync::Arc, time::Duration};

use hyper_util::{
    client::legacy,
    rt::{TokioExecutor, TokioTimer},
};
use kube::{Client, client::middleware::BaseUriLayer};
use rustls::{ClientConfig, client::Resumption, crypto::CryptoProvider};
use tokio::sync::Semaphore;
use tower::Layer;

use super::{
    answer::{Bounded, Limits},
    connector::{Connector, Guard},
    kubeconfig::{Credentials, Refusal, RuntimeKubeconfig},
};
use crate::active::Fence;

/// Idle connections close after this; with thousands of quiet runtimes they are what costs memory.
const IDLE: Duration = Duration::from_secs(60);

/// While a request waits, a silent HTTP/2 connection is asked whether it lives, so that one whose path was lost fails well
/// before the head's deadline and leaves the pool.
const PING: Duration = Duration::from_secs(5);

/// What one runtime may have under way towards us, in bytes, before we have read it.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 2 << 20;

/// What all clients share.
pub(super) struct Parts {
    pub(super) guard: Guard,
    pub(super) limits: Limits,
    pub(super) provider: Arc<CryptoProvider>,
    pub(super) fence: Fence,
}

/// Builds a client. It connects only when used. Must be called inside a tokio runtime, whose task it starts.
///
/// # Errors
/// [`Refusal::ForbiddenAddress`] and [`Refusal::ClientCertificate`].
pub(super) fn build(parts: &Parts, kubeconfig: RuntimeKubeconfig) -> Result<Client, Refusal> {
    let Parts { guard, limits, provider, fence } = parts;
    if let Some(address) = kubeconfig.address() {
        guard.rules.check(address).map_err(Refusal::ForbiddenAddress)?;
    }
    let RuntimeKubeconfig { server, server_name, ca, credentials } = kubeconfig;
    let roots = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|_| Refusal::Ca)?
        .with_root_certificates(ca);
    let (mut tls, authorization) = match credentials {
        Credentials::Token(value) => (roots.with_no_client_auth(), Some(value)),
        Credentials::Certificate(chain, key) => {
            (roots.with_client_auth_cert(chain, key).map_err(|_| Refusal::ClientCertificate)?, None)
        }
    };
    // A client lives as long as its credentials, so a resumed session never outlives them.
    tls.resumption = Resumption::in_memory_sessions(4);
    let connector = Connector::new(guard.clone(), tls, server_name, limits.connect);
    let client = legacy::Client::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE)
        .pool_max_idle_per_host(2)
        .http2_initial_stream_window_size(STREAM_WINDOW)
        .http2_initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keep_alive_interval(PING)
        .http2_keep_alive_timeout(PING)
        .build(connector);
    let bounded = Bounded {
        client,
        authorization,
        permits: Arc::new(Semaphore::new(limits.concurrent)),
        limits: *limits,
        metrics: guard.metrics.clone(),
        fence: fence.clone(),
    };
    guard.metrics.client_built();
    Ok(Client::new(BaseUriLayer::new(server).layer(bounded), "default"))
}
