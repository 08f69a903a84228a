//! Where the API server is, what makes it trustworthy, and as whom we speak.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

use http::{HeaderValue, Uri};
use rustls::{
    ClientConfig,
    client::Resumption,
    pki_types::{
        CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName,
        pem::{Error as PemError, PemObject},
    },
    version::TLS13,
};
use thiserror::Error;
use tidewatch_shared::tls::{self, TlsConfig};

use crate::clock;

/// Why there is no client for the API server.
#[derive(Debug, Error)]
pub(crate) enum Connect {
    #[error("{path} could not be read")]
    Read {
        path: PathBuf,
        #[source]
        error: io::Error,
    },
    #[error("the kubeconfig is not readable: {0}")]
    Kubeconfig(&'static str),
    #[error("no kubeconfig was given, and {0} is not set as it is in a pod")]
    NotInCluster(&'static str),
    #[error("the API server's address is not of the form https://host:port")]
    Server,
    #[error("the trust bundle or client certificate for the API server is not usable")]
    Tls(#[from] TlsConfig),
    #[error("the client key for the API server is not readable PEM")]
    Key(#[source] PemError),
    #[error("TLS for the API server could not be set up")]
    Setup(#[from] rustls::Error),
    #[error("the API server's name for TLS is not valid")]
    ServerName(#[from] InvalidDnsNameError),
    #[error("the token for the API server has characters that no header may have")]
    Token,
}

/// Bytes that stand fast, or a mounted file that is read again before each request.
#[derive(Clone)]
pub(super) enum Content {
    Fixed(Vec<u8>),
    File(PathBuf),
}

/// As whom requests are sent.
#[derive(Clone)]
pub(super) enum Person {
    /// A bearer token; Kubernetes renews a mounted one about once an hour.
    Token(Content),
    /// A client certificate: chain and key in PEM.
    Certificate { chain: Vec<u8>, key: Vec<u8> },
}

/// Everything that is needed to speak to one API server.
#[derive(Clone)]
pub(crate) struct Access {
    /// Scheme, authority, and perhaps a path that all paths begin with.
    pub(super) server: Uri,
    /// PEM.
    pub(super) bundle: Content,
    /// Another name for the API server's certificate than that in its address.
    pub(super) server_name: Option<String>,
    pub(super) person: Person,
}

impl Content {
    pub(super) fn read(&self) -> Result<Vec<u8>, Connect> {
        match self {
            Self::Fixed(bytes) => Ok(bytes.clone()),
            Self::File(path) => fs::read(path).map_err(|error| Connect::Read { path: path.clone(), error }),
        }
    }

    /// Whether it can change under our hands.
    pub(super) const fn may_change(&self) -> bool {
        matches!(self, Self::File(_))
    }
}

impl Access {
    /// The pod's own account, in the folder where it is mounted.
    pub(crate) fn in_cluster(account: &Path) -> Result<Self, Connect> {
        let variable = |name| env::var(name).map_err(|_| Connect::NotInCluster(name));
        let (host, port) = (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let file = |name: &str| Content::File(account.join(name));
        Ok(Self {
            server: server(&format!("https://{host}:{port}"))?,
            bundle: file("ca.crt"),
            server_name: None,
            person: Person::Token(file("token")),
        })
    }

    /// The TLS configuration for a trust bundle in PEM.
    pub(super) fn tls(&self, bundle: &[u8]) -> Result<ClientConfig, Connect> {
        let roots = tls::roots(&tls::certificates(bundle)?)?;
        let builder = ClientConfig::builder_with_provider(tls::provider())
            .with_protocol_versions(&[&TLS13])?
            .with_root_certificates(roots);
        let mut config = match &self.person {
            Person::Token(_) => builder.with_no_client_auth(),
            Person::Certificate { chain, key } => {
                let chain: Vec<CertificateDer<'static>> = tls::certificates(chain)?;
                builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(key).map_err(Connect::Key)?)?
            }
        };
        // Connections live for hours: what is kept to resume them would only cost memory.
        config.resumption = Resumption::disabled();
        Ok(clock::judge_by(config))
    }

    /// The name that the API server's certificate must have, if it is not that in the address.
    pub(super) fn server_name(&self) -> Result<Option<ServerName<'static>>, Connect> {
        Ok(self.server_name.clone().map(ServerName::try_from).transpose()?)
    }

    /// Value of `Authorization`, read anew.
    pub(super) fn authorization(&self) -> Result<Option<HeaderValue>, Connect> {
        let Person::Token(token) = &self.person else { return Ok(None) };
        let mut value = b"Bearer ".to_vec();
        value.extend_from_slice(token.read()?.trim_ascii());
        let mut value = HeaderValue::from_maybe_shared(bytes::Bytes::from(value)).map_err(|_| Connect::Token)?;
        value.set_sensitive(true);
        Ok(Some(value))
    }
}

/// Only https, and no query.
pub(super) fn server(text: &str) -> Result<Uri, Connect> {
    let uri: Uri = text.parse().map_err(|_| Connect::Server)?;
    let good = uri.scheme_str() == Some("https") && uri.authority().is_some() && uri.query().is_none();
    good.then_some(uri).ok_or(Connect::Server)
}
