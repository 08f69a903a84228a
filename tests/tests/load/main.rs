//! Load tests: properties that hold for any number of agents and events. They are a binary of their own and run one at
//! a time, so that no other work distorts the measurements.

mod agent;
mod hostile;
mod receiver;

use std::sync::Arc;

use anyhow::Result;
use tidewatch_testing::{
    bed::{self, TestBed},
    landscape::{Landscape, Options},
    limits,
};
use tokio::sync::{Mutex, MutexGuard};

/// Limit for the growth of memory from the first to the second measurement, in percent. It covers fragmentation in the
/// allocator.
const GROWTH_PERCENT: u64 = 10;

static EXCLUSIVE: Mutex<()> = Mutex::const_new(());

/// Raises the limit of open files, since thousands of connections have an end in this process, and waits until no other
/// test runs.
async fn exclusive() -> MutexGuard<'static, ()> {
    limits::raise_open_files();
    tidewatch_testing::install_crypto();
    EXCLUSIVE.lock().await
}

/// A landscape with a receiver, while no other test of this binary runs.
struct ExclusiveLandscape {
    landscape: Arc<Landscape>,
    _guard: MutexGuard<'static, ()>,
}

impl ExclusiveLandscape {
    /// Starts a landscape with this heartbeat interval.
    async fn start(name: &str, heartbeat_seconds: u32) -> Result<Self> {
        let guard = exclusive().await;
        let bed: &TestBed = bed::shared().await?;
        let options = Options { heartbeat_seconds, log: "warn".to_owned(), ..Options::default() };
        let landscape = Arc::new(Landscape::start(bed.kcp().await?, name, options).await?);
        Ok(Self { landscape, _guard: guard })
    }

    /// Starts a landscape with a receiver that issues agent certificates but installs no agents.
    async fn issuing(name: &str) -> Result<Self> {
        let guard = exclusive().await;
        let options = Options { agent_image: String::new(), log: "warn".to_owned(), ..Options::default() };
        let landscape = Landscape::start_issuing(bed::shared().await?.kcp().await?, name, options).await?;
        Ok(Self { landscape: Arc::new(landscape), _guard: guard })
    }
}

/// Fails if the memory grew by more than [`GROWTH_PERCENT`].
fn assert_flat(program: &str, before: u64, after: u64) {
    let limit = before + before * GROWTH_PERCENT / 100;
    assert!(after <= limit, "memory of {program} grew from {before} KiB to {after} KiB");
}
