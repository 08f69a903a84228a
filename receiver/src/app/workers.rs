//! Workers: each takes the next job from a queue, reconciles it, and reports the outcome.

use std::{panic::AssertUnwindSafe, sync::Arc};

use anyhow::{Error, anyhow};
use futures::FutureExt as _;
use tidewatch_api::{
    key::{KymaKey, Name},
    plan::Work,
};
use tidewatch_cluster::{
    error_class::ErrorClass,
    leader::{WriteFence, fenced},
    metered,
};
use tidewatch_fleet::{
    Cost, Shares,
    manifest_queue::{ManifestJob, ManifestQueue},
    queue::{Drift, Priority, QueuedWork, ReconcileOutcome},
    table::{Job, RuntimeTable},
};
use tidewatch_modules::{kyma, manifest};
use tokio::{task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;

/// A queue and the reconcile of its jobs.
pub(super) trait Controller: Send + Sync + 'static {
    /// Kind of the objects, for logs.
    const KIND: &'static str;

    /// Object in progress. A dropped job counts as failed.
    type Job: Send + Sync;

    /// Waits for the next job. Cancel safe.
    fn next(&self) -> impl Future<Output = Self::Job> + Send;

    /// What the workers need of a job.
    fn view(job: &Self::Job) -> JobView<'_>;

    /// Reconciles a job. Failures are part of the outcome.
    fn reconcile(&self, job: &Self::Job) -> impl Future<Output = ReconcileOutcome> + Send;

    /// Drops the cached state of the object of a cancelled job.
    fn forget(&self, job: &Self::Job);

    /// Ends a job.
    fn done(&self, job: Self::Job, outcome: ReconcileOutcome);
}

/// What the workers need of a job.
pub(super) struct JobView<'a> {
    key: &'a Name,
    queued: &'a QueuedWork,
    cancellation: &'a CancellationToken,
    /// Permits its writes.
    fence: &'a WriteFence,
    /// Kyma of the runtime whose shares it uses.
    kyma: &'a KymaKey,
    /// It uses the runtime's share of the reconciles: reports of its agent caused it. What follows from them uses none, so that
    /// a change costs one reconcile, however many it takes.
    counts_as_reconcile: bool,
}

/// Reconciles of Kymas.
pub(super) struct Kymas {
    pub(super) context: Arc<kyma::Context>,
    pub(super) fleet: RuntimeTable,
    pub(super) manifests: ManifestQueue,
}

impl Controller for Kymas {
    const KIND: &'static str = "Kyma";

    type Job = Job;

    fn next(&self) -> impl Future<Output = Job> + Send {
        self.fleet.next()
    }

    fn view(job: &Job) -> JobView<'_> {
        JobView {
            key: &job.key,
            queued: &job.queued,
            cancellation: &job.start.cancellation,
            fence: job.fence(),
            kyma: &job.key,
            counts_as_reconcile: job.start.has_new_reports,
        }
    }

    fn reconcile(&self, job: &Job) -> impl Future<Output = ReconcileOutcome> + Send {
        kyma::reconcile(&self.context, job)
    }

    fn forget(&self, job: &Job) {
        self.context.forget(&job.key);
    }

    fn done(&self, job: Job, outcome: ReconcileOutcome) {
        verify_modules(&self.manifests, &job.key, &job.queued, &outcome);
        self.fleet.done(job, outcome);
    }
}

/// Reconciles of Manifests.
pub(super) struct Manifests {
    pub(super) context: Arc<manifest::Context>,
    pub(super) queue: ManifestQueue,
}

impl Controller for Manifests {
    const KIND: &'static str = "Manifest";

    type Job = ManifestJob;

    fn next(&self) -> impl Future<Output = ManifestJob> + Send {
        self.queue.next()
    }

    fn view(job: &ManifestJob) -> JobView<'_> {
        JobView {
            key: &job.key,
            queued: &job.queued,
            cancellation: &job.cancellation,
            fence: &job.tenure.fence,
            kyma: &job.kyma,
            counts_as_reconcile: false,
        }
    }

    fn reconcile(&self, job: &ManifestJob) -> impl Future<Output = ReconcileOutcome> + Send {
        manifest::reconcile(&self.context, job)
    }

    fn forget(&self, job: &ManifestJob) {
        self.context.memories.forget(&job.key);
    }

    fn done(&self, job: ManifestJob, outcome: ReconcileOutcome) {
        self.queue.done(job, outcome);
    }
}

/// Enqueues the verification of a Kyma's Manifests when its own has ended.
fn verify_modules(manifests: &ManifestQueue, kyma: &KymaKey, queued: &QueuedWork, outcome: &ReconcileOutcome) {
    if queued.drift == Drift::All && outcome.ended.contains(Work::Kyma) {
        manifests.enqueue_kyma(kyma, Priority::Verification, true);
    }
}

/// Worker tasks; at shutdown each ends after its current reconcile.
#[derive(Default)]
pub(super) struct Workers {
    tasks: JoinSet<()>,
    shares: Shares,
}

impl Workers {
    /// Creates workers that keep to the shares of the runtimes.
    pub(super) fn new(shares: Shares) -> Self {
        Self { shares, ..Self::default() }
    }

    /// Starts workers of a controller. They wait for `synced`.
    pub(super) fn start(
        &mut self,
        controller: impl Controller,
        count: u16,
        synced: &CancellationToken,
        shutdown: &CancellationToken,
    ) {
        let controller = Arc::new(controller);
        for _ in 0..count {
            let controller = controller.clone();
            let shares = self.shares.clone();
            let synced = synced.clone();
            let shutdown = shutdown.clone();
            self.tasks.spawn(async move {
                // An object missing from a cache that is not synced would look deleted.
                if shutdown.run_until_cancelled(synced.cancelled()).await.is_some() {
                    work(&*controller, &shares, shutdown).await;
                }
            });
        }
    }

    /// Waits for a worker that ends unexpectedly, and returns the cause.
    pub(super) async fn failed(&mut self) -> Error {
        match self.tasks.join_next().await {
            Some(Err(error)) => Error::new(error).context("a worker failed"),
            Some(Ok(())) | None => anyhow!("a worker ended unexpectedly"),
        }
    }

    /// Waits until all workers have ended.
    pub(super) async fn drained(&mut self) {
        while self.tasks.join_next().await.is_some() {}
    }
}

async fn work<C: Controller>(controller: &C, shares: &Shares, shutdown: CancellationToken) {
    while let Some(job) = shutdown.run_until_cancelled(controller.next()).await {
        // On the heap: the futures of a reconcile are large, and nesting them would multiply their size on the stack.
        let reconcile = metered(Box::pin(run(controller, &job)));
        let JobView { key, fence, kyma, counts_as_reconcile, .. } = C::view(&job);
        let (outcome, writes) = fenced(fence.clone(), reconcile).await;
        let delay = shares.charge(kyma, Cost { writes, counts_as_reconcile }, Instant::now());
        if let Some(delay) = delay {
            let seconds = delay.rest.as_secs();
            if delay.is_for_writes {
                tracing::warn!(kind = C::KIND, key = %key, seconds, "Runtime has used up its share of the writes to the control plane");
            } else {
                tracing::debug!(kind = C::KIND, key = %key, seconds, "Runtime has used up its share of the reconciles");
            }
        }
        controller.done(job, ReconcileOutcome { rest: delay.map(|delay| delay.rest), ..outcome });
    }
}

async fn run<C: Controller>(controller: &C, job: &C::Job) -> ReconcileOutcome {
    let JobView { key, queued, cancellation, .. } = C::view(job);
    // A panic ends this reconcile, not the process: it is logged, and retried with backoff.
    let reconcile = AssertUnwindSafe(controller.reconcile(job)).catch_unwind();
    match cancellation.run_until_cancelled(reconcile).await {
        Some(Ok(outcome)) => outcome,
        Some(Err(_)) => {
            tracing::error!(kind = C::KIND, key = %key, "Reconcile panicked");
            ReconcileOutcome::failed(queued.work, ErrorClass::Ours)
        }
        // Cancelled because the object was removed, its Kyma deselected, or its shard released: another controller may
        // manage it now, so nothing more is sent.
        None => {
            controller.forget(job);
            ReconcileOutcome::default()
        }
    }
}

#[cfg(test)]
mod tests;
