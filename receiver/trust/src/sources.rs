//! Sources of the receiver's own certificate, the agents' roots and their issuer, and their combination.

use std::path::PathBuf;

use rustls::{
    client::{WebPkiServerVerifier, danger::ServerCertVerifier as _},
    server::VerifierBuilderError,
};
use rustls_pki_types::{ServerName, UnixTime};
use thiserror::Error;
use tidewatch_contract::certificate::Leaf;
use tidewatch_kit::{
    last_good::{ReadFileError, read_file},
    tls::{self, Identity, TlsConfigError},
};

use super::{Flags, IssuerName, PemIdentity, ServerIdentity, TlsFlags, Trust, TrustBundle, ca_state::CaState};

/// Flags that contradict each other.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum FlagsError {
    /// With files of the agents' roots this receiver issues nothing.
    #[error("with --client-ca no certificates are issued, so --issuer and --issuer-ca are of no use")]
    Issuer,
    /// The roots that agents shall trust are unknown.
    #[error("--tls-cert without --client-ca needs --server-ca: the roots that agents shall trust")]
    ServerCa,
    /// A cert-manager issuer issues no server certificate.
    #[error("--issuer cert-manager:… needs --issuer-ca, --tls-cert and --tls-key")]
    CertManager,
    /// The built-in CA has its roots in a Secret.
    #[error("--issuer-ca is of no use with the built-in CA")]
    IssuerCa,
    /// A certificate needs at least one name.
    #[error("--authority gives no name that a certificate could have")]
    NoName,
    /// A root must outlive the leaves that it signs.
    #[error(
        "--ca-rotation-seconds and --certificate-validity-seconds together must be less than --ca-validity-seconds"
    )]
    Rotation,
}

/// Reason for which a server certificate, a key or roots are rejected.
#[derive(Debug, Error)]
pub enum SourceError {
    /// A file is not readable.
    #[error(transparent)]
    Read(#[from] ReadFileError),
    /// The file of the named flag holds no usable roots.
    #[error("{0} has no usable roots")]
    Roots(&'static str, #[source] TlsConfigError),
    /// The certificate and its key are not usable.
    #[error("the certificate and its key are not usable")]
    Server(#[source] TlsConfigError),
    /// The certificate has expired.
    #[error("the certificate has expired")]
    Expired,
    /// Agents would reject the certificate for a name.
    #[error("agents would reject the certificate for {0}")]
    Verify(String, #[source] rustls::Error),
    /// The verifier cannot be built from the agents' roots.
    #[error("the roots that agents shall trust are not usable")]
    Verifier(#[source] VerifierBuilderError),
    /// There is no CA yet.
    #[error("there is no CA")]
    NoCa,
}

#[derive(Clone, Debug)]
pub(super) struct Sources {
    /// Chain and key of the receiver's own certificate; `None` if the built-in CA issues it.
    pub(super) server: Option<(PathBuf, PathBuf)>,
    /// Roots of the agents' certificates; `None` if the built-in CA has them.
    pub(super) clients: Option<PathBuf>,
    server_ca: Option<PathBuf>,
    proxy_ca: Option<PathBuf>,
    /// Names and addresses of the receiver.
    pub(super) names: Vec<ServerName<'static>>,
}

/// Contents of the files.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct FileContents {
    server: Option<(Vec<u8>, Vec<u8>)>,
    clients: Option<Vec<u8>>,
    server_ca: Option<Vec<u8>>,
    proxy_ca: Option<Vec<u8>>,
}

/// Validated configuration, to be published as a unit.
pub(super) struct TlsSnapshot {
    pub(super) identity: ServerIdentity,
    pub(super) trust: Trust,
}

impl Sources {
    pub(super) fn new(flags: &Flags, tls: &TlsFlags, names: Vec<ServerName<'static>>) -> Result<Self, FlagsError> {
        let server = tls.tls_cert.clone().zip(tls.tls_key.clone());
        let clients = match (&tls.client_ca, &flags.issuer, &flags.issuer_ca) {
            (Some(path), IssuerName::Builtin, None) => Some(path.clone()),
            (Some(_), ..) => return Err(FlagsError::Issuer),
            (None, IssuerName::Builtin, None) => None,
            (None, IssuerName::Builtin, Some(_)) => return Err(FlagsError::IssuerCa),
            (None, IssuerName::CertManager { .. }, Some(ca)) if server.is_some() => Some(ca.clone()),
            (None, IssuerName::CertManager { .. }, _) => return Err(FlagsError::CertManager),
        };
        if server.is_some() && tls.client_ca.is_none() && flags.server_ca.is_none() {
            return Err(FlagsError::ServerCa);
        }
        if names.is_empty() && server.is_none() {
            return Err(FlagsError::NoName);
        }
        if clients.is_none() && flags.ca_rotation_age + flags.certificate_validity >= flags.ca_validity {
            return Err(FlagsError::Rotation);
        }
        Ok(Self { server, clients, server_ca: flags.server_ca.clone(), proxy_ca: tls.proxy_ca.clone(), names })
    }

    pub(super) fn read(&self) -> Result<FileContents, SourceError> {
        let server = match &self.server {
            Some((chain, key)) => Some((read_file(chain)?, read_file(key)?)),
            None => None,
        };
        let optional = |path: &Option<PathBuf>| path.as_ref().map(read_file).transpose();
        let clients = optional(&self.clients)?;
        Ok(FileContents { server, clients, server_ca: optional(&self.server_ca)?, proxy_ca: optional(&self.proxy_ca)? })
    }

    /// Combines the files, the CA and the leaf that the CA issued to this receiver. `now` is in Unix seconds.
    pub(super) fn combine(
        &self,
        contents: &FileContents,
        state: Option<&CaState>,
        server_leaf: Option<&PemIdentity>,
        now: i64,
    ) -> Result<TlsSnapshot, SourceError> {
        let mut trust = match (&contents.clients, state) {
            (Some(pem), _) => {
                let clients = bundle("--client-ca or --issuer-ca", pem)?;
                Trust { agents: clients.clone(), clients, issuer: None }
            }
            (None, Some(state)) => state.trust(),
            (None, None) => return Err(SourceError::NoCa),
        };
        let server = match (&contents.server, server_leaf) {
            (Some((chain, key)), _) => Identity::from_pem(chain, key),
            (None, Some(server_leaf)) => server_leaf.identity(),
            (None, None) => return Err(SourceError::NoCa),
        }
        .map_err(SourceError::Server)?;
        if let Some(pem) = &contents.server_ca {
            trust.agents = bundle("--server-ca", pem)?;
            self.verify(&server, &trust.agents, now)?;
        }
        let identity = match &contents.proxy_ca {
            Some(pem) => ServerIdentity::new(&server, &bundle("--proxy-ca", pem)?).map(ServerIdentity::behind_proxy),
            None => ServerIdentity::new(&server, &trust.clients),
        };
        Ok(TlsSnapshot { identity: identity.map_err(SourceError::Server)?, trust })
    }

    /// Verifies the server's certificate as agents do: one that they reject would cut off all of them.
    fn verify(&self, server: &Identity, agents: &TrustBundle, now: i64) -> Result<(), SourceError> {
        let roots = agents.store().map_err(|error| SourceError::Roots("--server-ca", error))?;
        let verifier = WebPkiServerVerifier::builder_with_provider(roots.into(), tls::provider())
            .build()
            .map_err(SourceError::Verifier)?;
        let (leaf, rest) =
            server.chain.split_first().ok_or(SourceError::Server(TlsConfigError::Empty("the certificate chain")))?;
        let now = UnixTime::since_unix_epoch(std::time::Duration::from_secs(now.max(0).cast_unsigned()));
        for name in &self.names {
            let verified = verifier.verify_server_cert(leaf, rest, name, &[], now);
            verified.map_err(|error| SourceError::Verify(name.to_str().into_owned(), error))?;
        }
        Ok(())
    }
}

/// notAfter of the first certificate of a PEM chain.
pub(super) fn end_of(chain: &str) -> Option<i64> {
    let leaf = tls::certificates(chain.as_bytes()).ok()?.into_iter().next()?;
    Leaf::read(&leaf).ok().map(|leaf| leaf.not_after)
}

fn bundle(name: &'static str, pem: &[u8]) -> Result<TrustBundle, SourceError> {
    TrustBundle::from_pem(pem).map_err(|error| SourceError::Roots(name, error))
}
