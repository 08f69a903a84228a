//! The test bed: one etcd, a KCP, and any number of runtimes, each started on first use.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let bed = tidewatch_testing::bed::TestBed::start().await?;
//! let (kcp, runtime) = (bed.kcp().await?, bed.runtime("one").await?);
//! println!("{} {}", kcp.url(), runtime.url());
//! # Ok(()) }
//! ```

use std::{collections::BTreeMap, env, path::Path, sync::Arc};

use parking_lot::Mutex;
use tokio::sync::OnceCell;

use crate::{
    control_plane::{
        Admission, Binaries, Cluster, Tool,
        binaries::BinariesError,
        cluster::ClusterError,
        etcd::{Etcd, EtcdError},
    },
    progress::print_line,
};

mod folder;

pub use folder::FolderError;
use folder::{Folder, Keeper};

/// Most clusters of a test bed: the API servers take 250 MiB each, and more do not fit on a machine for tests.
pub const MAX_CLUSTERS: usize = 21;
const KCP: &str = "kcp";

/// Failure of the test bed.
#[derive(Debug, thiserror::Error)]
pub enum BedError {
    /// A binary is missing.
    #[error("find the binaries")]
    Binaries(#[from] BinariesError),
    /// Its folder cannot be made.
    #[error("make the test bed's folder")]
    Folder(#[from] FolderError),
    /// etcd did not start.
    #[error("start the store")]
    Etcd(#[from] EtcdError),
    /// A cluster did not start.
    #[error("start the cluster {0}")]
    Cluster(String, #[source] Box<ClusterError>),
    /// Not a valid name of a runtime.
    #[error("{0:?} is not a valid runtime name: at most 40 lower-case letters, digits and dashes, and not \"kcp\"")]
    Name(String),
    /// The cluster runs already, with other components than requested.
    #[error("the runtime {0} already runs {1}")]
    OtherKind(String, &'static str),
    /// Too many clusters.
    #[error("a test bed has at most {MAX_CLUSTERS} clusters")]
    TooMany,
}

type Slot = Arc<OnceCell<Arc<Cluster>>>;

/// Components of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClusterKind {
    ApiOnly,
    Workloads,
    Kubelet,
    OwnStore,
}

impl ClusterKind {
    const fn admission(self) -> Admission {
        match self {
            Self::ApiOnly | Self::OwnStore => Admission::ApiOnly,
            Self::Workloads => Admission::Workloads,
            Self::Kubelet => Admission::Kubelet,
        }
    }

    const fn description(self) -> &'static str {
        match self {
            Self::ApiOnly => "without workloads",
            Self::Workloads => "with workloads",
            Self::Kubelet => "for a kubelet",
            Self::OwnStore => "with a store of its own",
        }
    }
}

/// A test bed. Dropping it kills all its processes and removes its folder; after a panic, or with `TIDEWATCH_KEEP=1`,
/// the folder stays and its path is written to stderr.
#[derive(Debug)]
pub struct TestBed {
    clusters: Mutex<BTreeMap<String, (ClusterKind, Slot)>>,
    etcd: Etcd,
    binaries: Binaries,
    folder: Folder,
}

impl TestBed {
    /// Starts etcd, after building missing binaries.
    ///
    /// # Errors
    /// See [`BedError`].
    pub async fn start() -> Result<Self, BedError> {
        Self::start_with(Binaries::from_env()).await
    }

    /// Starts etcd from these binaries.
    ///
    /// # Errors
    /// See [`BedError`].
    pub async fn start_with(binaries: Binaries) -> Result<Self, BedError> {
        let etcd = binaries.get(Tool::Etcd).await?;
        binaries.get(Tool::KubeApiserver).await?;
        let folder = Folder::create()?;
        let etcd = Etcd::start(&etcd, &folder.path().join("etcd")).await.inspect_err(|_| folder.keep())?;
        Ok(Self { clusters: Mutex::default(), etcd, binaries, folder })
    }

    /// The control-plane cluster.
    ///
    /// # Errors
    /// See [`BedError`].
    pub async fn kcp(&self) -> Result<Arc<Cluster>, BedError> {
        self.cluster(KCP, ClusterKind::ApiOnly).await
    }

    /// The runtime of that name: an API server alone. Deleted namespaces stay `Terminating` there, and there is no
    /// garbage collection by owner references.
    ///
    /// # Errors
    /// See [`BedError`].
    pub async fn runtime(&self, name: &str) -> Result<Arc<Cluster>, BedError> {
        self.cluster(runtime_name(name)?, ClusterKind::ApiOnly).await
    }

    /// The runtime of that name, with controller manager, scheduler and kwok: Deployments become Available.
    ///
    /// # Errors
    /// See [`BedError`].
    pub async fn runtime_with_workloads(&self, name: &str) -> Result<Arc<Cluster>, BedError> {
        self.cluster(runtime_name(name)?, ClusterKind::Workloads).await
    }

    /// The runtime of that name, with a controller manager alone: Deployments get their pods, and a [`crate::kubelet::Kubelet`] runs
    /// them.
    ///
    /// # Errors
    /// See [`BedError`].
    pub async fn runtime_for_kubelet(&self, name: &str) -> Result<Arc<Cluster>, BedError> {
        self.cluster(runtime_name(name)?, ClusterKind::Kubelet).await
    }

    /// The runtime of that name: an API server with an etcd of its own, which a test may kill, compact or restore.
    ///
    /// # Errors
    /// See [`BedError`].
    pub async fn runtime_with_store(&self, name: &str) -> Result<Arc<Cluster>, BedError> {
        self.cluster(runtime_name(name)?, ClusterKind::OwnStore).await
    }

    /// The test bed's folder, with one folder for each cluster.
    pub fn dir(&self) -> &Path {
        self.folder.path()
    }

    /// The binaries, for instance for `kubectl`.
    pub fn binaries(&self) -> &Binaries {
        &self.binaries
    }

    /// The store of all clusters.
    pub fn etcd(&self) -> &Etcd {
        &self.etcd
    }

    /// Kills a runtime for good and frees its place. Its logs and data stay with the test bed; its name must not be
    /// used again.
    pub fn stop(&self, name: &str) {
        let stopped = self.clusters.lock().remove(name);
        if let Some(cluster) = stopped.as_ref().and_then(|(_, slot)| slot.get()) {
            cluster.kill();
        }
    }

    /// Keeps the folder unconditionally, for failures without a panic.
    pub fn keep(&self) {
        self.folder.keep();
    }

    async fn cluster(&self, name: &str, kind: ClusterKind) -> Result<Arc<Cluster>, BedError> {
        let slot = self.slot(name, kind)?;
        let started = slot.get_or_try_init(|| async {
            let store = (kind != ClusterKind::OwnStore).then(|| self.etcd.url());
            let cluster = Cluster::start(&self.binaries, self.dir(), name, store, kind.admission()).await;
            cluster.map(Arc::new).map_err(|e| {
                self.keep();
                BedError::Cluster(name.to_owned(), Box::new(e))
            })
        });
        Ok(Arc::clone(started.await?))
    }

    fn slot(&self, name: &str, kind: ClusterKind) -> Result<Slot, BedError> {
        let mut clusters = self.clusters.lock();
        match clusters.get(name) {
            Some((started, slot)) if *started == kind => Ok(Arc::clone(slot)),
            Some((started, _)) => Err(BedError::OtherKind(name.to_owned(), started.description())),
            None if clusters.len() >= MAX_CLUSTERS => Err(BedError::TooMany),
            None => {
                let slot = Slot::default();
                clusters.insert(name.to_owned(), (kind, Arc::clone(&slot)));
                Ok(slot)
            }
        }
    }
}

impl Drop for TestBed {
    fn drop(&mut self) {
        // Kills the API servers before their store: without it their orderly end takes a minute.
        let clusters = self.clusters.get_mut();
        for (_, slot) in clusters.values() {
            if let Some(cluster) = slot.get() {
                cluster.kill();
            }
        }
        self.etcd.kill();
        if std::thread::panicking() || keep_always() {
            self.folder.keep();
        }
    }
}

fn keep_always() -> bool {
    env::var_os("TIDEWATCH_KEEP").is_some_and(|value| !value.is_empty() && value != "0")
}

fn runtime_name(name: &str) -> Result<&str, BedError> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let valid = (1..=40).contains(&name.len()) && name.chars().all(allowed) && name != KCP && name != "etcd";
    valid.then_some(name).ok_or_else(|| BedError::Name(name.to_owned()))
}

static SHARED: OnceCell<TestBed> = OnceCell::const_new();

/// Prints the failure of a test, and keeps the folder of the shared test bed. For a test that fails by an error instead of a
/// panic.
pub fn test_failed(error: &anyhow::Error) {
    let folder = SHARED.get().map(|bed| bed.folder.keeper());
    report_failure(&format!("{error:#}"), folder.as_ref());
}

/// Prints the failure at once: the test harness does so only after the last test.
fn report_failure(failure: &str, folder: Option<&Keeper>) {
    print_line(failure);
    if let Some(folder) = folder
        && folder.keep()
    {
        print_line(&format!("the shared test bed's logs and data are kept in {}", folder.path().display()));
    }
}

/// The test bed that the tests of a binary share, each with names of its own.
///
/// A static is never dropped: the processes die with the binary, and the folder is removed when the next test bed
/// starts, unless a test panicked.
///
/// # Errors
/// See [`BedError`]; the next call retries.
pub async fn shared() -> Result<&'static TestBed, BedError> {
    SHARED
        .get_or_try_init(|| async {
            let bed = TestBed::start().await?;
            if keep_always() {
                bed.keep();
            }
            let folder = bed.folder.keeper();
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                report_failure(&panic.to_string(), Some(&folder));
                before(panic);
            }));
            Ok(bed)
        })
        .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_folders_and_prefixes() {
        assert!(runtime_name("runtime-1").is_ok());
        for bad in ["", "kcp", "etcd", "A", "a/b", "..", &"a".repeat(41)] {
            assert!(runtime_name(bad).is_err(), "{bad}");
        }
    }
}
