//! Changes of module objects in one shard that no worker has taken yet.

use std::collections::BTreeMap;

use tidewatch_api::key::KymaKey;

use crate::queue::{Drift, QueuedWork, WorkSet};

/// Changes that no worker has taken yet; bounded by the Kymas.
#[derive(Default)]
pub(super) struct ModuleReports {
    pub(super) by_kyma: BTreeMap<KymaKey, Drift>,
    /// The shard is among those with reports, or was taken from there.
    pub(super) is_announced: bool,
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
    pub(super) fn divert_manifest_work(&mut self, key: &KymaKey, queued: QueuedWork) -> Option<QueuedWork> {
        let QueuedWork { work, priority, drift } = queued;
        if !work.both(WorkSet::MANIFEST).is_empty() {
            self.add(key, drift.clone());
        }
        let work = work.minus(WorkSet::MANIFEST);
        (!work.is_empty()).then_some(QueuedWork { work, priority, drift })
    }

    /// Returns true if the shard is to be added to those with reports.
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

#[cfg(test)]
mod tests {
    use tidewatch_contract::event::{Change, Object};

    use super::*;
    use crate::queue::Priority;

    fn object(name: &str) -> Drift {
        let subject = format!("/v1/configmaps/ns/{name}").parse().unwrap();
        let kind = "ConfigMap".to_owned();
        let uid = String::new();
        let resource_version = String::new();
        Drift::of(Object { subject, kind, uid, resource_version, generation: None, change: Change::Spec })
    }

    #[test]
    fn work_on_manifests_is_split_off_with_the_changes() {
        let key = KymaKey::new("ns", "k");
        let mut reports = ModuleReports::default();
        let queued = |work| QueuedWork { drift: object("a"), ..QueuedWork::new(work, Priority::User) };
        assert_eq!(reports.divert_manifest_work(&key, queued(WorkSet::MANIFEST)), None);
        assert!(reports.announce() && !reports.announce(), "once");
        assert_eq!(reports.divert_manifest_work(&key, queued(WorkSet::RUNTIME)), Some(queued(WorkSet::RUNTIME)));
        let both = reports.divert_manifest_work(&key, queued(WorkSet::MANIFEST | WorkSet::RUNTIME));
        assert_eq!(both, Some(queued(WorkSet::RUNTIME)));
        reports.add(&key, object("b"));
        let Some(Drift::Objects(objects)) = reports.by_kyma.get(&key) else { panic!("{:?}", reports.by_kyma) };
        assert_eq!(objects.len(), 2, "each once");
        reports.remove(&key);
        assert!(reports.by_kyma.is_empty());
    }
}
