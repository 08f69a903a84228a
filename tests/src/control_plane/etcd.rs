//! One etcd for all API servers of a test bed; each of them has its own key prefix in it.

use std::{
    fs, io,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    time::Duration,
};

use crate::{
    http, ports,
    process::{Process, ProcessError, Program},
};

/// etcd answers in well under a second; a loaded machine may take longer.
const READY: Duration = Duration::from_secs(60);
const PROBE: Duration = Duration::from_secs(2);
/// How often another port is tried when somebody took the one that was free a moment ago.
const PORT_TRIES: usize = 5;

/// Why etcd does not run.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// No free port.
    #[error("find a free port")]
    Port(#[source] io::Error),
    /// Its data folder cannot be made.
    #[error("make the data folder of etcd")]
    Folder(#[source] io::Error),
    /// It does not start, or ended.
    #[error("start etcd")]
    Start(#[source] ProcessError),
}

/// A running etcd without fsync: its data is worth nothing after the test bed.
#[derive(Debug)]
pub struct Etcd {
    process: Process,
    url: String,
}

impl Etcd {
    /// Starts it with its data in `dir` and waits until it serves.
    ///
    /// # Errors
    /// See [`EtcdError`].
    pub async fn start(binary: &Path, dir: &Path) -> Result<Self, EtcdError> {
        fs::create_dir_all(dir).map_err(EtcdError::Folder)?;
        let mut tries = 1;
        loop {
            match Self::start_once(binary, dir).await {
                Err(EtcdError::Start(error)) if tries < PORT_TRIES && port_taken(&error) => tries += 1,
                outcome => return outcome,
            }
        }
    }

    async fn start_once(binary: &Path, dir: &Path) -> Result<Self, EtcdError> {
        let client = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free().map_err(EtcdError::Port)?));
        let peer = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free().map_err(EtcdError::Port)?));
        let (client_url, peer_url) = (format!("http://{client}"), format!("http://{peer}"));
        let program = Program::new("etcd", binary, dir.join("etcd.log"))
            .arg("--data-dir")
            .arg(dir.join("data"))
            .args(["--listen-client-urls", &client_url, "--advertise-client-urls", &client_url])
            .args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url])
            .args(["--initial-cluster", &format!("default={peer_url}")])
            .args(["--unsafe-no-fsync", "--log-level", "warn", "--quota-backend-bytes", "8589934592"]);
        let process = Process::start(program).map_err(EtcdError::Start)?;
        let ready = || async move {
            match http::get(client, "/readyz", PROBE).await {
                Ok((status, _)) if status.is_success() => Ok(()),
                Ok((status, body)) => Err(format!("/readyz says {status}: {body}")),
                Err(error) => Err(error.to_string()),
            }
        };
        process.until(READY, ready).await.map_err(EtcdError::Start)?;
        Ok(Self { process, url: client_url })
    }

    /// Its URL for clients.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its process, for faults and figures.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }
}

/// Whether a process ended because somebody else has its port.
pub(crate) fn port_taken(error: &ProcessError) -> bool {
    matches!(error, ProcessError::Ended { tail, .. } if tail.lines.iter().any(|l| l.contains("address already in use")))
}
