//! From where the receiver's own certificate, the roots of the agents and their issuer come, and what follows from them together.

use std::{fs, path::PathBuf};

use rustls::{
    client::{WebPkiServerVerifier, danger::ServerCertVerifier as _},
    server::VerifierBuilderError,
};
use rustls_pki_types::UnixTime;
use thiserror::Error;
use tidewatch_shared::{
    certificate::Leaf,
    tls::{self, Identity, TlsConfigError},
};

use super::{Flags, IssuerName, PemIdentity, ServerIdentity, ServerName, TlsFlags, Trust, TrustBundle, stored::Stored};

/// Flags that do not go together.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Inconsistent {
    /// Files of the agents' roots mean that nothing is issued here.
    #[error("with --client-ca no certificates are issued, so --issuer and --issuer-ca are of no use")]
    Issuer,
    /// Agents could not be told whom to trust.
    #[error("--tls-cert without --client-ca needs --server-ca: the roots that agents shall trust")]
    ServerCa,
    /// Somebody else's CA issues no server certificate.
    #[error("--issuer cert-manager:… needs --issuer-ca, --tls-cert and --tls-key")]
    CertManager,
    /// The built-in CA has its roots in a Secret.
    #[error("--issuer-ca is of no use with the built-in CA")]
    IssuerCa,
    /// A certificate needs a name.
    #[error("--authority gives no name that a certificate could have")]
    NoName,
    /// A root must outlive what it signs.
    #[error(
        "--ca-rotation-seconds and --certificate-validity-seconds together must be less than --ca-validity-seconds"
    )]
    Rotation,
}

/// Why a server certificate, a key or roots are refused.
#[derive(Debug, Error)]
pub enum Refused {
    /// A file.
    #[error("read {path}")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file with these roots.
    #[error("{0} has no usable roots")]
    Roots(&'static str, #[source] TlsConfigError),
    /// Certificate and key.
    #[error("the certificate and its key are not usable")]
    Server(#[source] TlsConfigError),
    /// The certificate has ended.
    #[error("the certificate has ended")]
    Ended,
    /// Agents would not accept it.
    #[error("agents would not accept the certificate for {0}")]
    Verify(String, #[source] rustls::Error),
    /// The verifier.
    #[error("the roots that agents shall trust are not usable")]
    Verifier(#[source] VerifierBuilderError),
    /// There is no CA yet.
    #[error("there is no CA")]
    NoCa,
}

/// Where the receiver's own certificate comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Server {
    Files { chain: PathBuf, key: PathBuf },
    Issued,
}

/// Where the roots of the agents come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Clients {
    File(PathBuf),
    Builtin,
    CertManager { kind: String, name: String, ca: PathBuf },
}

#[derive(Clone, Debug)]
pub(super) struct Sources {
    pub(super) server: Server,
    pub(super) clients: Clients,
    server_ca: Option<PathBuf>,
    proxy_ca: Option<PathBuf>,
    /// Under which the receiver is reached.
    pub(super) names: Vec<ServerName>,
}

/// What the files hold.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Contents {
    server: Option<(Vec<u8>, Vec<u8>)>,
    clients: Option<Vec<u8>>,
    server_ca: Option<Vec<u8>>,
    proxy_ca: Option<Vec<u8>>,
}

/// What is published, all of it checked.
pub(super) struct Whole {
    pub(super) identity: ServerIdentity,
    pub(super) trust: Trust,
}

impl Sources {
    pub(super) fn new(flags: &Flags, tls: &TlsFlags, names: Vec<ServerName>) -> Result<Self, Inconsistent> {
        let server = match (&tls.tls_cert, &tls.tls_key) {
            (Some(chain), Some(key)) => Server::Files { chain: chain.clone(), key: key.clone() },
            _ => Server::Issued,
        };
        let clients = match (&tls.client_ca, &flags.issuer, &flags.issuer_ca) {
            (Some(path), IssuerName::Builtin, None) => Clients::File(path.clone()),
            (Some(_), ..) => return Err(Inconsistent::Issuer),
            (None, IssuerName::Builtin, None) => Clients::Builtin,
            (None, IssuerName::Builtin, Some(_)) => return Err(Inconsistent::IssuerCa),
            (None, IssuerName::CertManager { kind, name }, Some(ca)) if server != Server::Issued => {
                Clients::CertManager { kind: kind.clone(), name: name.clone(), ca: ca.clone() }
            }
            (None, IssuerName::CertManager { .. }, _) => return Err(Inconsistent::CertManager),
        };
        let is_foreign = server != Server::Issued && !matches!(clients, Clients::File(_));
        if is_foreign && flags.server_ca.is_none() {
            return Err(Inconsistent::ServerCa);
        }
        if names.is_empty() && server == Server::Issued {
            return Err(Inconsistent::NoName);
        }
        if clients == Clients::Builtin && flags.ca_rotation() + flags.runtime_validity() >= flags.ca_validity() {
            return Err(Inconsistent::Rotation);
        }
        Ok(Self { server, clients, server_ca: flags.server_ca.clone(), proxy_ca: tls.proxy_ca.clone(), names })
    }

    /// Whether the built-in CA has a part in it.
    pub(super) fn need_ca(&self) -> bool {
        self.clients == Clients::Builtin
    }

    /// Whether the receiver's own certificate comes from files.
    pub(super) fn has_server_files(&self) -> bool {
        self.server != Server::Issued
    }

    pub(super) fn read(&self) -> Result<Contents, Refused> {
        let server = match &self.server {
            Server::Files { chain, key } => Some((read(chain)?, read(key)?)),
            Server::Issued => None,
        };
        let clients = match &self.clients {
            Clients::File(path) | Clients::CertManager { ca: path, .. } => Some(read(path)?),
            Clients::Builtin => None,
        };
        let optional = |path: &Option<PathBuf>| path.as_ref().map(read).transpose();
        Ok(Contents { server, clients, server_ca: optional(&self.server_ca)?, proxy_ca: optional(&self.proxy_ca)? })
    }

    /// Makes one whole of the files, the CA and the leaf that it made for this receiver. `now` is in Unix seconds.
    pub(super) fn combine(
        &self,
        contents: &Contents,
        stored: Option<&Stored>,
        own: Option<&PemIdentity>,
        now: i64,
    ) -> Result<Whole, Refused> {
        let mut trust = match (&contents.clients, stored) {
            (Some(pem), _) => {
                let clients = bundle("--client-ca or --issuer-ca", pem)?;
                Trust { agents: clients.clone(), clients, issuer: None }
            }
            (None, Some(stored)) => stored.trust(),
            (None, None) => return Err(Refused::NoCa),
        };
        let server = match (&contents.server, own) {
            (Some((chain, key)), _) => Identity::from_pem(chain, key),
            (None, Some(own)) => own.identity(),
            (None, None) => return Err(Refused::NoCa),
        }
        .map_err(Refused::Server)?;
        if let Some(pem) = &contents.server_ca {
            trust.agents = bundle("--server-ca", pem)?;
            self.verify(&server, &trust.agents, now)?;
        }
        let identity = match &contents.proxy_ca {
            Some(pem) => ServerIdentity::new(&server, &bundle("--proxy-ca", pem)?).map(ServerIdentity::behind_proxy),
            None => ServerIdentity::new(&server, &trust.clients),
        };
        Ok(Whole { identity: identity.map_err(Refused::Server)?, trust })
    }

    /// A certificate that agents refuse would silence all of them.
    fn verify(&self, server: &Identity, agents: &TrustBundle, now: i64) -> Result<(), Refused> {
        let roots = agents.store().map_err(|why| Refused::Roots("--server-ca", why))?;
        let verifier = WebPkiServerVerifier::builder_with_provider(roots.into(), tls::provider())
            .build()
            .map_err(Refused::Verifier)?;
        let (leaf, rest) =
            server.chain.split_first().ok_or(Refused::Server(TlsConfigError::Empty("the certificate chain")))?;
        let now = UnixTime::since_unix_epoch(std::time::Duration::from_secs(now.max(0).cast_unsigned()));
        for name in &self.names {
            let verified = verifier.verify_server_cert(leaf, rest, &name.for_tls(), &[], now);
            verified.map_err(|why| Refused::Verify(name.to_string(), why))?;
        }
        Ok(())
    }
}

impl Whole {
    /// Whether the certificate holds now; one whose end cannot be read does.
    pub(super) fn check_end(&self, now: i64) -> Result<(), Refused> {
        if self.identity.not_after().is_some_and(|end| end <= now) { Err(Refused::Ended) } else { Ok(()) }
    }
}

/// End of the first certificate of a chain in PEM.
pub(super) fn end_of(chain: &str) -> Option<i64> {
    let leaf = tls::certificates(chain.as_bytes()).ok()?.into_iter().next()?;
    Leaf::read(&leaf).ok().map(|leaf| leaf.not_after)
}

fn bundle(name: &'static str, pem: &[u8]) -> Result<TrustBundle, Refused> {
    TrustBundle::from_pem(pem).map_err(|why| Refused::Roots(name, why))
}

fn read(path: &PathBuf) -> Result<Vec<u8>, Refused> {
    fs::read(path).map_err(|source| Refused::Read { path: path.clone(), source })
}
