//! Turns of the Manifests of a cluster to let shared objects leave. Two of them that drop one object at the same time would hand
//! it over to each other: an inventory shrinks only when its reconcile ends.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use tidewatch_api::key::KymaKey;
use tokio::sync::{Mutex as Lock, OwnedMutexGuard};

/// A turn, which lasts until it is dropped.
pub(super) type Turn = OwnedMutexGuard<()>;

/// Locks of the clusters that have turns now. Clones share one state.
#[derive(Clone, Debug, Default)]
pub(super) struct Turns(Arc<Mutex<HashMap<KymaKey, Weak<Lock<()>>>>>);

impl Turns {
    /// Waits for the turn of a Manifest of a cluster.
    pub(super) async fn next(&self, cluster: &KymaKey) -> Turn {
        self.lock_of(cluster).lock_owned().await
    }

    fn lock_of(&self, cluster: &KymaKey) -> Arc<Lock<()>> {
        let mut locks = self.0.lock();
        if let Some(lock) = locks.get(cluster).and_then(Weak::upgrade) {
            return lock;
        }
        locks.retain(|_, lock| lock.strong_count() > 0);
        let lock = Arc::default();
        locks.insert(cluster.clone(), Arc::downgrade(&lock));
        lock
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_manifest_of_a_cluster_has_its_turn_and_ended_turns_are_forgotten() {
        let turns = Turns::default();
        let of = |name: &str| KymaKey::new("ns", name);
        let first = turns.next(&of("a")).await;
        assert!(turns.next(&of("a")).now_or_never().is_none());
        let other = turns.next(&of("b")).now_or_never();
        assert!(other.is_some(), "no Kyma waits for another one");
        drop((first, other));
        assert!(turns.next(&of("a")).now_or_never().is_some());
        drop(turns.next(&of("c")).await);
        assert_eq!(turns.0.lock().len(), 1);
    }
}
