//! Connections to the registry: name resolution, proxy, TLS, each new connection within one deadline.

#[cfg(test)]
pub(super) mod tests;

use std::{
    future, io,
    net::{SocketAddr, ToSocketAddrs as _},
    path::PathBuf,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
    vec,
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
            connect::{Connection, HttpConnector, dns::Name, proxy::Tunnel},
        },
        proxy::matcher::Matcher,
    },
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use rustls::{ClientConfig, RootCertStore};
use thiserror::Error;
use tidewatch_kit::{
    addresses::{AddressRules, ForbiddenAddressError},
    system_roots::SystemRoots,
    tls::{self, TlsConfigError},
};
use tokio::{net::TcpStream, task::spawn_blocking};
use tower::{BoxError, Service, ServiceExt as _, timeout::Timeout, util::BoxCloneSyncService};

use super::fetch::{Transport, Transports};

/// Lifetime of an idle pooled connection.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Addresses of one name that are tried; thousands would make one connect take for ever.
const MAX_ADDRESSES: usize = 8;
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

/// Creates pools of connections. `proxy` decides which servers are reached through a proxy, by `CONNECT` (RFC 9110,
/// section 9.3.6); `connect` limits name resolution, TCP, proxy and TLS of a connection, together. Hosts that only a
/// redirect names are connected to at addresses that `rules` regard as public. A proxy resolves names itself, so that
/// only addresses in URLs are checked before it gets them.
///
/// # Errors
/// [`TlsError::Config`].
pub fn transports(
    roots: RootCertStore,
    proxy: Matcher,
    connect: Duration,
    rules: AddressRules,
) -> Result<Transports, TlsError> {
    transports_with(roots, proxy, connect, rules, Arc::new(system_lookup))
}

pub(super) fn transports_with(
    roots: RootCertStore,
    proxy: Matcher,
    connect: Duration,
    rules: AddressRules,
    lookup: Lookup,
) -> Result<Transports, TlsError> {
    let config = ClientConfig::builder_with_provider(tls::provider())
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Config)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let proxy = Arc::new(proxy);
    let pool = |rules: Option<Arc<AddressRules>>| {
        let resolver = |rules| tcp(Resolver { lookup: lookup.clone(), rules }, connect);
        let connector =
            ProxyConnector { tcp: resolver(rules.clone()), to_proxy: resolver(None), proxy: proxy.clone(), rules };
        let https = HttpsConnectorBuilder::new()
            .with_tls_config(config.clone())
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        client(BoxCloneSyncService::new(Timeout::new(https, connect)))
    };
    Ok(Transports { known: pool(None), public: pool(Some(Arc::new(rules))) })
}

/// Creates a pool of connections without TLS, proxy and name resolution, for a server of the own node.
#[must_use]
pub fn direct(connect: Duration) -> Transport {
    let lookup: Lookup = Arc::new(|_| Err(io::ErrorKind::AddrNotAvailable.into()));
    let connector = tcp(Resolver { lookup, rules: None }, connect);
    client(BoxCloneSyncService::new(Timeout::new(connector, connect)))
}

fn tcp(resolver: Resolver, connect: Duration) -> HttpConnector<Resolver> {
    let mut tcp = HttpConnector::new_with_resolver(resolver);
    // URIs with the scheme https are given to it, too.
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(connect));
    tcp
}

/// HTTP/1.1 only: few large responses gain nothing from streams that share a connection.
fn client<C>(connector: C) -> Transport
where
    C: Service<Uri, Error = BoxError, Future: Send + Unpin> + Clone + Send + Sync + 'static,
    C::Response: hyper::rt::Read + hyper::rt::Write + Connection + Send + Unpin + 'static,
{
    let client = legacy::Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(POOL_IDLE_TIMEOUT)
        .pool_max_idle_per_host(4)
        .build::<_, Full<Bytes>>(connector);
    let body = |body: hyper::body::Incoming| body.map_err(Into::into).boxed_unsync();
    let service = client.map_response(move |response: http::Response<_>| response.map(body)).map_err(BoxError::from);
    BoxCloneSyncService::new(service)
}

/// Looks up the addresses of a name; may block.
pub(super) type Lookup = Arc<dyn Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync>;

fn system_lookup(name: &str) -> io::Result<Vec<SocketAddr>> {
    Ok((name, 0).to_socket_addrs()?.take(MAX_ADDRESSES).collect())
}

/// Resolves names, with rules to public addresses only.
#[derive(Clone)]
struct Resolver {
    lookup: Lookup,
    rules: Option<Arc<AddressRules>>,
}

impl Service<Name> for Resolver {
    type Response = vec::IntoIter<SocketAddr>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let Self { lookup, rules } = self.clone();
        async move {
            let found = spawn_blocking(move || lookup(name.as_str())).await??;
            let Some(rules) = rules else { return Ok(found.into_iter()) };
            let mut refused = None;
            let mut permitted = Vec::new();
            for address in found {
                match rules.check_public(address.ip()) {
                    Ok(()) => permitted.push(address),
                    Err(forbidden) => refused = Some(forbidden),
                }
            }
            match refused {
                Some(forbidden) if permitted.is_empty() => Err(forbidden.into()),
                _ => Ok(permitted.into_iter()),
            }
        }
        .boxed()
    }
}

/// Opens TCP connections, directly or as a tunnel through a proxy.
#[derive(Clone)]
struct ProxyConnector {
    tcp: HttpConnector<Resolver>,
    /// Connects to the proxy, whose address is the operator's choice.
    to_proxy: HttpConnector<Resolver>,
    proxy: Arc<Matcher>,
    /// Rules for addresses in URLs, which are not resolved.
    rules: Option<Arc<AddressRules>>,
}

impl ProxyConnector {
    fn check(&self, uri: &Uri) -> Result<(), ForbiddenAddressError> {
        let bare = |host: &str| host.trim_start_matches('[').trim_end_matches(']').parse().ok();
        match (&self.rules, uri.host().and_then(bare)) {
            (Some(rules), Some(address)) => rules.check_public(address),
            _ => Ok(()),
        }
    }
}

impl Service<Uri> for ProxyConnector {
    type Response = TokioIo<TcpStream>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.tcp.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        if let Err(forbidden) = self.check(&uri) {
            return future::ready(Err(forbidden.into())).boxed();
        }
        match self.proxy.intercept(&uri) {
            None => self.tcp.call(uri).map_err(BoxError::from).boxed(),
            Some(proxy) => {
                let tunnel = Tunnel::new(proxy.uri().clone(), self.to_proxy.clone());
                let mut tunnel = match proxy.basic_auth() {
                    Some(header) => tunnel.with_auth(header.clone()),
                    None => tunnel,
                };
                tunnel.call(uri).map_err(BoxError::from).boxed()
            }
        }
    }
}
