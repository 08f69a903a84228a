//! Connections to the registry: name resolution, proxy, TLS, each new connection within one deadline.

#[cfg(test)]
mod tests;

use std::{
    path::PathBuf,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use futures::{FutureExt as _, TryFutureExt as _, future::BoxFuture};
use http::Uri;
use http_body_util::{BodyExt as _, Full};
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::{
    client::{
        legacy::{
            self,
            connect::{HttpConnector, proxy::Tunnel},
        },
        proxy::matcher::Matcher,
    },
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use rustls::{ClientConfig, RootCertStore};
use thiserror::Error;
use tidewatch_shared::tls::{self, TlsConfigError};
use tokio::net::TcpStream;
use tower::{BoxError, Service, ServiceExt as _, timeout::Timeout, util::BoxCloneSyncService};

use super::fetch::Transport;
use crate::base::system_roots::SystemRoots;

/// Lifetime of an idle pooled connection.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Largest accepted CA file, in bytes.
const MAX_CA_BYTES: usize = 4 << 20;

/// Failure to set up the connections.
#[derive(Debug, Error)]
pub enum TlsError {
    /// The CA file cannot be read.
    #[error("read the registry's CA file {path}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// The CA file is not a list of certificates in PEM.
    #[error("the registry's CA file {path} is not usable")]
    Ca {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: TlsConfigError,
    },
    /// The CA file is too large.
    #[error("the registry's CA file {0} is larger than 4 MiB")]
    TooLarge(PathBuf),
    /// rustls refuses the configuration.
    #[error("set up TLS for the registry")]
    Config(#[source] rustls::Error),
}

/// Trusted roots: those of the system, and those of a file.
///
/// # Errors
/// [`TlsError`]. Unreadable roots of the system are logged, because the file may be the only source.
pub fn roots(ca_file: Option<&PathBuf>) -> Result<RootCertStore, TlsError> {
    let mut store = RootCertStore::clone(SystemRoots::load().store());
    if let Some(path) = ca_file {
        let pem = std::fs::read(path).map_err(|source| TlsError::Read { path: path.clone(), source })?;
        if pem.len() > MAX_CA_BYTES {
            return Err(TlsError::TooLarge(path.clone()));
        }
        let own = tls::usable_roots(&pem).map_err(|source| TlsError::Ca { path: path.clone(), source })?;
        if own.skipped > 0 {
            tracing::warn!(skipped = own.skipped, path = %path.display(), "Some certificates of the registry's CA file are no roots");
        }
        store.roots.extend(own.store.roots);
    }
    if store.is_empty() {
        tracing::warn!("No root certificates: only registries on plain HTTP can be reached");
    }
    Ok(store)
}

/// Creates a pool of connections. `proxy` decides which servers are reached through a proxy, by `CONNECT` (RFC 9110,
/// section 9.3.6); `connect` limits name resolution, TCP, proxy and TLS of a connection, together.
///
/// # Errors
/// [`TlsError::Config`].
pub fn transport(roots: RootCertStore, proxy: Matcher, connect: Duration) -> Result<Transport, TlsError> {
    let config = ClientConfig::builder_with_provider(tls::provider())
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Config)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let mut tcp = HttpConnector::new();
    // URIs with the scheme https are given to it, too.
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(connect));
    let connector = ProxyConnector { tcp, proxy: Arc::new(proxy) };
    let https =
        HttpsConnectorBuilder::new().with_tls_config(config).https_or_http().enable_http1().wrap_connector(connector);
    // HTTP/1.1 only: few large responses gain nothing from streams that share a connection.
    let client = legacy::Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(POOL_IDLE_TIMEOUT)
        .pool_max_idle_per_host(4)
        .build::<_, Full<Bytes>>(BoxCloneSyncService::new(Timeout::new(https, connect)));
    let body = |body: hyper::body::Incoming| body.map_err(Into::into).boxed_unsync();
    let service = client.map_response(move |response: http::Response<_>| response.map(body)).map_err(BoxError::from);
    Ok(BoxCloneSyncService::new(service))
}

/// Opens TCP connections, directly or as a tunnel through a proxy.
#[derive(Clone)]
struct ProxyConnector {
    tcp: HttpConnector,
    proxy: Arc<Matcher>,
}

impl Service<Uri> for ProxyConnector {
    type Response = TokioIo<TcpStream>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.tcp.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        match self.proxy.intercept(&uri) {
            None => self.tcp.call(uri).map_err(BoxError::from).boxed(),
            Some(proxy) => {
                let tunnel = Tunnel::new(proxy.uri().clone(), self.tcp.clone());
                let mut tunnel = match proxy.basic_auth() {
                    Some(header) => tunnel.with_auth(header.clone()),
                    None => tunnel,
                };
                tunnel.call(uri).map_err(BoxError::from).boxed()
            }
        }
    }
}
