//! Address, trust bundle and credentials of an API server.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

use http::{HeaderValue, Uri};
use rustls::{
    ClientConfig,
    pki_types::{InvalidDnsNameError, PrivateKeyDer, ServerName, pem::PemObject},
};
use thiserror::Error;
use tidewatch_kit::tls::{self, Identity, PemError, TlsConfigError};

use crate::clock;

/// Errors in the configuration of the API server's client.
#[derive(Debug, Error)]
pub(crate) enum ClientSetupError {
    #[error("failed to read {path}")]
    Read {
        path: PathBuf,
        #[source]
        error: io::Error,
    },
    #[error("invalid kubeconfig: {0}")]
    Kubeconfig(&'static str),
    #[error("no kubeconfig configured, and not in a pod: {0} is not set")]
    NotInCluster(&'static str),
    #[error("the API server's address does not have the form https://host:port")]
    Server,
    #[error("invalid trust bundle or client certificate for the API server")]
    Tls(#[from] TlsConfigError),
    #[error("invalid PEM in the client key for the API server")]
    Key(#[source] PemError),
    #[error("failed to set up TLS for the API server")]
    Setup(#[source] TlsConfigError),
    #[error("invalid TLS server name of the API server")]
    ServerName(#[from] InvalidDnsNameError),
    #[error("the token for the API server is not a valid header value")]
    Token,
}

/// Fixed bytes, or a mounted file that is read again for each request.
#[derive(Clone)]
pub(super) enum Content {
    Fixed(Vec<u8>),
    File(PathBuf),
}

/// Credential of the client.
#[derive(Clone)]
pub(super) enum Credential {
    /// Bearer token; Kubernetes rotates a mounted one about once an hour.
    Token(Content),
    /// Client certificate: chain and key in PEM.
    Certificate { chain: Vec<u8>, key: Vec<u8> },
}

/// Configuration of the client for one API server.
#[derive(Clone)]
pub(crate) struct Access {
    /// Scheme, authority, and an optional path prefix.
    pub(super) server: Uri,
    /// Trust bundle in PEM.
    pub(super) bundle: Content,
    /// Server name for TLS, if it differs from the host of the address.
    pub(super) server_name: Option<String>,
    pub(super) credential: Credential,
}

impl Content {
    pub(super) fn read(&self) -> Result<Vec<u8>, ClientSetupError> {
        match self {
            Self::Fixed(bytes) => Ok(bytes.clone()),
            Self::File(path) => fs::read(path).map_err(|error| ClientSetupError::Read { path: path.clone(), error }),
        }
    }
}

impl Access {
    /// The pod's service account in its mount directory.
    pub(crate) fn in_cluster(account: &Path) -> Result<Self, ClientSetupError> {
        let variable = |name| env::var(name).map_err(|_| ClientSetupError::NotInCluster(name));
        let host = variable("KUBERNETES_SERVICE_HOST")?;
        let port = variable("KUBERNETES_SERVICE_PORT")?;
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let file = |name: &str| Content::File(account.join(name));
        Ok(Self {
            server: server(&format!("https://{host}:{port}"))?,
            bundle: file("ca.crt"),
            server_name: None,
            credential: Credential::Token(file("token")),
        })
    }

    /// TLS configuration for a trust bundle in PEM.
    pub(super) fn tls(&self, bundle: &[u8]) -> Result<ClientConfig, ClientSetupError> {
        let roots = tls::usable_roots(bundle)?;
        if roots.skipped > 0 {
            tracing::warn!(skipped = roots.skipped, "Some certificates of the API server's trust bundle are no roots");
        }
        let identity = match &self.credential {
            Credential::Token(_) => None,
            Credential::Certificate { chain, key } => {
                let chain = tls::certificates(chain)?;
                let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| ClientSetupError::Key(error.into()))?;
                Some(Identity { chain, key })
            }
        };
        // Connections live for hours, so the disabled session resumption costs nothing.
        let tls = tls::client(identity.as_ref(), roots.store).map_err(ClientSetupError::Setup)?;
        Ok(clock::with_wall_clock(tls))
    }

    /// Server name that the API server's certificate must have, if it differs from the host of the address.
    pub(super) fn server_name(&self) -> Result<Option<ServerName<'static>>, ClientSetupError> {
        Ok(self.server_name.clone().map(ServerName::try_from).transpose()?)
    }

    /// Value of `Authorization`, with the current token.
    pub(super) fn authorization(&self) -> Result<Option<HeaderValue>, ClientSetupError> {
        let Credential::Token(token) = &self.credential else { return Ok(None) };
        let mut value = b"Bearer ".to_vec();
        value.extend_from_slice(token.read()?.trim_ascii());
        let mut value =
            HeaderValue::from_maybe_shared(bytes::Bytes::from(value)).map_err(|_| ClientSetupError::Token)?;
        value.set_sensitive(true);
        Ok(Some(value))
    }
}

/// Parses an https address without query.
pub(super) fn server(text: &str) -> Result<Uri, ClientSetupError> {
    let uri: Uri = text.parse().map_err(|_| ClientSetupError::Server)?;
    let good = uri.scheme_str() == Some("https") && uri.authority().is_some() && uri.query().is_none();
    good.then_some(uri).ok_or(ClientSetupError::Server)
}
