//! Asks the admin listener: one request, over plain HTTP or TLS, with a deadline and a limit.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use clap::Args;
use http::{HeaderValue, Request, StatusCode, Uri, header, uri::Scheme};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use serde::Serialize;
use thiserror::Error;
use tidewatch_shared::{table, tls};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;

/// The whole question and answer.
const DEADLINE: Duration = Duration::from_secs(30);
/// Bytes of an answer: far more than 20,000 runtimes need.
const ANSWER_BYTES: usize = 256 << 20;

/// Where the admin listener is: scheme, host and port, and nothing else.
#[derive(Clone, Debug)]
pub struct AdminUrl {
    tls: bool,
    host: String,
    port: u16,
}

/// Why a text is no [`AdminUrl`].
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("not of the form http://host:port or https://host:port")]
pub struct ParseAdminUrl;

impl FromStr for AdminUrl {
    type Err = ParseAdminUrl;

    fn from_str(text: &str) -> Result<Self, ParseAdminUrl> {
        let uri: Uri = text.parse().map_err(|_| ParseAdminUrl)?;
        let (Some(scheme), Some(authority), "/" | "") = (uri.scheme(), uri.authority(), uri.path()) else {
            return Err(ParseAdminUrl);
        };
        if uri.query().is_some() || authority.as_str().contains('@') || ![Scheme::HTTP, Scheme::HTTPS].contains(scheme)
        {
            return Err(ParseAdminUrl);
        }
        let tls = *scheme == Scheme::HTTPS;
        let port = authority.port_u16().unwrap_or(if tls { 443 } else { 80 });
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        Ok(Self { tls, host, port })
    }
}

impl fmt::Display for AdminUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}", self.authority())
    }
}

impl AdminUrl {
    fn authority(&self) -> String {
        let Self { host, port, .. } = self;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }
}

/// Which receiver is asked, and how.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct Whom {
    /// The admin listener of the receiver.
    #[arg(long, env = "TIDEWATCH_ADMIN_URL", default_value = "http://127.0.0.1:8085")]
    pub admin_url: AdminUrl,

    /// File with the bearer token, where the listener asks for one.
    #[arg(long, env = "TIDEWATCH_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,

    /// File with the roots of the listener's certificate, in PEM; needed for https.
    #[arg(long, env = "TIDEWATCH_ADMIN_CA")]
    pub ca_file: Option<PathBuf>,
}

impl Whom {
    /// Reads the files.
    pub(super) fn ask(&self) -> Result<Ask> {
        Ask::new(self.admin_url.clone(), self.token_file.as_deref(), self.ca_file.as_deref())
    }
}

/// A question that can be asked.
pub(super) struct Ask {
    url: AdminUrl,
    connector: Option<TlsConnector>,
    token: Option<HeaderValue>,
}

impl Ask {
    /// Reads the files.
    pub(super) fn new(url: AdminUrl, token: Option<&Path>, ca: Option<&Path>) -> Result<Self> {
        let read = |path: &Path| fs::read(path).with_context(|| format!("read {}", path.display()));
        if token.is_some() && !url.tls {
            bail!("a token is sent over https only");
        }
        let connector = match (url.tls, ca) {
            (false, _) => None,
            (true, None) => bail!("https needs --ca-file"),
            (true, Some(ca)) => {
                let roots = tls::roots(&tls::certificates(&read(ca)?)?)?;
                Some(TlsConnector::from(Arc::new(tls::client_without_client_auth(roots)?)))
            }
        };
        let token = token.map(|path| bearer(&read(path)?)).transpose()?;
        Ok(Self { url, connector, token })
    }

    /// The answer's body to a GET.
    pub(super) async fn get(&self, path: &'static str) -> Result<Bytes> {
        self.within(Request::get(path).body(Full::default())?).await
    }

    /// The answer's body to a POST of JSON.
    pub(super) async fn post(&self, path: &'static str, body: &impl Serialize) -> Result<Bytes> {
        let body = Full::from(serde_json::to_vec(body)?);
        self.within(Request::post(path).header(header::CONTENT_TYPE, "application/json").body(body)?).await
    }

    async fn within(&self, request: Request<Full<Bytes>>) -> Result<Bytes> {
        timeout(DEADLINE, self.exchange(request)).await.with_context(|| format!("no answer within {DEADLINE:?}"))?
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Bytes> {
        let tcp = TcpStream::connect((self.url.host.as_str(), self.url.port)).await.context("connect")?;
        match &self.connector {
            None => self.send(tcp, request).await,
            Some(connector) => {
                let name = ServerName::try_from(self.url.host.clone()).context("name the server")?;
                self.send(connector.connect(name, tcp).await.context("agree on TLS")?, request).await
            }
        }
    }

    async fn send(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send,
        mut request: Request<Full<Bytes>>,
    ) -> Result<Bytes> {
        let headers = request.headers_mut();
        headers.insert(header::HOST, HeaderValue::from_str(&self.url.authority()).context("name the host")?);
        if let Some(token) = &self.token {
            headers.insert(header::AUTHORIZATION, token.clone());
        }
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let answer = async {
            let response = sender.send_request(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), ANSWER_BYTES).collect().await;
            let body = body.map_err(|error| anyhow::anyhow!(error)).context("read the answer")?.to_bytes();
            if !status.is_success() {
                let said = String::from_utf8_lossy(&body[..body.len().min(SAID)]);
                bail!(Refused { status, said: table::sanitize(said.trim()) });
            }
            Ok(body)
        };
        tokio::pin!(answer);
        // The connection has to be driven until the answer is there; its own end says nothing that the answer does not.
        tokio::select! {
            answer = &mut answer => answer,
            _ = connection => answer.await,
        }
    }
}

/// The receiver answered, and not with what was asked for.
#[derive(Debug, Error)]
#[error("the receiver says {status}: {said}")]
pub(super) struct Refused {
    pub(super) status: StatusCode,
    said: String,
}

/// Bytes of a refusal that are shown.
const SAID: usize = 200;

/// Its value is marked so that no log or debug text shows it.
fn bearer(token: &[u8]) -> Result<HeaderValue> {
    let value = [b"Bearer ", token.trim_ascii()].concat();
    let mut value = HeaderValue::from_bytes(&value).context("the token is not one line of text")?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_admin_url_is_scheme_host_and_port() {
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
    fn a_token_never_leaves_in_clear_text() {
        let url: AdminUrl = "http://127.0.0.1:1".parse().unwrap();
        assert!(Ask::new(url, Some(Path::new("/dev/null")), None).is_err());
        assert_eq!(format!("{:?}", bearer(b" secret\n").unwrap()), "Sensitive");
        assert!(bearer(b"a\nb").is_err());
    }
}
