//! TLS of this port from files, which are reloaded as they change.

use std::{path::PathBuf, sync::Arc};

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use thiserror::Error;
use tidewatch_kit::{
    last_good::{FILE_POLL_INTERVAL, LastGood, ReadFileError, read_file},
    tls::{Identity, TlsConfigError},
};
use tidewatch_trust::{ProxyIdentity, ServerIdentity, TrustBundle};
use tokio::time::{self, MissedTickBehavior};

use super::{CallerVerifier, Flags, Proxy};

/// Error of loading the TLS files.
#[derive(Debug, Error)]
pub enum TlsFilesError {
    /// A file is not readable.
    #[error(transparent)]
    Read(#[from] ReadFileError),
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

/// Paths or contents of the files.
#[derive(Clone, PartialEq, Eq)]
struct Files<T> {
    clients: T,
    chain: T,
    key: T,
    proxy: Option<T>,
}

/// Keeps TLS configuration and caller verification up to date with the files.
pub struct TlsFiles {
    paths: Files<PathBuf>,
    /// Identity of the proxy, if one terminates TLS in front of this port.
    proxy: Option<ProxyIdentity>,
    files: LastGood<Files<Vec<u8>>>,
    /// Current TLS configuration.
    pub tls: Arc<ArcSwap<ServerConfig>>,
    /// Current verifier of callers.
    pub callers: CallerVerifier,
    metrics: tidewatch_trust::Metrics,
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
        metrics: tidewatch_trust::Metrics,
    ) -> Result<Self, TlsFilesError> {
        let paths = Files {
            clients: flags.v2_client_ca.clone().ok_or(TlsFilesError::NoClientCa)?,
            chain: flags.v2_tls_cert.as_ref().or(certificate).ok_or(TlsFilesError::NoServer)?.clone(),
            key: flags.v2_tls_key.as_ref().or(key).ok_or(TlsFilesError::NoServer)?.clone(),
            proxy: flags.v2_proxy_ca.clone(),
        };
        let proxy = flags.v2_proxy_identity.clone();
        let contents = paths.read()?;
        let (identity, callers) = contents.build(proxy.as_ref())?;
        let tls = Arc::new(ArcSwap::new(identity.config));
        let files = LastGood::new("Certificate files of contract v2", contents);
        Ok(Self { paths, proxy, files, tls, callers, metrics })
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
        self.metrics.reloaded(result.is_ok());
        self.files.record(contents, result.map_err(anyhow::Error::new));
    }

    fn apply(&self, contents: &Files<Vec<u8>>, now: i64) -> Result<(), TlsFilesError> {
        let (identity, callers) = contents.build(self.proxy.as_ref())?;
        if identity.not_after().is_some_and(|end| end <= now) {
            return Err(TlsFilesError::Expired);
        }
        self.callers.replace(&callers);
        self.tls.store(identity.config);
        tracing::info!(certificate = identity.fingerprint, "Certificates of contract v2 are in use");
        Ok(())
    }
}

impl Files<PathBuf> {
    fn read(&self) -> Result<Files<Vec<u8>>, TlsFilesError> {
        Ok(Files {
            clients: read_file(&self.clients)?,
            chain: read_file(&self.chain)?,
            key: read_file(&self.key)?,
            proxy: self.proxy.as_ref().map(read_file).transpose()?,
        })
    }
}

impl Files<Vec<u8>> {
    fn build(&self, proxy: Option<&ProxyIdentity>) -> Result<(ServerIdentity, CallerVerifier), TlsFilesError> {
        let trusted = match (&self.proxy, proxy) {
            (Some(roots), Some(identity)) => {
                Some(Proxy { roots: TrustBundle::from_pem(roots)?, identity: identity.clone() })
            }
            _ => None,
        };
        let callers = CallerVerifier::new(TrustBundle::from_pem(&self.clients)?, trusted)?;
        let identity = ServerIdentity::new(&Identity::from_pem(&self.chain, &self.key)?, &callers.bundle())?;
        Ok((if proxy.is_some() { identity.behind_proxy() } else { identity }, callers))
    }
}
