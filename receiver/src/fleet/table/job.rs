//! One reconcile, from the queue to its result.

use std::{fmt, time::Duration};

use tidewatch_shared::trace;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{RuntimeTable, traces::TraceLinks};
use crate::{
    base::{error_class::ErrorClass, key::KymaKey},
    fleet::{
        Snapshot,
        queue::{QueuedWork, ReconcileOutcome},
    },
};

/// State at the start of a reconcile, needed when it ends.
#[derive(Debug)]
pub(super) struct ReconcileStart {
    pub(super) generation: u64,
    pub(super) snapshot: Snapshot,
    /// Acceptance time of its oldest event.
    pub(super) accepted: Option<Instant>,
    pub(super) at: Instant,
    /// Time limit of the reconcile.
    pub(super) time_limit: Duration,
    /// Traces of the events that caused it.
    pub(super) traces: TraceLinks,
    /// Cancelled when the Kyma is removed.
    pub(super) cancellation: CancellationToken,
}

/// A Kyma in progress, to be returned to [`RuntimeTable::done`]. A dropped job counts as failed, so that no Kyma stays
/// in progress forever.
pub struct Job {
    /// The Kyma.
    pub key: KymaKey,
    /// Work to do.
    pub queued: QueuedWork,
    /// `None` once the job has ended.
    start: Option<(RuntimeTable, ReconcileStart)>,
    traceparent: Option<String>,
    cancellation: CancellationToken,
    time_limit: Duration,
}

impl Job {
    pub(super) fn new(fleet: RuntimeTable, (key, queued, start): (KymaKey, QueuedWork, ReconcileStart)) -> Self {
        let (traceparent, cancellation, time_limit) =
            (start.traces.end_wait(), start.cancellation.clone(), start.time_limit);
        Self { key, queued, start: Some((fleet, start)), traceparent, cancellation, time_limit }
    }

    /// `traceparent` of its wait in the queue, if events caused it and traces are exported.
    pub(crate) fn traceparent(&self) -> Option<&str> {
        self.traceparent.as_deref()
    }

    /// Starts the span of its reconcile, which continues the trace of its wait in the queue.
    pub(crate) fn span(&self) -> Option<trace::Span> {
        trace::span("reconcile", None, self.traceparent())
    }

    /// Time limit of the reconcile; beyond it the runtime counts as unresponsive.
    #[must_use]
    pub const fn time_limit(&self) -> Duration {
        self.time_limit
    }

    /// Cancelled when the Kyma is deleted or no longer selected; nothing may be written for it afterwards.
    #[must_use]
    pub fn cancellation(&self) -> CancellationToken {
        self.cancellation.clone()
    }

    pub(super) fn take(&mut self) -> Option<ReconcileStart> {
        self.start.take().map(|(_, start)| start)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some((fleet, start)) = self.start.take() {
            fleet.finish(
                &self.key,
                &self.queued,
                &start,
                &ReconcileOutcome::failed(self.queued.work, ErrorClass::Ours),
            );
        }
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("key", &self.key).field("queued", &self.queued).finish_non_exhaustive()
    }
}
