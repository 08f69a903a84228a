//! The test bed: one etcd, a KCP, and any number of runtimes, each started when it is first asked for.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let bed = tidewatch_tests::bed::TestBed::start().await?;
//! let (kcp, runtime) = (bed.kcp().await?, bed.runtime("one").await?);
//! println!("{} {}", kcp.url(), runtime.url());
//! # Ok(()) }
//! ```

use std::{
    collections::BTreeMap,
    env,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::OnceCell;

use crate::{
    control_plane::{
        Admission, Binaries, Cluster, Tool,
        binaries::BinariesError,
        cluster::ClusterError,
        etcd::{Etcd, EtcdError},
    },
    progress::say,
};

mod folder;

use folder::Folder;
pub use folder::FolderError;

/// More API servers than this do not fit on a machine for tests (250 MiB each).
pub const MAX_CLUSTERS: usize = 21;
const KCP: &str = "kcp";

/// Why the test bed does not stand.
#[derive(Debug, thiserror::Error)]
pub enum BedError {
    /// A binary is missing.
    #[error("find the binaries")]
    Binaries(#[from] BinariesError),
    /// Its folder cannot be made.
    #[error("make the test bed's folder")]
    Folder(#[from] FolderError),
    /// etcd.
    #[error("start the store")]
    Etcd(#[from] EtcdError),
    /// A cluster.
    #[error("start the cluster {0}")]
    Cluster(String, #[source] Box<ClusterError>),
    /// The name cannot be that of a cluster.
    #[error("{0:?} is no name for a runtime: lower-case letters, digits and dashes, at most 40, and not \"kcp\"")]
    Name(String),
    /// The cluster runs already, made of other parts than now asked.
    #[error("the runtime {0} was started {1}")]
    Otherwise(String, &'static str),
    /// Too many clusters.
    #[error("a test bed has at most {MAX_CLUSTERS} clusters")]
    TooMany,
}

type Slot = Arc<OnceCell<Arc<Cluster>>>;

/// What a cluster consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    ApiOnly,
    Workloads,
    Kubelet,
    OwnStore,
}

impl Kind {
    const fn admission(self) -> Admission {
        match self {
            Self::ApiOnly | Self::OwnStore => Admission::ApiOnly,
            Self::Workloads => Admission::Workloads,
            Self::Kubelet => Admission::Kubelet,
        }
    }

    const fn described(self) -> &'static str {
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
    clusters: Mutex<BTreeMap<String, (Kind, Slot)>>,
    etcd: Etcd,
    binaries: Binaries,
    folder: Folder,
}

impl TestBed {
    /// Starts etcd, after building what is missing.
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
        self.cluster(KCP, Kind::ApiOnly).await
    }

    /// The runtime of that name: an API server alone. Namespaces that are deleted there stay `Terminating`, and nothing
    /// is collected by owner.
    ///
    /// # Errors
    /// See [`BedError`].
    pub async fn runtime(&self, name: &str) -> Result<Arc<Cluster>, BedError> {
        self.cluster(runtime_name(name)?, Kind::ApiOnly).await
    }

    /// The runtime of that name, with controller manager, scheduler and kwok: Deployments become Available.
    ///
    /// # Errors
    /// See [`BedError`].
    pub async fn runtime_with_workloads(&self, name: &str) -> Result<Arc<Cluster>, BedError> {
        self.cluster(runtime_name(name)?, Kind::Workloads).await
    }

    /// The runtime of that name, with a controller manager alone: Deployments get their pods, and a [`crate::kubelet::Kubelet`] runs
    /// them.
    ///
    /// # Errors
    /// See [`BedError`].
    pub async fn runtime_for_kubelet(&self, name: &str) -> Result<Arc<Cluster>, BedError> {
        self.cluster(runtime_name(name)?, Kind::Kubelet).await
    }

    /// The runtime of that name: an API server with an etcd of its own, which a test may kill, compact or set back.
    ///
    /// # Errors
    /// See [`BedError`].
    pub async fn runtime_with_store(&self, name: &str) -> Result<Arc<Cluster>, BedError> {
        self.cluster(runtime_name(name)?, Kind::OwnStore).await
    }

    /// The test bed's folder; each cluster has one of its own in it.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.folder.path()
    }

    /// The binaries, for instance for `kubectl`.
    #[must_use]
    pub fn binaries(&self) -> &Binaries {
        &self.binaries
    }

    /// The store of all clusters.
    #[must_use]
    pub fn etcd(&self) -> &Etcd {
        &self.etcd
    }

    /// Kills a runtime for good and makes room for another one. Its logs and data stay with the test bed; its name is not used again.
    pub fn stop(&self, name: &str) {
        let stopped = self.clusters.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
        if let Some(cluster) = stopped.as_ref().and_then(|(_, slot)| slot.get()) {
            cluster.kill();
        }
    }

    /// Keeps the folder whatever happens. For what fails without a panic.
    pub fn keep(&self) {
        self.folder.keep();
    }

    async fn cluster(&self, name: &str, kind: Kind) -> Result<Arc<Cluster>, BedError> {
        let slot = self.slot(name, kind)?;
        let started = slot.get_or_try_init(|| async {
            let store = (kind != Kind::OwnStore).then(|| self.etcd.url());
            let cluster = Cluster::start(&self.binaries, self.dir(), name, store, kind.admission()).await;
            cluster.map(Arc::new).map_err(|e| {
                self.keep();
                BedError::Cluster(name.to_owned(), Box::new(e))
            })
        });
        Ok(Arc::clone(started.await?))
    }

    fn slot(&self, name: &str, kind: Kind) -> Result<Slot, BedError> {
        let mut clusters = self.clusters.lock().unwrap_or_else(PoisonError::into_inner);
        match clusters.get(name) {
            Some((started, slot)) if *started == kind => Ok(Arc::clone(slot)),
            Some((started, _)) => Err(BedError::Otherwise(name.to_owned(), started.described())),
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
        // The API servers before their store: without it their orderly end takes a minute.
        let clusters = self.clusters.get_mut().unwrap_or_else(PoisonError::into_inner);
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
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let good = (1..=40).contains(&name.len()) && name.chars().all(plain) && name != KCP && name != "etcd";
    good.then_some(name).ok_or_else(|| BedError::Name(name.to_owned()))
}

static SHARED: OnceCell<TestBed> = OnceCell::const_new();

/// Keeps the folder of the shared test bed, for a test that fails by an error: that is no panic.
pub fn keep_shared() {
    if let Some(bed) = SHARED.get()
        && bed.folder.keeper().keep()
    {
        say(&format!("the shared test bed's logs and data are kept in {}", bed.dir().display()));
    }
}

/// The one test bed that the tests of a binary share where they can be told apart by name.
///
/// A static is never dropped: the processes die with the binary, and the folder is removed when the next test bed
/// starts, unless a test panicked.
///
/// # Errors
/// See [`BedError`]; the next caller tries again.
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
                if folder.keep() {
                    say(&format!("the shared test bed's logs and data are kept in {}", folder.path().display()));
                }
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
