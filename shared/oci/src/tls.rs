//! Connections to the registry: name resolution, proxy, TLS, each new connection within one deadline.

#[cfg(test)]
pub(super) mod tests;

use std::{
    io,
    net::{SocketAddr, ToSocketAddrs as _},
    path::PathBuf,
    sync::Arc,
    time::Duration,
    vec,
};

use bytes::Bytes;
use futures::FutureExt as _;
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
    addresses::AddressRules,
    system_roots::SystemRoots,
    tls::{self, TlsConfigError},
};
use tokio::{net::TcpStream, task::spawn_blocking};
use tower::{BoxError, Service, ServiceExt as _, service_fn, timeout::Timeout, util::BoxCloneSyncService};

use super::fetch::{CONNECT_TIMEOUT, Transport, Transports};

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
/// section 9.3.6). Hosts that only a redirect names are connected to at addresses that `rules` regard as public. A proxy resolves
/// names itself, so that only addresses in URLs are checked before it gets them.
///
/// # Errors
/// [`TlsError::Config`].
pub fn transports(roots: RootCertStore, proxy: Matcher, rules: AddressRules) -> Result<Transports, TlsError> {
    transports_with(roots, proxy, CONNECT_TIMEOUT, rules, Arc::new(system_lookup))
}

/// As [`transports`]; `connect` limits name resolution, TCP, proxy and TLS of a connection, together.
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
        let tcp = |rules| tcp(resolver(lookup.clone(), rules), connect);
        let connector = ProxyConnector { tcp: tcp(rules.clone()), to_proxy: tcp(None), proxy: proxy.clone(), rules };
        let https = HttpsConnectorBuilder::new()
            .with_tls_config(config.clone())
            .https_or_http()
            .enable_http1()
            .wrap_connector(service_fn(move |uri| connector.clone().connect(uri)));
        client(BoxCloneSyncService::new(Timeout::new(https, connect)))
    };
    Ok(Transports { known: pool(None), public: pool(Some(Arc::new(rules))) })
}

/// Creates a pool of connections without TLS, proxy and name resolution, for a server of the own node.
pub fn direct() -> Transport {
    let lookup: Lookup = Arc::new(|_| Err(io::ErrorKind::AddrNotAvailable.into()));
    let connector = tcp(resolver(lookup, None), CONNECT_TIMEOUT);
    client(BoxCloneSyncService::new(Timeout::new(connector, CONNECT_TIMEOUT)))
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
type Resolver = BoxCloneSyncService<Name, vec::IntoIter<SocketAddr>, BoxError>;

fn resolver(lookup: Lookup, rules: Option<Arc<AddressRules>>) -> Resolver {
    Resolver::new(service_fn(move |name| resolve(lookup.clone(), rules.clone(), name)))
}

async fn resolve(
    lookup: Lookup,
    rules: Option<Arc<AddressRules>>,
    name: Name,
) -> Result<vec::IntoIter<SocketAddr>, BoxError> {
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
    async fn connect(self, uri: Uri) -> Result<TokioIo<TcpStream>, BoxError> {
        let bare = |host: &str| host.trim_start_matches('[').trim_end_matches(']').parse().ok();
        if let (Some(rules), Some(address)) = (&self.rules, uri.host().and_then(bare)) {
            rules.check_public(address)?;
        }
        let Some(proxy) = self.proxy.intercept(&uri) else { return Ok(self.tcp.oneshot(uri).boxed().await?) };
        let tunnel = Tunnel::new(proxy.uri().clone(), self.to_proxy);
        let tunnel = match proxy.basic_auth() {
            Some(header) => tunnel.with_auth(header.clone()),
            None => tunnel,
        };
        Ok(tunnel.oneshot(uri).boxed().await?)
    }
}
