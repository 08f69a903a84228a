//! Tenure of a shard: the right of this process to work on its runtimes.

use std::time::Duration;

use tidewatch_api::{key::KymaKey, shard::ShardId};
use tidewatch_cluster::leader::{WriteFence, fenced};
use tokio::time::Instant;
use tokio_util::task::{TaskTracker, task_tracker::TaskTrackerToken};

/// Right to work on the runtimes of a shard, from its acquisition to its release. Clones share the fence.
#[derive(Clone, Debug)]
pub struct Tenure {
    /// The shard; `None` for objects of a shard that is not held.
    pub(super) shard: Option<ShardId>,
    /// Distinguishes the tenures of this process.
    pub(super) number: u64,
    /// Open while the holder may write; closed for good when the shard is released.
    pub fence: WriteFence,
    /// Time from which no write of a previous holder can land, if there was one.
    pub(super) safe: Option<Instant>,
    /// Work in progress. Closed when the shard is drained: no other work begins.
    work: TaskTracker,
}

/// Work in progress, which a drain of the shard waits for, until it is dropped.
#[derive(Debug)]
pub(crate) struct WorkInProgress {
    _token: TaskTrackerToken,
}

impl Tenure {
    /// Tenure of a shard that was acquired at `started`. It ends with `fence`, or earlier. After `request_deadline` the writes
    /// of the previous holder have landed.
    pub(super) fn new(
        shard: ShardId,
        number: u64,
        fence: &WriteFence,
        started: Instant,
        request_deadline: Duration,
    ) -> Self {
        Self {
            shard: Some(shard),
            number,
            fence: fence.child(),
            safe: Some(started + request_deadline),
            work: TaskTracker::new(),
        }
    }

    /// Tenure for an object of a shard that this process does not hold: it permits no write.
    pub fn ended() -> Self {
        Self { shard: None, number: 0, fence: WriteFence::closed(), safe: None, work: TaskTracker::new() }
    }

    /// Begins work that a drain waits for; `None` if the shard is being drained.
    pub(super) fn begin(&self) -> Option<WorkInProgress> {
        let token = self.work.token();
        // After the token is taken, so that a drain either waits for it or is noticed here.
        (!self.work.is_closed()).then_some(WorkInProgress { _token: token })
    }

    /// Runs work under the fence, so that a drain waits for its end; `None` if the shard is being drained.
    pub async fn run<F: Future>(&self, work: F) -> Option<F::Output> {
        let _in_progress = self.begin()?;
        Some(fenced(self.fence.clone(), work).await)
    }

    /// True when no work may begin any more.
    pub(super) fn is_draining(&self) -> bool {
        self.work.is_closed()
    }

    /// Permits no new work from now on.
    pub(super) fn drain(&self) {
        self.work.close();
    }

    /// Waits until all work in progress has ended, after [`Self::drain`].
    pub(super) async fn drained(&self) {
        self.work.wait().await;
    }
}

/// Returns the tenure of the shard of a Kyma, or [`Tenure::ended`] if this process does not hold it.
pub type Tenures = Box<dyn Fn(&KymaKey) -> Tenure + Send + Sync>;

#[cfg(any(test, feature = "testing"))]
impl Tenure {
    /// Open tenure without a previous holder.
    pub fn open() -> Self {
        Self { fence: WriteFence::default(), ..Self::ended() }
    }

    /// Open tenure that began at `started`.
    #[cfg(test)]
    pub(crate) fn since(started: Instant) -> Self {
        Self { safe: Some(started + tidewatch_cluster::limits::REQUEST_DEADLINE), ..Self::open() }
    }
}
