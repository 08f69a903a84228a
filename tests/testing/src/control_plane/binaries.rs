//! Finds the control plane's binaries, or builds them from their published Go modules.
//!
//! Binaries in `KUBEBUILDER_ASSETS` are used as they are. The rest is built once into
//! `target/control-plane/<module>-<version>/` under a file lock. A build writes to a temporary name first, so that a
//! killed one leaves no incomplete binary. `TIDEWATCH_KUBERNETES=oldest` selects the oldest supported Kubernetes.

use std::{
    env, fs,
    fs::File,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{
    paths,
    process::{Process, ProcessError, Program, Tail},
    progress::{Step, print_line},
};

/// Longer than any build; only a hanging download exceeds it.
const BUILD_DEADLINE: Duration = Duration::from_secs(3600);
const POLL: Duration = Duration::from_millis(200);

/// A Go module of this repository that names, with checksums, the module to build. Its `go.mod` is the only place of
/// the version.
#[derive(Debug)]
struct Module {
    folder: &'static str,
    go_mod: &'static str,
    /// The required module that gives the version.
    source: &'static str,
}

static KUBERNETES: Module = Module {
    folder: "kubernetes",
    go_mod: include_str!("../../../control-plane/kubernetes/go.mod"),
    source: "k8s.io/kubernetes",
};
/// The oldest Kubernetes that kube supports.
static OLDEST_KUBERNETES: Module = Module {
    folder: "kubernetes-oldest",
    go_mod: include_str!("../../../control-plane/kubernetes-oldest/go.mod"),
    source: "k8s.io/kubernetes",
};
static ETCD: Module = Module {
    folder: "etcd",
    go_mod: include_str!("../../../control-plane/etcd/go.mod"),
    source: "go.etcd.io/etcd/server/v3",
};
static KWOK: Module =
    Module { folder: "kwok", go_mod: include_str!("../../../control-plane/kwok/go.mod"), source: "sigs.k8s.io/kwok" };
static REGISTRY: Module = Module {
    folder: "registry",
    go_mod: include_str!("../../../control-plane/registry/go.mod"),
    source: "github.com/distribution/distribution/v3",
};

impl Module {
    /// The version in the line `[require ]<source> <version>` of its `go.mod`, such as `v1.36.3`.
    fn version(&self) -> &'static str {
        let versions = self.go_mod.lines().filter_map(|line| {
            let mut words = line.trim().trim_start_matches("require ").split_whitespace();
            (words.next() == Some(self.source)).then(|| words.next()).flatten()
        });
        versions.into_iter().find(|word| word.starts_with('v')).unwrap_or("unknown")
    }

    fn ldflags(&self) -> String {
        if self.source != KUBERNETES.source {
            return "-s -w".to_owned();
        }
        // An API server without a version refuses to serve some groups.
        let version = self.version();
        let mut numbers = version.trim_start_matches('v').split('.');
        let major = numbers.next().unwrap_or_default();
        let minor = numbers.next().unwrap_or_default();
        let package = "k8s.io/component-base/version";
        format!("-s -w -X {package}.gitVersion={version} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}")
    }
}

/// A binary of the control plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tool {
    /// The API server.
    KubeApiserver,
    /// Its store.
    Etcd,
    /// The command line client.
    Kubectl,
    /// Deployments, ReplicaSets, garbage collection, namespaces, accounts.
    KubeControllerManager,
    /// Binds pods to nodes.
    KubeScheduler,
    /// Simulates kubelets.
    Kwok,
    /// The CNCF distribution registry.
    Registry,
}

impl Tool {
    /// The name of its file.
    pub fn file(self) -> &'static str {
        match self {
            Self::KubeApiserver => "kube-apiserver",
            Self::Etcd => "etcd",
            Self::Kubectl => "kubectl",
            Self::KubeControllerManager => "kube-controller-manager",
            Self::KubeScheduler => "kube-scheduler",
            Self::Kwok => "kwok",
            Self::Registry => "registry",
        }
    }

    fn package(self) -> String {
        let source = match self {
            Self::Etcd => return ETCD.source.to_owned(),
            // Its main package is in this repository.
            Self::Registry => return ".".to_owned(),
            Self::Kwok => KWOK.source,
            Self::KubeApiserver | Self::Kubectl | Self::KubeControllerManager | Self::KubeScheduler => {
                KUBERNETES.source
            }
        };
        format!("{source}/cmd/{}", self.file())
    }
}

/// Reason why a binary is missing.
#[derive(Debug, thiserror::Error)]
pub enum BinariesError {
    /// Neither the binary nor Go is available.
    #[error(
        "{0} is missing: either let KUBEBUILDER_ASSETS name a folder that holds it, or install Go (https://go.dev/dl) \
         and the test bed builds it"
    )]
    NoGo(&'static str),
    /// The variable that selects the Kubernetes has another value.
    #[error("TIDEWATCH_KUBERNETES is {0:?}: leave it out, or set it to \"oldest\"")]
    Kubernetes(String),
    /// The folder for built binaries cannot be used.
    #[error("use the folder {0}")]
    Folder(PathBuf, #[source] io::Error),
    /// The build did not start or did not end.
    #[error("build {0}")]
    Build(&'static str, #[source] ProcessError),
    /// The build failed.
    #[error("build {0}: go failed; {1}")]
    Failed(&'static str, Tail),
}

/// Locations of the binaries, and the means to build missing ones.
#[derive(Debug, Clone)]
pub struct Binaries {
    assets: Option<PathBuf>,
    built: PathBuf,
    go: PathBuf,
    /// Value of `TIDEWATCH_KUBERNETES`, or empty.
    kubernetes: String,
}

impl Binaries {
    /// Uses `KUBEBUILDER_ASSETS`, `TIDEWATCH_KUBERNETES`, cargo's target folder, and the `go` of the search path.
    pub fn from_env() -> Self {
        Self {
            assets: env::var_os("KUBEBUILDER_ASSETS").filter(|dir| !dir.is_empty()).map(PathBuf::from),
            built: paths::target().join("control-plane"),
            go: "go".into(),
            kubernetes: env::var("TIDEWATCH_KUBERNETES").unwrap_or_default(),
        }
    }

    /// Path of the tool, which is built first if it is missing: seconds to minutes, with progress on stderr.
    ///
    /// # Errors
    /// See [`BinariesError`].
    pub async fn get(&self, tool: Tool) -> Result<PathBuf, BinariesError> {
        if let Some(found) = self.find(tool) {
            return Ok(found);
        }
        let this = self.clone();
        // The lock blocks its thread, and the build takes minutes.
        let built = tokio::task::spawn_blocking(move || this.build(tool)).await;
        built.unwrap_or_else(|e| Err(BinariesError::Folder(self.built.clone(), io::Error::other(e))))
    }

    /// Path of the tool if it exists already.
    pub fn find(&self, tool: Tool) -> Option<PathBuf> {
        let given = self.assets.as_ref().map(|assets| assets.join(tool.file()));
        given.into_iter().chain(self.target(tool)).find(|path| path.is_file())
    }

    fn module(&self, tool: Tool) -> Result<&'static Module, BinariesError> {
        match (tool, &*self.kubernetes) {
            (Tool::Etcd, _) => Ok(&ETCD),
            (Tool::Kwok, _) => Ok(&KWOK),
            (Tool::Registry, _) => Ok(&REGISTRY),
            (_, "") => Ok(&KUBERNETES),
            (_, "oldest") => Ok(&OLDEST_KUBERNETES),
            (_, other) => Err(BinariesError::Kubernetes(other.to_owned())),
        }
    }

    fn target(&self, tool: Tool) -> Result<PathBuf, BinariesError> {
        let module = self.module(tool)?;
        Ok(self.built.join(format!("{}-{}", module.folder, module.version())).join(tool.file()))
    }

    fn build(&self, tool: Tool) -> Result<PathBuf, BinariesError> {
        let target = self.target(tool)?;
        let folder = target.parent().unwrap_or(&self.built).to_path_buf();
        let unusable = |e| BinariesError::Folder(folder.clone(), e);
        fs::create_dir_all(&folder).map_err(unusable)?;
        let _lock = lock(&self.built.join(".lock")).map_err(unusable)?;
        if target.is_file() {
            return Ok(target);
        }
        let partial = folder.join(format!(".{}.partial", tool.file()));
        self.go_build(tool, &partial, folder.join(format!("{}.log", tool.file())))?;
        fs::rename(&partial, &target).map_err(unusable)?;
        Ok(target)
    }

    fn go_build(&self, tool: Tool, output: &Path, log: PathBuf) -> Result<(), BinariesError> {
        let name = tool.file();
        let module = self.module(tool)?;
        if !self.has_go() {
            return Err(BinariesError::NoGo(name));
        }
        let _ = fs::remove_file(&log);
        let program = Program::new("go build", &self.go, log)
            .args(["build", "-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags"])
            .arg(module.ldflags())
            .arg("-o")
            .arg(output)
            .arg(tool.package())
            .env("GOWORK", "off")
            .dir(paths::workspace().join("tests/control-plane").join(module.folder));
        let mut step = Step::begin(format!("building {name} {} (once)", module.version()));
        let go = Process::start(program).map_err(|e| BinariesError::Build(name, e))?;
        let began = std::time::Instant::now();
        loop {
            match go.status().map_err(|e| BinariesError::Build(name, e))? {
                Some(status) if status.success() => break,
                Some(_) => return Err(BinariesError::Failed(name, go.tail())),
                None if began.elapsed() > BUILD_DEADLINE => {
                    let name = name.to_owned();
                    let tail = Box::new(go.tail());
                    let late = ProcessError::StillRuns { name, waited: BUILD_DEADLINE, tail };
                    return Err(BinariesError::Build(tool.file(), late));
                }
                None => step.tick(),
            }
            std::thread::sleep(POLL);
        }
        step.done();
        Ok(())
    }

    fn has_go(&self) -> bool {
        let version = std::process::Command::new(&self.go).arg("version").output();
        version.is_ok_and(|output| output.status.success())
    }
}

/// Waits for the lock; it is released when the file is closed, also by a kill.
fn lock(path: &Path) -> io::Result<File> {
    let file = File::options().create(true).truncate(false).write(true).open(path)?;
    if file.try_lock().is_err() {
        print_line("waiting for another build of the control plane ...");
        file.lock()?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn binaries(dir: &tempfile::TempDir, go: &str) -> Binaries {
        Binaries {
            assets: Some(dir.path().join("assets")),
            built: dir.path().join("built"),
            go: go.into(),
            kubernetes: String::new(),
        }
    }

    #[test]
    fn versions_come_from_the_modules() {
        for module in [&KUBERNETES, &OLDEST_KUBERNETES, &ETCD, &KWOK, &REGISTRY] {
            assert!(module.version().starts_with('v'), "{}: {}", module.folder, module.version());
        }
        for module in [&KUBERNETES, &OLDEST_KUBERNETES] {
            assert!(module.ldflags().contains(&format!("gitVersion={} ", module.version())));
        }
        assert_ne!(KUBERNETES.version(), OLDEST_KUBERNETES.version());
        assert_eq!(Tool::Kwok.package(), "sigs.k8s.io/kwok/cmd/kwok");
    }

    #[tokio::test]
    async fn missing_go_error_names_both_remedies() {
        let dir = tempfile::tempdir().expect("a folder");
        let error = binaries(&dir, "/no/such/go").get(Tool::Etcd).await.expect_err("nothing there");
        assert!(matches!(error, BinariesError::NoGo("etcd")), "{error}");
        let text = error.to_string();
        assert!(text.contains("KUBEBUILDER_ASSETS") && text.contains("install Go"), "{text}");
    }

    #[tokio::test]
    async fn only_a_known_kubernetes_is_built() {
        let dir = tempfile::tempdir().expect("a folder");
        let of = |kubernetes: &str| Binaries { kubernetes: kubernetes.to_owned(), ..binaries(&dir, "/no/such/go") };
        let newest = of("").module(Tool::KubeApiserver).expect("known").folder;
        let oldest = of("oldest").module(Tool::Kubectl).expect("known").folder;
        assert_eq!([newest, oldest], ["kubernetes", "kubernetes-oldest"]);
        let error = of("1.2").get(Tool::KubeApiserver).await.expect_err("unknown");
        assert!(error.to_string().contains(r#""1.2""#), "{error}");
        assert!(of("1.2").module(Tool::Etcd).is_ok());
    }

    #[tokio::test]
    async fn the_given_folder_goes_first() {
        let dir = tempfile::tempdir().expect("a folder");
        fs::create_dir(dir.path().join("assets")).expect("created");
        fs::write(dir.path().join("assets/etcd"), "").expect("written");
        let found = binaries(&dir, "/no/such/go").get(Tool::Etcd).await.expect("found");
        assert_eq!(found, dir.path().join("assets/etcd"));
    }

    /// A fake `go` that writes its output file and then runs `end`.
    fn fake_go(dir: &tempfile::TempDir, end: &str) -> String {
        let path = dir.path().join("go").display().to_string();
        let script = format!("#!/bin/sh\n[ \"$1\" = version ] && exit 0\necho half >\"$8\"\n{end}\n");
        // Written by a child: a file that this process has open for writing while another test forks cannot be
        // executed.
        let write = ["-c", r#"printf %s "$2" >"$1" && chmod 755 "$1""#, "write", &path, &script];
        assert!(std::process::Command::new("sh").args(write).status().expect("a shell").success());
        path
    }

    #[tokio::test]
    async fn failed_build_leaves_no_binary_and_reports_its_log() {
        let dir = tempfile::tempdir().expect("a folder");
        let go = fake_go(&dir, "echo cannot compile >&2; exit 1");
        let error = binaries(&dir, &go).get(Tool::Etcd).await.expect_err("the build fails");
        assert!(error.to_string().contains("cannot compile"), "{error}");
        assert_eq!(binaries(&dir, &go).find(Tool::Etcd), None);
    }

    #[tokio::test]
    async fn a_build_is_made_once() {
        let dir = tempfile::tempdir().expect("a folder");
        let built = binaries(&dir, &fake_go(&dir, "exit 0")).get(Tool::Kwok).await.expect("built");
        let again = binaries(&dir, "/no/such/go").get(Tool::Kwok).await.expect("found");
        assert_eq!(built, again);
    }
}
