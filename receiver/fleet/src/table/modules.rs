//! Changes of module objects. The queue of the Manifests has a lock of its own: its workers take the reports from here, and hand
//! them back once they are settled.

use std::collections::VecDeque;

use parking_lot::Mutex;
use tidewatch_api::shard::ShardId;

use super::{RuntimeTable, kymas::Entry, state::State};
use crate::{ModuleReport, ReportedEvents, queue::WorkSet};

/// Shards with reports, in the order of their turns.
pub(super) type ReportedShards = Mutex<VecDeque<ShardId>>;

impl RuntimeTable {
    /// Calls a function whenever there are new reports from now on. Only the first call has an effect.
    pub(crate) fn on_module_report(&self, added: Box<dyn Fn() + Send + Sync>) {
        let _ = self.0.report_added.set(added);
    }

    /// Returns true if there are reports.
    pub(crate) fn has_module_reports(&self) -> bool {
        !self.0.reports.lock().is_empty()
    }

    /// Takes the next report.
    pub(crate) fn take_module_report(&self) -> Option<ModuleReport> {
        loop {
            let shard = self.0.reports.lock().pop_front()?;
            // The step announces the shard again if it has more reports.
            if let Some(Some(report)) = self.with(shard, |state, _| state.take_module_report()) {
                return Some(report);
            }
        }
    }

    /// Settles the events of a report: each Manifest that they affect has been reconciled since. While the shard is drained none
    /// is: the queue drops Manifests whose reconcile may not begin. The agent sends these events to the next holder.
    pub(crate) fn modules_settled(&self, events: &ReportedEvents) {
        self.with_kyma(&events.kyma, |state, _| {
            if state.tenure.is_draining() {
                return;
            }
            let entry = state.kymas.get_mut(&events.kyma).filter(|entry| entry.generation == events.generation);
            if let Some(Entry { runtime, .. }) = entry {
                runtime.ended(&events.snapshot, WorkSet::MANIFEST);
            }
        });
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
                return Some(ModuleReport { drift, events: ReportedEvents { kyma, generation, snapshot } });
            }
        }
    }
}
