//! Flags of this port.

use std::{fs, net::SocketAddr, path::PathBuf};

use clap::Args;
use thiserror::Error;
use tidewatch_shared::tls::TlsConfig;

use super::{Callers, Proxy};
use crate::{
    gateway::ProxyIdentity,
    pki::{ServerIdentity, TrustBundle},
};

/// How contract v2 is served.
#[derive(Clone, Debug, Args)]
#[group(id = "contract-v2")]
pub struct Flags {
    /// Serves contract v2 of the incumbent's agents, on a port of its own.
    #[arg(long, env = "TIDEWATCH_V2", requires = "v2_client_ca")]
    pub v2: bool,

    /// Where the incumbent's agents connect, if contract v2 is served: mTLS only.
    #[arg(long, env = "TIDEWATCH_V2_ADDRESS", default_value = "0.0.0.0:8083")]
    pub v2_address: SocketAddr,

    /// The roots of the incumbent's agents' certificates, in PEM. They count on this port alone.
    #[arg(long, env = "TIDEWATCH_V2_CLIENT_CA")]
    pub v2_client_ca: Option<PathBuf>,

    /// Certificate chain of this port, leaf first, in PEM; that of the event port unless given.
    #[arg(long, env = "TIDEWATCH_V2_TLS_CERT", requires = "v2_tls_key")]
    pub v2_tls_cert: Option<PathBuf>,

    /// Its key, PKCS#8 in PEM.
    #[arg(long, env = "TIDEWATCH_V2_TLS_KEY", requires = "v2_tls_cert")]
    pub v2_tls_key: Option<PathBuf>,

    /// The roots of a proxy that ends TLS in front of this port, in PEM; then nobody but that proxy may connect. It must replace what clients write into
    /// X-Forwarded-Client-Cert.
    #[arg(long, env = "TIDEWATCH_V2_PROXY_CA", requires = "v2_proxy_identity")]
    pub v2_proxy_ca: Option<PathBuf>,

    /// SPIFFE URI or DNS name in that proxy's own certificate.
    #[arg(long, env = "TIDEWATCH_V2_PROXY_IDENTITY", requires = "v2_proxy_ca")]
    pub v2_proxy_identity: Option<ProxyIdentity>,
}

/// Why this port has no TLS.
#[derive(Debug, Error)]
pub enum BuildTls {
    /// A file is missing or not readable.
    #[error("read {path}")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The flag that names the roots is missing.
    #[error("--v2 needs --v2-client-ca")]
    NoClientCa,
    /// There are no files of the event port either.
    #[error("--v2 needs --v2-tls-cert and --v2-tls-key where the event port has no files")]
    NoServer,
    /// What the files hold is of no use.
    #[error("build the TLS of contract v2")]
    Tls(#[from] TlsConfig),
}

impl Flags {
    /// Reads the files. `certificate` and `key` are those of the event port.
    ///
    /// # Errors
    /// [`BuildTls`].
    pub fn tls(
        &self,
        certificate: Option<&PathBuf>,
        key: Option<&PathBuf>,
    ) -> Result<(ServerIdentity, Callers), BuildTls> {
        let bundle = |path: &PathBuf| Ok::<_, BuildTls>(TrustBundle::from_pem(&read(path)?)?);
        let clients = bundle(self.v2_client_ca.as_ref().ok_or(BuildTls::NoClientCa)?)?;
        let proxy = match (&self.v2_proxy_ca, &self.v2_proxy_identity) {
            (Some(roots), Some(identity)) => Some(Proxy { roots: bundle(roots)?, identity: identity.clone() }),
            _ => None,
        };
        let callers = Callers::new(clients, proxy)?;
        let chain = read(self.v2_tls_cert.as_ref().or(certificate).ok_or(BuildTls::NoServer)?)?;
        let key = read(self.v2_tls_key.as_ref().or(key).ok_or(BuildTls::NoServer)?)?;
        Ok((ServerIdentity::from_pem(&chain, &key, callers.bundle())?, callers))
    }
}

fn read(path: &PathBuf) -> Result<Vec<u8>, BuildTls> {
    fs::read(path).map_err(|source| BuildTls::Read { path: path.clone(), source })
}
