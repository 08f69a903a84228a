//! Changes of module objects. The queue of the Manifests has a lock of its own: its workers take the reports from here, and hand
//! them back once they are settled.

use tidewatch_api::key::KymaKey;

use super::{RuntimeTable, kymas::Entry, state::State};
use crate::{ModuleReport, ReportedEvents, queue::WorkSet};

impl RuntimeTable {
    /// Calls a function whenever there are new reports from now on. Only the first call has an effect.
    pub(crate) fn on_module_report(&self, added: Box<dyn Fn() + Send + Sync>) {
        let _ = self.0.report_added.set(added);
    }

    /// Returns true if there are reports.
    pub(crate) fn has_module_reports(&self) -> bool {
        self.0.shared.agenda().reports.first().is_some()
    }

    /// Takes the next report.
    pub(crate) fn take_module_report(&self) -> Option<ModuleReport> {
        loop {
            let kyma = self.0.shared.agenda().reports.first()?.clone();
            // It may have left its shard meanwhile.
            if let Some(Some(report)) = self.with_kyma(&kyma, |state, _| state.take_module_report(&kyma)) {
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
    /// Takes the report of a Kyma, with a snapshot of its accepted sequences.
    fn take_module_report(&mut self, kyma: &KymaKey) -> Option<ModuleReport> {
        let entry = self.kymas.get(kyma)?;
        let drift = self.shared.agenda().reports.take(kyma)?;
        let generation = entry.generation;
        let snapshot = entry.runtime.snapshot();
        Some(ModuleReport { drift, events: ReportedEvents { kyma: kyma.clone(), generation, snapshot } })
    }
}
