//! Changes of module objects that no worker has taken yet.

use std::{collections::BTreeMap, mem, ops::Bound};

use tidewatch_api::key::KymaKey;

use crate::queue::{Drift, QueuedWork, WorkSet};

/// Changes that no worker has taken yet; bounded by the Kymas.
#[derive(Default)]
pub(super) struct ModuleReports {
    by_kyma: BTreeMap<KymaKey, Drift>,
    /// Kyma whose changes were taken last: the next one after it has its turn.
    last: Option<KymaKey>,
    /// There are changes after there were none, and no worker was woken yet.
    is_new: bool,
}

impl ModuleReports {
    /// Adds changes of a Kyma's runtime.
    pub(super) fn add(&mut self, key: &KymaKey, drift: Drift) {
        self.is_new |= self.by_kyma.is_empty();
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

    /// Returns true if a worker is to be woken, which takes all changes.
    pub(super) fn announce(&mut self) -> bool {
        mem::take(&mut self.is_new)
    }

    /// Kyma whose changes are to be taken next; all Kymas take turns.
    pub(super) fn first(&self) -> Option<&KymaKey> {
        let after = self.last.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let next = self.by_kyma.range((after, Bound::Unbounded)).next();
        next.or_else(|| self.by_kyma.first_key_value()).map(|(key, _)| key)
    }

    /// Takes the changes of a Kyma.
    pub(super) fn take(&mut self, key: &KymaKey) -> Option<Drift> {
        let drift = self.by_kyma.remove(key)?;
        self.last = Some(key.clone());
        Some(drift)
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
        assert_eq!(reports.first(), None);
    }

    #[test]
    fn kymas_take_turns_although_one_has_new_changes_again_and_again() {
        let [first, second] = ["a", "b"].map(|name| KymaKey::new("ns", name));
        let mut reports = ModuleReports::default();
        [&first, &second].into_iter().for_each(|key| reports.add(key, object("a")));
        let taken: Vec<_> = std::iter::from_fn(|| {
            let key = reports.first()?.clone();
            reports.take(&key)?;
            reports.add(&first, object("b"));
            Some(key)
        })
        .take(3)
        .collect();
        assert_eq!(taken, [first.clone(), second, first]);
    }
}
