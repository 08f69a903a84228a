//! The product's own binaries: built by cargo in the profile that runs, started, harmed and measured as processes.

use std::{
    collections::BTreeMap,
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitStatus,
    time::Duration,
};

use tokio::{sync::OnceCell, time::timeout};

use crate::{
    http,
    process::{Process, ProcessError, Program, Signal, Tail},
    progress::Step,
};

mod build;
mod figures;

pub use build::BuildError;
pub use figures::{Memory, cpu_by_thread, memory};

const PROBE: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_secs(1);

/// The built binaries.
#[derive(Debug, Clone)]
pub struct ProductBinaries {
    by_name: BTreeMap<String, PathBuf>,
}

impl ProductBinaries {
    /// The agent's binary.
    ///
    /// # Errors
    /// [`BuildError::Missing`] if its package has no such binary.
    pub fn agent(&self) -> Result<&Path, BuildError> {
        self.get("tidewatch-agent")
    }

    /// The receiver's binary.
    ///
    /// # Errors
    /// [`BuildError::Missing`] if its package has no such binary.
    pub fn receiver(&self) -> Result<&Path, BuildError> {
        self.get("tidewatch-receiver")
    }

    /// A binary by its name.
    ///
    /// # Errors
    /// [`BuildError::Missing`].
    pub fn get(&self, name: &str) -> Result<&Path, BuildError> {
        self.by_name.get(name).map(PathBuf::as_path).ok_or_else(|| BuildError::Missing(name.to_owned()))
    }
}

/// Runs `cargo build` for agent and receiver, once for this process, in the profile of the running binary.
///
/// # Errors
/// See [`BuildError`]; the next caller tries again.
pub async fn build_binaries() -> Result<ProductBinaries, BuildError> {
    static BUILT: OnceCell<ProductBinaries> = OnceCell::const_new();
    let built = BUILT.get_or_try_init(|| async {
        let mut step = Step::begin("building agent and receiver");
        // cargo blocks for as long as it compiles.
        // This crate is among them so that cargo unifies the same features as for the running binary, and compiles no
        // dependency a second time.
        let packages = &["tidewatch-agent", "tidewatch-receiver", "tidewatch-tests"];
        let mut cargo = tokio::task::spawn_blocking(|| build::cargo_build(packages));
        let by_name = loop {
            match timeout(TICK, &mut cargo).await {
                Ok(ended) => break ended.map_err(|e| BuildError::Call(e.to_string()))??,
                Err(_) => step.tick(),
            }
        };
        step.done();
        Ok(ProductBinaries { by_name })
    });
    built.await.cloned()
}

/// A binary of ours that runs, with its metrics and probes on a port of its own. Ends with its owner.
#[derive(Debug)]
pub struct ProductProcess {
    process: Process,
    probes: SocketAddr,
    admin: Option<SocketAddr>,
}

impl ProductProcess {
    /// Starts it; `probes` is where it was told, by its arguments, to serve `/readyz`, `/healthz` and `/metrics`.
    ///
    /// # Errors
    /// See [`ProcessError`].
    pub fn start(program: Program, probes: SocketAddr) -> Result<Self, ProcessError> {
        Ok(Self { process: Process::start(program)?, probes, admin: None })
    }

    /// Adds where it was told to serve its admin listener.
    #[must_use]
    pub fn with_admin(mut self, admin: SocketAddr) -> Self {
        self.admin = Some(admin);
        self
    }

    /// Waits until `/readyz` says yes. An error carries what it said last and the log's end.
    ///
    /// # Errors
    /// [`ProcessError::Ended`] or [`ProcessError::NotReady`].
    pub async fn ready(&self, deadline: Duration) -> Result<(), ProcessError> {
        self.process.until(deadline, || self.probe("/readyz")).await
    }

    /// Waits until a condition on its `/metrics` page holds; the value that `look` takes from the page is returned.
    ///
    /// # Errors
    /// [`ProcessError::Ended`] or [`ProcessError::NotReady`].
    pub async fn metrics_until<T>(
        &self,
        deadline: Duration,
        look: impl Fn(&str) -> Option<T>,
    ) -> Result<T, ProcessError> {
        let look = &look;
        let ask = || async move {
            let (_, page) = self.get("/metrics").await.map_err(|e| e.to_string())?;
            look(&page).ok_or_else(|| "the metrics do not show it".to_owned())
        };
        self.process.until(deadline, ask).await
    }

    /// GETs a path of its probe port.
    ///
    /// # Errors
    /// See [`http::HttpError`].
    pub async fn get(&self, path: &str) -> Result<(::http::StatusCode, String), http::HttpError> {
        http::get(self.probes, path, PROBE).await
    }

    async fn probe(&self, path: &str) -> Result<(), String> {
        match self.get(path).await {
            Ok((status, _)) if status.is_success() => Ok(()),
            Ok((status, body)) => Err(format!("{path} says {status}: {}", body.trim())),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Where probes and metrics are served.
    #[must_use]
    pub fn probes(&self) -> SocketAddr {
        self.probes
    }

    /// Where its admin listener is, if it was told.
    #[must_use]
    pub fn admin(&self) -> Option<SocketAddr> {
        self.admin
    }

    /// The process below: pid, log, status, waiting for conditions.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Kills it with -9.
    pub fn kill9(&self) {
        self.process.kill();
    }

    /// Asks for an orderly end and waits for it.
    ///
    /// # Errors
    /// [`ProcessError::StillRuns`] at the deadline.
    pub async fn sigterm(&self, deadline: Duration) -> Result<ExitStatus, ProcessError> {
        self.process.signal(Signal::Term)?;
        self.process.ended(deadline).await
    }

    /// Freezes it.
    ///
    /// # Errors
    /// If it is gone.
    pub fn sigstop(&self) -> Result<(), ProcessError> {
        self.process.signal(Signal::Stop)
    }

    /// Lets it go on after [`ProductProcess::sigstop`].
    ///
    /// # Errors
    /// If it is gone.
    pub fn sigcont(&self) -> Result<(), ProcessError> {
        self.process.signal(Signal::Cont)
    }

    /// The last lines of its log and where it is.
    #[must_use]
    pub fn tail(&self) -> Tail {
        self.process.tail()
    }

    /// The whole log as text.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn log_text(&self) -> io::Result<String> {
        fs::read_to_string(self.process.log())
    }

    /// How much memory it has now, and had at most.
    ///
    /// # Errors
    /// If it is gone.
    pub fn memory(&self) -> io::Result<Memory> {
        memory(self.process.pid())
    }

    /// CPU time used so far, by thread name (at most 15 bytes long, as the kernel cuts it); threads of one name are
    /// summed, threads that ended are not in it.
    ///
    /// # Errors
    /// If it is gone.
    pub fn cpu_by_thread(&self) -> io::Result<BTreeMap<String, Duration>> {
        cpu_by_thread(self.process.pid())
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    /// A probe port that answers these, one after the other, and then the last one for ever.
    async fn probes(answers: &'static [(u16, &'static str)]) -> SocketAddr {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("bound");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(async move {
            let mut number = 0;
            while let Ok((mut stream, _)) = listener.accept().await {
                let (status, body) = answers[number.min(answers.len() - 1)];
                number += 1;
                let _ = stream.read(&mut [0; 1024]).await;
                let length = body.len();
                let answer =
                    format!("HTTP/1.1 {status} x\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}");
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        address
    }

    fn start(dir: &tempfile::TempDir, script: &str, probes: SocketAddr) -> ProductProcess {
        let program = Program::new("product", "sh", dir.path().join("log")).args(["-c", script]);
        ProductProcess::start(program, probes).expect("started")
    }

    #[tokio::test]
    async fn ready_when_the_probe_says_so_and_ended_on_term() {
        let dir = tempfile::tempdir().expect("a folder");
        let probes = probes(&[(503, "pending: caches"), (200, "ok")]).await;
        let product = start(&dir, "exec sleep 600", probes);
        product.ready(SOON).await.expect("ready");
        assert!(product.memory().expect("figures").pss_kib > 0);
        assert_eq!(product.cpu_by_thread().expect("figures").len(), 1);
        let status = product.sigterm(SOON).await.expect("ended");
        assert!(!status.success());
    }

    #[tokio::test]
    async fn not_ready_tells_what_is_pending_and_the_last_words() {
        let dir = tempfile::tempdir().expect("a folder");
        let product = start(&dir, "echo waiting; exec sleep 600", probes(&[(503, "pending: caches")]).await);
        // Not ready before it has spoken, so that its words are there.
        let spoken = || async { product.log_text().ok().filter(|text| !text.is_empty()).ok_or_else(String::new) };
        product.process().until(SOON, spoken).await.expect("words");
        let text = product.ready(Duration::from_millis(100)).await.expect_err("never ready").to_string();
        assert!(text.contains("pending: caches") && text.contains("waiting"), "{text}");
    }

    #[tokio::test]
    async fn an_end_is_not_waited_for_in_vain() {
        let dir = tempfile::tempdir().expect("a folder");
        let product = start(&dir, "echo no certificate >&2; exit 4", probes(&[(503, "")]).await);
        let error = product.ready(SOON).await.expect_err("it ended");
        assert!(matches!(error, ProcessError::Ended { .. }) && error.to_string().contains("no certificate"), "{error}");
    }

    #[tokio::test]
    async fn waits_for_a_metric() {
        let dir = tempfile::tempdir().expect("a folder");
        let product = start(&dir, "exec sleep 600", probes(&[(200, "sent 0\n"), (200, "sent 3\n")]).await);
        let sent = |page: &str| page.strip_prefix("sent ")?.trim().parse::<u32>().ok().filter(|sent| *sent > 0);
        assert_eq!(product.metrics_until(SOON, sent).await.expect("sent"), 3);
    }
}
