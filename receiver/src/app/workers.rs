//! The workers: each takes the next wanted Kyma from the queue, works on it, and says how it ended.

use std::{panic::AssertUnwindSafe, sync::Arc};

use anyhow::{Error, anyhow};
use futures::FutureExt as _;
use tokio::{sync::Mutex, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    base::class::Class,
    controllers::kyma::{self, Context},
    fleet::{hub::Hub, queue::Outcome},
};

/// All workers; they end at shutdown, each after the pass that it is in.
pub(super) struct Workers(Mutex<JoinSet<()>>);

impl Workers {
    pub(super) fn start(
        context: &Arc<Context>,
        hub: &Hub,
        count: u16,
        synced: &CancellationToken,
        shutdown: &CancellationToken,
    ) -> Self {
        let mut tasks = JoinSet::new();
        for _ in 0..count {
            let (context, hub, synced, shutdown) = (context.clone(), hub.clone(), synced.clone(), shutdown.clone());
            tasks.spawn(async move {
                // What a cache does not hold yet must not look as if it did not exist.
                if shutdown.run_until_cancelled(synced.cancelled()).await.is_some() {
                    work(context, hub, shutdown).await;
                }
            });
        }
        Self(Mutex::new(tasks))
    }

    /// Waits until a worker ended although nobody told it to.
    pub(super) async fn failed(&self) -> Error {
        match self.0.lock().await.join_next().await {
            Some(Err(error)) => Error::new(error).context("a worker failed"),
            Some(Ok(())) | None => anyhow!("a worker ended, which it never should"),
        }
    }

    /// Waits until every worker has ended its pass.
    pub(super) async fn drained(&self) {
        while self.0.lock().await.join_next().await.is_some() {}
    }
}

async fn work(context: Arc<Context>, hub: Hub, shutdown: CancellationToken) {
    while let Some(job) = shutdown.run_until_cancelled(hub.next()).await {
        let works = job.wanted.works;
        // A defect in one pass costs that pass, not the process: it is told, and tried again with backoff.
        let pass = AssertUnwindSafe(kyma::pass(&context, &job)).catch_unwind();
        let outcome = match job.gone().run_until_cancelled(pass).await {
            Some(Ok(outcome)) => outcome,
            Some(Err(_)) => {
                tracing::error!(kyma = %job.key, "A pass panicked");
                Outcome::failed(works, Class::Ours)
            }
            // Somebody else's now, perhaps: what is not sent yet never is.
            None => {
                context.forget(&job.key);
                Outcome::default()
            }
        };
        hub.done(job, outcome);
    }
}
