//! How KCP is reached.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use futures::FutureExt;
use http::Uri;
use hyper_rustls::{FixedServerNameResolver, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use kube::{
    Client, Config,
    client::ConfigExt as _,
    config::{KubeConfigOptions, Kubeconfig},
};
use rustls::pki_types::ServerName;
use tower::{
    ServiceBuilder, ServiceExt,
    timeout::{Timeout, TimeoutLayer},
};

use crate::{base::limits::REQUEST_DEADLINE, kube::leader::Fence};

/// A connection to KCP is opened in this time, TLS included, or not at all.
const CONNECT: Duration = Duration::from_secs(5);
/// While a call or a watch waits, a connection that has been silent for so long is asked whether it lives, and has as long to answer. A
/// path that was lost without a word, such as one that a firewall forgot, is so noticed in twice this time.
const PING: Duration = Duration::from_secs(10);
/// The same for TCP, where a proxy in the path speaks no HTTP/2: silence is probed, and what was sent is acknowledged in the same time.
const PROBE: Duration = Duration::from_secs(10);
const PROBES: u32 = 2;

/// What a client of KCP is made of: from a kubeconfig, or else from what is `found`. It retries nothing by itself.
///
/// # Errors
/// The kubeconfig cannot be read, or nothing is found.
pub(crate) async fn config(kubeconfig: Option<&Path>, found: impl Future<Output = Result<Config>>) -> Result<Config> {
    let mut config = match kubeconfig {
        Some(path) => {
            let kubeconfig = Kubeconfig::read_from(path).with_context(|| format!("read {}", path.display()))?;
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?
        }
        None => found.await?,
    };
    config.default_retry = false;
    config.connect_timeout = Some(CONNECT);
    Ok(config)
}

/// A client that retries nothing by itself: reconciles have their own backoff, and a retried write would hide a conflict. It writes only
/// as long as the fence holds.
///
/// All calls and watches share one HTTP/2 connection, which asks for a sign of life: kube's own stack speaks HTTP/1.1, where a watch on
/// a connection that is lost without a word stands still for five minutes.
///
/// # Errors
/// The configuration cannot be used, or asks for a proxy.
pub(crate) fn client(config: &Config, fence: &Fence) -> Result<Client> {
    client_within(config, fence, REQUEST_DEADLINE)
}

/// The head of an answer comes within `head`, that of a watch included; a body that stops is the end of its connection.
fn client_within(config: &Config, fence: &Fence, head: Duration) -> Result<Client> {
    ensure!(config.proxy_url.is_none(), "the control plane cannot be reached through a proxy");
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_keepalive(Some(PROBE));
    http.set_keepalive_interval(Some(PROBE));
    http.set_keepalive_retries(Some(PROBES));
    #[cfg(target_os = "linux")]
    http.set_tcp_user_timeout(Some(PROBE * (PROBES + 1)));
    let https = HttpsConnectorBuilder::new().with_tls_config(config.rustls_client_config()?).https_or_http();
    let https = match &config.tls_server_name {
        Some(name) => {
            let name = ServerName::try_from(name.clone()).context("the name of the control plane's server")?;
            https.with_server_name_resolver(FixedServerNameResolver::new(name))
        }
        None => https,
    };
    let connector = Timeout::new(https.enable_all_versions().wrap_connector(http), CONNECT);
    let connector = ServiceExt::<Uri>::map_future(connector, FutureExt::boxed);
    let client = legacy::Client::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .http2_keep_alive_interval(PING)
        .http2_keep_alive_timeout(PING)
        .build(connector);
    let service = ServiceBuilder::new()
        .layer(TimeoutLayer::new(head))
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        // Last: a token that is read or asked for takes its time.
        .layer(fence.layer())
        .service(client);
    Ok(Client::new(service, config.default_namespace.clone()))
}

/// A client for nothing but the Lease: HTTP/1.1, so that a call that is given up closes its connection and the next one opens another.
/// A Lease has no time to wait for a [`PING`].
///
/// # Errors
/// The configuration cannot be used.
pub(crate) fn client_of_lease(config: Config) -> Result<Client> {
    Ok(Client::try_from(config)?)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::Api;
    use tokio::net::TcpListener;

    use super::*;

    /// A client of a server that takes connections and never says a word.
    async fn of_the_silent(head: Duration, fence: &Fence) -> (Api<ConfigMap>, TcpListener) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let config = Config::new(format!("http://{}", listener.local_addr().unwrap()).parse().unwrap());
        (Api::namespaced(client_within(&config, fence, head).unwrap(), "kcp-system"), listener)
    }

    #[tokio::test]
    async fn a_call_that_is_not_answered_ends() {
        let (maps, _listener) = of_the_silent(Duration::from_millis(50), &Fence::default()).await;
        let Err(kube::Error::Service(error)) = maps.get("a").await else { panic!("a word") };
        assert!(error.is::<tower::timeout::error::Elapsed>(), "{error}");
    }

    #[tokio::test]
    async fn nothing_is_written_behind_a_fence_that_is_shut() {
        let (maps, _listener) = of_the_silent(REQUEST_DEADLINE, &Fence::shut()).await;
        let Err(kube::Error::Service(error)) = maps.delete("a", &Default::default()).await else { panic!("a word") };
        assert!(error.is::<crate::kube::leader::Lapsed>(), "{error}");
    }

    #[test]
    fn a_proxy_is_refused_by_name() {
        let mut config = Config::new("https://kcp.test".parse().unwrap());
        config.proxy_url = Some("http://proxy.test".parse().unwrap());
        let refused = client(&config, &Fence::default()).err().unwrap().to_string();
        assert!(refused.contains("proxy"), "{refused}");
    }
}
