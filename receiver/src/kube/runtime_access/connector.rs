//! Connects to a runtime: resolves its name, refuses forbidden addresses, and only then opens TCP and TLS.
//!
//! The check stands on the resolved address and the connection goes to exactly that address, so a name cannot first
//! show a harmless address and then lead elsewhere. Connecting ends at one deadline, whatever part of it hangs.

use std::{
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
    vec,
};

use futures::{FutureExt, future::BoxFuture};
use http::Uri;
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::{
    client::legacy::connect::{HttpConnector, dns::Name},
    rt::TokioIo,
};
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use thiserror::Error;
use tokio::{net::TcpStream, sync::Semaphore, task::spawn_blocking, time::timeout};
use tower::{BoxError, Service};

use super::{
    Metrics,
    addresses::{Forbidden, Rules},
    kubeconfig::literal,
};

/// Addresses of one name that are tried; a name with thousands would make one connect endless work.
const MAX_ADDRESSES: usize = 8;

/// Lookups of one runtime at a time. A lookup occupies a thread until the system's resolver gives up, also when nobody
/// waits for it any more: one runtime with a silent name server must not take all of them.
const MAX_LOOKUPS: usize = 2;

/// Dead peers are noticed by TCP after about this long, even when nothing is sent.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// Why there is no connection; a [`Forbidden`] address is an error of its own.
#[derive(Debug, Error)]
pub(super) enum Connecting {
    #[error("the runtime's name `{0}` could not be resolved")]
    Resolve(String, #[source] io::Error),
    #[error("the runtime's name `{0}` has no address")]
    NoAddress(String),
    #[error("the resolver has stopped")]
    Stopped,
    #[error("no connection to the runtime within {0:?}")]
    Late(Duration),
}

/// Judges and counts.
#[derive(Clone)]
pub(super) struct Guard {
    pub(super) rules: Arc<Rules>,
    pub(super) metrics: Metrics,
}

impl Guard {
    fn check(&self, address: IpAddr) -> Result<(), Forbidden> {
        self.rules.check(address).inspect_err(|forbidden| self.metrics.forbidden(forbidden.why.label()))
    }
}

/// Resolves names to allowed addresses only.
#[derive(Clone)]
pub(super) struct Resolver {
    guard: Guard,
    lookups: Arc<Semaphore>,
}

impl Service<Name> for Resolver {
    type Response = vec::IntoIter<SocketAddr>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let Self { guard, lookups } = self.clone();
        async move {
            let permit = lookups.acquire_owned().await.map_err(|_| Connecting::Stopped)?;
            let host = name.to_string();
            let asked = host.clone();
            let found = spawn_blocking(move || {
                let _permit = permit;
                (&*asked, 0).to_socket_addrs().map(|found| found.take(MAX_ADDRESSES).collect::<Vec<_>>())
            });
            let found =
                found.await.map_err(|_| Connecting::Stopped)?.map_err(|e| Connecting::Resolve(host.clone(), e))?;
            Ok(allowed(&guard, &host, found)?.into_iter())
        }
        .boxed()
    }
}

/// Keeps the allowed addresses; if none is left, the first refusal is the error.
fn allowed(guard: &Guard, host: &str, found: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, BoxError> {
    let (good, bad): (Vec<_>, Vec<_>) =
        found.into_iter().map(|to| guard.check(to.ip()).map(|()| to)).partition(Result::is_ok);
    match bad.into_iter().find_map(Result::err) {
        Some(forbidden) if good.is_empty() => Err(forbidden.into()),
        None if good.is_empty() => Err(Connecting::NoAddress(host.to_owned()).into()),
        _ => Ok(good.into_iter().flatten().collect()),
    }
}

/// The way to one runtime.
#[derive(Clone)]
pub(super) struct Connector {
    https: HttpsConnector<HttpConnector<Resolver>>,
    guard: Guard,
    deadline: Duration,
}

impl Connector {
    /// `deadline` covers name, TCP and TLS together.
    pub(super) fn new(guard: Guard, tls: ClientConfig, name: ServerName<'static>, deadline: Duration) -> Self {
        let lookups = Arc::new(Semaphore::new(MAX_LOOKUPS));
        let mut http = HttpConnector::new_with_resolver(Resolver { guard: guard.clone(), lookups });
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_keepalive(Some(KEEPALIVE));
        http.set_keepalive_interval(Some(KEEPALIVE / 3));
        http.set_keepalive_retries(Some(3));
        // Shared among the addresses, so that a dead one leaves time for the next.
        http.set_connect_timeout(Some(deadline));
        let https = HttpsConnectorBuilder::new().with_tls_config(tls).https_only();
        let https = https.with_server_name_resolver(FixedServerNameResolver::new(name));
        Self { https: https.enable_all_versions().wrap_connector(http), guard, deadline }
    }
}

impl Service<Uri> for Connector {
    type Response = MaybeHttpsStream<TokioIo<TcpStream>>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.https.poll_ready(cx)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        // An address in the URL never reaches the resolver.
        if let Some(Err(forbidden)) = literal(&to).map(|address| self.guard.check(address)) {
            return async move { Err(forbidden.into()) }.boxed();
        }
        let (connecting, deadline) = (self.https.call(to), self.deadline);
        async move { timeout(deadline, connecting).await.map_err(|_| Connecting::Late(deadline))? }.boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard(allow: &[&str]) -> Guard {
        let allow = allow.iter().map(|network| network.parse().unwrap()).collect();
        Guard { rules: Arc::new(Rules::new(allow, vec![])), metrics: Metrics::default() }
    }

    fn to(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_name_may_have_forbidden_addresses_if_one_is_allowed() {
        let good = allowed(&guard(&[]), "h", vec![to("127.0.0.1:0"), to("203.0.113.1:0")]).unwrap();
        assert_eq!(good, [to("203.0.113.1:0")]);
        let error = allowed(&guard(&[]), "h", vec![to("127.0.0.1:0"), to("[::1]:0")]).unwrap_err();
        assert_eq!(error.downcast_ref::<Forbidden>().unwrap().address, to("127.0.0.1:0").ip());
        assert!(allowed(&guard(&[]), "h", vec![]).unwrap_err().to_string().contains("has no address"));
    }

    #[tokio::test]
    async fn a_name_that_leads_to_the_own_host_is_refused() {
        let lookups = Arc::new(Semaphore::new(1));
        let mut resolver = Resolver { guard: guard(&[]), lookups: lookups.clone() };
        let error = resolver.call("localhost".parse().unwrap()).await.unwrap_err();
        assert!(error.is::<Forbidden>(), "{error}");
        let mut resolver = Resolver { guard: guard(&["127.0.0.0/8", "::1"]), lookups };
        assert!(resolver.call("localhost".parse().unwrap()).await.unwrap().all(|to| to.ip().is_loopback()));
    }
}
