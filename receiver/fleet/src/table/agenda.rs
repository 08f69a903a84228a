//! Agenda of a process: what waits for its workers, of all shards.

use tidewatch_api::key::KymaKey;
use tokio::time::Instant;

use super::{Settings, module_reports::ModuleReports};
use crate::queue::{Queue, QueuedWork};

/// See the module documentation. Bounded by the number of Kymas in the shards that are held.
pub(super) struct Agenda {
    pub(super) queue: Queue<KymaKey>,
    /// Changes of module objects, for the workers of the Manifests.
    pub(super) reports: ModuleReports,
}

/// Kyma with work enqueued by a request of its agent.
pub(super) struct Enqueued {
    pub(super) kyma: KymaKey,
    /// No work of it was in the queue.
    pub(super) is_new: bool,
}

impl Agenda {
    pub(super) fn new(settings: &Settings) -> Self {
        Self { queue: Queue::new(settings.slots, settings.seed), reports: ModuleReports::default() }
    }

    /// Adds the work that a request of a Kyma's agent caused: work on Manifests to the reports, and the rest to the queue.
    pub(super) fn add(&mut self, kyma: &KymaKey, queued: QueuedWork, now: Instant) -> Option<Enqueued> {
        let queued = self.reports.divert_manifest_work(kyma, queued)?;
        let is_new = self.queue.queued(kyma).is_empty();
        self.queue.enqueue(kyma, queued, now);
        Some(Enqueued { kyma: kyma.clone(), is_new })
    }

    /// Removes a Kyma that leaves its shard, or whose shard is released. A reconcile in progress keeps back the next Kyma of that
    /// name, in whichever shard.
    pub(super) fn remove(&mut self, kyma: &KymaKey) {
        self.queue.remove(kyma);
        self.reports.remove(kyma);
    }
}
