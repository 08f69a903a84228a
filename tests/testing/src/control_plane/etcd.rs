//! etcd: one for all API servers of a test bed, each with its own key prefix, or one of its own for a cluster
//! with a store that a test disturbs.

use std::{
    fs, io,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::json;

use crate::{
    http::{self, HttpError},
    ports,
    process::{Process, ProcessError, Program, Signal},
};

/// etcd answers in well under a second; a loaded machine may take longer.
const READY: Duration = Duration::from_secs(60);
const PROBE: Duration = Duration::from_secs(2);
/// A compaction reads all discarded revisions.
const COMPACTION: Duration = Duration::from_secs(60);
/// Attempts with another port when a process took the one that was free a moment ago.
const PORT_TRIES: usize = 5;
/// Time for which a restarted etcd waits for its old ports.
const OLD_PORT: Duration = Duration::from_secs(20);

/// Failure of an etcd operation.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// No free port.
    #[error("find a free port")]
    Port(#[source] io::Error),
    /// Its data folder cannot be made.
    #[error("make the data folder of etcd")]
    Folder(#[source] io::Error),
    /// It did not start, or ended.
    #[error("start etcd")]
    Start(#[source] ProcessError),
    /// A signal could not be sent.
    #[error("send a signal to etcd")]
    Signal(#[source] ProcessError),
    /// Its JSON gateway did not answer.
    #[error("request to etcd")]
    Request(#[source] HttpError),
    /// Its JSON gateway refused, or its response is not as expected.
    #[error("unexpected response of etcd: {0}")]
    Answer(String),
    /// Its data could not be copied or restored.
    #[error("copy the data of etcd")]
    Copy(#[source] io::Error),
}

/// An etcd without fsync: its data survives a kill of the process, and is not needed after the test bed.
#[derive(Debug)]
pub struct Etcd {
    settings: Settings,
    url: String,
    process: Mutex<Arc<Process>>,
}

/// Settings that are constant over its restarts.
#[derive(Debug)]
struct Settings {
    binary: PathBuf,
    dir: PathBuf,
    client: SocketAddr,
    peer: SocketAddr,
}

/// A copy of an etcd's data, to restore.
#[derive(Debug)]
pub struct Backup(PathBuf);

impl Etcd {
    /// Starts it with its data in `dir` and waits until it serves.
    ///
    /// # Errors
    /// See [`EtcdError`].
    pub async fn start(binary: &Path, dir: &Path) -> Result<Self, EtcdError> {
        fs::create_dir_all(dir).map_err(EtcdError::Folder)?;
        let address = || Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free().map_err(EtcdError::Port)?)));
        let mut tries = 1;
        loop {
            let binary = binary.to_path_buf();
            let dir = dir.to_path_buf();
            let settings = Settings { binary, dir, client: address()?, peer: address()? };
            match settings.run().await {
                Ok(process) => {
                    let url = format!("http://{}", settings.client);
                    return Ok(Self { settings, url, process: Mutex::new(process) });
                }
                Err(EtcdError::Start(error)) if tries < PORT_TRIES && port_taken(&error) => tries += 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// URL for clients; the same after a restart.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its current process.
    pub fn process(&self) -> Arc<Process> {
        Arc::clone(&self.process.lock())
    }

    /// Kills it with SIGKILL.
    pub fn kill(&self) {
        self.process().kill();
    }

    /// Stops it (SIGSTOP).
    ///
    /// # Errors
    /// If it is gone.
    pub fn freeze(&self) -> Result<(), EtcdError> {
        self.process().signal(Signal::Stop).map_err(EtcdError::Signal)
    }

    /// Continues it after [`Etcd::freeze`].
    ///
    /// # Errors
    /// If it is gone.
    pub fn thaw(&self) -> Result<(), EtcdError> {
        self.process().signal(Signal::Cont).map_err(EtcdError::Signal)
    }

    /// Kills it if it still runs, and starts it again on the same ports with the data in its folder.
    ///
    /// # Errors
    /// See [`EtcdError`].
    pub async fn restart(&self) -> Result<(), EtcdError> {
        self.kill();
        let began = Instant::now();
        let process = loop {
            match self.settings.run().await {
                Err(EtcdError::Start(error)) if port_taken(&error) && began.elapsed() < OLD_PORT => {}
                outcome => break outcome?,
            }
        };
        *self.process.lock() = process;
        Ok(())
    }

    /// Compacts all history before its current revision, and returns that revision.
    ///
    /// # Errors
    /// See [`EtcdError`].
    pub async fn compact(&self) -> Result<u64, EtcdError> {
        #[derive(Deserialize)]
        struct Status {
            header: Header,
        }
        #[derive(Deserialize)]
        struct Header {
            revision: String,
        }
        let text = self.post("/v3/maintenance/status", "{}".to_owned()).await?;
        let status: Status = serde_json::from_str(&text).map_err(|_| EtcdError::Answer(text.clone()))?;
        let revision = status.header.revision.parse().map_err(|_| EtcdError::Answer(text))?;
        // protobuf's JSON encodes 64-bit numbers as strings.
        let body = json!({"revision": status.header.revision, "physical": true}).to_string();
        self.post("/v3/kv/compaction", body).await?;
        Ok(revision)
    }

    /// Kills it and copies its data. One copy at a time.
    ///
    /// # Errors
    /// [`EtcdError::Copy`].
    pub fn back_up(&self) -> Result<Backup, EtcdError> {
        self.kill();
        let copy = self.settings.dir.join("copy");
        copy_all(&self.settings.data(), &copy).map_err(EtcdError::Copy)?;
        Ok(Backup(copy))
    }

    /// Kills it and replaces its data by a copy: from the next restart on, later writes are lost.
    ///
    /// # Errors
    /// [`EtcdError::Copy`].
    #[expect(clippy::needless_pass_by_value, reason = "the copy is used up")]
    pub fn restore(&self, backup: Backup) -> Result<(), EtcdError> {
        self.kill();
        let data = self.settings.data();
        fs::remove_dir_all(&data).and_then(|()| fs::rename(&backup.0, &data)).map_err(EtcdError::Copy)
    }

    async fn post(&self, path: &str, json: String) -> Result<String, EtcdError> {
        let (status, body) =
            http::post(self.settings.client, path, json, COMPACTION).await.map_err(EtcdError::Request)?;
        if status.is_success() { Ok(body) } else { Err(EtcdError::Answer(format!("{status}: {body}"))) }
    }
}

impl Settings {
    fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    async fn run(&self) -> Result<Arc<Process>, EtcdError> {
        let client = self.client;
        let client_url = format!("http://{client}");
        let peer_url = format!("http://{}", self.peer);
        let program = Program::new("etcd", &self.binary, self.dir.join("etcd.log"))
            .arg("--data-dir")
            .arg(self.data())
            .args(["--listen-client-urls", &client_url, "--advertise-client-urls", &client_url])
            .args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url])
            .args(["--initial-cluster", &format!("default={peer_url}")])
            .args(["--unsafe-no-fsync", "--log-level", "warn", "--quota-backend-bytes", "8589934592"]);
        let process = Process::start(program).map_err(EtcdError::Start)?;
        let ready = || async move {
            match http::get(client, "/readyz", PROBE).await {
                Ok((status, _)) if status.is_success() => Ok(()),
                Ok((status, body)) => Err(format!("/readyz returned {status}: {body}")),
                Err(error) => Err(error.to_string()),
            }
        };
        process.until(READY, ready).await.map_err(EtcdError::Start)?;
        Ok(Arc::new(process))
    }
}

/// Copies a folder recursively; `to` is replaced.
fn copy_all(from: &Path, to: &Path) -> io::Result<()> {
    match fs::remove_dir_all(to) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => fs::create_dir_all(to)?,
    }
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_all(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// Returns true if a process ended because another process has its port.
pub(crate) fn port_taken(error: &ProcessError) -> bool {
    matches!(error, ProcessError::Ended { tail, .. } if tail.lines.iter().any(|l| l.contains("address already in use")))
}
