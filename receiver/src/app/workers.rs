//! Workers: each takes the next Kyma from the queue, reconciles it, and reports the outcome.

use std::{panic::AssertUnwindSafe, sync::Arc};

use anyhow::{Error, anyhow};
use futures::FutureExt as _;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::{
    base::error_class::ErrorClass,
    controllers::kyma::{self, Context},
    fleet::{queue::ReconcileOutcome, table::RuntimeTable},
};

/// Worker tasks; at shutdown each ends after its current reconcile.
pub(super) struct Workers(JoinSet<()>);

impl Workers {
    pub(super) fn start(
        context: &Arc<Context>,
        fleet: &RuntimeTable,
        count: u16,
        synced: &CancellationToken,
        shutdown: &CancellationToken,
    ) -> Self {
        let mut tasks = JoinSet::new();
        for _ in 0..count {
            let (context, fleet, synced, shutdown) = (context.clone(), fleet.clone(), synced.clone(), shutdown.clone());
            tasks.spawn(async move {
                // An object missing from a cache that is not synced would look deleted.
                if shutdown.run_until_cancelled(synced.cancelled()).await.is_some() {
                    work(context, fleet, shutdown).await;
                }
            });
        }
        Self(tasks)
    }

    /// Waits for a worker that ends unexpectedly, and returns the cause.
    pub(super) async fn failed(&mut self) -> Error {
        match self.0.join_next().await {
            Some(Err(error)) => Error::new(error).context("a worker failed"),
            Some(Ok(())) | None => anyhow!("a worker ended unexpectedly"),
        }
    }

    /// Waits until all workers have ended.
    pub(super) async fn drained(&mut self) {
        while self.0.join_next().await.is_some() {}
    }
}

async fn work(context: Arc<Context>, fleet: RuntimeTable, shutdown: CancellationToken) {
    while let Some(job) = shutdown.run_until_cancelled(fleet.next()).await {
        let work = job.queued.work;
        // A panic ends this reconcile, not the process: it is logged, and retried with backoff.
        let reconcile = AssertUnwindSafe(kyma::reconcile(&context, &job)).catch_unwind();
        let outcome = match job.start.cancellation.run_until_cancelled(reconcile).await {
            Some(Ok(outcome)) => outcome,
            Some(Err(_)) => {
                tracing::error!(kyma = %job.key, "Reconcile panicked");
                ReconcileOutcome::failed(work, ErrorClass::Ours)
            }
            // Cancelled because the Kyma was removed or deselected: another controller may manage it now, so nothing
            // more is sent.
            None => {
                context.forget(&job.key);
                ReconcileOutcome::default()
            }
        };
        fleet.done(job, outcome);
    }
}
