//! What this port presents and demands: from files, which are taken as they change.

use std::{fs, path::PathBuf, sync::Arc};

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use thiserror::Error;
use tidewatch_shared::tls::TlsConfigError;
use tokio::time::{self, MissedTickBehavior};

use super::{Callers, Flags, Proxy};
use crate::pki::{self, Latest, POLL, ProxyIdentity, ServerIdentity, TrustBundle};

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
    Tls(#[from] TlsConfigError),
    /// The certificate has ended.
    #[error("the certificate of contract v2 has ended")]
    Ended,
}

/// Which files.
#[derive(Clone, Debug)]
struct Paths {
    clients: PathBuf,
    chain: PathBuf,
    key: PathBuf,
    proxy: Option<(PathBuf, ProxyIdentity)>,
}

/// What they hold.
#[derive(Clone, PartialEq, Eq)]
struct Contents {
    clients: Vec<u8>,
    chain: Vec<u8>,
    key: Vec<u8>,
    proxy: Option<Vec<u8>>,
}

/// Keeps TLS and callers up to date with the files, for as long as it runs.
pub struct Files {
    paths: Paths,
    files: Latest<Contents>,
    tls: Arc<ArcSwap<ServerConfig>>,
    callers: Callers,
    metrics: pki::Metrics,
}

impl Files {
    /// Reads the files for the first time. `certificate` and `key` are those of the event port.
    ///
    /// # Errors
    /// [`BuildTls`].
    pub fn open(
        flags: &Flags,
        certificate: Option<&PathBuf>,
        key: Option<&PathBuf>,
        metrics: pki::Metrics,
    ) -> Result<Self, BuildTls> {
        let paths = Paths {
            clients: flags.v2_client_ca.clone().ok_or(BuildTls::NoClientCa)?,
            chain: flags.v2_tls_cert.as_ref().or(certificate).ok_or(BuildTls::NoServer)?.clone(),
            key: flags.v2_tls_key.as_ref().or(key).ok_or(BuildTls::NoServer)?.clone(),
            proxy: flags.v2_proxy_ca.clone().zip(flags.v2_proxy_identity.clone()),
        };
        let contents = paths.read()?;
        let (identity, callers) = paths.build(&contents)?;
        let tls = Arc::new(ArcSwap::new(identity.config()));
        let files = Latest::new("Certificate files of contract v2", contents);
        Ok(Self { paths, files, tls, callers, metrics })
    }

    /// What the handshake presents and demands.
    #[must_use]
    pub fn tls(&self) -> Arc<ArcSwap<ServerConfig>> {
        self.tls.clone()
    }

    /// Who may call.
    #[must_use]
    pub fn callers(&self) -> Callers {
        self.callers.clone()
    }

    /// Runs for ever.
    pub async fn run(mut self) -> &'static str {
        let mut poll = time::interval(POLL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            poll.tick().await;
            self.look(jiff::Timestamp::now().as_second());
        }
    }

    /// Takes files into use that have changed and are good, all of them at once; `now` is in Unix seconds.
    pub(super) fn look(&mut self, now: i64) {
        let Some(contents) = self.files.news(self.paths.read()) else { return };
        let taken = self.take(&contents, now);
        self.files.tried(contents, taken.map_err(anyhow::Error::new), &self.metrics);
    }

    fn take(&self, contents: &Contents, now: i64) -> Result<(), BuildTls> {
        let (identity, callers) = self.paths.build(contents)?;
        if identity.not_after().is_some_and(|end| end <= now) {
            return Err(BuildTls::Ended);
        }
        self.callers.replace(&callers);
        self.tls.store(identity.config());
        tracing::info!(certificate = identity.fingerprint(), "Certificates of contract v2 are in use");
        Ok(())
    }
}

impl Paths {
    fn read(&self) -> Result<Contents, BuildTls> {
        Ok(Contents {
            clients: read(&self.clients)?,
            chain: read(&self.chain)?,
            key: read(&self.key)?,
            proxy: self.proxy.as_ref().map(|(path, _)| read(path)).transpose()?,
        })
    }

    fn build(&self, contents: &Contents) -> Result<(ServerIdentity, Callers), BuildTls> {
        let proxy = match (&contents.proxy, &self.proxy) {
            (Some(roots), Some((_, identity))) => {
                Some(Proxy { roots: TrustBundle::from_pem(roots)?, identity: identity.clone() })
            }
            _ => None,
        };
        let callers = Callers::new(TrustBundle::from_pem(&contents.clients)?, proxy)?;
        let identity = ServerIdentity::from_pem(&contents.chain, &contents.key, &callers.bundle())?;
        Ok((if self.proxy.is_some() { identity.behind_proxy() } else { identity }, callers))
    }
}

fn read(path: &PathBuf) -> Result<Vec<u8>, BuildTls> {
    fs::read(path).map_err(|source| BuildTls::Read { path: path.clone(), source })
}
