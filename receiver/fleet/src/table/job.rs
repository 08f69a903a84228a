//! One reconcile, from the queue to its result.

use std::{fmt, time::Duration};

use tidewatch_api::key::KymaKey;
use tidewatch_cluster::{error_class::ErrorClass, leader::WriteFence};
use tidewatch_kit::trace;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{RuntimeTable, traces::TraceLinks};
use crate::{
    Snapshot, Tenure, WorkInProgress,
    queue::{QueuedWork, ReconcileOutcome},
};

/// A reconcile that begins.
pub(super) type Started = (KymaKey, QueuedWork, ReconcileStart);

/// State at the start of a reconcile, needed when it ends.
#[derive(Debug)]
pub struct ReconcileStart {
    pub(super) generation: u64,
    /// Tenure of the shard; its fence permits the reconcile's writes.
    pub tenure: Tenure,
    /// Makes a drain of the shard wait for the reconcile.
    pub(super) _in_progress: WorkInProgress,
    pub(super) snapshot: Snapshot,
    /// Acceptance time of its oldest event.
    pub(super) accepted: Option<Instant>,
    /// Events or heartbeats of the agent have caused work since the last reconcile began. False for a retry, and for what our
    /// own writes cause.
    pub has_new_reports: bool,
    pub(super) at: Instant,
    /// Time limit of the reconcile; beyond it the runtime counts as unresponsive.
    pub time_limit: Duration,
    /// Traces of the events that caused it.
    pub(super) traces: Option<Box<TraceLinks>>,
    /// Cancelled when the Kyma is deleted or no longer selected, or its shard released; nothing may be written for it afterwards.
    pub cancellation: CancellationToken,
}

/// A Kyma in progress, to be returned to [`RuntimeTable::done`]. A dropped job counts as failed, so that no Kyma stays
/// in progress forever.
pub struct Job {
    /// The Kyma.
    pub key: KymaKey,
    /// Work to do.
    pub queued: QueuedWork,
    /// Begin of the reconcile, and what ends it early.
    pub start: ReconcileStart,
    /// `None` once the job has ended.
    table: Option<RuntimeTable>,
    /// `traceparent` of its wait in the queue, if events caused it and traces are exported.
    pub(super) traceparent: Option<String>,
}

impl Job {
    pub(super) fn new(table: RuntimeTable, (key, queued, start): Started) -> Self {
        let traceparent = start.traces.as_ref().and_then(|traces| traces.end_wait());
        Self { key, queued, start, table: Some(table), traceparent }
    }

    /// Fence that permits the writes of its reconcile.
    pub const fn fence(&self) -> &WriteFence {
        &self.start.tenure.fence
    }

    /// Starts the span of its reconcile, which continues the trace of its wait in the queue.
    pub fn span(&self) -> Option<trace::Span> {
        trace::span("reconcile", None, self.traceparent.as_deref())
    }

    /// Ends the reconcile, unless it has ended.
    pub(super) fn end(&mut self, outcome: &ReconcileOutcome) {
        if let Some(table) = self.table.take() {
            table.finish(self, outcome);
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.end(&ReconcileOutcome::failed(self.queued.work, ErrorClass::Ours));
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("key", &self.key).field("queued", &self.queued).finish_non_exhaustive()
    }
}
