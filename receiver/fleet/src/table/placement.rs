//! Places of Kymas: in which shard each is, with which runtime and plan.

use std::sync::Arc;

use tidewatch_api::{identity::RuntimeId, key::KymaKey, plan::Plan};

use super::RuntimeTable;

impl RuntimeTable {
    /// Sets runtime id and plan of a Kyma; `uid` is that of its object. Another runtime id resets the runtime's state.
    /// Enqueues only work that becomes unsettled by a new plan. A Kyma of a shard that is not held is only counted.
    ///
    /// A Kyma that moves to another shard loses its work, and its reconcile is cancelled, in the step that places it there.
    /// The queue keeps it back until that reconcile has ended, so that no two reconciles of a Kyma run concurrently.
    pub fn place(&self, key: KymaKey, uid: &str, runtime: Option<RuntimeId>, plan: Arc<Plan>) {
        let _placing = self.placing();
        let shard = self.shard_of(runtime.as_ref(), uid);
        let from = self.directory().shard_of(&key);
        let is_taken_over = from.is_some_and(|from| from != shard && self.directory().tenure(from).is_none());
        self.with_both(from, shard, |from, to, now| {
            if let Some(from) = from {
                from.remove(&key);
            }
            self.directory().place(&key, shard, runtime.is_some());
            let Some(to) = to else { return };
            to.place(key.clone(), runtime, plan, now);
            if is_taken_over {
                to.taken_over(&key, now);
            }
        });
        self.fleet_changed();
    }

    /// Returns true if a Kyma was placed with an equal plan; `None` for an unknown Kyma.
    pub fn has_plan(&self, key: &KymaKey, plan: &Plan) -> Option<bool> {
        self.with_kyma(key, |state, _| {
            state.kymas.get(key).map(|entry| entry.runtime.plan_revision() == plan.revision())
        })?
    }

    /// Removes a Kyma.
    pub fn remove(&self, key: &KymaKey) {
        let _placing = self.placing();
        let Some(shard) = self.directory().shard_of(key) else { return };
        self.with_both(None, shard, |_, state, _| {
            if let Some(state) = state {
                state.remove(key);
            }
            // A worker that finds it in the queue finds its shard as well.
            self.directory().remove(key);
        });
        if let Some(outbox) = self.0.shared.outbox_for(false) {
            self.update_target_metrics(&outbox);
        }
        self.fleet_changed();
    }

    /// Updates the heartbeat interval, which follows the number of Kymas with a runtime id in all shards of the fleet: those
    /// of other replicas are placed as well.
    fn fleet_changed(&self) {
        let runtimes = self.directory().runtimes();
        self.0.shared.interval.set(self.0.settings.heartbeat_interval(runtimes));
    }
}
