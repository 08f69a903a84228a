//! Many agents, and many events: what must hold whatever their number. A binary of its own, one test at a time, so that nobody else's
//! work is in the figures.

mod agent;
mod receiver;

use std::sync::Arc;

use anyhow::Result;
use tidewatch_tests::{
    bed::{self, TestBed},
    landscape::{Landscape, Options},
    limits,
};
use tokio::sync::{Mutex, MutexGuard};

/// More than this the second half may not have over the first, in percent: allocators keep what they once had in uneven pieces.
const GROWTH_PERCENT: u64 = 10;

static TURN: Mutex<()> = Mutex::const_new(());

/// Files that are open at the same time: thousands of connections, both ends of some of them.
const OPEN_FILES: u64 = 12_000;

/// Waits until nobody else is at work. Every test begins with it, so that nothing is running yet when the program has to begin again.
async fn turn() -> MutexGuard<'static, ()> {
    limits::raise_open_files(OPEN_FILES);
    tidewatch_tests::install_crypto();
    TURN.lock().await
}

/// A landscape with a receiver and nobody else, alone on the machine.
struct Alone {
    landscape: Arc<Landscape>,
    _turn: MutexGuard<'static, ()>,
}

impl Alone {
    /// With heartbeats wanted every so many seconds.
    async fn start(name: &str, heartbeat_seconds: u32) -> Result<Self> {
        let turn = turn().await;
        let bed: &TestBed = bed::shared().await?;
        let options = Options { heartbeat_seconds, log: "warn".to_owned(), ..Options::default() };
        let landscape = Arc::new(Landscape::start(bed.kcp().await?, name, options).await?);
        Ok(Self { landscape, _turn: turn })
    }

    /// With a receiver that issues the certificates of agents, and installs none.
    async fn issuing(name: &str) -> Result<Self> {
        let turn = turn().await;
        let options = Options { agent_image: String::new(), log: "warn".to_owned(), ..Options::default() };
        let landscape = Landscape::from_nothing(bed::shared().await?.kcp().await?, name, options).await?;
        Ok(Self { landscape: Arc::new(landscape), _turn: turn })
    }
}

/// Fails when the memory grew by more than it may.
fn assert_flat(what: &str, before: u64, after: u64) {
    let most = before + before * GROWTH_PERCENT / 100;
    assert!(after <= most, "{what} had {before} KiB, and now has {after} KiB");
}
