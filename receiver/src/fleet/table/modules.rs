//! Changes of module objects under the lock of a shard. The queue of the Manifests has a lock of its own: a task
//! takes the reports from here, and returns their tickets once they are settled.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

use super::{
    RuntimeTable,
    state::{Entry, State},
};
use crate::{
    base::{key::KymaKey, shard::ShardId},
    fleet::{
        ModuleReport, ReportTicket,
        due::next_due,
        queue::{Drift, QueuedWork, WorkSet},
    },
};

/// Changes that no task has taken yet; bounded by the Kymas.
#[derive(Default)]
pub(super) struct ModuleReports {
    by_kyma: BTreeMap<KymaKey, Drift>,
    /// The shard is among the [`ReportedShards`], or was taken from there.
    is_announced: bool,
}

impl ModuleReports {
    /// Adds changes of a Kyma's runtime.
    pub(super) fn add(&mut self, key: &KymaKey, drift: Drift) {
        match self.by_kyma.get_mut(key) {
            Some(known) => known.merge(drift),
            None => drop(self.by_kyma.insert(key.clone(), drift)),
        }
    }

    /// Adds the changes behind the work on Manifests, and returns the rest of the work.
    pub(super) fn split(&mut self, key: &KymaKey, queued: QueuedWork) -> Option<QueuedWork> {
        let QueuedWork { work, priority, drift } = queued;
        if !work.both(WorkSet::MANIFEST).is_empty() {
            self.add(key, drift.clone());
        }
        let work = work.minus(WorkSet::MANIFEST);
        (!work.is_empty()).then_some(QueuedWork { work, priority, drift })
    }

    /// Returns true if the shard is to be added to the [`ReportedShards`].
    pub(super) fn announce(&mut self) -> bool {
        let is_new = !self.is_announced && !self.by_kyma.is_empty();
        self.is_announced |= is_new;
        is_new
    }

    /// Drops the changes of a removed Kyma.
    pub(super) fn remove(&mut self, key: &KymaKey) {
        self.by_kyma.remove(key);
    }
}

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
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
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
                let (generation, snapshot) = (entry.generation, entry.runtime.snapshot());
                return Some(ModuleReport { drift, ticket: ReportTicket { kyma, generation, snapshot } });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tidewatch_shared::event::{Change, Object};

    use super::*;
    use crate::fleet::queue::Priority;

    fn object(name: &str) -> Drift {
        let subject = format!("/v1/configmaps/ns/{name}").parse().unwrap();
        let (kind, uid, resource_version) = ("ConfigMap".to_owned(), String::new(), String::new());
        Drift::of(Object { subject, kind, uid, resource_version, generation: None, change: Change::Spec })
    }

    #[test]
    fn work_on_manifests_is_split_off_with_the_changes() {
        let key = KymaKey::new("ns", "k");
        let mut reports = ModuleReports::default();
        let queued = |work| QueuedWork { drift: object("a"), ..QueuedWork::new(work, Priority::User) };
        assert_eq!(reports.split(&key, queued(WorkSet::MANIFEST)), None);
        assert!(reports.announce() && !reports.announce(), "once");
        assert_eq!(reports.split(&key, queued(WorkSet::RUNTIME)), Some(queued(WorkSet::RUNTIME)));
        let both = reports.split(&key, queued(WorkSet::MANIFEST | WorkSet::RUNTIME));
        assert_eq!(both, Some(queued(WorkSet::RUNTIME)));
        reports.add(&key, object("b"));
        let Some(Drift::Objects(objects)) = reports.by_kyma.get(&key) else { panic!("{:?}", reports.by_kyma) };
        assert_eq!(objects.len(), 2, "each once");
        reports.remove(&key);
        assert!(reports.by_kyma.is_empty());
    }
}
