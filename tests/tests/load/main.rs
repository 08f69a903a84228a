//! Many agents, and many events: what must hold whatever their number. A binary of its own, one test at a time, so that nobody else's
//! work is in the figures.

mod agent;
mod receiver;

use std::sync::Arc;

use anyhow::Result;
use tidewatch_tests::{
    bed::{self, TestBed},
    landscape::{Landscape, Options},
};
use tokio::sync::{Mutex, MutexGuard};

/// More than this the second half may not have over the first, in percent: allocators keep what they once had in uneven pieces.
const GROWTH_PERCENT: u64 = 10;

static TURN: Mutex<()> = Mutex::const_new(());

/// A landscape with a receiver and nobody else, alone on the machine.
struct Alone {
    landscape: Arc<Landscape>,
    _turn: MutexGuard<'static, ()>,
}

impl Alone {
    async fn start(name: &str) -> Result<Self> {
        tidewatch_tests::install_crypto();
        let turn = TURN.lock().await;
        let bed: &TestBed = bed::shared().await?;
        let options = Options { heartbeat_seconds: 5, log: "warn".to_owned(), ..Options::default() };
        let landscape = Arc::new(Landscape::start(bed.kcp().await?, name, options).await?);
        Ok(Self { landscape, _turn: turn })
    }
}

/// Fails when the memory grew by more than it may.
fn assert_flat(what: &str, before: u64, after: u64) {
    let most = before + before * GROWTH_PERCENT / 100;
    assert!(after <= most, "{what} had {before} KiB, and now has {after} KiB");
}
