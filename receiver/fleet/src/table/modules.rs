//! Changes of module objects: taken under the lock of a shard, and handed over without it, because the queue of the Manifests
//! has a lock of its own.

use tidewatch_api::{key::ManifestKey, shard::ShardId};

use super::{RuntimeTable, entry::Entry, state::State};
use crate::{
    ModuleReport,
    manifest_queue::ManifestQueue,
    queue::{Drift, WorkSet},
};

/// Takes the reports of a table.
pub(super) type TakeReport = Box<dyn Fn(ModuleReport) + Send + Sync>;

impl RuntimeTable {
    /// Hands reports over to a queue from now on, and those that are settled back. `affected` returns the Manifests that a report
    /// concerns, each with the objects to read again. Until then, reports wait; only the first call has an effect.
    pub fn connect_modules(
        &self,
        queue: ManifestQueue,
        affected: impl Fn(&ModuleReport) -> Vec<(ManifestKey, Drift)> + Send + Sync + 'static,
    ) {
        let table = self.clone();
        queue.return_settled_to(Box::new(move |report| table.modules_settled(report)));
        self.report_modules_to(Box::new(move |report| queue.report(affected(&report), report)));
    }

    pub(super) fn report_modules_to(&self, take: TakeReport) {
        let _ = self.0.reports.set(take);
        self.held().into_iter().for_each(|shard| self.hand_over_reports(shard));
    }

    /// Settles the events of a report: each Manifest that they affect has been reconciled since. While the shard is drained none
    /// is: the queue drops Manifests whose reconcile may not begin. The agent sends these events to the next holder.
    pub(crate) fn modules_settled(&self, report: &ModuleReport) {
        self.with_kyma(&report.kyma, |state, _| {
            if state.tenure.is_draining() {
                return;
            }
            let entry = state.kymas.get_mut(&report.kyma).filter(|entry| entry.generation == report.generation);
            if let Some(Entry { runtime, .. }) = entry {
                runtime.ended(&report.snapshot, WorkSet::MANIFEST);
            }
        });
    }

    /// Hands the reports of a shard over. The caller must hold no lock of a shard.
    pub(super) fn hand_over_reports(&self, shard: ShardId) {
        let Some(take) = self.0.reports.get() else { return };
        // Two reports of one runtime are handed over in the order of their snapshots, or the later one would settle the events
        // of the earlier one.
        let _turn = self.0.reporting.lock();
        let next = || self.lock(shard).as_mut().and_then(State::take_module_report);
        while let Some(report) = next() {
            take(report);
        }
    }
}

impl State {
    fn take_module_report(&mut self) -> Option<ModuleReport> {
        loop {
            let (kyma, drift) = self.reports.by_kyma.pop_first()?;
            if let Some(entry) = self.kymas.get(&kyma) {
                let generation = entry.generation;
                let snapshot = entry.runtime.snapshot();
                return Some(ModuleReport { kyma, drift, generation, snapshot });
            }
        }
    }
}
