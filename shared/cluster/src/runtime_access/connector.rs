//! Connects to a runtime: resolves its name, refuses forbidden addresses, and only then opens TCP and TLS.
//!
//! The resolved address is checked, and the connection goes to exactly that address, so DNS rebinding cannot lead it
//! elsewhere. One deadline covers all parts of connecting.

use std::{
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::Arc,
    time::Duration,
    vec,
};

use futures::FutureExt as _;
use http::Uri;
use hyper_rustls::{FixedServerNameResolver, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::connect::{HttpConnector, dns::Name},
    rt::TokioIo,
};
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use thiserror::Error;
use tidewatch_kit::{metrics::ReasonLabel, variant::VariantName as _};
use tokio::{sync::Semaphore, task::spawn_blocking, time::timeout};
use tower::{BoxError, ServiceExt as _, service_fn, util::BoxCloneSyncService};

use super::{
    Metrics,
    addresses::{AddressRules, ForbiddenAddressError},
    kubeconfig::literal,
    limited_stream::LimitedStream,
};

/// Limit of addresses of one name that are tried; thousands would make one connect take for ever.
const MAX_ADDRESSES: usize = 8;

/// Concurrent lookups of one runtime. A lookup occupies a thread until the system's resolver gives up, even when the
/// caller is gone: one runtime with a silent name server must not occupy all of them.
const MAX_LOOKUPS: usize = 2;

/// TCP keepalive, which detects dead peers after about twice this time even when nothing is sent.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// Failure to connect; a [`ForbiddenAddressError`] is an error of its own.
#[derive(Debug, Error)]
pub(super) enum ConnectError {
    #[error("the runtime's name `{0}` could not be resolved")]
    Resolve(String, #[source] io::Error),
    #[error("the runtime's name `{0}` has no address")]
    NoAddress(String),
    #[error("the resolver has stopped")]
    ResolverStopped,
    #[error("no connection to the runtime within {0:?}")]
    Timeout(Duration),
}

/// Checks addresses and counts refusals.
#[derive(Clone)]
pub(super) struct AddressGuard {
    pub(super) rules: Arc<AddressRules>,
    pub(super) metrics: Metrics,
}

impl AddressGuard {
    fn check(&self, address: IpAddr) -> Result<(), ForbiddenAddressError> {
        self.rules.check(address).inspect_err(|forbidden| {
            self.metrics.forbidden.get_or_create(&ReasonLabel { reason: forbidden.reason.as_str() }).inc();
        })
    }
}

/// Resolves names to allowed addresses only.
type Resolver = BoxCloneSyncService<Name, vec::IntoIter<SocketAddr>, BoxError>;

async fn resolve(
    guard: AddressGuard,
    lookups: Arc<Semaphore>,
    name: Name,
) -> Result<vec::IntoIter<SocketAddr>, BoxError> {
    let permit = lookups.acquire_owned().await.map_err(|_| ConnectError::ResolverStopped)?;
    let host = name.to_string();
    let queried = host.clone();
    let found = spawn_blocking(move || {
        let _permit = permit;
        (&*queried, 0).to_socket_addrs().map(|found| found.take(MAX_ADDRESSES).collect::<Vec<_>>())
    });
    let found =
        found.await.map_err(|_| ConnectError::ResolverStopped)?.map_err(|e| ConnectError::Resolve(host.clone(), e))?;
    Ok(allowed(&guard, &host, found)?.into_iter())
}

/// Keeps the allowed addresses; if none is left, returns the first refusal.
fn allowed(guard: &AddressGuard, host: &str, found: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, BoxError> {
    let (accepted, refused): (Vec<_>, Vec<_>) =
        found.into_iter().map(|to| guard.check(to.ip()).map(|()| to)).partition(Result::is_ok);
    match refused.into_iter().find_map(Result::err) {
        Some(forbidden) if accepted.is_empty() => Err(forbidden.into()),
        None if accepted.is_empty() => Err(ConnectError::NoAddress(host.to_owned()).into()),
        _ => Ok(accepted.into_iter().flatten().collect()),
    }
}

/// HTTP versions that a connector offers in ALPN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocols {
    /// HTTP/2 and HTTP/1.1.
    All,
    /// HTTP/1.1 only, as an upgrade to WebSocket requires.
    Http1,
}

/// Connector to one runtime.
pub(super) type Connector = BoxCloneSyncService<Uri, TokioIo<LimitedStream>, BoxError>;

/// Builds a connector; `deadline` covers name resolution, TCP and TLS together.
pub(super) fn build(
    guard: AddressGuard,
    tls: ClientConfig,
    name: ServerName<'static>,
    deadline: Duration,
    protocols: Protocols,
) -> Connector {
    let checked = guard.clone();
    let lookups = Arc::new(Semaphore::new(MAX_LOOKUPS));
    let resolve = service_fn(move |name| resolve(checked.clone(), lookups.clone(), name));
    let mut http = HttpConnector::new_with_resolver(Resolver::new(resolve));
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_keepalive(Some(KEEPALIVE));
    http.set_keepalive_interval(Some(KEEPALIVE / 3));
    http.set_keepalive_retries(Some(3));
    // Split among the addresses, so that a dead one leaves time for the next.
    http.set_connect_timeout(Some(deadline));
    let https = HttpsConnectorBuilder::new().with_tls_config(tls).https_only();
    let https = https.with_server_name_resolver(FixedServerNameResolver::new(name));
    let https = match protocols {
        Protocols::All => https.enable_all_versions().wrap_connector(http),
        Protocols::Http1 => https.enable_http1().wrap_connector(http),
    };
    Connector::new(service_fn(move |to: Uri| {
        // An IP address in the URL never reaches the resolver.
        let checked = literal(&to).map_or(Ok(()), |address| guard.check(address)).map_err(BoxError::from);
        let connecting = https.clone().oneshot(to).boxed();
        let metrics = guard.metrics.clone();
        async move {
            checked?;
            let stream = timeout(deadline, connecting).await.map_err(|_| ConnectError::Timeout(deadline))??;
            Ok(TokioIo::new(LimitedStream::new(stream, metrics)))
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard(allow: &[&str]) -> AddressGuard {
        let allow = allow.iter().map(|network| network.parse().unwrap()).collect();
        AddressGuard { rules: Arc::new(AddressRules { allow, deny: vec![] }), metrics: Metrics::default() }
    }

    fn to(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn forbidden_addresses_of_a_name_are_skipped_if_one_is_allowed() {
        let accepted = allowed(&guard(&[]), "h", vec![to("127.0.0.1:0"), to("203.0.113.1:0")]).unwrap();
        assert_eq!(accepted, [to("203.0.113.1:0")]);
        let error = allowed(&guard(&[]), "h", vec![to("127.0.0.1:0"), to("[::1]:0")]).unwrap_err();
        assert_eq!(error.downcast_ref::<ForbiddenAddressError>().unwrap().address, to("127.0.0.1:0").ip());
        assert!(allowed(&guard(&[]), "h", vec![]).unwrap_err().to_string().contains("has no address"));
    }

    #[tokio::test]
    async fn name_that_resolves_to_loopback_is_refused() {
        let lookups = Arc::new(Semaphore::new(1));
        let name: Name = "localhost".parse().unwrap();
        let error = resolve(guard(&[]), lookups.clone(), name.clone()).await.unwrap_err();
        assert!(error.is::<ForbiddenAddressError>(), "{error}");
        let allowing = guard(&["127.0.0.0/8", "::1"]);
        assert!(resolve(allowing, lookups, name).await.unwrap().all(|to| to.ip().is_loopback()));
    }
}
