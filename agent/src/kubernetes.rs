//! The runtime's API server: requests with a deadline and a byte limit, over HTTP/2 where it is offered.
//!
//! kube brings the configuration, the token reload and the trust; the transport below it is ours, because a connection per
//! watch, unlimited bodies and silent retries are not what an agent of 10 MiB can have.

mod call;
mod lane;

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use hyper_rustls::{FixedServerNameResolver, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client as HyperClient, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use kube::{
    Client, Config,
    client::ConfigExt,
    config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use rustls::pki_types::{InvalidDnsNameError, ServerName};
use thiserror::Error;
use tower::{BoxError, ServiceBuilder};

pub(crate) use call::{Accept, Call};
pub(crate) use lane::Lane;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// Receive windows: what a peer may send before we read it, and so what it may cost us.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 256 << 10;
/// Long requests on one connection. API servers allow 100 streams each; the rest is for lists.
const WATCHES_PER_LANE: usize = 64;

/// Why there is no client for the API server.
#[derive(Debug, Error)]
pub(crate) enum Connect {
    #[error("the kubeconfig is not readable")]
    Kubeconfig(#[source] Box<KubeconfigError>),
    #[error("the pod's own account is not readable, and no kubeconfig was given")]
    InCluster(#[source] Box<InClusterError>),
    #[error("the TLS configuration for the API server could not be made")]
    Tls(#[source] Box<kube::Error>),
    #[error("the API server's name for TLS is not valid")]
    ServerName(#[source] InvalidDnsNameError),
    #[error("the credentials for the API server could not be used")]
    Credentials(#[source] Box<kube::Error>),
}

/// The API server; clones share its connections.
#[derive(Clone)]
pub(crate) struct Cluster(Arc<Inner>);

struct Inner {
    config: Config,
    lanes: Mutex<Vec<Lane>>,
}

impl Cluster {
    /// Reads a kubeconfig, or the pod's own account. Nothing is connected yet.
    pub(crate) async fn load(kubeconfig: Option<&Path>) -> Result<Self, Connect> {
        let config = match kubeconfig {
            Some(path) => from_file(path).await.map_err(|error| Connect::Kubeconfig(Box::new(error)))?,
            None => Config::incluster().map_err(|error| Connect::InCluster(Box::new(error)))?,
        };
        let cluster = Self(Arc::new(Inner { config, lanes: Mutex::default() }));
        // The first lane is made now, so that a configuration that cannot work ends the start.
        cluster.lane(0)?;
        Ok(cluster)
    }

    /// The connection for the watch in a slot; slots are small numbers that are used again.
    pub(crate) fn lane(&self, slot: usize) -> Result<Lane, Connect> {
        let number = slot / WATCHES_PER_LANE;
        let mut lanes = self.0.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        while lanes.len() <= number {
            lanes.push(Lane::new(client(&self.0.config)?));
        }
        Ok(lanes[number].clone())
    }
}

async fn from_file(path: &Path) -> Result<Config, KubeconfigError> {
    Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &KubeConfigOptions::default()).await
}

fn client(config: &Config) -> Result<Client, Connect> {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_keepalive(Some(KEEP_ALIVE));
    http.set_connect_timeout(Some(CONNECT_TIMEOUT));
    let tls = config.rustls_client_config().map_err(|error| Connect::Tls(Box::new(error)))?;
    let builder = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http();
    let builder = match &config.tls_server_name {
        Some(name) => {
            let name = ServerName::try_from(name.clone()).map_err(Connect::ServerName)?;
            builder.with_server_name_resolver(FixedServerNameResolver::new(name))
        }
        None => builder,
    };
    let https = builder.enable_all_versions().wrap_connector(http);
    let base = HyperClient::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .pool_max_idle_per_host(1)
        .http1_max_buf_size(STREAM_WINDOW as usize)
        .http2_initial_stream_window_size(STREAM_WINDOW)
        .http2_initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .http2_keep_alive_timeout(KEEP_ALIVE / 2)
        .http2_keep_alive_while_idle(true)
        .build(https);
    let credentials = |error| Connect::Credentials(Box::new(error));
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer().map_err(credentials)?)
        .layer(config.extra_headers_layer().map_err(credentials)?)
        .map_err(BoxError::from)
        .service(base);
    Ok(Client::new(service, config.default_namespace.clone()))
}
