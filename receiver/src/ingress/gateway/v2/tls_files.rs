//! TLS of this port from files, which are reloaded as they change.

use std::{fs, path::PathBuf, sync::Arc};

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use thiserror::Error;
use tidewatch_shared::tls::TlsConfigError;
use tokio::time::{self, MissedTickBehavior};

use super::{CallerVerifier, Flags, Proxy};
use crate::pki::{self, FILE_POLL_INTERVAL, LastGood, ProxyIdentity, ServerIdentity, TrustBundle};

/// Error of loading the TLS files.
#[derive(Debug, Error)]
pub enum TlsFilesError {
    /// A file is missing or not readable.
    #[error("read {path}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// I/O error.
        source: std::io::Error,
    },
    /// The flag with the client roots is missing.
    #[error("--v2 needs --v2-client-ca")]
    NoClientCa,
    /// Neither this port nor the event port has certificate files.
    #[error("--v2 needs --v2-tls-cert and --v2-tls-key where the event port has no files")]
    NoServer,
    /// The files hold no usable certificates or key.
    #[error("build the TLS of contract v2")]
    Tls(#[from] TlsConfigError),
    /// The server certificate has expired.
    #[error("the certificate of contract v2 has expired")]
    Expired,
}

#[derive(Clone, Debug)]
struct Paths {
    clients: PathBuf,
    chain: PathBuf,
    key: PathBuf,
    proxy: Option<(PathBuf, ProxyIdentity)>,
}

#[derive(Clone, PartialEq, Eq)]
struct Contents {
    clients: Vec<u8>,
    chain: Vec<u8>,
    key: Vec<u8>,
    proxy: Option<Vec<u8>>,
}

/// Keeps TLS configuration and caller verification up to date with the files.
pub struct TlsFiles {
    paths: Paths,
    files: LastGood<Contents>,
    tls: Arc<ArcSwap<ServerConfig>>,
    callers: CallerVerifier,
    metrics: pki::Metrics,
}

impl TlsFiles {
    /// Reads the files for the first time. `certificate` and `key` are those of the event port.
    ///
    /// # Errors
    /// [`TlsFilesError`].
    pub fn open(
        flags: &Flags,
        certificate: Option<&PathBuf>,
        key: Option<&PathBuf>,
        metrics: pki::Metrics,
    ) -> Result<Self, TlsFilesError> {
        let paths = Paths {
            clients: flags.v2_client_ca.clone().ok_or(TlsFilesError::NoClientCa)?,
            chain: flags.v2_tls_cert.as_ref().or(certificate).ok_or(TlsFilesError::NoServer)?.clone(),
            key: flags.v2_tls_key.as_ref().or(key).ok_or(TlsFilesError::NoServer)?.clone(),
            proxy: flags.v2_proxy_ca.clone().zip(flags.v2_proxy_identity.clone()),
        };
        let contents = paths.read()?;
        let (identity, callers) = paths.build(&contents)?;
        let tls = Arc::new(ArcSwap::new(identity.config()));
        let files = LastGood::new("Certificate files of contract v2", contents);
        Ok(Self { paths, files, tls, callers, metrics })
    }

    /// Returns the current TLS configuration.
    #[must_use]
    pub fn tls(&self) -> Arc<ArcSwap<ServerConfig>> {
        self.tls.clone()
    }

    /// Returns the current verifier of callers.
    #[must_use]
    pub fn callers(&self) -> CallerVerifier {
        self.callers.clone()
    }

    /// Polls the files forever.
    pub async fn run(mut self) -> &'static str {
        let mut poll = time::interval(FILE_POLL_INTERVAL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            poll.tick().await;
            self.reload(jiff::Timestamp::now().as_second());
        }
    }

    /// Reads the files, and uses them if they have changed and are all valid; `now` is in Unix seconds.
    pub(super) fn reload(&mut self, now: i64) {
        let Some(contents) = self.files.changed(self.paths.read()) else { return };
        let result = self.apply(&contents, now);
        self.files.record(contents, result.map_err(anyhow::Error::new), &self.metrics);
    }

    fn apply(&self, contents: &Contents, now: i64) -> Result<(), TlsFilesError> {
        let (identity, callers) = self.paths.build(contents)?;
        if identity.not_after().is_some_and(|end| end <= now) {
            return Err(TlsFilesError::Expired);
        }
        self.callers.replace(&callers);
        self.tls.store(identity.config());
        tracing::info!(certificate = identity.fingerprint(), "Certificates of contract v2 are in use");
        Ok(())
    }
}

impl Paths {
    fn read(&self) -> Result<Contents, TlsFilesError> {
        Ok(Contents {
            clients: read(&self.clients)?,
            chain: read(&self.chain)?,
            key: read(&self.key)?,
            proxy: self.proxy.as_ref().map(|(path, _)| read(path)).transpose()?,
        })
    }

    fn build(&self, contents: &Contents) -> Result<(ServerIdentity, CallerVerifier), TlsFilesError> {
        let proxy = match (&contents.proxy, &self.proxy) {
            (Some(roots), Some((_, identity))) => {
                Some(Proxy { roots: TrustBundle::from_pem(roots)?, identity: identity.clone() })
            }
            _ => None,
        };
        let callers = CallerVerifier::new(TrustBundle::from_pem(&contents.clients)?, proxy)?;
        let identity = ServerIdentity::from_pem(&contents.chain, &contents.key, &callers.bundle())?;
        Ok((if self.proxy.is_some() { identity.behind_proxy() } else { identity }, callers))
    }
}

fn read(path: &PathBuf) -> Result<Vec<u8>, TlsFilesError> {
    fs::read(path).map_err(|source| TlsFilesError::Read { path: path.clone(), source })
}
