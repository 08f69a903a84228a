//! One reconcile of a Manifest, from the queue to its result.

use std::{fmt, time::Duration};

use tidewatch_api::key::{KymaKey, ManifestKey};
use tidewatch_cluster::error_class::ErrorClass;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::ManifestQueue;
use crate::{
    Tenure, WorkInProgress,
    queue::{QueuedWork, ReconcileOutcome},
};

/// A Manifest in progress, to be returned to [`ManifestQueue::done`]. A dropped job counts as failed, so that no Manifest
/// stays in progress forever.
pub struct ManifestJob {
    /// The Manifest.
    pub key: ManifestKey,
    /// Kyma of its runtime.
    pub kyma: KymaKey,
    /// Tenure of the Kyma's shard; its fence permits the reconcile's writes.
    pub tenure: Tenure,
    /// Work to do.
    pub queued: QueuedWork,
    /// Time limit of the reconcile; beyond it the runtime counts as unresponsive.
    pub time_limit: Duration,
    /// Cancelled when the Manifest is deleted, its Kyma is no longer selected, or the shard of its runtime is released; nothing
    /// may be written for it afterwards.
    pub cancellation: CancellationToken,
    /// Start of the reconcile.
    pub(super) since: Instant,
    /// Number of reports of changed objects before the reconcile, which covers those.
    pub(super) reports_before: u64,
    /// Makes a drain of the shard wait for the reconcile.
    pub(super) _in_progress: WorkInProgress,
    /// `None` until a worker gets the job, and once it has ended.
    pub(super) queue: Option<ManifestQueue>,
}

impl ManifestJob {
    /// Ends the reconcile, unless it has ended.
    pub(super) fn end(&mut self, outcome: &ReconcileOutcome) {
        if let Some(queue) = self.queue.take() {
            queue.finish(self, outcome);
        }
    }
}

impl Drop for ManifestJob {
    fn drop(&mut self) {
        self.end(&ReconcileOutcome::failed(self.queued.work, ErrorClass::Ours));
    }
}

impl fmt::Debug for ManifestJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, kyma, queued, .. } = self;
        f.debug_struct("ManifestJob")
            .field("key", key)
            .field("kyma", kyma)
            .field("queued", queued)
            .finish_non_exhaustive()
    }
}
