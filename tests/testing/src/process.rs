//! A child process that ends with its owner.
//!
//! # Guarantees
//! * Dropping the [`Process`] kills it and waits for its end.
//! * It dies with the process that started it, also if that one panics, is interrupted or is killed with SIGKILL: the
//!   child begins as a small shell that leaves a watcher behind and then becomes the program (same pid). The watcher
//!   reads from a pipe that only the parent can write to; end of file without a line means that the parent is gone.
//! * Its soft limit of open files is 1024, the usual default: a program that needs more has to raise it.
//! * It has its own process group, so that Ctrl-C at a terminal reaches only the parent, which ends its children in
//!   order.
//! * Its output goes to a log file; every error about it carries the log's path and its last lines.

use std::{
    ffi::OsString,
    fmt,
    fs::{self, File},
    future::Future,
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};

/// Waits on fd 3 in the background and kills the program at end of file; a line means an orderly end.
const LIFELINE: &str = r#"exec 3<&0 </dev/null
ulimit -S -n 1024 2>/dev/null || :
(IFS= read -r _ <&3 || kill -s KILL $$) >/dev/null 2>&1 &
exec "$@" 3<&-"#;

/// Poll interval of conditions.
const POLL: Duration = Duration::from_millis(25);
/// Most bytes read from the end of a log for an error message.
const TAIL_BYTES: u64 = 16 << 10;
/// Most lines of a log in an error message.
const TAIL_LINES: usize = 15;

/// Failure of a child process.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The log file cannot be opened.
    #[error("open the log {0}")]
    Log(PathBuf, #[source] io::Error),
    /// There is no shell, or no more processes are allowed.
    #[error("start {0}")]
    Spawn(String, #[source] io::Error),
    /// It ended while it was expected to run.
    #[error("{name} ended unexpectedly ({status}); {tail}")]
    Ended {
        /// Name of the process.
        name: String,
        /// Exit status.
        status: ExitStatus,
        /// The end of its log.
        tail: Box<Tail>,
    },
    /// It runs, but the awaited condition did not hold in time.
    #[error("{name} was not ready within {waited:?}: {last}; {tail}")]
    NotReady {
        /// Name of the process.
        name: String,
        /// The deadline that passed.
        waited: Duration,
        /// Result of the last check.
        last: String,
        /// The end of its log.
        tail: Box<Tail>,
    },
    /// It did not end within the deadline.
    #[error("{name} is still running after {waited:?}; {tail}")]
    StillRuns {
        /// Name of the process.
        name: String,
        /// The deadline that passed.
        waited: Duration,
        /// The end of its log.
        tail: Box<Tail>,
    },
    /// A signal could not be sent, most likely because the process is gone.
    #[error("send SIG{signal} to {name}")]
    Signal {
        /// Name of the process.
        name: String,
        /// Name of the signal without `SIG`.
        signal: Signal,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// Its state cannot be read.
    #[error("query the state of {0}")]
    Wait(String, #[source] io::Error),
}

/// The last lines of a log, and its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tail {
    /// The log file.
    pub path: PathBuf,
    /// At most 15 lines.
    pub lines: Vec<String>,
}

impl fmt::Display for Tail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.lines.is_empty() {
            return write!(f, "its log {} is empty", self.path.display());
        }
        write!(f, "the last lines of its log {}:", self.path.display())?;
        self.lines.iter().try_for_each(|line| write!(f, "\n    {line}"))
    }
}

/// The signals that tests send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// Requests an orderly end.
    Term,
    /// Ctrl-C.
    Int,
    /// Stops the process; connections stay open and nothing answers.
    Stop,
    /// Continues after [`Signal::Stop`].
    Cont,
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Term => "TERM",
            Self::Int => "INT",
            Self::Stop => "STOP",
            Self::Cont => "CONT",
        })
    }
}

/// Description of a program to start.
#[derive(Debug, Clone)]
pub struct Program {
    /// Name of the process in errors.
    pub name: String,
    /// The binary.
    pub binary: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Environment variables to set besides the inherited ones.
    pub env: Vec<(OsString, OsString)>,
    /// Inherits no environment variable if set.
    pub fresh: bool,
    /// Its working directory, if not the parent's.
    pub dir: Option<PathBuf>,
    /// The file that takes stdout and stderr; appended to.
    pub log: PathBuf,
}

impl Program {
    /// A program without arguments.
    pub fn new(name: impl Into<String>, binary: impl Into<PathBuf>, log: impl Into<PathBuf>) -> Self {
        let name = name.into();
        let binary = binary.into();
        let log = log.into();
        Self { name, binary, args: Vec::new(), env: Vec::new(), fresh: false, dir: None, log }
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Inherits no environment variable.
    #[must_use]
    pub fn fresh(mut self) -> Self {
        self.fresh = true;
        self
    }

    /// Sets the working directory.
    #[must_use]
    pub fn dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.dir = Some(dir.into());
        self
    }
}

#[derive(Debug)]
struct State {
    child: Child,
    /// The parent's end of the pipe; `None` once the child is known to be gone.
    lifeline: Option<ChildStdin>,
    status: Option<ExitStatus>,
}

/// A running child process; see the guarantees of [the module](self).
#[derive(Debug)]
pub struct Process {
    name: String,
    pid: u32,
    log: PathBuf,
    /// Start of this run's part of the log, in bytes.
    log_start: u64,
    state: Mutex<State>,
}

impl Process {
    /// Starts the program. A missing binary shows as an end with status 127.
    ///
    /// # Errors
    /// [`ProcessError::Log`] or [`ProcessError::Spawn`].
    pub fn start(program: Program) -> Result<Self, ProcessError> {
        let Program { name, binary, args, env, fresh, dir, log } = program;
        let log_error = |e| ProcessError::Log(log.clone(), e);
        let file = File::options().create(true).append(true).open(&log).map_err(log_error)?;
        let log_start = file.metadata().map_err(log_error)?.len();
        let mut command = Command::new("sh");
        if fresh {
            command.env_clear();
        }
        command.arg("-c").arg(LIFELINE).arg(&name).arg(binary).args(args).envs(env);
        command.stdin(Stdio::piped()).stdout(file.try_clone().map_err(log_error)?).stderr(file).process_group(0);
        if let Some(dir) = dir {
            command.current_dir(dir);
        }
        let mut child = command.spawn().map_err(|e| ProcessError::Spawn(name.clone(), e))?;
        let lifeline = child.stdin.take();
        let pid = child.id();
        Ok(Self { name, pid, log, log_start, state: Mutex::new(State { child, lifeline, status: None }) })
    }

    /// Name given at the start.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Process id; the program's own, not a shell's.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The log file.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// The last lines of this run's part of the log.
    pub fn tail(&self) -> Tail {
        Tail { path: self.log.clone(), lines: last_lines(&self.log, self.log_start).unwrap_or_default() }
    }

    /// Exit status, or `None` while it runs.
    ///
    /// # Errors
    /// [`ProcessError::Wait`].
    pub fn status(&self) -> Result<Option<ExitStatus>, ProcessError> {
        let mut state = self.lock();
        if state.status.is_none() {
            let status = state.child.try_wait().map_err(|e| ProcessError::Wait(self.name.clone(), e))?;
            if status.is_some() {
                state.record_end(status);
            }
        }
        Ok(state.status)
    }

    /// Kills it with SIGKILL and waits for its end. Does nothing if it has ended already.
    pub fn kill(&self) {
        let mut state = self.lock();
        if state.status.is_none() {
            let _ = state.child.kill();
            let status = state.child.wait().ok();
            state.record_end(status);
        }
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// [`ProcessError::Signal`] if it is gone.
    pub fn signal(&self, signal: Signal) -> Result<(), ProcessError> {
        let failed = |source| ProcessError::Signal { name: self.name.clone(), signal, source };
        if self.status()?.is_some() {
            return Err(failed(io::Error::from(io::ErrorKind::NotFound)));
        }
        // The shell's own `kill`: there may be no such program, and a system call would need unsafe code.
        let sent = Command::new("sh")
            .args(["-c", r#"kill -s "$1" "$2""#, "kill", &signal.to_string(), &self.pid.to_string()])
            .stdin(Stdio::null())
            .output()
            .map_err(failed)?;
        if sent.status.success() {
            Ok(())
        } else {
            Err(failed(io::Error::other(String::from_utf8_lossy(&sent.stderr).trim().to_owned())))
        }
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    /// [`ProcessError::StillRuns`] at the deadline.
    pub async fn ended(&self, deadline: Duration) -> Result<ExitStatus, ProcessError> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.status()? {
                return Ok(status);
            }
            if began.elapsed() >= deadline {
                return Err(ProcessError::StillRuns {
                    name: self.name.clone(),
                    waited: deadline,
                    tail: Box::new(self.tail()),
                });
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Polls `ready` until it returns `Ok`. `ready` bounds its own time.
    ///
    /// # Errors
    /// [`ProcessError::Ended`] as soon as the process ends, [`ProcessError::NotReady`] at the deadline.
    pub async fn until<T, F>(&self, deadline: Duration, mut ready: impl FnMut() -> F) -> Result<T, ProcessError>
    where
        F: Future<Output = Result<T, String>>,
    {
        let began = Instant::now();
        loop {
            let last = match ready().await {
                // Another server may have taken its port and answer instead, so the process must still run.
                Ok(value) if self.status()?.is_none() => return Ok(value),
                Ok(_) => String::new(),
                Err(last) => last,
            };
            if let Some(status) = self.status()? {
                return Err(ProcessError::Ended { name: self.name.clone(), status, tail: Box::new(self.tail()) });
            }
            if began.elapsed() >= deadline {
                let name = self.name.clone();
                let tail = Box::new(self.tail());
                return Err(ProcessError::NotReady { name, waited: deadline, last, tail });
            }
            tokio::time::sleep(POLL).await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl State {
    /// Records the end and dismisses the watcher, which must not kill another process that gets the same pid.
    fn record_end(&mut self, status: Option<ExitStatus>) {
        self.status = status;
        if let Some(mut lifeline) = self.lifeline.take() {
            let _ = lifeline.write_all(b"ended\n");
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The last lines of a file from `start` on.
fn last_lines(path: &Path, start: u64) -> io::Result<Vec<String>> {
    let mut file = fs::File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(start.max(length.saturating_sub(TAIL_BYTES))))?;
    let mut bytes = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let mut lines: Vec<String> =
        text.lines().rev().filter(|line| !line.is_empty()).take(TAIL_LINES).map(str::to_owned).collect();
    lines.reverse();
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn sh(dir: &tempfile::TempDir, script: &str) -> Process {
        let program = Program::new("child", "sh", dir.path().join("log")).args(["-c", script]);
        Process::start(program).expect("a shell starts")
    }

    fn alive(pid: u32) -> bool {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        !stat.is_empty() && !stat.contains(") Z ")
    }

    #[tokio::test]
    async fn unexpected_end_is_reported_with_log_tail_and_path() {
        let dir = tempfile::tempdir().expect("a folder");
        let child = sh(&dir, "echo one; echo 'address already in use' >&2; exit 3");
        let error = child.until(SOON, || async { Err::<(), _>("no answer".to_owned()) }).await.expect_err("it ends");
        let text = error.to_string();
        assert!(text.contains("exit status: 3") && text.contains("one\n    address already in use"), "{text}");
        assert!(text.contains(&dir.path().join("log").display().to_string()), "{text}");
    }

    #[tokio::test]
    async fn log_tail_is_of_this_run_only() {
        let dir = tempfile::tempdir().expect("a folder");
        sh(&dir, "echo first").ended(SOON).await.expect("it ends");
        let second = sh(&dir, "echo second");
        second.ended(SOON).await.expect("it ends");
        assert_eq!(second.tail().lines, ["second"]);
    }

    #[tokio::test]
    async fn missing_binary_is_reported() {
        let dir = tempfile::tempdir().expect("a folder");
        let child = Process::start(Program::new("gone", "/no/such/binary", dir.path().join("log"))).expect("spawned");
        assert_eq!(child.ended(SOON).await.expect("it ends").code(), Some(127));
        assert!(child.tail().to_string().contains("/no/such/binary"));
    }

    #[tokio::test]
    async fn stop_and_cont_freeze_and_thaw() {
        let dir = tempfile::tempdir().expect("a folder");
        let child = sh(&dir, "trap 'exit 7' TERM; echo set; while :; do sleep 0.05; done");
        let trap_set = || async { (child.tail().lines == ["set"]).then_some(()).ok_or_else(String::new) };
        child.until(SOON, trap_set).await.expect("the trap is set");
        child.signal(Signal::Stop).expect("sent");
        child.signal(Signal::Term).expect("sent");
        assert_eq!(child.status().expect("known"), None);
        child.signal(Signal::Cont).expect("sent");
        assert_eq!(child.ended(SOON).await.expect("it ends").code(), Some(7));
        assert!(matches!(child.signal(Signal::Term), Err(ProcessError::Signal { .. })));
    }

    #[tokio::test]
    async fn dropping_kills() {
        let dir = tempfile::tempdir().expect("a folder");
        let child = sh(&dir, "trap '' TERM INT HUP; while :; do sleep 1; done");
        let pid = child.pid();
        assert!(alive(pid));
        drop(child);
        assert!(!alive(pid));
    }

    /// The parent in this test is a shell that holds the writing end as a `Process` does, and is killed with SIGKILL.
    #[tokio::test]
    async fn a_child_dies_with_a_parent_that_is_killed() {
        let dir = tempfile::tempdir().expect("a folder");
        let fifo = dir.path().join("lifeline");
        let pid_file = dir.path().join("pid");
        let script = r#"mkfifo "$1"
            sh -c "$2" child sh -c 'echo $$ >"$0.new"; mv "$0.new" "$0"; while :; do sleep 1; done' "$3" <"$1" &
            exec 9>"$1"; kill -s KILL "$$" 9>&- & while :; do sleep 1; done"#;
        // The parent kills itself only after the child has written its pid.
        let script = script.replace("kill -s KILL", r#"until [ -s "$3" ]; do sleep 0.05; done; kill -s KILL"#);
        let program = Program::new("parent", "sh", dir.path().join("log")).args(["-c", &script, "parent"]).args([
            fifo.as_os_str(),
            LIFELINE.as_ref(),
            pid_file.as_os_str(),
        ]);
        let parent = Process::start(program).expect("started");
        parent.ended(SOON).await.expect("killed");
        let pid = fs::read_to_string(&pid_file).expect("the child wrote its pid").trim().parse().expect("a pid");
        let began = Instant::now();
        while alive(pid) {
            assert!(began.elapsed() < SOON, "the child lives on");
            tokio::time::sleep(POLL).await;
        }
    }
}
