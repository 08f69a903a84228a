//! Builds the client of one runtime: HTTP/2 where the server offers it, over our own connector and bounds.
//!
//! kube's own stack is not used here: it retries every method, reads without limits, opens one HTTP/1.1 connection per
//! call, and cannot judge resolved addresses.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use hyper_util::{
    client::legacy,
    rt::{TokioExecutor, TokioTimer},
};
use kube::{Client, client::middleware::BaseUriLayer};
use rustls::{ClientConfig, client::Resumption, crypto::CryptoProvider};
use tokio::{sync::Semaphore, time::Instant};
use tower::Layer;

use super::{
    answer::{Bounded, Limits},
    connector::{Connector, Guard},
    kubeconfig::{Credentials, Refusal, RuntimeKubeconfig},
};
use crate::kube::leader::Fence;

/// Idle connections close after this, and idle clients are dropped: with thousands of quiet runtimes they are what costs memory.
pub(super) const IDLE: Duration = Duration::from_secs(30);

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

/// A client, and when it was last of use.
pub(super) struct Built {
    pub(super) client: Client,
    pub(super) usage: Arc<Usage>,
}

/// When something was last asked of a runtime, and whether an answer is still under way.
pub(super) struct Usage {
    pub(super) permits: Arc<Semaphore>,
    concurrent: usize,
    last: Mutex<Instant>,
}

impl Usage {
    fn new(concurrent: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(concurrent)), concurrent, last: Mutex::new(Instant::now()) }
    }

    /// It is of use now.
    pub(super) fn now(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// When something was last asked; `None` while something is under way.
    pub(super) fn rests_since(&self) -> Option<Instant> {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        (self.permits.available_permits() == self.concurrent).then_some(last)
    }
}

/// Builds a client. It connects only when used. Must be called inside a tokio runtime, whose task it starts.
///
/// # Errors
/// [`Refusal::ForbiddenAddress`] and [`Refusal::ClientCertificate`].
pub(super) fn build(parts: &Parts, kubeconfig: &RuntimeKubeconfig) -> Result<Built, Refusal> {
    let Parts { guard, limits, provider, fence } = parts;
    if let Some(address) = kubeconfig.address() {
        guard.rules.check(address).map_err(Refusal::ForbiddenAddress)?;
    }
    let RuntimeKubeconfig { server, server_name, ca, credentials } = kubeconfig;
    let roots = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|_| Refusal::Ca)?
        .with_root_certificates(ca.clone());
    let (mut tls, authorization) = match credentials {
        Credentials::Token(value) => (roots.with_no_client_auth(), Some(value.clone())),
        Credentials::Certificate(chain, key) => {
            let paired = roots.with_client_auth_cert(chain.clone(), key.clone_key());
            (paired.map_err(|_| Refusal::ClientCertificate)?, None)
        }
    };
    // A client lives as long as its credentials, so a resumed session never outlives them.
    tls.resumption = Resumption::in_memory_sessions(4);
    let connector = Connector::new(guard.clone(), tls, server_name.clone(), limits.connect);
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
    let usage = Arc::new(Usage::new(limits.concurrent));
    let bounded = Bounded {
        client,
        authorization,
        usage: usage.clone(),
        limits: *limits,
        metrics: guard.metrics.clone(),
        fence: fence.clone(),
    };
    guard.metrics.client_built();
    Ok(Built { client: Client::new(BaseUriLayer::new(server.clone()).layer(bounded), "default"), usage })
}
