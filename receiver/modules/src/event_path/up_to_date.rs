//! Kymas whose conditions are up to date, so that the loop does not compute those of an idle fleet again each second.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use tidewatch_api::key::KymaKey;
use tidewatch_fleet::{pause::PauseReason, stores::kymas::CachedKyma};
use tidewatch_trust::Stragglers;

/// Inputs of the conditions that all Kymas share. Snapshots are compared by address: their owners replace them only when they
/// change.
#[derive(Clone, Default)]
pub(super) struct SharedInputs {
    /// Stragglers of the CA rotation.
    pub(super) stragglers: Option<Arc<Stragglers>>,
    /// Kymas that failed in halted rollouts.
    pub(super) halts: Option<Arc<HashMap<KymaKey, String>>>,
    /// Pause of all runtimes.
    pub(super) paused: Option<PauseReason>,
}

impl SharedInputs {
    fn is_same(&self, other: &Self) -> bool {
        self.stragglers.as_ref().map(Arc::as_ptr) == other.stragglers.as_ref().map(Arc::as_ptr)
            && self.halts.as_ref().map(Arc::as_ptr) == other.halts.as_ref().map(Arc::as_ptr)
            && self.paused == other.paused
    }
}

/// Cached Kymas whose conditions need no change as long as neither the object nor another input changes. An entry keeps its
/// object alive, so that its address belongs to no other one; at most one outdated object is kept per change.
#[derive(Default)]
pub(super) struct UpToDate {
    inputs: SharedInputs,
    kymas: HashMap<usize, Arc<CachedKyma>>,
}

impl UpToDate {
    /// Forgets all Kymas if an input that they share has changed, and the outdated objects if there are more entries than whole
    /// Kymas: those of other replicas have no entries, and must not be kept whole by outdated ones.
    pub(super) fn follow(&mut self, inputs: &SharedInputs, kymas: &[Arc<CachedKyma>]) {
        if !self.inputs.is_same(inputs) {
            self.inputs = inputs.clone();
            self.kymas.clear();
        }
        let whole = || kymas.iter().filter(|kyma| !kyma.is_reduced());
        if self.kymas.len() > whole().count() {
            let present: HashSet<_> = whole().map(address).collect();
            self.kymas.retain(|address, _| present.contains(address));
        }
    }

    /// Returns whether nothing has changed since [`Self::insert`].
    pub(super) fn contains(&self, kyma: &Arc<CachedKyma>) -> bool {
        self.kymas.contains_key(&address(kyma))
    }

    /// Adds a Kyma whose conditions need no change.
    pub(super) fn insert(&mut self, kyma: &Arc<CachedKyma>) {
        self.kymas.insert(address(kyma), kyma.clone());
    }

    /// Removes a Kyma, because an input of its own has changed.
    pub(super) fn remove(&mut self, kyma: &Arc<CachedKyma>) {
        self.kymas.remove(&address(kyma));
    }

    /// Removes all Kymas.
    pub(super) fn clear(&mut self) {
        self.kymas.clear();
    }
}

fn address(kyma: &Arc<CachedKyma>) -> usize {
    Arc::as_ptr(kyma).addr()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tidewatch_api::Kyma;

    use super::*;

    fn kyma() -> Arc<CachedKyma> {
        Arc::new(whole().into())
    }

    fn whole() -> Kyma {
        let kyma = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma", "metadata": {"name": "k"},
            "spec": {"channel": "regular"}});
        serde_json::from_value(kyma).unwrap()
    }

    #[test]
    fn another_object_is_not_up_to_date_even_with_the_same_content() {
        let mut up_to_date = UpToDate::default();
        let kymas = [kyma(), kyma()];
        up_to_date.insert(&kymas[0]);
        assert!(up_to_date.contains(&kymas[0].clone()) && !up_to_date.contains(&kymas[1]));
        up_to_date.remove(&kymas[0]);
        assert!(!up_to_date.contains(&kymas[0]));
    }

    #[test]
    fn changed_input_of_all_forgets_all() {
        let kymas = [kyma(), kyma()];
        let halts = || Some(Arc::default());
        let stragglers = || Some(Arc::default());
        let before = SharedInputs { stragglers: stragglers(), halts: halts(), paused: None };
        for after in [
            SharedInputs { stragglers: stragglers(), ..before.clone() },
            SharedInputs { halts: halts(), ..before.clone() },
            SharedInputs { halts: None, ..before.clone() },
            SharedInputs { paused: Some(PauseReason::ConfigMap), ..before.clone() },
        ] {
            let mut up_to_date = UpToDate::default();
            up_to_date.follow(&before, &kymas);
            kymas.iter().for_each(|kyma| up_to_date.insert(kyma));
            up_to_date.follow(&before.clone(), &kymas);
            assert!(kymas.iter().all(|kyma| up_to_date.contains(kyma)), "nothing has changed");
            up_to_date.follow(&after, &kymas);
            assert!(!kymas.iter().any(|kyma| up_to_date.contains(kyma)));
        }
    }

    #[test]
    fn outdated_objects_are_bounded() {
        let mut up_to_date = UpToDate::default();
        let inputs = SharedInputs::default();
        let other = kyma();
        up_to_date.insert(&other);
        for _ in 0..100 {
            let mut kymas = vec![other.clone(), kyma()];
            // Of the shards of other replicas.
            kymas.extend((0..50).map(|_| Arc::new(CachedKyma::reduced(&whole()))));
            up_to_date.follow(&inputs, &kymas);
            up_to_date.insert(&kymas[1]);
            assert!(up_to_date.kymas.len() <= 3 && up_to_date.contains(&other));
        }
    }
}
