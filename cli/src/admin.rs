//! The connection to a receiver's admin listener: a port-forward to the pod of an active receiver, or a URL.

use std::{cell::RefCell, fmt, fs, path::PathBuf, str::FromStr, sync::Arc};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use clap::Args;
use http::{
    HeaderValue, Request, Uri, header,
    uri::{Authority, Scheme},
};
use http_body_util::Full;
use k8s_openapi::api::{
    coordination::v1::{Lease, LeaseSpec},
    core::v1::Pod,
};
use kube::{Api, Client, ResourceExt as _, api::ListParams, core::PartialObjectMeta};
use rustls_pki_types::ServerName;
use serde::Serialize;
use thiserror::Error;
use tidewatch_api::leases;
use tidewatch_cluster::runtime_access::list_map;
use tidewatch_kit::tls;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::{
    cluster::{ClusterFlags, LIST_LIMITS, within_deadline},
    port_forward, request,
};

/// Limit of a response in bytes, far above the report of 20,000 runtimes.
const MAX_RESPONSE_BYTES: usize = 256 << 20;
/// Default port of the receiver's admin listener.
const DEFAULT_ADMIN_PORT: u16 = 8085;

/// URL of an admin listener: scheme, host and port only.
#[derive(Clone, Debug)]
pub struct AdminUrl {
    tls: bool,
    /// Host and port.
    authority: Authority,
}

/// The text is no [`AdminUrl`].
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("not of the form http://host:port or https://host:port")]
pub struct ParseAdminUrlError;

impl FromStr for AdminUrl {
    type Err = ParseAdminUrlError;

    fn from_str(text: &str) -> Result<Self, ParseAdminUrlError> {
        let uri: Uri = text.parse().map_err(|_| ParseAdminUrlError)?;
        let (Some(scheme), Some(authority), "/" | "") = (uri.scheme(), uri.authority(), uri.path()) else {
            return Err(ParseAdminUrlError);
        };
        if uri.query().is_some() || authority.as_str().contains('@') || ![Scheme::HTTP, Scheme::HTTPS].contains(scheme)
        {
            return Err(ParseAdminUrlError);
        }
        let tls = *scheme == Scheme::HTTPS;
        let port = authority.port_u16().unwrap_or(if tls { 443 } else { 80 });
        let authority = format!("{}:{port}", authority.host()).parse().map_err(|_| ParseAdminUrlError)?;
        Ok(Self { tls, authority })
    }
}

impl fmt::Display for AdminUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}", self.authority)
    }
}

/// Flags that select the receiver and the connection to it.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct AdminFlags {
    /// Control plane with the receiver.
    #[command(flatten)]
    pub cluster: ClusterFlags,

    /// Port of the admin listener in the receiver's pod
    #[arg(long, env = "TIDEWATCH_ADMIN_PORT", default_value_t = DEFAULT_ADMIN_PORT, value_name = "PORT")]
    pub admin_port: u16,

    /// URL of the admin listener; by default a port-forward to the pod of an active receiver
    #[arg(long, env = "TIDEWATCH_ADMIN_URL", value_name = "URL")]
    pub admin_url: Option<AdminUrl>,

    /// File with the bearer token, for a listener at --admin-url that requires one
    #[arg(long, env = "TIDEWATCH_TOKEN_FILE", value_name = "FILE", requires = "admin_url")]
    pub token_file: Option<PathBuf>,

    /// File with the roots of the listener's certificate, in PEM; required for https
    #[arg(long, env = "TIDEWATCH_ADMIN_CA", value_name = "FILE", requires = "admin_url")]
    pub ca_file: Option<PathBuf>,
}

impl AdminFlags {
    /// Reads the files and builds the clients; connects only when used.
    pub(crate) async fn connect(&self) -> Result<AdminClient<'_>> {
        let Some(url) = &self.admin_url else {
            let client = self.cluster.client().await?;
            return Ok(AdminClient::PortForward(ReceiverPods { client, flags: self, last_pod: RefCell::default() }));
        };
        Ok(AdminClient::Url(self.url_route(url)?))
    }

    fn url_route<'a>(&self, url: &'a AdminUrl) -> Result<UrlRoute<'a>> {
        let read = |path: &PathBuf| fs::read(path).with_context(|| format!("read {}", path.display()));
        if self.token_file.is_some() && !url.tls {
            bail!("a token is sent over https only");
        }
        let connector = match (url.tls, &self.ca_file) {
            (false, _) => None,
            (true, None) => bail!("https needs --ca-file"),
            (true, Some(ca)) => {
                let roots = tls::roots(&tls::certificates(&read(ca)?)?)?;
                Some(TlsConnector::from(Arc::new(tls::client(None, roots)?)))
            }
        };
        let token = self.token_file.as_ref().map(|path| bearer(&read(path)?)).transpose()?;
        Ok(UrlRoute { url, connector, token })
    }
}

/// Client of an admin listener.
pub(crate) enum AdminClient<'a> {
    Url(UrlRoute<'a>),
    PortForward(ReceiverPods<'a>),
}

/// A listener at a URL.
pub(crate) struct UrlRoute<'a> {
    url: &'a AdminUrl,
    connector: Option<TlsConnector>,
    token: Option<HeaderValue>,
}

/// The receivers' pods in KCP.
pub(crate) struct ReceiverPods<'a> {
    client: Client,
    flags: &'a AdminFlags,
    /// Pod that answered the last request; empty after a failure.
    last_pod: RefCell<Option<String>>,
}

impl fmt::Display for AdminClient<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Url(route) => route.url.fmt(f),
            Self::PortForward(ReceiverPods { flags, last_pod, .. }) => match last_pod.borrow().as_deref() {
                Some(pod) => write!(f, "pod {}/{pod}", flags.cluster.namespace),
                None => write!(f, "an active pod of the receiver in {}", flags.cluster.namespace),
            },
        }
    }
}

impl AdminClient<'_> {
    /// Body of the response to a GET.
    pub(crate) async fn get(&self, path: &'static str) -> Result<Bytes> {
        self.send(Request::get(path).body(Full::default())?).await
    }

    /// Body of the response to a POST of JSON.
    pub(crate) async fn post(&self, path: &'static str, body: &impl Serialize) -> Result<Bytes> {
        let body = Full::from(serde_json::to_vec(body)?);
        self.send(Request::post(path).header(header::CONTENT_TYPE, "application/json").body(body)?).await
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Bytes> {
        within_deadline(async {
            match self {
                Self::Url(route) => route.send(request).await,
                Self::PortForward(pods) => pods.send(request).await,
            }
        })
        .await
    }
}

impl UrlRoute<'_> {
    async fn send(&self, mut request: Request<Full<Bytes>>) -> Result<Bytes> {
        if let Some(token) = &self.token {
            request.headers_mut().insert(header::AUTHORIZATION, token.clone());
        }
        let authority = &self.url.authority;
        let tcp = TcpStream::connect(authority.as_str()).await.context("connect")?;
        match &self.connector {
            None => request::send(tcp, authority.as_str(), request, MAX_RESPONSE_BYTES).await,
            Some(connector) => {
                let host = authority.host().trim_matches(['[', ']']).to_owned();
                let name = ServerName::try_from(host).context("parse the server name")?;
                let stream = connector.connect(name, tcp).await.context("complete the TLS handshake")?;
                request::send(stream, authority.as_str(), request, MAX_RESPONSE_BYTES).await
            }
        }
    }
}

impl ReceiverPods<'_> {
    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Bytes> {
        // Taken before the request: after a failure another receiver may be the active one.
        let pod = match self.last_pod.take() {
            Some(pod) => pod,
            None => self.active_pod().await?,
        };
        let pods = self.flags.cluster.api(&self.client);
        let body = port_forward::send(&pods, &pod, self.flags.admin_port, request, MAX_RESPONSE_BYTES).await?;
        self.last_pod.replace(Some(pod));
        Ok(body)
    }

    /// Name of the pod with the newest renewal of a membership Lease. Each of them serves the whole fleet.
    async fn active_pod(&self) -> Result<String> {
        let AdminFlags { cluster, .. } = self.flags;
        let namespace = &cluster.namespace;
        let leases: Api<Lease> = cluster.api(&self.client);
        let mut specs = Vec::new();
        for name in (0..leases::MAX_REPLICAS).map(leases::member) {
            let lease = within_deadline(leases.get_opt(&name)).await;
            let lease = lease.with_context(|| format!("read the Lease {namespace}/{name}"))?;
            specs.extend(lease.and_then(|lease| lease.spec));
        }
        let holder = newest_holder(specs.into_iter());
        let holder = holder.with_context(|| format!("no receiver holds a membership Lease in {namespace}"))?;
        let pods: Api<PartialObjectMeta<Pod>> = cluster.api(&self.client);
        let pods = list_map(&pods, &ListParams::default(), &LIST_LIMITS, |pod| pod).await;
        let pods = pods.with_context(|| format!("list the pods in {namespace}"))?;
        let pod = pods.into_iter().find(|pod| is_holder(pod, &holder)).map(|pod| pod.name_any());
        pod.with_context(|| {
            format!("the holder {holder} of a membership Lease is no pod in {namespace}; use --admin-url")
        })
    }
}

/// Holder with the newest renewal.
fn newest_holder(specs: impl Iterator<Item = LeaseSpec>) -> Option<String> {
    let held = specs.filter_map(|spec| Some((spec.renew_time?.0, spec.holder_identity.filter(|id| !id.is_empty())?)));
    held.max().map(|(_, holder)| holder)
}

/// Matches the part of the holder identity before the instance: the pod's uid (`--lease-place`, as deployed), or its
/// name, which is the host name in the pod.
fn is_holder(pod: &PartialObjectMeta<Pod>, holder: &str) -> bool {
    let place = holder.rsplit_once('_').map(|(place, _)| place);
    place.is_some() && [&pod.metadata.uid, &pod.metadata.name].into_iter().any(|id| id.as_deref() == place)
}

/// Header value of the token, marked as sensitive so that no log or debug text contains it.
fn bearer(token: &[u8]) -> Result<HeaderValue> {
    let value = [b"Bearer ", token.trim_ascii()].concat();
    let mut value = HeaderValue::from_bytes(&value).context("the token is not one line of text")?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use serde_json::json;
    use tidewatch_receiver::config::Config;

    use super::*;

    #[test]
    fn admin_url_is_scheme_host_and_port() {
        for (text, shown) in [
            ("http://127.0.0.1:8085", "http://127.0.0.1:8085"),
            ("https://receiver.kcp-system/", "https://receiver.kcp-system:443"),
            ("http://[::1]:1", "http://[::1]:1"),
        ] {
            assert_eq!(text.parse::<AdminUrl>().unwrap().to_string(), shown);
        }
        for bad in ["", "127.0.0.1:8085", "ftp://x", "http://x/fleet", "http://x?y", "http://user@x", "http://"] {
            assert!(bad.parse::<AdminUrl>().is_err(), "{bad}");
        }
    }

    #[test]
    fn token_is_never_sent_in_clear_text() {
        let flags = AdminFlags {
            cluster: ClusterFlags { kubeconfig: None, namespace: "n".into() },
            admin_port: 1,
            admin_url: None,
            token_file: Some("/dev/null".into()),
            ca_file: None,
        };
        assert!(flags.url_route(&"http://127.0.0.1:1".parse().unwrap()).is_err());
        assert_eq!(format!("{:?}", bearer(b" secret\n").unwrap()), "Sensitive");
        assert!(bearer(b"a\nb").is_err());
    }

    #[test]
    fn lease_holder_is_a_pod_by_uid_or_name() {
        let pod = serde_json::from_value(
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "receiver_0", "uid": "u-1"}}),
        );
        let pod = pod.unwrap();
        for holder in ["u-1_00000000000000ff", "receiver_0_00000000000000ff"] {
            assert!(is_holder(&pod, holder), "{holder}");
        }
        for other in ["u-2_00ff", "u-1", "receiver_0", "_00ff", ""] {
            assert!(!is_holder(&pod, other), "{other}");
        }
    }

    #[test]
    fn newest_renewal_decides_among_the_replicas() {
        let specs =
            |specs: serde_json::Value| newest_holder(serde_json::from_value::<Vec<_>>(specs).unwrap().into_iter());
        let spec = |holder: &str, second: u8| json!({"holderIdentity": holder, "renewTime": format!("2026-11-25T20:00:{second:02}.000000Z")});
        assert_eq!(specs(json!([spec("a", 1), spec("b", 3), spec("c", 2), spec("", 9)])).as_deref(), Some("b"));
        assert_eq!(specs(json!([spec("", 1), {"holderIdentity": "never renewed"}, {}])), None);
    }

    #[test]
    fn defaults_are_those_of_the_receiver() {
        let receiver = Config::parse_from(["receiver", "--authority=kcp:8443", "--oci-registry-host=r"]);
        assert_eq!(receiver.admin.admin_address.port(), DEFAULT_ADMIN_PORT);
    }
}
