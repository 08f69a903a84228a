//! Changes of module objects under the lock of a shard. The queue of the Manifests has a lock of its own: a task
//! takes the reports from here, and returns their tickets once they are settled.

use std::collections::VecDeque;

use parking_lot::{Mutex, MutexGuard};
use tidewatch_api::shard::ShardId;
use tokio::sync::Notify;

use super::{RuntimeTable, entry::Entry, state::State};
use crate::{ModuleReport, ReportTicket, due::next_due, queue::WorkSet};

/// Shards with reports, in the order of their turns.
#[derive(Default)]
pub(super) struct ReportedShards {
    shards: Mutex<VecDeque<ShardId>>,
    /// A shard was added.
    pub(super) added: Notify,
}

impl ReportedShards {
    pub(super) fn add(&self, shard: ShardId) {
        self.lock().push_back(shard);
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<ShardId>> {
        self.shards.lock()
    }
}

impl RuntimeTable {
    /// Waits for the next report of changes in the modules of a runtime. Supports one caller, which passes the ticket to
    /// [`Self::modules_settled`]. Cancel safe.
    pub async fn next_module_report(&self) -> ModuleReport {
        next_due(&self.0.reports.added, || (self.take_module_report(), None)).await
    }

    /// Settles the events of a report: each Manifest that they affect has been reconciled since. While the shard is drained none
    /// is: the queue drops Manifests whose reconcile may not begin. The agent sends these events to the next holder.
    pub fn modules_settled(&self, ticket: &ReportTicket) {
        self.with_kyma(&ticket.kyma, |state, _| {
            if state.tenure.is_draining() {
                return;
            }
            let entry = state.kymas.get_mut(&ticket.kyma).filter(|entry| entry.generation == ticket.generation);
            if let Some(Entry { runtime, .. }) = entry {
                runtime.ended(&ticket.snapshot, WorkSet::MANIFEST);
            }
        });
    }

    fn take_module_report(&self) -> Option<ModuleReport> {
        loop {
            let shard = self.0.reports.lock().pop_front()?;
            // The step announces the shard again if it has more reports.
            if let Some(Some(report)) = self.with(shard, |state, _| state.take_module_report()) {
                return Some(report);
            }
        }
    }
}

impl State {
    fn take_module_report(&mut self) -> Option<ModuleReport> {
        self.reports.is_announced = false;
        loop {
            let (kyma, drift) = self.reports.by_kyma.pop_first()?;
            if let Some(entry) = self.kymas.get(&kyma) {
                let generation = entry.generation;
                let snapshot = entry.runtime.snapshot();
                return Some(ModuleReport { drift, ticket: ReportTicket { kyma, generation, snapshot } });
            }
        }
    }
}
