//! Clients of the control plane.

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

use super::Metrics;
use crate::{leader::WriteFence, limits::REQUEST_DEADLINE, measured::measured};

/// Deadline for opening a connection to KCP, TLS handshake included.
const CONNECT: Duration = Duration::from_secs(5);
/// Interval and timeout of HTTP/2 pings on a silent connection while a request or watch is pending. A path that was
/// lost without a FIN or RST, for example in a firewall, is detected within twice this time.
const PING: Duration = Duration::from_secs(10);
/// Keepalive interval of TCP, for proxies in the path that do not speak HTTP/2; also bounds how long sent data may stay
/// unacknowledged.
const PROBE: Duration = Duration::from_secs(10);
const PROBES: u32 = 2;
/// Deadline of a response's body, watches excepted: time for a page of 500 large objects over a slow network. For the first list of
/// a watch, which has any length, that of each part.
const BODY: Duration = Duration::from_secs(60);

/// Configuration of a client of KCP: from the kubeconfig, or from `default` without one. Requests are not retried by
/// the client.
///
/// # Errors
/// The kubeconfig cannot be read, or `default` fails.
pub async fn config(kubeconfig: Option<&Path>, default: impl Future<Output = Result<Config>>) -> Result<Config> {
    let mut config = match kubeconfig {
        Some(path) => {
            let kubeconfig = Kubeconfig::read_from(path).with_context(|| format!("read {}", path.display()))?;
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?
        }
        None => default.await?,
    };
    config.default_retry = false;
    config.connect_timeout = Some(CONNECT);
    Ok(config)
}

/// Makes a client without retries of its own, because reconciles have their own backoff, and a retried write would hide
/// a conflict. Its writes need an open fence, and `metrics` count its requests and open watches.
///
/// All requests and watches share one HTTP/2 connection with pings. kube's own stack speaks HTTP/1.1, where a watch on
/// a silently lost connection stalls for five minutes.
///
/// # Errors
/// The configuration cannot be used, or requires a proxy.
pub fn client(config: &Config, fence: &WriteFence, metrics: Metrics) -> Result<Client> {
    client_within(config, fence, metrics, REQUEST_DEADLINE, BODY)
}

/// `head` is the deadline of the response's head, also for watches; `body` that of its body, from then on. The body of a
/// watch on a lost connection is ended by the pings, and a silent one by the watcher.
fn client_within(
    config: &Config,
    fence: &WriteFence,
    metrics: Metrics,
    head: Duration,
    body: Duration,
) -> Result<Client> {
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
            let name = ServerName::try_from(name.clone()).context("parse the server name of the control plane")?;
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
        // Innermost, because obtaining a token takes time in which the fence may close.
        .layer(fence.layer())
        .service(measured(client, metrics, body));
    Ok(Client::new(service, config.default_namespace.clone()))
}

/// Makes a client for the Lease only. It speaks HTTP/1.1, so that a cancelled request closes its connection and the
/// next one opens another: a Lease cannot wait for a [`PING`].
///
/// # Errors
/// The configuration cannot be used.
pub fn lease_client(config: Config) -> Result<Client> {
    Ok(Client::try_from(config)?)
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::{
        Api,
        api::{ListParams, WatchEvent, WatchParams},
    };
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{TcpListener, TcpStream},
    };

    use super::*;
    use crate::leader::fenced;

    /// Client of a server that accepts connections and never responds.
    async fn silent_server(head: Duration, fence: &WriteFence) -> (Api<ConfigMap>, TcpListener) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        (api(&listener, fence, head, BODY), listener)
    }

    fn api(listener: &TcpListener, fence: &WriteFence, head: Duration, body: Duration) -> Api<ConfigMap> {
        let config = Config::new(format!("http://{}", listener.local_addr().unwrap()).parse().unwrap());
        Api::namespaced(client_within(&config, fence, Metrics::default(), head, body).unwrap(), "kcp-system")
    }

    /// Answers a request with a head and the beginning of a body.
    async fn answer(listener: &TcpListener, body: &str) -> TcpStream {
        let (mut stream, _) = listener.accept().await.unwrap();
        let _ = stream.read(&mut [0; 4_096]).await.unwrap();
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n";
        stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        stream
    }

    #[tokio::test]
    async fn list_that_stands_still_ends_and_a_silent_watch_goes_on() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let maps = api(&listener, &WriteFence::default(), REQUEST_DEADLINE, Duration::from_millis(50));
        let parameters = WatchParams::default();
        let list = ListParams::default();
        let (watch, mut watched) = tokio::join!(maps.watch(&parameters, "1"), answer(&listener, ""));
        let mut watch = watch.unwrap().boxed();
        let (list, _stalled) = tokio::join!(maps.list(&list), answer(&listener, r#"{"items":["#));
        let error = anyhow::Error::new(list.unwrap_err());
        assert!(format!("{error:#}").contains("not complete within 0.05 s"), "{error:#}");
        let event = r#"{"type":"ADDED","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"a"}}}"#;
        watched.write_all(format!("{event}\n").as_bytes()).await.unwrap();
        assert!(matches!(watch.next().await, Some(Ok(WatchEvent::Added(_)))));
    }

    #[tokio::test]
    async fn request_without_response_times_out() {
        let (maps, _listener) = silent_server(Duration::from_millis(50), &WriteFence::default()).await;
        let Err(kube::Error::Service(error)) = maps.get("a").await else { panic!("a response") };
        assert!(error.is::<tower::timeout::error::Elapsed>(), "{error}");
    }

    #[tokio::test]
    async fn closed_fence_refuses_writes() {
        let (maps, _listener) = silent_server(REQUEST_DEADLINE, &WriteFence::closed()).await;
        let Err(kube::Error::Service(error)) = maps.delete("a", &Default::default()).await else {
            panic!("a response")
        };
        assert!(error.is::<crate::leader::NotLeaderError>(), "{error}");
    }

    #[tokio::test]
    async fn write_of_a_reconcile_needs_the_fence_of_its_shard_although_that_of_the_process_is_open() {
        let (maps, listener) = silent_server(Duration::from_millis(50), &WriteFence::default()).await;
        let shard = WriteFence::default().child();
        let parameters = Default::default();
        let sent = fenced(shard.clone(), maps.delete("a", &parameters));
        let (sent, accepted) = tokio::join!(sent, listener.accept());
        accepted.unwrap();
        let Err(kube::Error::Service(error)) = sent else { panic!("a response") };
        assert!(error.is::<tower::timeout::error::Elapsed>(), "{error}");
        shard.close();
        let Err(kube::Error::Service(error)) = fenced(shard, maps.delete("a", &parameters)).await else {
            panic!("a response")
        };
        assert!(error.is::<crate::leader::NotLeaderError>(), "{error}");
    }

    #[test]
    fn proxy_is_refused_with_its_reason() {
        let mut config = Config::new("https://kcp.test".parse().unwrap());
        config.proxy_url = Some("http://proxy.test".parse().unwrap());
        let refused = client(&config, &WriteFence::default(), Metrics::default()).err().unwrap().to_string();
        assert!(refused.contains("proxy"), "{refused}");
    }
}
