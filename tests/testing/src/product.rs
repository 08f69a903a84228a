//! The product's own binaries: built by cargo in the profile of the running binary, started, disturbed and measured as
//! processes.

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
pub use figures::{Memory, cpu_by_thread, cpu_time, memory, metric, metric_sum, open_files};

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

    /// The operators' program.
    ///
    /// # Errors
    /// [`BuildError::Missing`] if its package has no such binary.
    pub fn cli(&self) -> Result<&Path, BuildError> {
        self.get("tidewatch")
    }

    /// A binary by its name.
    ///
    /// # Errors
    /// [`BuildError::Missing`].
    pub fn get(&self, name: &str) -> Result<&Path, BuildError> {
        self.by_name.get(name).map(PathBuf::as_path).ok_or_else(|| BuildError::Missing(name.to_owned()))
    }
}

/// Runs `cargo build` for agent, receiver, operators' program and the sample modules' operator, once for this process, in the profile of the running binary.
///
/// # Errors
/// See [`BuildError`]; the next caller tries again.
pub async fn build_binaries() -> Result<ProductBinaries, BuildError> {
    static BUILT: OnceCell<ProductBinaries> = OnceCell::const_new();
    let built = BUILT.get_or_try_init(|| async {
        let mut step = Step::begin("building agent, receiver and operators' program");
        // cargo blocks for as long as it compiles. This crate is among the packages, and tests ask for the
        // feature `unified`, so that cargo unifies the same features as for the running binary, and compiles nothing twice.
        let packages = &[
            "tidewatch-agent",
            "tidewatch-receiver",
            "tidewatch-cli",
            "tidewatch-sample-operator",
            "tidewatch-testing",
        ];
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

/// A running binary of the product, with its metrics and probes on a port of its own. Ends with its owner.
#[derive(Debug)]
pub struct ProductProcess {
    process: Process,
    probes: SocketAddr,
    admin: Option<SocketAddr>,
}

impl ProductProcess {
    /// Starts it; `probes` is the address of `/readyz`, `/healthz` and `/metrics` in its arguments.
    ///
    /// # Errors
    /// See [`ProcessError`].
    pub fn start(program: Program, probes: SocketAddr) -> Result<Self, ProcessError> {
        Ok(Self { process: Process::start(program)?, probes, admin: None })
    }

    /// Adds the address of the admin listener in its arguments.
    #[must_use]
    pub fn with_admin(mut self, admin: SocketAddr) -> Self {
        self.admin = Some(admin);
        self
    }

    /// Waits until `/readyz` succeeds. An error carries the last response and the end of the log.
    ///
    /// # Errors
    /// [`ProcessError::Ended`] or [`ProcessError::NotReady`].
    pub async fn ready(&self, deadline: Duration) -> Result<(), ProcessError> {
        self.process.until(deadline, || self.probe("/readyz")).await
    }

    /// Waits until a condition on its `/metrics` page holds; returns the value that `look` takes from the page.
    ///
    /// # Errors
    /// [`ProcessError::Ended`] or [`ProcessError::NotReady`].
    pub async fn metrics_until<T>(
        &self,
        deadline: Duration,
        look: impl Fn(&str) -> Option<T>,
    ) -> Result<T, ProcessError> {
        let look = &look;
        let poll = || async move {
            let (_, page) = self.get("/metrics").await.map_err(|e| e.to_string())?;
            look(&page).ok_or_else(|| "the metrics do not show it".to_owned())
        };
        self.process.until(deadline, poll).await
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
            Ok((status, body)) => Err(format!("{path} returned {status}: {}", body.trim())),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Address of probes and metrics.
    pub fn probes(&self) -> SocketAddr {
        self.probes
    }

    /// Address of its admin listener, if it has one.
    pub fn admin(&self) -> Option<SocketAddr> {
        self.admin
    }

    /// The underlying process: pid, log, status, waiting for conditions.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Kills it with SIGKILL.
    pub fn kill9(&self) {
        self.process.kill();
    }

    /// Sends SIGTERM and waits for the end.
    ///
    /// # Errors
    /// [`ProcessError::StillRuns`] at the deadline.
    pub async fn sigterm(&self, deadline: Duration) -> Result<ExitStatus, ProcessError> {
        self.process.signal(Signal::Term)?;
        self.process.ended(deadline).await
    }

    /// Stops it with SIGSTOP.
    ///
    /// # Errors
    /// If it is gone.
    pub fn sigstop(&self) -> Result<(), ProcessError> {
        self.process.signal(Signal::Stop)
    }

    /// Continues it after [`ProductProcess::sigstop`].
    ///
    /// # Errors
    /// If it is gone.
    pub fn sigcont(&self) -> Result<(), ProcessError> {
        self.process.signal(Signal::Cont)
    }

    /// The last lines of its log, and its path.
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

    /// Its memory now, and its peak.
    ///
    /// # Errors
    /// If it is gone.
    pub fn memory(&self) -> io::Result<Memory> {
        memory(self.process.pid())
    }

    /// CPU time used so far, by thread name (at most 15 bytes, truncated by the kernel); threads of one name are
    /// summed, threads that ended are not included.
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

    /// A probe port that serves these responses in order, and then the last one for ever.
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
    async fn ready_follows_the_probe_and_sigterm_ends_it() {
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
    async fn not_ready_error_has_pending_checks_and_log_tail() {
        let dir = tempfile::tempdir().expect("a folder");
        let product = start(&dir, "echo waiting; exec sleep 600", probes(&[(503, "pending: caches")]).await);
        // Waits for the first output before checking readiness, so that the log has a line.
        let has_output = || async { product.log_text().ok().filter(|text| !text.is_empty()).ok_or_else(String::new) };
        product.process().until(SOON, has_output).await.expect("words");
        let text = product.ready(Duration::from_millis(100)).await.expect_err("never ready").to_string();
        assert!(text.contains("pending: caches") && text.contains("waiting"), "{text}");
    }

    #[tokio::test]
    async fn early_end_is_reported_at_once() {
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
