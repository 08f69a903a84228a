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
    client::{ClientBuilder, ConfigExt as _},
    config::{KubeConfigOptions, Kubeconfig},
};
use rustls::pki_types::ServerName;
use tower::{BoxError, ServiceBuilder, ServiceExt, timeout::Timeout};

use crate::active::Fence;

/// A connection to KCP is opened in this time, TLS included, or not at all.
const CONNECT: Duration = Duration::from_secs(5);
/// While a call or a watch waits, a connection that has been silent for so long is asked whether it lives, and has as long to answer. A
/// path that was lost without a word, such as one that a firewall forgot, is so noticed in twice this time.
const PING: Duration = Duration::from_secs(10);
/// The same for TCP, where a proxy in the path speaks no HTTP/2.
const PROBE: Duration = Duration::from_secs(10);
const PROBES: u32 = 3;

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
    ensure!(config.proxy_url.is_none(), "the control plane cannot be reached through a proxy");
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_keepalive(Some(PROBE));
    http.set_keepalive_interval(Some(PROBE));
    http.set_keepalive_retries(Some(PROBES));
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
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(client);
    Ok(ClientBuilder::new(service, config.default_namespace.clone()).with_layer(&fence.layer()).build())
}

/// A client for nothing but the Lease: HTTP/1.1, so that a call that is given up closes its connection and the next one opens another.
/// A Lease has no time to wait for a [`PING`].
///
/// # Errors
/// The configuration cannot be used.
pub(crate) fn client_of_lease(config: Config) -> Result<Client> {
    Ok(Client::try_from(config)?)
}
